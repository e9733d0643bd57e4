"""Tasks that fail."""

import asyncio

from penstock.launch.supervisor.processes import Tasks, traceback_lines


async def test_an_exception_is_seen_and_a_cancellation_is_none() -> None:
    seen: list[BaseException] = []

    async def fail() -> None:
        raise ValueError("x")

    async def last_for_ever() -> None:
        await asyncio.get_running_loop().create_future()

    tasks = Tasks(seen.append)
    failing, endless = tasks.start(fail()), tasks.start(last_for_ever())
    await asyncio.wait([failing])
    tasks.cancel()
    await asyncio.wait([endless])
    (error,) = seen
    assert traceback_lines(error)[-1] == "ValueError: x"
