"""Embeddings and scores of running pipelines, against transformers."""

import base64
import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from penstock import Client, RequestError
from penstock.launch.pipeline.control_client import list_processes
from penstock.protocol.client.scoring import Scoring
from penstock.protocol.messages.sampling import Pooling
from tests.pipeline.pooling.conftest import Served

pytestmark = pytest.mark.pipeline
TEXTS = ["17+25=", "Instruct: find it\nQuery:where", "é🙂", "x" * 500]
Numbers = Any


@torch.inference_mode()
def expected(its: Served, text: str | list[int]) -> Numbers:
    """Return the embedding by transformers, as sentence-transformers makes it."""
    token_ids = text if isinstance(text, list) else its.tokenizer.encode(text).ids
    hidden = its.model(torch.tensor([token_ids])).last_hidden_state[0, -1]
    return torch.nn.functional.normalize(hidden, dim=0).numpy()


@torch.inference_mode()
def expected_score(its: Served, query: str, document: str) -> float:
    """Return the score by transformers, as the model's card computes it."""
    (request,) = Scoring([(query, document)], [0, 0]).requests
    token_ids = its.tokenizer.encode(request["prompt"], add_special_tokens=False).ids
    labels = [its.tokenizer.token_to_id(one) for one in ("no", "yes")]
    logits = its.model(torch.tensor([token_ids])).logits[0, -1, labels]
    return float(logits.log_softmax(0)[1].exp())


def test_the_openai_client(embedder: Served) -> None:
    """Base64 is its default."""
    create = embedder.openai.embeddings.create
    whole = create(model="tiny-embedding", input=TEXTS, user="somebody")
    assert [one.index for one in whole.data] == [0, 1, 2, 3]
    for text, one in zip(TEXTS, whole.data, strict=True):
        assert float(np.array(one.embedding) @ expected(embedder, text)) >= 0.99999
        np.testing.assert_allclose(one.embedding, expected(embedder, text), atol=1e-5)
    number = sum(len(embedder.tokenizer.encode(text).ids) for text in TEXTS)
    assert (whole.usage.prompt_tokens, whole.usage.total_tokens) == (number, number)
    floats = create(model="tiny-embedding", input=TEXTS, encoding_format="float")
    assert [one.embedding for one in floats.data] == [one.embedding for one in whole.data]
    (short,) = create(model="tiny-embedding", input=TEXTS[0], dimensions=16).data
    cut = expected(embedder, TEXTS[0])[:16]
    np.testing.assert_allclose(short.embedding, cut / np.linalg.norm(cut), atol=1e-5)


def test_token_ids_are_taken_as_they_are(embedder: Served) -> None:
    one = embedder.post("/v1/embeddings", input=[5, 6, 7])["data"]
    two = embedder.post("/v1/embeddings", input=[[9], [5, 6, 7]])["data"]
    np.testing.assert_allclose(one[0]["embedding"], expected(embedder, [5, 6, 7]), atol=1e-5)
    assert one[0]["embedding"] == two[1]["embedding"]
    np.testing.assert_allclose(two[0]["embedding"], expected(embedder, [9]), atol=1e-5)


def test_a_text_is_cut_before_the_token_that_ends_it(embedder: Served) -> None:
    ids = embedder.tokenizer.encode("y" * 700).ids
    for number in (5, -1):
        most = 600 if number == -1 else number
        fields = {"input": "y" * 700, "truncate_prompt_tokens": number}
        reply = embedder.post("/v1/embeddings", **fields)
        cut = [*ids[: most - 1], ids[-1]]
        np.testing.assert_allclose(
            reply["data"][0]["embedding"], expected(embedder, cut), atol=1e-5
        )
        assert reply["usage"]["prompt_tokens"] == most


