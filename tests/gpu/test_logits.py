"""Logits on a GPU against transformers in float32 on the same weights, upcast."""

from collections import defaultdict
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from penstock.kernels.layouts.sampling import column
from penstock.models.random_checkpoint import make_checkpoint, shape_of
from penstock.protocol.config import Config
from penstock.protocol.messages.sampling import SamplingParams
from tests.engine import Engine
from tests.gpu.checkpoints import release, save_small

pytestmark = pytest.mark.gpu
NUM_DECODED = 6


@pytest.fixture(scope="module", params=["demo", "0.6B", "3.5-0.8B", "3.5-35B-A3B"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "demo":
        return Config().model_folder
    path = tmp_path_factory.mktemp("random")
    if request.param == "0.6B":
        save_small(path)
    else:
        make_checkpoint(path, shape_of(request.param) | {"num_hidden_layers": 4})
    return path


class Logits:
    """Logits of each row that samples, kept on the host, by the seed of its request."""

    def __init__(self, engine: Engine) -> None:
        self._rows: defaultdict[int, dict[int, Tensor]] = defaultdict(dict)
        seeds = column(engine.runner._slots.parameters, "seed")
        complete = engine.runner._complete

        def record(rows: Any, computed: Any, *others: Any) -> Any:
            slots, positions, _ = computed.rows
            given = slots.tolist(), seeds[slots.clamp(min=0)].tolist(), positions.tolist()
            for slot, seed, position, logits in zip(*given, computed.logits.cpu(), strict=True):
                if slot >= 0:
                    self._rows[seed][position] = logits
            return complete(rows, computed, *others)

        engine.runner._complete = record  # type: ignore[method-assign]

    def of(self, seed: int) -> Tensor:
        """Return the logits of a sequence in the order of its tokens, [tokens, vocab_size]."""
        return torch.stack([logits for _, logits in sorted(self._rows[seed].items())])


def relative_error(ours: Tensor, reference: Tensor) -> float:
    return float((ours - reference).norm() / reference.norm())


def reference_logits(folder: Path, texts: list[list[int]], dtype: torch.dtype) -> list[Tensor]:
    """Return the logits of the last NUM_DECODED + 1 tokens of each text."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().cuda()
    logits = []
    with torch.inference_mode():
        for text in texts:
            ids = torch.tensor([text], device="cuda")
            kept = model(ids, logits_to_keep=NUM_DECODED + 1).logits[0]
            logits.append(kept.float().cpu())
    return logits


@pytest.mark.parametrize("batch", [1, 7, 30, 60, 90])
@pytest.mark.parametrize(
    ("attention", "dtype"),
    [("triton", "bfloat16"), ("triton", "float16"), ("flash-attn", "bfloat16")],
)
def test_logits_are_as_near_as_those_of_transformers(
    folder: Path, batch: int, attention: str, dtype: str
) -> None:
    """Prefill and decode, in each kind of matrix product."""
    if attention == "flash-attn":
        pytest.importorskip("flash_attn")
    rng = Random(batch)
    options = {"attention": attention, "enable_cuda_graphs": False, "kv_cache_gib": 4.0}
    options["dtype"] = dtype
    engine = Engine(
        Config(model=str(folder), device="cuda", max_num_batched_tokens=32768, **options)  # type: ignore[arg-type]
    )
    recorded = Logits(engine)
    vocab_size = engine.model.vocab_size
    prompts = [
        [rng.randrange(min(vocab_size, 256)) for _ in range(rng.randrange(5, 300))]
        for _ in range(batch)
    ]
    greedy = {"temperature": 0.0, "max_tokens": NUM_DECODED + 1, "ignore_eos": True}
    sequences = [
        engine.add(str(n), prompt, SamplingParams(seed=n, **greedy))  # type: ignore[arg-type]
        for n, prompt in enumerate(prompts)
    ]
    engine.run()
    del engine
    release()
    ours = torch.stack([recorded.of(n)[:, :vocab_size] for n in range(batch)])
    texts = [sequence.token_ids[:-1] for sequence in sequences]
    exact = torch.stack(reference_logits(folder, texts, torch.float32))
    theirs = torch.stack(reference_logits(folder, texts, getattr(torch, dtype)))
    error, their_error = relative_error(ours, exact), relative_error(theirs, exact)
    print(f"{folder.name} {attention} batch {batch}: {error:.2e}, transformers {their_error:.2e}")
    assert error < 5e-2
    assert error < 1.1 * their_error
