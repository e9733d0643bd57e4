"""A runner of the real model on a CPU, driven by plans."""

from pathlib import Path

import torch

from penstock.protocol.config import Config
from penstock.protocol.messages.plan import BatchPlan
from penstock.protocol.messages.worker import WorkerAssignment
from penstock.services.worker.loading import load
from penstock.services.worker.model_runner import ModelRunner
from tests.models.forward import random_prompts
from tests.services.worker.plans import plan

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
