"""Qwen3's mixture of experts: transformers' logits in float32, each rank's share, the worker."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from penstock.models.tensor_parallel import TensorParallel
from penstock.protocol.config import Config
from penstock.protocol.messages.sampling import SamplingParams
from tests.engine import Engine
from tests.models.checkpoints import EXPERTS, save_checkpoint
from tests.models.forward import load_model, prefill_logits, random_prompts

pytestmark = pytest.mark.slow


@torch.inference_mode()
def transformers_logits(model: PreTrainedModel, prompts: list[list[int]]) -> Tensor:
    """Return the logits after every token of the prompts, each prompt on its own."""
    return torch.cat([model(torch.tensor([prompt])).logits[0] for prompt in prompts])


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"norm_topk_prob": False, "tie_word_embeddings": True},
        {"decoder_sparse_step": 2, "mlp_only_layers": [], "num_hidden_layers": 4},
        {"num_experts": 5, "num_experts_per_tok": 5, "moe_intermediate_size": 36},
        {"hidden_size": 600, "moe_intermediate_size": 520, "initializer_range": 0.1},
    ],
)
def test_logits_are_those_of_transformers(tmp_path: Path, shape: dict[str, object]) -> None:
    reference = save_checkpoint(tmp_path, **{**EXPERTS, **shape})
    prompts = random_prompts(264, 1, 30, 150)
    logits = prefill_logits(load_model(tmp_path), prompts)
    assert logits is not None
    expected = transformers_logits(reference, prompts)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_the_ranks_experts_make_up_the_whole(tmp_path: Path, expert_parallel: bool) -> None:
    save_checkpoint(tmp_path, **EXPERTS)
    whole = load_model(tmp_path).model.layers[2].mlp
    ranks = [load_model(tmp_path, TensorParallel(rank, 4), expert_parallel) for rank in range(4)]
    parts = [rank.model.layers[2].mlp for rank in ranks]
    downs = [part.down_proj.weight for part in parts]
    assert torch.equal(torch.cat(downs, 0 if expert_parallel else 2), whole.down_proj.weight)
    for half, expected in enumerate(whole.gate_up_proj.weight.chunk(2, 1)):
        gates = [part.gate_up_proj.weight.chunk(2, 1)[half] for part in parts]
        assert torch.equal(torch.cat(gates, 0 if expert_parallel else 1), expected)
    assert all(torch.equal(part.gate.weight, whole.gate.weight) for part in parts)
    assert whole.num_idle_weights == 9 * 3 * 40 * 64


def test_a_worker_serves_experts(tmp_path: Path) -> None:
    reference = save_checkpoint(tmp_path, **EXPERTS)
    engine = Engine(Config(model=str(tmp_path), device="cpu", num_threads=1, max_num_seqs=4))
    sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    prompts = random_prompts(264, 5, 40, 90)
    sequences = [engine.add(str(n), prompt, sampling) for n, prompt in enumerate(prompts)]
    engine.run()
    for prompt, sequence in zip(prompts, sequences, strict=True):
        tokens = prompt + list(sequence.output_token_ids)
        expected = transformers_logits(reference, [tokens]).argmax(-1).tolist()
        assert expected[len(prompt) - 1 : -1] == tokens[len(prompt) :]
        assert len(tokens) == len(prompt) + 12
