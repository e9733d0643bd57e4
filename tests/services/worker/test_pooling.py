"""Embeddings and probabilities of labels: those of transformers, the same bits in every batch."""

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import Qwen3ForCausalLM

from penstock.protocol.messages.plan import RowAdded, RowExtras
from penstock.protocol.messages.sampling import Pooling
from penstock.services.worker.launched_step import BAD_LOGITS
from penstock.services.worker.model_runner import ModelRunner
from tests.models.checkpoints import save_embedding_model
from tests.services.worker.conftest import Checkpoint
from tests.services.worker.driver import PROMPTS, make_runner
from tests.services.worker.plans import plan, row

EMBED = Pooling()
LABELS = Pooling(label_ids=[9, 200, 7])


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Return a random embedding model, here and in transformers."""
    folder = tmp_path_factory.mktemp("embedder")
    return Checkpoint(folder, save_embedding_model(folder))


def pooled_row(slot: int, prompt: list[int], begin: int, pooling: Pooling) -> RowAdded:
    extras = RowExtras(len(prompt), pooling=pooling)
    return row(slot, prompt, range(begin, begin + -(-len(prompt) // 16)), extras=extras)


def run_together(runner: ModelRunner, poolings: list[Pooling]) -> list[NDArray[np.float32]]:
    """Return the numbers of PROMPTS, computed in one step."""
    begins = np.cumsum([0, *(-(-len(prompt) // 16) for prompt in PROMPTS)]).tolist()
    added = [
        pooled_row(slot, *pair)
        for slot, pair in enumerate(zip(PROMPTS, begins[:-1], poolings, strict=True))
    ]
    chunks = [(slot, len(prompt)) for slot, prompt in enumerate(PROMPTS)]
    return numbers(runner, added, chunks)


def numbers(
    runner: ModelRunner, added: list[RowAdded], chunks: list[tuple[int, int]]
) -> list[NDArray[np.float32]]:
    output = runner.launch(plan(added=added, chunks=chunks)).output()
    assert [index for index, _ in output.pooled] == list(range(len(chunks)))
    return [np.frombuffer(one, "<f4") for _, one in output.pooled]


@pytest.mark.parametrize("attention", ["auto", "torch"])
@torch.inference_mode()
def test_embeddings_are_those_of_transformers(embedder: Checkpoint, attention: str) -> None:
    found = run_together(make_runner(embedder.folder, attention=attention), [EMBED] * len(PROMPTS))
    for prompt, vector in zip(PROMPTS, found, strict=True):
        hidden = embedder.model(torch.tensor([prompt])).last_hidden_state[0, -1]
        expected = torch.nn.functional.normalize(hidden, dim=0).numpy()
        assert float(vector @ expected) >= 0.999999
        np.testing.assert_allclose(vector, expected, atol=1e-5)


def test_an_embedding_has_the_same_bits_in_every_batch_and_chunk(embedder: Checkpoint) -> None:
    together = run_together(make_runner(embedder.folder), [EMBED] * len(PROMPTS))
    runner = make_runner(embedder.folder)
    for prompt, expected in zip(PROMPTS, together, strict=True):
        (alone,) = numbers(runner, [pooled_row(0, prompt, 0, EMBED)], [(0, len(prompt))])
        assert alone.tobytes() == expected.tobytes()
        runner.clear()
    added = [pooled_row(0, PROMPTS[2], 0, EMBED)]
    first = runner.launch(plan(added=added, chunks=[(0, 77)]))
    assert (first.token_ids(), first.output().pooled) == ([], [])
    (chunked,) = numbers(runner, [], [(0, 63)])
    assert chunked.tobytes() == together[2].tobytes()


def test_fewer_dimensions_are_the_first_ones_of_length_1(embedder: Checkpoint) -> None:
    runner = make_runner(embedder.folder)
    whole = run_together(runner, [EMBED] * len(PROMPTS))
    runner.clear()
    cuts = [Pooling(dimensions=number) for number in (1, 7, 32, 63, 64)]
    for full, short, cut in zip(whole, run_together(runner, cuts), cuts, strict=True):
        expected = full[: cut.dimensions] / np.linalg.norm(full[: cut.dimensions])
        assert short.shape == (cut.dimensions,)
        np.testing.assert_allclose(short, expected, rtol=1e-6)


@torch.inference_mode()
def test_labels_and_embeddings_beside_text(folder: Path, reference: Qwen3ForCausalLM) -> None:
    """One step has a row of text, one with logprobs, and rows with each kind of pooling."""
    runner = make_runner(folder)
    added = [
        row(0, PROMPTS[1], [60]),
        pooled_row(1, PROMPTS[0], 0, LABELS),
        row(2, PROMPTS[3], [61], extras=RowExtras(len(PROMPTS[3]), num_logprobs=1)),
        pooled_row(3, PROMPTS[2], 10, EMBED),
        pooled_row(4, PROMPTS[4], 30, Pooling(label_ids=[3])),
    ]
    order = (1, 0, 3, 2, 4)
    chunks = [(slot, len(PROMPTS[index])) for slot, index in enumerate(order)]
    step = runner.launch(plan(added=added, chunks=chunks))
    tokens, output = step.token_ids(), step.output()
    logits = [reference(torch.tensor([prompt])).logits[0, -1] for prompt in PROMPTS]
    assert (tokens[0], tokens[2]) == (int(logits[1].argmax()), int(logits[3].argmax()))
    assert [index for index, _ in output.logprobs] == [2]
    pooled = {index: np.frombuffer(data, "<f4") for index, data in output.pooled}
    expected = logits[0][LABELS.label_ids].softmax(0).numpy()
    np.testing.assert_allclose(pooled[1], expected, atol=1e-6)
    assert (len(pooled[3]), pooled[4].tolist()) == (64, [1.0])


def test_an_embedding_that_is_not_finite_fails_alone(embedder: Checkpoint) -> None:
    runner = make_runner(embedder.folder)
    embedding = runner._model.model.embed_tokens.weight
    bad = next(token for token in PROMPTS[0] if token not in PROMPTS[1])
    embedding.data[bad] = float("nan")
    added = [pooled_row(0, PROMPTS[0], 0, EMBED), pooled_row(1, PROMPTS[1], 5, EMBED)]
    output = runner.launch(plan(added=added, chunks=[(0, 37), (1, 5)])).output()
    assert output.failed == [(0, BAD_LOGITS)]
    assert [index for index, _ in output.pooled] == [1]
