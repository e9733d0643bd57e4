"""Training of the demo models: `python -m tests.tools.demo.train --minutes 7` in the repository.

With `--hybrid`, the hybrid model and its MTP layer are trained. Meant for one GPU. The learning
rate follows the clock rather than a number of steps, so the run takes the time it is given on
whatever device it has. The shipped checkpoint of Qwen3 is what seven minutes (6,600 steps) on an
NVIDIA H200 with 16 processor cores gave.
"""

import argparse
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.tools.demo.batches import BUCKETS, Batch, buckets_of, training_batches
from tests.tools.demo.dialogues import IGNORED
from tests.tools.demo.evaluate import evaluate, measure_drafts, print_drafts, print_table
from tests.tools.demo.hybrid import Hybrid, Pass
from tests.tools.demo.model_files import (
    CHECKPOINT_FOLDER,
    HYBRID_FOLDER,
    load_trained,
    logits_of,
    new_model,
    save_checkpoint,
)

WARMUP_STEPS = 200
MAX_GRADIENT_NORM = 1.0
STEPS_PER_REPORT = 250
# of the losses of the MTP layer's passes; the layer itself learns equally fast with other weights,
# as AdamW's steps do not depend on them
PASS_WEIGHTS = 0.2, 0.1, 0.1
MAX_UNROLLED = 1024  # longer batches have one pass only, as masks of later passes are large


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


def new_optimizer(model: nn.Module) -> torch.optim.AdamW:
    """Return AdamW; only matrices are decayed."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim != 2]
    groups = [
        {"params": matrices, "weight_decay": 0.05},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float(), targets.flatten(), ignore_index=IGNORED)


def losses_of(model: nn.Module, batch: Batch, hidden: Tensor | None = None) -> list[Tensor]:
    """Return the loss of the model, then those of the passes of its MTP layer.

    hidden: hidden states of the hybrid model, if they are known.
    """
    if not isinstance(model, Hybrid):
        return [cross_entropy(logits_of(model, batch.token_ids).flatten(0, 1), batch.targets)]
    if hidden is None:
        hidden = model.hidden(batch.token_ids)
    losses = [cross_entropy(model.logits(hidden), batch.targets)]
    # Row p predicts token p + 2, if it and the token before it are the model's own.
    targets = functional.pad(batch.targets[:, 1:], (0, 1), value=IGNORED)
    targets = targets.masked_fill(batch.targets == IGNORED, IGNORED)
    passes: list[Pass] = []
    is_short = batch.token_ids.shape[1] <= MAX_UNROLLED
    for _ in PASS_WEIGHTS if is_short else PASS_WEIGHTS[:1]:
        passes.append(model.mtp_pass(batch.token_ids, hidden, passes))
        losses.append(cross_entropy(model.logits(passes[-1].hidden), targets))
    return losses


def backward(model: nn.Module, batch: Batch) -> Tensor:
    """Add a batch's gradients and return its losses, 0 for passes that were not made.

    On a GPU products are computed in bfloat16, from weights rounded as they will be in the
    checkpoint.
    """
    kind = batch.token_ids.device.type
    with torch.autocast(kind, dtype=torch.bfloat16, enabled=kind == "cuda"):
        losses = losses_of(model, batch)
    weighted = zip((1.0, *PASS_WEIGHTS), losses, strict=False)
    torch.autograd.backward(sum(weight * loss for weight, loss in weighted) / len(BUCKETS))
    shown = torch.stack(losses).detach()
    return functional.pad(shown, (0, 1 + len(PASS_WEIGHTS) - len(shown)))


def train(
    model: nn.Module,
    steps: Iterator[list[Batch]],
    schedule: Schedule,
    device: torch.device,
    save: Callable[[], Path],
) -> None:
    """Trains until the schedule's time is over."""
    optimizer = new_optimizer(model)
    recent = torch.zeros(1, device=device)
    for step, batches in enumerate(steps):
        if schedule.progress() >= 1.0:
            break
        for group in optimizer.param_groups:
            group["lr"] = schedule.learning_rate(step)
        recent = recent + torch.stack([backward(model, batch.to(device)) for batch in batches])
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
        optimizer.step()
        optimizer.zero_grad()
        if step == 0 or (step + 1) % STEPS_PER_REPORT == 0:
            report(step + 1, schedule, recent / (STEPS_PER_REPORT if step else 1))
            recent = torch.zeros(1, device=device)
            save()


def report(step: int, schedule: Schedule, losses: Tensor) -> None:
    """Print how far the training is and the mean losses of each bucket."""
    texts = (
        f"{bucket.num_tokens} tokens: {' '.join(f'{loss:.5f}' for loss in of_bucket if loss)}"
        for bucket, of_bucket in zip(BUCKETS, losses.tolist(), strict=False)
    )
    progress = f"step {step}, {schedule.progress():.0%} of the time"
    print(f"{progress}, loss at {', '.join(texts)}", flush=True)


def compile_model(model: nn.Module) -> None:
    """Compile what the layers share, once for each shape."""
    torch._dynamo.config.suppress_errors = True
    if isinstance(model, Hybrid):
        model.compile_parts()
        return
    for layer in model.model.layers:
        layer.compile(dynamic=False)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a demo model and measure it.")
    parser.add_argument("--hybrid", action="store_true", help="the hybrid model, instead of Qwen3")
    parser.add_argument(
        "--minutes", type=float, default=7.0, help="of training; measuring comes on top"
    )
    parser.add_argument("--steps", type=int, help="at most; without it, the time is the only limit")
    parser.add_argument("--output", type=Path, help="folder; by default that of the shipped model")
    parser.add_argument("--start-from", type=Path, help="a checkpoint to continue from")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="at the peak")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=20480, help="of each batch, if --hybrid")
    parser.add_argument("--longest", type=int, default=4096, help="of the batches' lengths")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--no-compile", action="store_true", help="do not use torch.compile")
    parser.add_argument("--fraction", type=float, default=1.0, help="of the evaluation's prompts")
    return parser.parse_args()


def main() -> None:
    """Trains, writes the checkpoint, and measures what was written."""
    args = parse_arguments()
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    started = time.monotonic()
    output = args.output or (HYBRID_FOLDER if args.hybrid else CHECKPOINT_FOLDER)
    model = load_trained(args.start_from) if args.start_from else new_model(hybrid=args.hybrid)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{num_parameters:,} parameters, {args.workers} processes make the batches", flush=True)
    model.train().to(args.device)
    if not args.no_compile:
        compile_model(model)
    schedule = Schedule(args.learning_rate, started, args.minutes * 60)
    buckets = buckets_of(args.tokens) if args.hybrid else BUCKETS
    buckets = tuple(bucket for bucket in buckets if bucket.num_tokens <= args.longest)
    steps = islice(training_batches(args.seed, args.workers, buckets), args.steps)
    train(model, steps, schedule, torch.device(args.device), lambda: save_checkpoint(model, output))
    weights = save_checkpoint(model, output)
    print(f"{weights.name}: {weights.stat().st_size / 1e6:.2f} MB", flush=True)
    torch.set_float32_matmul_precision("highest")
    saved = load_trained(output).to(args.device)
    if isinstance(saved, Hybrid):
        print_drafts(measure_drafts(saved, args.fraction, batch_tokens=65536))
    print_table(evaluate(saved, args.fraction, batch_tokens=65536), num_wrong_shown=3)


if __name__ == "__main__":
    main()
