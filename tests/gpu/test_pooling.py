"""Embeddings and scores in bfloat16 against transformers in float32, with the same weights."""

import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM, Qwen3Model

from penstock import LLM
from penstock.protocol.client.scoring import LABELS, Scoring
from penstock.protocol.config import Config
from tests.gpu.checkpoints import LAYERS
from tests.models.checkpoints import (
    change_config,
    save_checkpoint,
    save_embedding_model,
    write_embedding_files,
)

pytestmark = pytest.mark.gpu
SHAPE = LAYERS | {"max_position_embeddings": 2048}
"""of Qwen3-Embedding-0.6B and Qwen3-Reranker-0.6B, with the demo model's tokenizer"""
DEMO = Config().model_folder
TEXTS = ["17+25=", "Instruct: find it\nQuery:where", "é🙂", "x" * 500, "count from 3 to 9 " * 40]


def as_ids(folder: Path, text: str) -> torch.Tensor:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return torch.tensor([tokenizer.encode(text).ids], device="cuda")


def load(folder: Path, dtype: torch.dtype) -> Qwen3Model:
    return Qwen3Model.from_pretrained(folder, dtype=dtype).eval().cuda()


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.cosine_similarity(a.double().cpu(), b.double().cpu(), dim=0))


@torch.inference_mode()
def test_embeddings_are_as_near_as_those_of_transformers(tmp_path: Path) -> None:
    """Random layers cost transformers in bfloat16 0.0006 to 0.0017 of the cosine, too."""
    made = save_embedding_model(tmp_path, **SHAPE)
    made.bfloat16().save_pretrained(tmp_path)
    change_config(tmp_path, architectures=["Qwen3ForCausalLM"])
    with LLM(str(tmp_path), device="cuda", kv_cache_gib=1) as llm:
        found = [torch.tensor(one.outputs.embedding) for one in llm.embed(TEXTS)]
    exact, rough = (load(tmp_path, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    losses, theirs = [], []
    for text, embedding in zip(TEXTS, found, strict=True):
        ids = as_ids(tmp_path, text)
        expected = exact(ids).last_hidden_state[0, -1]
        losses.append(1 - cosine(embedding, expected))
        theirs.append(1 - cosine(rough(ids).last_hidden_state[0, -1], expected))
        print(f"1 - cosine: {losses[-1]:.6f}, transformers {theirs[-1]:.6f}")
    assert sum(losses) <= 1.2 * sum(theirs)


@torch.inference_mode()
def test_embeddings_of_trained_weights(tmp_path: Path) -> None:
    """The demo model's last hidden state as an embedding, to 0.999 of the cosine in bfloat16."""
    Qwen3Model.from_pretrained(DEMO, dtype=torch.bfloat16).save_pretrained(tmp_path)
    change_config(tmp_path, architectures=["Qwen3ForCausalLM"])
    write_embedding_files(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, tmp_path)
    with LLM(str(tmp_path), device="cuda", kv_cache_gib=1) as llm:
        found = [torch.tensor(one.outputs.embedding) for one in llm.embed(TEXTS)]
    exact = load(tmp_path, dtype=torch.float32)
    cosines = [
        cosine(embedding, exact(as_ids(tmp_path, text)).last_hidden_state[0, -1])
        for text, embedding in zip(TEXTS, found, strict=True)
    ]
    print("cosines of trained weights:", *(f"{one:.6f}" for one in cosines))
    assert min(cosines) >= 0.999


@torch.inference_mode()
def test_documents_in_the_order_of_transformers(tmp_path: Path) -> None:
    made = save_checkpoint(tmp_path, **SHAPE, vocab_size=272, tie_word_embeddings=True)
    for path in tmp_path.glob("model*"):  # of float32
        path.unlink()
    made.bfloat16().save_pretrained(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.add_tokens(list(LABELS))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    labels = [tokenizer.token_to_id(one) for one in ("no", "yes")]
    model = Qwen3ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval().cuda()
    expected = []
    for text in TEXTS:
        (request,) = Scoring([("where", text)], [0, 0]).requests
        logits = model(as_ids(tmp_path, request["prompt"])).logits[0, -1, labels]
        expected.append(float(logits.log_softmax(0)[1].exp()))
    with LLM(str(tmp_path), device="cuda", kv_cache_gib=1) as llm:
        found = [one.outputs.score for one in llm.score("where", TEXTS)]
    print(*(f"{a:.5f} {b:.5f}" for a, b in zip(found, expected, strict=True)), sep="\n")
    assert sorted(range(5), key=found.__getitem__) == sorted(range(5), key=expected.__getitem__)
