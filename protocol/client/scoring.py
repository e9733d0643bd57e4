"""Scores of pairs of texts: the requests to send for them, and the scores in the replies.

A model that generates text judges a pair with the prompt of Qwen3-Reranker (Zhang et al. 2025,
arXiv:2506.05176): the score is the probability of "yes" in relation to "no". An embedding model
embeds both texts: the score is their cosine.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from penstock.protocol.client.errors import RequestError
from penstock.protocol.messages.client import ErrorReply, GenerateReply
from penstock.protocol.messages.sampling import Pooling

LABELS = ("yes", "no")
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""of the published Qwen3-Reranker, where a request has none"""
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

        pairs: query and document. label_ids: tokens of LABELS; None: of an embedding model.
        instruction: the task; without it, queries are embedded as they are.
        """
        self._judges = label_ids is not None
        begin = "" if instruction is None else f"Instruct: {instruction}\nQuery:"
        self._pairs = pairs if self._judges else [(begin + one, other) for one, other in pairs]
        self._texts = list(dict.fromkeys(text for pair in self._pairs for text in pair))
        fields: dict[str, Any] = {"pooling": Pooling(label_ids=list(label_ids or ()))}
        prompts = self._texts
        if self._judges:
            fields["add_special_tokens"] = False
            task = INSTRUCTION if instruction is None else instruction
            prompts = [_PROMPT.format(task, *pair) for pair in pairs]
        self.requests = [{"prompt": prompt, **fields} for prompt in prompts]
        """fields of a GenerateRequest each; texts of several pairs are embedded once"""

    def scores(self, replies: Iterable[GenerateReply]) -> list[float]:
        """Return the score of each pair; replies: to all requests. Raises RequestError."""
        results = [result_of(reply) for reply in replies]
        if self._judges:
            return [numbers[0] for numbers in results]
        vectors = dict(zip(self._texts, results, strict=True))
        return [_dot(vectors[query], vectors[document]) for query, document in self._pairs]


def result_of(reply: GenerateReply) -> list[float]:
    """Return the numbers of a request with `pooling`. Raises RequestError if it was aborted."""
    if reply.pooled is None:
        message = "the request was aborted before its prompt was computed"
        raise RequestError(ErrorReply(code="failed", message=message, request_id=reply.request_id))
    return reply.numbers


def label_id(label: str, token_ids: Sequence[int]) -> int:
    """Return the one token of a label. Raises RequestError for a tokenizer that has none."""
    if len(token_ids) != 1:
        text = f"got {len(token_ids)} tokens for {label!r}, expected 1, as Qwen3's tokenizers have"
        raise RequestError(ErrorReply(code="invalid", message=f"model: {text}", field="model"))
    return token_ids[0]


def _dot(one: list[float], other: list[float]) -> float:
    return sum(x * y for x, y in zip(one, other, strict=True))
