"""Steps of the real model: the tokens of transformers, and the same bits in every order of work."""

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import Qwen3ForCausalLM

from penstock.kernels.cpu.decode_step import DecodeStep
from penstock.models.qwen3 import Qwen3
from penstock.protocol.config import Config
from penstock.protocol.messages.plan import BatchPlan, RowExtras
from penstock.protocol.messages.structured import StructuredOutputs
from penstock.protocol.messages.worker import WorkerAssignment
from penstock.services.worker.loading import load
from penstock.services.worker.model_runner import ModelRunner
from penstock.services.worker.step_output import BAD_LOGITS
from tests.models.checkpoints import save_checkpoint
from tests.models.forward import random_prompts
from tests.services.worker.plans import plan, row

PROMPTS = random_prompts(264, 37, 5, 140, 16, 1)
NUM_DECODED = 20


def make_runner(folder: Path, block_size: int = 16, num_blocks: int = 64) -> ModelRunner:
    config = Config(
        model=str(folder),
        device="cpu",
        block_size=block_size,
        num_blocks=num_blocks,
        max_model_len=512,
        max_num_seqs=8,
        num_threads=1,
    )
    return load(config, WorkerAssignment(1, "group", 0, 1, ""), lambda: None)


@pytest.fixture(scope="module")
def greedy(reference: Qwen3ForCausalLM) -> list[list[int]]:
    """Return the continuation of each of PROMPTS by transformers' model."""
    outputs = []
    for prompt in PROMPTS:
        token_ids = list(prompt)
        for _ in range(NUM_DECODED):
            with torch.inference_mode():
                logits = reference(torch.tensor([token_ids])).logits[0, -1]
            token_ids.append(int(logits.argmax()))
        outputs.append(token_ids[len(prompt) :])
    return outputs


