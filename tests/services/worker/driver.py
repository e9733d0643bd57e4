"""A runner of the real model on a CPU, driven by plans."""

from pathlib import Path
from typing import Any

import torch

from penstock.protocol.config import Config
from penstock.protocol.messages.packed import PackedLogprobs
from penstock.protocol.messages.plan import BatchPlan, RowExtras
from penstock.protocol.messages.worker import WorkerAssignment
from penstock.services.worker.launched_step import StepOutput
from penstock.services.worker.loading import load
from penstock.services.worker.model_runner import ModelRunner
from tests.models.forward import random_prompts
from tests.services.worker.plans import plan, row

PROMPTS = random_prompts(264, 37, 5, 140, 16, 1)
NUM_DECODED = 20
PROMPT, OTHER = random_prompts(264, 37, 20)
NUM_STEPS = 16


def make_runner(
    folder: Path, block_size: int = 16, num_blocks: int = 64, attention: str = "auto"
) -> ModelRunner:
    config = Config(
        model=str(folder),
        device="cpu",
        attention=attention,  # type: ignore[arg-type]
        block_size=block_size,
        num_blocks=num_blocks,
        max_model_len=512,
        max_num_seqs=8,
        num_threads=1,
    )
    return load(config, WorkerAssignment(1, "group", 0, 1, ""), lambda: None)


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


class Listener(Driver):
    """Also keeps what the steps tell."""

    def __init__(self, folder: Path) -> None:
        super().__init__(make_runner(folder))
        self.outputs: list[StepOutput] = []
        launch = self.runner.launch

        def launch_and_listen(step_plan: BatchPlan):  # type: ignore[no-untyped-def]
            step = launch(step_plan)
            self.outputs.append(step.output())
            return step

        self.runner.launch = launch_and_listen  # type: ignore[method-assign]

    def logprobs(self, index: int) -> list[PackedLogprobs]:
        """Return those of a sampled row, step by step."""
        return [dict(output.logprobs)[index] for output in self.outputs]


def generate(folder: Path, asked: RowExtras | None, **sampling: Any) -> Listener:
    """PROMPT in slot 3 with extras, between two rows of OTHER without."""
    listener = Listener(folder)
    added = [row(3, PROMPT, range(5), extras=asked, **sampling)]
    added += [row(1, OTHER, range(10, 14)), row(6, OTHER, range(20, 24), temperature=1.0, seed=3)]
    listener.step(plan(added=added, chunks=[(3, 37), (1, 20), (6, 20)]), 1, 3, 6)
    listener.decode(NUM_STEPS - 1, 1, 3, 6)
    return listener


def extras(prompt: list[int] = PROMPT, **asked: object) -> RowExtras:
    return RowExtras(len(prompt), **asked)  # type: ignore[arg-type]


def tables(block_size: int, num_blocks: int, lengths: list[int]) -> list[list[int]]:
    """Block tables for rows of these lengths, from blocks in a random order."""
    blocks = iter(torch.randperm(num_blocks).tolist())
    return [[next(blocks) for _ in range(-(-n // block_size))] for n in lengths]
