import asyncio


async def forever() -> None:
    await asyncio.sleep(1000)


async def main() -> None:
    main.task = asyncio.create_task(forever())
    await asyncio.sleep(0)


asyncio.run(main())


async def never() -> None: ...


never()
print(main.task.cancelled())