class Driver:
    """Gives a runner plans and keeps the tokens of each slot."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.tokens: dict[int, list[int]] = {}

    def step(self, step_plan: BatchPlan, *slots: int) -> None:
        """`slots`: those that sample."""
        token_ids = self.runner.launch(step_plan).token_ids()
        for slot, token_id in zip(sorted(slots), token_ids, strict=True):
            self.tokens.setdefault(slot, []).append(token_id)

    def decode(self, num_steps: int, *slots: int) -> None:
        for _ in range(num_steps):
            self.step(plan(), *slots)


def tables(block_size: int, num_blocks: int, lengths: list[int]) -> list[list[int]]:
    """Block tables for rows of these lengths, from blocks in a random order."""
    blocks = iter(torch.randperm(num_blocks).tolist())
    return [[next(blocks) for _ in range(-(-n // block_size))] for n in lengths]


@pytest.mark.parametrize(("block_size", "num_blocks"), [(16, 64), (256, 8), (1, 400)])
def test_prefill_and_decode(
    folder: Path, greedy: list[list[int]], block_size: int, num_blocks: int
) -> None:
    driver = Driver(make_runner(folder, block_size, num_blocks))
    lengths = [len(prompt) + NUM_DECODED for prompt in PROMPTS]
    block_tables = tables(block_size, num_blocks, lengths)
    added = [row(s, PROMPTS[s], block_tables[s]) for s in range(5)]
    chunks = [(s, len(PROMPTS[s])) for s in range(5)]
    driver.step(plan(added=added, chunks=chunks), *range(5))
    driver.decode(NUM_DECODED - 1, *range(5))
    assert list(driver.tokens.values()) == greedy


def test_chunked_prefill_beside_decode(folder: Path, greedy: list[list[int]]) -> None:
    driver = Driver(make_runner(folder))
    driver.step(plan(added=[row(1, PROMPTS[1], [0, 1])], chunks=[(1, 5)]), 1)
    added = [row(0, PROMPTS[0], [9, 3, 5, 6]), row(2, PROMPTS[2], range(20, 30))]
    driver.step(plan(added=added, chunks=[(0, 20), (2, 64)]), 1)
    driver.step(plan(chunks=[(2, 63), (0, 16)]), 1)
    driver.step(plan(chunks=[(0, 1)]), 0, 1)
    driver.step(plan(chunks=[(2, 13)]), 0, 1, 2)
    driver.decode(8, 0, 1, 2)
    assert [driver.tokens[slot] for slot in (0, 1, 2)] == [
        greedy[0][:10],
        greedy[1][:13],
        greedy[2][:9],
    ]


def test_a_slot_and_its_blocks_change_hands_in_one_plan(
    folder: Path, greedy: list[list[int]]
) -> None:
    driver = Driver(make_runner(folder))
    added = [row(0, PROMPTS[2], range(10)), row(1, PROMPTS[1], [10, 11])]
    driver.step(plan(added=added, chunks=[(0, 140), (1, 5)]), 0, 1)
    driver.decode(3, 0, 1)
    del driver.tokens[0]
    added = [row(0, PROMPTS[0], [4, 2, 0, 7])]
    driver.step(plan(removed=[0], added=added, chunks=[(0, 37)]), 0, 1)
    driver.decode(3, 0, 1)
    driver.step(plan(removed=[1]), 0)
    assert driver.tokens == {0: greedy[0][:5], 1: greedy[1][:8]}


def test_blocks_computed_before_are_shared(folder: Path, greedy: list[list[int]]) -> None:
    driver = Driver(make_runner(folder))
    driver.step(plan(added=[row(0, PROMPTS[0], [5, 9, 1])], chunks=[(0, 37)]), 0)
    added = [row(3, PROMPTS[0], [5, 9, 2, 3], 32)]
    driver.step(plan(removed=[0], added=added, chunks=[(3, 5)]), 3)
    driver.decode(15, 3)
    assert driver.tokens[3] == greedy[0][:16]


def test_blocks_are_appended_when_a_row_needs_them(folder: Path, greedy: list[list[int]]) -> None:
    driver = Driver(make_runner(folder))
    added = [row(0, PROMPTS[3], [8]), row(1, PROMPTS[4], [2])]
    driver.step(plan(added=added, chunks=[(0, 16), (1, 1)]), 0, 1)
    driver.step(plan(appended=[(0, 30)]), 0, 1)
    driver.decode(14, 0, 1)
    driver.step(plan(appended=[(1, 0)]), 0, 1)
    driver.step(plan(appended=[(0, 31)]), 0, 1)
    assert driver.tokens == {0: greedy[3][:18], 1: greedy[4][:18]}


def test_a_plan_without_rows_gives_no_tokens(folder: Path) -> None:
    runner = make_runner(folder)
    assert runner.launch(plan()).token_ids() == []
    step = runner.launch(plan(added=[row(0, [1, 2, 3], [0])], chunks=[(0, 2)]))
    assert step.token_ids() == []
    assert step.done()


def test_clear_makes_room_for_the_next_epoch(folder: Path, greedy: list[list[int]]) -> None:
    driver = Driver(make_runner(folder))
    driver.step(plan(added=[row(0, PROMPTS[2], range(10))], chunks=[(0, 100)]))
    driver.runner.clear()
    driver.step(plan(added=[row(0, PROMPTS[1], [4, 5])], chunks=[(0, 5)]), 0)
    driver.decode(4, 0)
    assert driver.tokens[0] == greedy[1][:5]


def test_refuses_a_token_that_the_model_does_not_have(folder: Path) -> None:
    runner = make_runner(folder)
    with pytest.raises(ValueError, match="token id of slot 0: got 264, expected 0 to 263"):
        runner.launch(plan(added=[row(0, [264], [0])], chunks=[(0, 1)]))


def test_seeded_tokens_depend_on_nothing_but_the_sequence(folder: Path) -> None:
    """Other slot, other rows, other chunks, and recomputed in the middle."""
    sampling = {"temperature": 1.5, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "seed": -7}
    alone = Driver(make_runner(folder))
    alone.step(plan(added=[row(0, PROMPTS[0], range(5), **sampling)], chunks=[(0, 37)]), 0)
    alone.decode(19, 0)
    other = Driver(make_runner(folder))
    added = [row(1, PROMPTS[2], range(20, 30), temperature=1.0)]
    added += [row(5, PROMPTS[0], [9, 7, 5, 3, 1], **sampling)]
    other.step(plan(added=added, chunks=[(1, 140), (5, 30)]), 1)
    other.step(plan(chunks=[(5, 7)]), 1, 5)
    other.decode(9, 1, 5)
    added = [row(2, PROMPTS[0] + other.tokens[5], [30, 31, 32, 33, 34], **sampling)]
    other.step(plan(removed=[5], added=added, chunks=[(2, 47)]), 1, 2)
    other.decode(9, 1, 2)
    assert other.tokens[5] + other.tokens[2] == alone.tokens[0]
    assert len(set(alone.tokens[0])) > 5


class Logits:
    """Keeps the logits of every row of every step, also those that sample nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[Tensor] = []
        compute_logits = Qwen3.compute_logits

        def record(model: Qwen3, hidden_states: Tensor, out: Tensor | None) -> Tensor | None:
            logits = compute_logits(model, hidden_states, out)
            assert logits is not None
            self.rows += logits.unbind(0)
            return logits

        decode = DecodeStep.__call__

        def record_decoding(
            step: DecodeStep, record: NDArray[np.int32], num_rows: int
        ) -> NDArray[np.int64]:
            tokens = decode(step, record, num_rows)
            self.rows += step.logits[:num_rows].clone().unbind(0)
            return tokens

        monkeypatch.setattr(Qwen3, "compute_logits", record)
        monkeypatch.setattr(DecodeStep, "__call__", record_decoding)

    def take(self) -> Tensor:
        """Return the logits since the last call, [num_rows, vocab_size]."""
        rows, self.rows = self.rows, []
        return torch.stack(rows)


