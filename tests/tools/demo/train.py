"""Training of the demo model: `python -m tests.tools.demo.train --minutes 7` in the repository.

Meant for one GPU. The learning rate follows the clock rather than a number of steps, so the
run takes the time it is given on whatever device it has. The shipped checkpoint is what seven
minutes (6,600 steps) on an NVIDIA H200 with 16 processor cores gave.
"""

import argparse
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional
from transformers import Qwen3ForCausalLM

from tests.tools.demo.batches import BUCKETS, Batch, training_batches
from tests.tools.demo.dialogues import IGNORED
from tests.tools.demo.evaluate import evaluate, print_table
from tests.tools.demo.model_files import (
    CHECKPOINT_FOLDER,
    load_model,
    new_model,
    save_checkpoint,
)

WARMUP_STEPS = 200
MAX_GRADIENT_NORM = 1.0
STEPS_PER_REPORT = 250


@dataclass(frozen=True)
class Schedule:
    """The learning rate: a short warm-up by steps, then a cosine to nothing by the clock."""

    peak: float
    started: float
    seconds: float

    def progress(self) -> float:
        """Return the share of the time that is over."""
        return (time.monotonic() - self.started) / self.seconds

    def learning_rate(self, step: int) -> float:
        """Return the learning rate for a step that starts now."""
        warmup = min(1.0, (step + 1) / WARMUP_STEPS)
        decay = 0.5 * (1.0 + math.cos(math.pi * min(1.0, self.progress())))
        return self.peak * warmup * decay


def new_optimizer(model: Qwen3ForCausalLM) -> torch.optim.AdamW:
    """Return AdamW; norm weights are not decayed."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": 0.05},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True)


def backward(model: Qwen3ForCausalLM, batch: Batch) -> torch.Tensor:
    """Add a batch's gradients and return its loss.

    Products are computed in bfloat16, from weights rounded as they will be in the checkpoint.
    """
    with torch.autocast(model.device.type, dtype=torch.bfloat16):
        logits = model(batch.token_ids, use_cache=False).logits
    loss = functional.cross_entropy(
        logits.flatten(0, 1).float(), batch.targets.flatten(), ignore_index=IGNORED
    )
    torch.autograd.backward(loss / len(BUCKETS))
    return loss.detach()


def train(model: Qwen3ForCausalLM, steps: Iterator[list[Batch]], schedule: Schedule) -> None:
    """Trains until the schedule's time is over."""
    optimizer = new_optimizer(model)
    recent = torch.zeros(len(BUCKETS), device=model.device)
    for step, batches in enumerate(steps):
        if schedule.progress() >= 1.0:
            break
        for group in optimizer.param_groups:
            group["lr"] = schedule.learning_rate(step)
        recent += torch.stack([backward(model, batch.to(model.device)) for batch in batches])
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % STEPS_PER_REPORT == 0:
            report(step + 1, schedule, recent / STEPS_PER_REPORT)
            recent.zero_()


def report(step: int, schedule: Schedule, losses: torch.Tensor) -> None:
    """Print how far the training is and the mean loss of each bucket."""
    texts = (
        f"{bucket.num_tokens} tokens: {loss:.5f}"
        for bucket, loss in zip(BUCKETS, losses.tolist(), strict=True)
    )
    print(f"step {step}, {schedule.progress():.0%} of the time, loss at {', '.join(texts)}")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train the demo model and measure it.")
    parser.add_argument(
        "--minutes", type=float, default=7.0, help="of training; measuring comes on top"
    )
    parser.add_argument("--output", type=Path, default=CHECKPOINT_FOLDER)
    parser.add_argument("--start-from", type=Path, help="a checkpoint to continue from")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="at the peak")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--no-compile", action="store_true", help="do not use torch.compile")
    parser.add_argument("--fraction", type=float, default=1.0, help="of the evaluation's prompts")
    return parser.parse_args()


def main() -> None:
    """Trains, writes the checkpoint, and measures what was written."""
    args = parse_arguments()
    torch.manual_seed(args.seed)
    started = time.monotonic()
    model = load_model(args.start_from) if args.start_from else new_model()
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{num_parameters:,} parameters, {args.workers} processes make the batches")
    model.train().to(args.device)
    if not args.no_compile:
        # Layer by layer: the layers share their compiled code, one for each bucket's shape.
        for layer in model.model.layers:
            layer.compile(dynamic=False)
    schedule = Schedule(args.learning_rate, started, args.minutes * 60)
    train(model, training_batches(args.seed, args.workers), schedule)
    weights = save_checkpoint(model, args.output)
    print(f"{weights.name}: {weights.stat().st_size / 1e6:.2f} MB", flush=True)
    saved = load_model(args.output).to(args.device)
    print_table(evaluate(saved, args.fraction, batch_tokens=65536), num_wrong_shown=3)


if __name__ == "__main__":
    main()
