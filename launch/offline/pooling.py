"""Embeddings and scores of `LLM`, shaped as in vLLM."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import Struct
from tqdm import tqdm

from penstock.launch.offline.bounded_concurrency import replies_to
from penstock.launch.offline.outputs import prompts_of
from penstock.protocol.checkpoint import read_model_config
from penstock.protocol.client.client import Client
from penstock.protocol.client.scoring import LABELS, Scoring, label_id, result_of
from penstock.protocol.config import Config
from penstock.protocol.messages.client import GenerateReply, GenerateRequest
from penstock.protocol.messages.sampling import Pooling


class EmbeddingOutput(Struct, kw_only=True):
    """Numbers of an embedding, of length 1."""

    embedding: list[float]


class EmbeddingRequestOutput(Struct, kw_only=True):
    """One prompt with its embedding."""

    request_id: str
    outputs: EmbeddingOutput
    num_prompt_tokens: int
    num_cached_tokens: int
    finished: bool = True


class ScoringOutput(Struct, kw_only=True):
    """The score of a pair of texts."""

    score: float


class ScoringRequestOutput(Struct, kw_only=True):
    """One pair of texts with its score."""

    request_id: str
    outputs: ScoringOutput
    finished: bool = True


class PoolingMethods:
    """The methods of `LLM` whose results are numbers."""

    config: Config
    _client: Client
    _window: int
    _numbers: "itertools.count[int]"

    def embed(
        self,
        prompts: Any,
        *,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """Return the embedding of each prompt; prompts are those of `generate`.

        dimensions: numbers to keep. truncate_prompt_tokens: the first tokens to keep of a longer
        prompt. Raises RequestError for what is refused.
        """
        fields = {"pooling": Pooling(dimensions=dimensions), "truncation_side": "right"}
        fields["truncate_prompt_tokens"] = truncate_prompt_tokens
        requests = [{"prompt": prompt, **fields} for prompt in prompts_of(prompts)]
        return [
            EmbeddingRequestOutput(
                request_id=reply.request_id,
                outputs=EmbeddingOutput(embedding=result_of(reply)),
                num_prompt_tokens=reply.usage.prompt_tokens,
                num_cached_tokens=reply.usage.cached_tokens,
            )
            for reply in self._pool(requests, len(requests), "embeddings", use_tqdm)
        ]

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        instruction: str | None = None,
        use_tqdm: bool = True,
    ) -> list[ScoringRequestOutput]:
        """Return the score of each pair of texts; one first text may stand for all pairs.

        instruction: the task, for the model's prompt. Raises ValueError, RequestError.
        """
        first = [data_1] if isinstance(data_1, str) else list(data_1)
        second = [data_2] if isinstance(data_2, str) else list(data_2)
        if len(first) not in (1, len(second)):
            raise ValueError(f"data_1: got {len(first)} texts, expected 1 or {len(second)}")
        pairs = list(zip(itertools.cycle(first), second, strict=False))
        scoring = Scoring(pairs, self._labels(), instruction)
        number = len(scoring.parts)
        scores = scoring.scores(self._pool(scoring.requests, number, "scores", use_tqdm))
        return [
            ScoringRequestOutput(
                request_id=str(next(self._numbers)), outputs=ScoringOutput(score=score)
            )
            for score in scores
        ]

    def _labels(self) -> list[int] | None:
        if read_model_config(self.config.model_folder).is_embedding_model:
            return None
        ask = self._client.tokenize
        return [label_id(one, ask(one, add_special_tokens=False).token_ids) for one in LABELS]

    def _pool(
        self, requests: Iterable[dict[str, Any]], number: int, name: str, shows: bool
    ) -> list[GenerateReply]:
        """Return the replies, in the order of the requests, which are taken as they are sent."""
        questions = (
            GenerateRequest(request_id=str(next(self._numbers)), **one) for one in requests
        )
        with tqdm(total=number, desc=name, dynamic_ncols=True, disable=not shows) as bar:
            return replies_to(self._client, questions, self._window, GenerateReply, bar.update)
