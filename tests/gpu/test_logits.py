"""Logits on a GPU against transformers in float32 on the same weights, upcast."""

from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from penstock.models.model import Model
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
    """Logits of each row that samples, kept on the host."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[Tensor] = []
        compute_logits = Model.compute_logits

        def record(model: Model, hidden_states: Tensor, out: Tensor | None = None) -> Tensor:
            logits = compute_logits(model, hidden_states, out)
            self.steps.append(logits.cpu())
            return logits

        monkeypatch.setattr(Model, "compute_logits", record)


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
    folder: Path, monkeypatch: pytest.MonkeyPatch, batch: int, attention: str, dtype: str
) -> None:
    """Prefill and decode, in each kind of matrix product."""
    if attention == "flash-attn":
        pytest.importorskip("flash_attn")
    recorded = Logits(monkeypatch)
    rng = Random(batch)
    options = {"attention": attention, "enable_cuda_graphs": False, "kv_cache_gib": 4.0}
    options["dtype"] = dtype
    engine = Engine(
        Config(model=str(folder), device="cuda", max_num_batched_tokens=32768, **options)  # type: ignore[arg-type]
    )
    vocab_size = engine.model.vocab_size
    prompts = [
        [rng.randrange(min(vocab_size, 256)) for _ in range(rng.randrange(5, 300))]
        for _ in range(batch)
    ]
    greedy = SamplingParams(temperature=0, max_tokens=NUM_DECODED + 1, ignore_eos=True)
    sequences = [engine.add(str(n), prompt, greedy) for n, prompt in enumerate(prompts)]
    engine.run()
    del engine
    release()
    ours = torch.stack([step[:batch] for step in recorded.steps[: NUM_DECODED + 1]], 1)
    texts = [sequence.token_ids[:-1] for sequence in sequences]
    exact = torch.stack(reference_logits(folder, texts, torch.float32))
    theirs = torch.stack(reference_logits(folder, texts, getattr(torch, dtype)))
    error, their_error = relative_error(ours, exact), relative_error(theirs, exact)
    print(f"{folder.name} {attention} batch {batch}: {error:.2e}, transformers {their_error:.2e}")
    assert error < 2e-2
    assert error < 1.1 * their_error
