"""Documents that are cut before they are scored."""

from typing import Any

import pytest

from penstock.protocol.client.scoring import Scoring
from tests.pipeline.pooling.conftest import Served

pytestmark = pytest.mark.pipeline


def test_documents_are_cut(reranker: Served) -> None:
    """A character of two tokens, and one of four, are left out where they would be cut."""
    full = ["abcdef", "abé", "ab🙂x", "abc", ""]
    cut = ["abc", "ab", "ab", "abc", ""]

    def scores(path: str, documents: list[str], **fields: Any) -> Any:
        reply = reranker.post(path, query="q", documents=documents, **fields)["results"]
        return [one["relevance_score"] for one in sorted(reply, key=lambda one: one["index"])]

    expected = scores("/v1/rerank", cut)
    assert scores("/v1/rerank", full, max_tokens_per_doc=3) == expected
    (request,) = Scoring([("q", "")], [0, 1]).requests
    size = len(reranker.tokenizer.encode(request["prompt"], add_special_tokens=False).ids)
    assert scores("/v1/rerank", full, truncate_prompt_tokens=size + 3) == expected
    both = {"truncate_prompt_tokens": size + 9, "max_tokens_per_doc": 3}
    assert scores("/v1/rerank", full, **both) == expected
    data = reranker.post("/v1/score", text_1="q", text_2=full, truncate_prompt_tokens=size + 3)
    assert [one["score"] for one in data["data"]] == expected
    long = "x" * 9000
    message, param = reranker.refusal("/v1/rerank", query="q", documents=[long])
    assert "expected up to" in message
    scores("/v1/rerank", [long], truncate_prompt_tokens=-1)
    message, param = reranker.refusal(
        "/v1/rerank", query="q", documents=["a"], truncate_prompt_tokens=size
    )
    assert param == "truncate_prompt_tokens"
    assert f"got {size}, expected more than the {size} tokens" in message
    assert reranker.refusal("/v1/rerank", query="q", documents=["a"], max_tokens_per_doc=0)


def test_documents_of_an_embedding_model_are_cut(embedder: Served) -> None:
    (cut,) = embedder.post("/v1/score", text_1="q", text_2="abc")["data"]
    for fields in ({"truncate_prompt_tokens": 4}, {"max_tokens_per_doc": 3}):
        reply = embedder.post("/v1/rerank", query="q", documents=["abcdef"], **fields)
        assert reply["results"][0]["relevance_score"] == cut["score"]