REFUSED: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "empty": ("/v1/embeddings", {"input": ""}, "input: got an empty one", "input"),
    "one empty": ("/v1/embeddings", {"input": ["a", ""]}, "input[1]: got ''", "input[1]"),
    "mixed": ("/v1/embeddings", {"input": ["a", 5]}, "input: got token ids next to", "input"),
    "unknown token": ("/v1/embeddings", {"input": [5, 264]}, "input[1]: got 264", "input"),
    "long": ("/v1/embeddings", {"input": "a" * 600}, "got 601 tokens, expected up to 600", "input"),
    "many": ("/v1/embeddings", {"input": ["a"] * 2049}, "input: got 2049 entries", "input"),
    "large": (
        "/v1/embeddings",
        {"input": ["a", "b" * 3_000_000]},
        "input[1]: got 3000000 bytes, expected up to",
        "input[1]",
    ),
    "large query": (
        "/v1/score",
        {"text_1": "b" * 1_500_000, "text_2": ["a"] * 2048},
        "text_1: got 1500000 bytes, expected up to",
        "text_1",
    ),
    "wide": (
        "/v1/embeddings",
        {"input": "a", "dimensions": 65},
        "dimensions: got 65, expected up to 64",
        "dimensions",
    ),
    "format": ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "got 'int8'", ""),
    "chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "hi"}]},
        "model: got an embedding model, which generates no text",
        "model",
    ),
    "completion": ("/v1/completions", {"prompt": "a"}, "model: got an embedding model", "model"),
    "pairs": ("/v1/score", {"text_1": ["a", "b"], "text_2": "c"}, "text_2: got 1 texts", "text_2"),
    "names": ("/v1/score", {"text_1": "a", "documents": "c"}, "text_1: got queries or", "text_1"),
    "no documents": ("/v1/rerank", {"query": "a", "documents": []}, "documents: got []", ""),
}


@pytest.mark.parametrize(("path", "fields", "sentence", "field"), REFUSED.values(), ids=REFUSED)
def test_refused(
    embedder: Served, path: str, fields: dict[str, Any], sentence: str, field: str
) -> None:
    message, param = embedder.refusal(path, **fields)
    assert sentence in message
    assert param == (field or next(name for name in fields if name in message))


def test_a_client_over_zeromq_and_programs(embedder: Served) -> None:
    client: Client = embedder.llm._client
    vector = client.embed(TEXTS[1])
    np.testing.assert_allclose(vector, expected(embedder, TEXTS[1]), atol=1e-5)
    assert len(client.embed([5, 6], dimensions=3)) == 3
    for fields, sentence in (
        ({"pooling": Pooling(label_ids=[1])}, "which has no output layer"),
        ({"pooling": Pooling(), "temperature": 0.5}, "temperature: got a value together with pool"),
        ({"pooling": Pooling(), "stream": True}, "stream: got a value together with pooling"),
        ({}, "which generates no text"),
    ):
        with pytest.raises(RequestError, match=sentence):
            client.generate("a", **fields)
    outputs = embedder.llm.embed([*TEXTS, {"prompt_token_ids": [5, 6]}], use_tqdm=False)
    assert outputs[1].outputs.embedding == vector
    np.testing.assert_allclose(outputs[4].outputs.embedding, expected(embedder, [5, 6]), atol=1e-5)
    (scored,) = embedder.llm.score("a", "b", use_tqdm=False)
    cosine = float(expected(embedder, "a") @ expected(embedder, "b"))
    assert scored.outputs.score == pytest.approx(cosine, abs=1e-5)


def test_an_embedding_is_the_same_in_every_batch(embedder: Served) -> None:
    texts = [f"{number} {'ab' * (number % 90)}" for number in range(120)]
    alone = [embedder.llm._client.embed(text) for text in texts[:20]]
    together = embedder.post("/v1/embeddings", input=texts, encoding_format="base64")["data"]
    for one, other in zip(alone, together, strict=False):
        assert one == np.frombuffer(base64.b64decode(other["embedding"]), "<f4").tolist()


