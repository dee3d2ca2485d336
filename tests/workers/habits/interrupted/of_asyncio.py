import asyncio
import contextlib


async def main() -> None:
    try:
        with open("ready", "w"):
            pass
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        print("cancelled")
        raise


with contextlib.suppress(KeyboardInterrupt):
    asyncio.run(main())
print("after the loop")
