import asyncio
import signal


async def main() -> None:
    loop = asyncio.get_running_loop()
    got = asyncio.Event()
    loop.add_signal_handler(signal.SIGUSR1, got.set)
    signal.raise_signal(signal.SIGUSR1)
    await got.wait()
    process = await asyncio.create_subprocess_shell("exit 4")
    print(await process.wait(), await asyncio.to_thread(lambda: "thread"))


asyncio.run(main())
asyncio.get_event_loop_policy().new_event_loop()
