"""The size of the KV cache, and answers out of one in 8 bits."""

from functools import partial
from pathlib import Path
from random import Random

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from penstock.kernels.matrices import FP8
from penstock.models.architecture import describe
from penstock.protocol.checkpoint import ModelError, read_model_config
from penstock.protocol.config import Config
from penstock.protocol.messages.sampling import SamplingParams
from penstock.services.worker.memory.kv_cache import (
    STANDBY_BYTES,
    KVLayout,
    free_gpu_bytes,
    zeros,
)
from tests.engine import Engine
from tests.tools.demo.tasks import TASK_NAMES, Sizes, is_right, make_example


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8])
@pytest.mark.parametrize(
    ("block_size", "tp_size", "shape"), [(16, 1, (7, 16, 4, 16)), (256, 4, (7, 256, 1, 16))]
)
def test_is_as_large_as_asked_for(
    folder: Path, block_size: int, tp_size: int, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    model = read_model_config(folder)
    layout = KVLayout(describe(model), tp_size, block_size, dtype)
    memory = layout.allocate(7, zeros(7 * layout.block_bytes, torch.device("cpu")))
    kv_caches = memory.layers
    assert len(kv_caches) == 2
    num_bytes = 0
    for k, v, scales in kv_caches:
        assert k.dtype == v.dtype == dtype
        assert k.shape == v.shape == shape
        assert (scales is not None) == (dtype == FP8)
        for tensor in (k, v, *(scales or ())):
            assert not tensor.float().any()
            num_bytes += tensor.nbytes
    assert layout.num_fitting_blocks(num_bytes) == 7
    assert layout.num_fitting_blocks(num_bytes - 1) == 6


def test_refuses_what_holds_no_block(folder: Path) -> None:
    layout = KVLayout(describe(read_model_config(folder)), 1, 16, torch.float32)
    with pytest.raises(ModelError, match=r"KV cache: got 0\.00 GiB, expected"):
        layout.num_fitting_blocks(1000)


@pytest.mark.parametrize("has_standby", [False, True])
def test_what_the_trial_holds_is_free(has_standby: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of 10,000 MB with 1,000 of weights, 70 of buffers, and steps of 20 and 50."""
    mb, peak = 10**6, 0

    def run(step: int, trial: int) -> None:
        nonlocal peak
        peak = (70 + trial + step) * mb

    for trial in (0, 30):
        stubs = {
            "memory_allocated": (70 + trial) * mb,
            "mem_get_info": ((10_000 - 1_070 - trial) * mb, 10_000 * mb),
            "reset_peak_memory_stats": None,
            "synchronize": None,
            "empty_cache": None,
        }
        for name, result in stubs.items():
            monkeypatch.setattr(torch.cuda, name, lambda *_, result=result: result)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: peak)
        found = free_gpu_bytes(
            [partial(run, 20, trial), partial(run, 50, trial)],
            0.9,
            torch.device("cuda"),
            trial_bytes=trial * mb,
            has_standby=has_standby,
        )
        assert found == (9_000 - 1_070 - 70) * mb - has_standby * (STANDBY_BYTES + 140 * mb)


def answers(*, preempt: bool = False, **options: object) -> tuple[list[list[int]], int]:
    """Return the demo model's answers to chats that begin alike, and the number of right ones."""
    config = Config(device="cpu", num_threads=1, **options)  # type: ignore[arg-type]
    engine, rng = Engine(config), Random(3)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(config.model_folder)
    rules = {"role": "system", "content": "Be brief and right. " * 3}
    examples = [make_example(rng, TASK_NAMES[n % 4], Sizes(4, 8)) for n in range(12)]
    sequences = []
    for number, example in enumerate(examples):
        text = tokenizer.apply_chat_template(
            [rules, {"role": "user", "content": example.prompt}],
            tokenize=False,
            add_generation_prompt=True,
        )
        sampling = SamplingParams(temperature=0, max_tokens=60)
        sequences.append(engine.add(str(number), list(tokenizer.encode(text)), sampling))

    def disturb() -> None:
        for sequence in list(engine.scheduler.running):
            if sequence.num_preemptions < len(sequence.output_token_ids) < 3:
                engine.scheduler.preempt(sequence)

    engine.run(disturb if preempt else lambda: None)
    outputs = [sequence.output_token_ids for sequence in sequences]
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in outputs]
    pairs = zip(examples, texts, strict=True)
    assert not preempt or any(sequence.num_preemptions for sequence in sequences)
    return outputs, sum(is_right(example.prompt, text) for example, text in pairs)


def test_memory_that_the_machine_does_not_have(folder: Path) -> None:
    layout = KVLayout(describe(read_model_config(folder)), 1, 16, torch.float32)
    with pytest.raises(ModelError, match=r"KV cache: Unable to allocate .*lower --kv-cache-gib"):
        zeros((1 << 45) * layout.block_bytes, torch.device("cpu"))


@pytest.mark.slow
def test_8_bits_answer_as_well_however_blocks_are_used() -> None:
    outputs, num_right = answers(kv_cache_dtype="fp8", num_blocks=200)
    assert num_right == answers(num_blocks=200)[1]
    options = {"num_blocks": 30, "max_num_batched_tokens": 50, "max_num_seqs": 8}
    disturbed, _ = answers(kv_cache_dtype="fp8", preempt=True, **options)  # type: ignore[arg-type]
    assert disturbed == outputs
