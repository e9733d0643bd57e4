"""Scores of pairs of texts: the requests to send for them, and the scores in the replies.

A model that generates text judges a pair with the prompt of Qwen3-Reranker (Zhang et al. 2025,
arXiv:2506.05176): the score is the probability of "yes" in relation to "no". An embedding model
embeds both texts: the score is their cosine.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from penstock.protocol.client.session import RequestError
from penstock.protocol.messages.client import ErrorReply, GenerateReply
from penstock.protocol.messages.sampling import Pooling

LABELS = ("yes", "no")
# instruction of the published Qwen3-Reranker, for requests without an instruction
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
_PROMPT = (
    f"<|im_start|>system\n{_SYSTEM}<|im_end|>\n<|im_start|>user\n"
    "<Instruct>: {}\n<Query>: {}\n<Document>: {}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)


class Scoring:
    """Pairs of texts to be scored by one model."""

    def __init__(
        self,
        pairs: Sequence[tuple[str, str]],
        label_ids: Sequence[int] | None,
        instruction: str | None = None,
    ) -> None:
        """Make the requests.

        pairs: query and document. label_ids: tokens of LABELS; None for an embedding model.
        instruction: the task; without it, queries are embedded as they are.
        """
        self._pairs = pairs
        self._instruction = instruction
        self._judges = label_ids is not None
        self._fields: dict[str, Any] = {"pooling": Pooling(label_ids=list(label_ids or ()))}
        # for an embedding model: instruction and text → `query` or `document`
        self._texts: dict[tuple[str | None, str], str] = {}
        if self._judges:
            self._fields["add_special_tokens"] = False
            task = INSTRUCTION if instruction is None else instruction
            # texts in the prompt of each request, by their role
            self.parts = [
                {"instruction": task, "query": query, "document": document}
                for query, document in pairs
            ]
            return
        for query, document in pairs:
            self._texts.setdefault((instruction, query), "query")
            self._texts.setdefault((None, document), "document")
        self.parts = [
            ({} if task is None else {"instruction": task}) | {kind: text}
            for (task, text), kind in self._texts.items()
        ]

    @property
    def requests(self) -> Iterator[dict[str, Any]]:
        """The fields of each GenerateRequest, made lazily: each may have a copy of a long query.

        For an embedding model, a text of several pairs is embedded once.
        """
        return map(self.request, range(len(self.parts)))

    def request(self, index: int) -> dict[str, Any]:
        """Return the fields of one request."""
        texts = list(self.parts[index].values())
        prompt = texts[-1]
        if self._judges:
            prompt = _PROMPT.format(*texts)
        elif len(texts) > 1:
            prompt = f"Instruct: {texts[0]}\nQuery:{texts[1]}"
        return {"prompt": prompt, **self._fields}

    def scores(self, replies: Iterable[GenerateReply]) -> list[float]:
        """Return the score of each pair. replies: replies to all requests. Raises RequestError."""
        results = [result_of(reply) for reply in replies]
        if self._judges:
            return [numbers[0] for numbers in results]
        vectors = dict(zip(self._texts, results, strict=True))
        task = self._instruction
        return [_dot(vectors[task, query], vectors[None, other]) for query, other in self._pairs]


def result_of(reply: GenerateReply) -> list[float]:
    """Return the numbers of a request with `pooling`. Raises RequestError if it was aborted."""
    if reply.pooled is None:
        message = "the request was aborted before its prompt was computed"
        raise RequestError(ErrorReply(code="failed", message=message, request_id=reply.request_id))
    return reply.numbers


def label_id(label: str, token_ids: Sequence[int]) -> int:
    """Return the only token of a label. Raises RequestError if it has several tokens, or none."""
    if len(token_ids) != 1:
        text = f"got {len(token_ids)} tokens for {label!r}, expected 1, as Qwen3's tokenizers have"
        raise RequestError(ErrorReply(code="invalid", message=f"model: {text}", field="model"))
    return token_ids[0]


def _dot(vector: list[float], other: list[float]) -> float:
    return sum(x * y for x, y in zip(vector, other, strict=True))