@pytest.mark.parametrize("block_size", [16, 256])
def test_decode_and_recomputation_give_the_same_bits(
    folder: Path, monkeypatch: pytest.MonkeyPatch, block_size: int
) -> None:
    logits = Logits(monkeypatch)
    prompt = PROMPTS[2][:120]
    decoding = Driver(make_runner(folder))
    decoding.step(plan(added=[row(0, prompt, range(10))], chunks=[(0, 120)]), 0)
    decoding.decode(NUM_DECODED, 0)
    decoded, tokens = logits.take(), prompt + decoding.tokens[0]
    for behind in range(NUM_DECODED + 1):
        num_tokens = 120 + behind
        num_before = (7 * behind) % num_tokens
        own, others = tables(block_size, 64, [num_tokens, 37])
        added = [row(1, tokens[:num_tokens], own), row(4, PROMPTS[0], others)]
        runner = make_runner(folder, block_size)
        if num_before:
            runner.launch(plan(added=added, chunks=[(1, num_before), (4, 20)]))
            added = []
        runner.launch(plan(added=added, chunks=[(1, num_tokens - num_before), (4, 10)]))
        recomputed, _ = logits.take()[-2:]
        assert torch.equal(recomputed, decoded[behind]), f"after {behind} tokens"


def test_the_number_of_rows_changes_no_bit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = Logits(monkeypatch)
    alone = []
    for prompt in PROMPTS:
        driver = Driver(make_runner(folder))
        driver.step(plan(added=[row(0, prompt, range(12))], chunks=[(0, len(prompt))]), 0)
        driver.decode(NUM_DECODED, 0)
        alone.append(logits.take())
    driver = Driver(make_runner(folder, num_blocks=60))
    added = [
        row(slot, prompt, range(12 * slot, 12 * slot + 12)) for slot, prompt in enumerate(PROMPTS)
    ]
    chunks = [(slot, len(prompt)) for slot, prompt in enumerate(PROMPTS)]
    driver.step(plan(added=added, chunks=chunks), *range(5))
    driver.decode(NUM_DECODED, *range(5))
    together = logits.take().view(NUM_DECODED + 1, 5, -1)
    for slot, expected in enumerate(alone):
        assert torch.equal(together[:, slot], expected)


BROKEN = 263
"""a token whose embedding is NaN"""


@pytest.fixture(scope="module")
def broken_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("broken")
    model = save_checkpoint(folder)
    weights = model.state_dict()
    weights["model.embed_tokens.weight"][BROKEN] = torch.nan
    model.save_pretrained(folder, state_dict=weights)
    return folder


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "extras",
    [
        None,
        RowExtras(4, num_logprobs=2, num_prompt_logprobs=1, repetition_penalty=1.5),
        RowExtras(4, structured_outputs=StructuredOutputs(regex="[a-z]*"), end_token_ids=[258]),
    ],
)
def test_a_row_whose_logits_are_nan_fails_alone(
    broken_folder: Path, extras: RowExtras | None, temperature: float
) -> None:
    """The row beside it gets the tokens that it gets alone; the next steps don't mind."""
    alone = Driver(make_runner(broken_folder))
    beside = row(2, PROMPTS[1], [7], temperature=temperature)
    alone.step(plan(added=[beside], chunks=[(2, 5)]), 2)
    alone.decode(4, 2)
    runner = make_runner(broken_folder)
    bad = row(1, [1, 2, BROKEN, 3], [3], temperature=temperature, extras=extras)
    step = plan(added=[bad, beside], chunks=[(1, 4), (2, 5)])
    for number in range(5):
        launched = runner.launch(step)
        assert launched.token_ids() == [-1, alone.tokens[2][number]]
        assert launched.output().failed == [(0, BAD_LOGITS)]
        step = plan()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_decoding_has_the_tokens_of_steps_in_torch(folder: Path, temperature: float) -> None:
    """Other memory, as a long prompt needs, takes the place of the memory of earlier steps."""
    runners = make_runner(folder), make_runner(folder)
    runners[1]._decode = None
    tokens = []
    for runner in runners:
        torch.manual_seed(0)
        driver = Driver(runner)
        blocks = tables(16, 64, [90, 70, 300])
        rows = [
            row(slot, PROMPTS[slot], blocks[slot], temperature=temperature, top_k=30, seed=slot)
            for slot in range(2)
        ]
        chunks = [(slot, len(PROMPTS[slot])) for slot in range(2)]
        driver.step(plan(added=rows, chunks=chunks), 0, 1)
        driver.decode(10, 0, 1)
        prompt = [5] * 250
        driver.step(plan(added=[row(2, prompt, blocks[2])], chunks=[(2, 250)]), 0, 1, 2)
        driver.decode(10, 0, 1, 2)
        tokens.append(driver.tokens)
    assert runners[0]._decode is not None
    assert tokens[0] == tokens[1]
