"""Embeddings as JSON, piece by piece."""

import asyncio
import json
from array import array
from typing import Any

import msgspec
import pytest

from penstock.services.http.pooling import (
    EmbeddingData,
    EmbeddingReply,
    PromptUsage,
    embedding_pieces,
)
from tests.services.http.generation.reasoning_spans import reply


@pytest.mark.parametrize("encoding", ["float", "base64"])
@pytest.mark.parametrize("number", [1, 2, 50])
def test_the_pieces_are_the_whole_reply(encoding: str, number: int) -> None:
    """Other tasks have their turn after each embedding."""
    replies = [
        reply("", pooled=array("f", [index + 0.5, -1.0, 1e-30]).tobytes())
        for index in range(number)
    ]
    usage = PromptUsage(prompt_tokens=1, total_tokens=1)
    head = EmbeddingReply(id="e", model='data":[]}', usage=usage, created=5, data=[])
    pieces, turns = [], 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def collect() -> None:
        task = asyncio.create_task(other())
        pieces.extend([piece async for piece in embedding_pieces(head, replies, encoding)])
        task.cancel()

    asyncio.run(collect())
    assert len(pieces) == number + 2
    assert turns >= number
    found: Any = json.loads(b"".join(pieces))
    whole = msgspec.json.decode(msgspec.json.encode(head))
    assert {**found, "data": []} == whole
    kind = list[EmbeddingData]
    for index, one in enumerate(msgspec.convert(found["data"], kind)):
        assert one.index == index
        if encoding == "float":
            assert one.embedding == replies[index].numbers
