"""Bits of a step's logits: the same in every batch, for every cut of a prompt, in each way."""

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.cpu.compiled_step import DecodeStep
from penstock.models.model import Model
from tests.services.worker.driver import NUM_DECODED, PROMPTS, Driver, make_runner, tables
from tests.services.worker.plans import plan, row


class Logits:
    """Keeps the logits of every row of every step, also those that sample nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[Tensor] = []
        compute_logits = Model.compute_logits

        def record(model: Model, hidden_states: Tensor, out: Tensor | None) -> Tensor | None:
            logits = compute_logits(model, hidden_states, out)
            assert logits is not None
            self.rows += logits.unbind(0)
            return logits

        decode = DecodeStep.__call__

        def record_decoding(
            step: DecodeStep, record: NDArray[np.int32], num_rows: int
        ) -> list[int]:
            tokens = decode(step, record, num_rows)
            self.rows += step.logits[:num_rows].clone().unbind(0)
            return tokens

        monkeypatch.setattr(Model, "compute_logits", record)
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
    order = sorted(range(5), key=lambda slot: (len(PROMPTS[slot]) > 1, slot))
    together[0, order] = together[0].clone()  # a prompt of one token is a row that decodes
    for slot, expected in enumerate(alone):
        assert torch.equal(together[:, slot], expected)


@pytest.mark.slow
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
