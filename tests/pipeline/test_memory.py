"""Many requests, of which some are aborted or left: nothing of them stays.

`PENSTOCK_SEARCH=25 pytest -s tests/pipeline/test_memory.py` prints the documented figures.
"""

import asyncio
from collections.abc import Callable
from random import Random

import psutil
import pytest

from penstock.protocol.client.async_client import AsyncClient
from tests.pipeline.conftest import Pipeline, pipeline  # noqa: F401  a fixture
from tests.search import scaled
from tests.tools.demo.tasks import answer_to, count_prompt

pytestmark = pytest.mark.pipeline
NUM_REQUESTS = scaled(400)
CONCURRENCY = 64
MAX_GROWTH = 8
"""MiB of a process from the end of the first fifth of the requests; not of a worker, whose KV cache
takes memory from the kernel where it is first written to"""


async def ask(client: AsyncClient, draw: Random) -> None:
    """Send a request that is answered, aborted after some tokens, or left with its connection."""
    begin = draw.randrange(100)
    prompt = count_prompt(begin, begin + draw.randrange(20))
    fate = draw.random()
    if fate < 0.6:
        assert (await client.generate(prompt)).text == answer_to(prompt)
        return
    stream = client.stream(prompt)
    async for _ in stream:
        if draw.random() < 0.3:
            await stream.abort()
            break
    assert answer_to(prompt).startswith((await stream.result()).text)


async def load(endpoint: str, number: int, draw: Random) -> None:
    """Send `number` requests, CONCURRENCY at a time, a new connection for every few hundred."""
    while number > 0:
        async with AsyncClient(endpoint) as client:
            left = client.submit(count_prompt(1, 90))  # nobody waits for it
            numbers = iter(range(min(number, 5 * CONCURRENCY)))

            async def work(client: AsyncClient = client, numbers: object = numbers) -> None:
                for _ in numbers:  # type: ignore[attr-defined]
                    await ask(client, draw)

            await asyncio.gather(*(work() for _ in range(CONCURRENCY)))
            assert left.request_id
        number -= 5 * CONCURRENCY


async def idle(endpoint: str) -> None:
    """Wait until the pipeline has nothing left of any request."""
    async with AsyncClient(endpoint) as client:
        while True:
            status = await client.status(fresh=True)
            one = status.scheduler
            if one and not status.num_requests and one.num_free_blocks == one.num_blocks:
                return


def memory(served: Pipeline) -> dict[str, float]:
    """MiB of each process."""
    pids = served.processes().items()
    return {name: psutil.Process(pid).memory_info().rss / 2**20 for name, pid in pids}


@pytest.mark.long
@pytest.mark.search
def test_nothing_grows(pipeline: Callable[..., Pipeline]) -> None:  # noqa: F811
    served = pipeline("--max-num-seqs", "64")
    draw = Random(1)

    async def run(number: int) -> None:
        await load(served.endpoint, number, draw)
        await idle(served.endpoint)

    asyncio.run(run(NUM_REQUESTS // 5))
    before = memory(served)
    asyncio.run(run(NUM_REQUESTS - NUM_REQUESTS // 5))
    after = memory(served)
    print(*(f"{name} {before[name]:.1f} → {after[name]:.1f} MiB" for name in after))  # noqa: T201
    growth = {name: after[name] - before[name] for name in after if name != "worker.1"}
    assert max(growth.values()) < MAX_GROWTH, growth
