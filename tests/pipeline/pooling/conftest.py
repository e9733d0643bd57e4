"""An embedding model and a reranker, each in a pipeline for all tests of this folder."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from penstock import LLM
from penstock.protocol.client.scoring import LABELS
from tests.models.checkpoints import save_checkpoint, save_embedding_model
from tests.pipeline.ports import free_port

SMALL = {"device": "cpu", "num_threads": 1, "kv_cache_gib": 0.1}


class Served:
    """A model in a pipeline with an HTTP server, and in transformers."""

    def __init__(self, folder: Path, model: PreTrainedModel, llm: LLM, url: str) -> None:
        self.model = model
        self.llm = llm
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0)
        self._http = httpx.Client(base_url=url, timeout=60)

    def post(self, path: str, **fields: Any) -> Any:
        """Return the decoded reply to a request that is served."""
        reply = self._http.post(path, json=fields)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def refusal(self, path: str, **fields: Any) -> tuple[str, str]:
        """Return message and field of an invalid request's error."""
        reply = self._http.post(path, json=fields)
        assert reply.status_code == 400
        return reply.json()["error"]["message"], reply.json()["error"]["param"]


def served(folder: Path, model: PreTrainedModel, **options: Any) -> Iterator[Served]:
    port = free_port()
    with LLM(str(folder), http=1, http_port=port, **SMALL, **options) as llm:
        yield Served(folder, model, llm, f"http://127.0.0.1:{port}")


@pytest.fixture(scope="session")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Chunks of 64 tokens, in two ranks."""
    folder = tmp_path_factory.mktemp("embedder") / "tiny-embedding"
    folder.mkdir()
    model = save_embedding_model(folder, max_position_embeddings=600)
    yield from served(folder, model, tensor_parallel_size=2, max_num_batched_tokens=64)


@pytest.fixture(scope="session")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """With tokens for both labels."""
    folder = tmp_path_factory.mktemp("reranker")
    model = save_checkpoint(
        folder, vocab_size=272, tie_word_embeddings=True, max_position_embeddings=1024
    )
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(list(LABELS))
    tokenizer.save(str(folder / "tokenizer.json"))
    yield from served(folder, model)
