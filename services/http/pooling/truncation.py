"""Documents cut to a number of tokens before they are scored."""

from collections.abc import Sequence

from penstock.protocol.client.async_client import AsyncClient
from penstock.protocol.client.scoring import Scoring
from penstock.services.http.shared.access import caller
from penstock.services.http.shared.errors import invalid
from penstock.services.http.shared.event_stream import bounded

Pairs = Sequence[tuple[str, str]]


async def room_of(
    client: AsyncClient,
    pairs: Pairs,
    most: int,
    label_ids: Sequence[int],
    instruction: str | None,
) -> dict[str, int]:
    """Return the tokens that each query leaves for a document in a prompt of `most` tokens.

    Raises ApiError where a query leaves no room.
    """
    plain = {"add_special_tokens": False, "client": caller.get().client}
    room = {}
    for query in dict.fromkeys(query for query, _ in pairs):
        prompt = Scoring([(query, "")], label_ids, instruction).request(0)["prompt"]
        num_tokens = len((await client.tokenize(prompt, **plain)).token_ids)
        room[query] = most - num_tokens
        if room[query] < 1:
            problem = f"got {most}, expected more than the {num_tokens} tokens of the prompt"
            raise invalid("truncate_prompt_tokens", f"{problem} without a document")
    return room


async def cut(client: AsyncClient, pairs: Pairs, most: dict[str, int]) -> Pairs:
    """Return the pairs; most: tokens of the documents of each query."""
    sender = caller.get().client
    plain = {"add_special_tokens": False, "truncation_side": "right", "client": sender}

    async def cut_text(wanted: tuple[str, int]) -> str:
        text, length = wanted
        if len(text.encode()) <= length:  # a token has a byte or more
            return text
        reply = await client.tokenize(text, truncate_prompt_tokens=length + 1, **plain)
        if len(reply.token_ids) <= length:
            return text
        first = await client.detokenize(reply.token_ids[:length], client=sender)
        return first if text.startswith(first) else first.rstrip("\ufffd")  # a part of a character

    wanted = dict.fromkeys((document, most[query]) for query, document in pairs)
    texts = dict(zip(wanted, await bounded(cut_text, wanted), strict=True))
    return [(query, texts[document, most[query]]) for query, document in pairs]
