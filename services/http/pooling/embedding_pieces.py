"""The reply of `/v1/embeddings`, encoded piece by piece: other requests have their turn between."""

import asyncio
import base64
from collections.abc import AsyncIterator, Sequence

from penstock.protocol.client.scoring import result_of
from penstock.protocol.messages.client import GenerateReply
from penstock.services.http.pooling.schema import EmbeddingData, EmbeddingReply
from penstock.services.http.replies import ENCODER


async def embedding_pieces(
    head: EmbeddingReply, replies: Sequence[GenerateReply], encoding: str
) -> AsyncIterator[bytes]:
    """Yield the JSON text of a reply, one embedding at a time; head: the reply without data."""
    text = ENCODER.encode(head)  # which ends with `"data":[]}`
    yield text[:-2]
    for index, reply in enumerate(replies):
        data = EmbeddingData(index=index, embedding=_encoded(reply, encoding))
        yield b"," * (index > 0) + ENCODER.encode(data)
        await asyncio.sleep(0)
    yield text[-2:]


def _encoded(reply: GenerateReply, encoding: str) -> list[float] | str:
    numbers = result_of(reply)
    return numbers if encoding == "float" else base64.b64encode(reply.pooled or b"").decode()
