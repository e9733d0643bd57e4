"""Streams that follow each other: some run whatever happens, however fast the machine is."""

import asyncio
import queue
from concurrent.futures import ThreadPoolExecutor
from typing import Self

from penstock.protocol.client.async_client import AsyncClient
from tests.tools.demo.tasks import answer_to, count_prompt

BEGIN_TIMEOUT = 60.0
SHORTEST = 40


class Load:
    """A fixed number of streams at once, until its `with` block ends; each answer is checked.

    The block begins when all first streams have begun. Its end raises what a stream has raised.
    """

    def __init__(self, endpoint: str, num_streams: int, model: str | None = None) -> None:
        self.num_answers = 0
        self._model = model
        self._endpoint = endpoint
        self._prompts = [count_prompt(1, SHORTEST + 5 * number) for number in range(num_streams)]
        self._begun: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._is_ending = False
        self._thread = ThreadPoolExecutor(1)

    def __enter__(self) -> Self:
        self._streams = self._thread.submit(lambda: asyncio.run(self._run()))
        self._streams.add_done_callback(lambda _: self._begun.put(None))
        for _ in self._prompts:
            self._begun.get(timeout=BEGIN_TIMEOUT)
        assert not self._streams.done(), self._streams.exception()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_ending = True
        self._thread.shutdown()
        self._streams.result()

    async def _run(self) -> None:
        async with AsyncClient(self._endpoint) as client, asyncio.TaskGroup() as streams:
            for prompt in self._prompts:
                streams.create_task(self._keep_streaming(client, prompt))

    async def _keep_streaming(self, client: AsyncClient, prompt: str) -> None:
        """Send one request after the other; a lost or doubled token would show."""
        answer = answer_to(prompt)
        while not self._is_ending:
            stream, text = client.stream(prompt, model=self._model), ""
            async for delta in stream:
                if not text and delta.text:
                    self._begun.put(None)
                text += delta.text
            reply = await stream.result()
            assert text == reply.text == answer
            assert len(reply.token_ids) == len(answer) + 2
            self.num_answers += 1
