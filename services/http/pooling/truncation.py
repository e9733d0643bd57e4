"""Documents cut to a number of tokens before they are scored."""

from collections.abc import Sequence

from penstock.protocol.client.async_client import AsyncClient
from penstock.protocol.client.scoring import Scoring
from penstock.services.http.shared.access import caller
from penstock.services.http.shared.errors import invalid
from penstock.services.http.shared.event_stream import bounded

Pairs = Sequence[tuple[str, str]]


class Truncation:
    """Limits of the tokens of documents."""

    def __init__(self, client: AsyncClient, max_open: int) -> None:
        """max_open: requests to the pipeline at a time."""
        self._client, self._max_open = client, max_open

    async def cut(self, pairs: Pairs, most: int) -> Pairs:
        """Return the pairs with documents of up to `most` tokens."""
        return await self._cut(pairs, {query: most for query, _ in pairs})

    async def cut_prompts(
        self, pairs: Pairs, most: int, label_ids: Sequence[int], instruction: str | None
    ) -> Pairs:
        """Return the pairs with documents so long that prompts have up to `most` tokens.

        Raises ApiError where the query leaves no room.
        """
        room = {}
        for query in dict.fromkeys(query for query, _ in pairs):
            (request,) = Scoring([(query, "")], label_ids, instruction).requests
            prompt = request["prompt"]
            tokens = await self._client.tokenize(
                prompt, add_special_tokens=False, client=caller.get().client
            )
            room[query] = most - len(tokens.token_ids)
            if room[query] < 1:
                problem = f"got {most}, expected more than the {len(tokens.token_ids)} tokens of "
                raise invalid("truncate_prompt_tokens", f"{problem}the prompt without a document")
        return await self._cut(pairs, room)

    async def _cut(self, pairs: Pairs, most: dict[str, int]) -> Pairs:
        """Return the pairs; most: tokens of the documents of each query."""
        wanted = dict.fromkeys((document, most[query]) for query, document in pairs)
        texts = await bounded(self._max_open, self._cut_text, wanted)
        cut = dict(zip(wanted, texts, strict=True))
        return [(query, cut[document, most[query]]) for query, document in pairs]

    async def _cut_text(self, wanted: tuple[str, int]) -> str:
        text, most = wanted
        if len(text.encode()) <= most:  # a token has a byte or more
            return text
        client, sender = self._client, caller.get().client
        plain = {"add_special_tokens": False, "client": sender}
        reply = await client.tokenize(
            text, **plain, truncate_prompt_tokens=most + 1, truncation_side="right"
        )
        if len(reply.token_ids) <= most:
            return text
        cut = await client.detokenize(reply.token_ids[:most], client=sender)
        return cut if text.startswith(cut) else cut.rstrip("\ufffd")  # a part of a character