def test_documents_in_the_order_of_transformers(reranker: Served) -> None:
    """50 queries; text is generated meanwhile, in the same steps, and has its own tokens."""
    draw = random.Random(0)
    words = [f"{draw.getrandbits(24):x}" for _ in range(60)]
    client = reranker.llm._client
    alone = client.generate("one two", max_tokens=200, temperature=0, ignore_eos=True).token_ids
    beside = client.submit("one two", max_tokens=200, temperature=0, ignore_eos=True)

    def ask(query: str, documents: list[str]) -> Any:
        return reranker.post("/v1/rerank", query=query, documents=documents)["results"]

    cases = [(" ".join(draw.sample(words, 3)), draw.sample(words, 5)) for _ in range(50)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda case: ask(*case), cases))
    for (query, documents), results in zip(cases, found, strict=True):
        scores = [expected_score(reranker, query, one) for one in documents]
        order = sorted(range(5), key=lambda index: -scores[index])
        assert [one["index"] for one in results] == order
        for one in results:
            assert one["relevance_score"] == pytest.approx(scores[one["index"]], abs=1e-5)
            assert one["document"]["text"] == documents[one["index"]]
    assert beside.result().token_ids == alone


def test_forms_of_rerank_and_score(reranker: Served) -> None:
    documents: list[Any] = ["a", {"text": "b", "id": 7}, "c"]
    reply = reranker.post("/v2/rerank", query="q", documents=documents, top_n=2)
    assert len(reply["results"]) == 2
    silent = reranker.post("/rerank", query="q", documents=documents, return_documents=False)
    assert all("document" not in one for one in silent["results"])
    scores = {one["index"]: one["relevance_score"] for one in silent["results"]}
    several = reranker.post("/v1/score", text_1="q", text_2=["a", "b", "c"])
    assert [one["score"] for one in several["data"]] == [scores[index] for index in range(3)]
    pairs = reranker.post("/score", queries=["q", "r"], documents=["a", "a"])
    assert pairs["data"][0]["score"] == scores[0] != pairs["data"][1]["score"]
    other = reranker.post("/v1/rerank", query="q", documents=["a"], instruction="another task")
    assert other["results"][0]["relevance_score"] != scores[0]
    offline = reranker.llm.score("q", ["a", "b", "c"], use_tqdm=False)
    assert [one.outputs.score for one in offline] == [scores[index] for index in range(3)]


def test_a_long_query_is_refused_before_its_prompts_are_made(reranker: Served) -> None:
    query, documents = "q" * 900_000, ["a"] * 2047 + ["b" * 200_000]
    for names in (("query", "instruction"), ("instruction", "query")):
        fields = dict(zip(names, (query, "q"), strict=True)) | {"documents": documents}
        message, param = reranker.refusal("/v1/rerank", **fields)
        assert f"{names[0]}: got 1100001 bytes of instruction and query and document" in message
        assert param == names[0]


def test_a_model_of_text_makes_no_embeddings(reranker: Served) -> None:
    message, param = reranker.refusal("/v1/embeddings", input="a")
    assert message.startswith("model: got one that generates text, expected an embedding model")
    assert param == "model"


@pytest.mark.chaos
def test_results_outlive_processes(reranker: Served) -> None:
    """A worker and a detokenizer die with requests in flight, and with results on their way."""
    client, labels = reranker.llm._client, Pooling(label_ids=[5, 6, 7])
    texts = [f"{number} {'ab' * (number % 90)}" for number in range(200)]
    alone = [client.generate(text, pooling=labels).numbers for text in texts[:5]]
    names = {one.name: one.pid for one in list_processes(reranker.llm.config.name)}
    streams = [
        client.submit(text, pooling=labels, cache_salt=f"salt {number}")
        for number, text in enumerate(texts)
    ]
    streams[0].result()
    for name in ("worker.1", "detokenizer.1"):
        os.kill(names[name], signal.SIGKILL)
    results = [stream.result().numbers for stream in streams]
    assert results[:5] == alone
    assert all(sum(one) == pytest.approx(1) for one in results)
    (status,) = client.status(fresh=True).schedulers
    assert status.num_free_blocks == status.num_blocks
