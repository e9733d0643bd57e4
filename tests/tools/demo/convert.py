"""The hybrid demo model made of the other one: `python -m tests.tools.demo.convert --minutes 15`.

This needs far fewer steps than random weights do, so a processor can be enough. Embedding, MLPs and
the last attention layer are those of the Qwen3 demo. Its other attention layers become gated
DeltaNet, which learns to give the same outputs for the same inputs; then all layers are
trained together. At last the MTP layer learns to predict one token more.
"""

import argparse
import itertools
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import Qwen3ForCausalLM

from tests.tools.demo.batches import Batch, buckets_of, training_batches
from tests.tools.demo.evaluate import evaluate, measure_drafts, print_drafts, print_table
from tests.tools.demo.hybrid import Hybrid, Layer, states_before
from tests.tools.demo.model_files import (
    CHECKPOINT_FOLDER,
    HYBRID_CONFIG,
    HYBRID_FOLDER,
    load_hybrid,
    load_model,
    save_checkpoint,
)
from tests.tools.demo.train import MAX_GRADIENT_NORM, cross_entropy, losses_of

WARMUP_STEPS = 30


def converted(source: Qwen3ForCausalLM) -> Hybrid:
    """Return a hybrid model with all layers of Qwen3 but the attention of the first three."""
    model = Hybrid(HYBRID_CONFIG | {"initializer_range": HYBRID_CONFIG["hidden_size"] ** -0.5})
    given = source.model.state_dict()
    own = model.model.state_dict()
    for name in own.keys() & given.keys():
        if "linear_attn" not in name and not name.endswith("q_proj.weight"):
            own[name] = given[name] - 1 if "norm" in name else given[name]
    last = len(model.model.layers) - 1
    prefix = f"layers.{last}.self_attn"
    attention = model.model.layers[last].self_attn
    q = given[f"{prefix}.q_proj.weight"].view(attention.heads, attention.dim, -1)
    # A gate of sigmoid(0) is a half.
    own[f"{prefix}.q_proj.weight"] = torch.cat([q, torch.zeros_like(q)], 1).flatten(0, 1)
    own[f"{prefix}.o_proj.weight"] = 2 * own[f"{prefix}.o_proj.weight"]
    model.model.load_state_dict(own)
    model.mtp = Hybrid(HYBRID_CONFIG).mtp
    return model


def mixed(layer: Layer, normed: Tensor) -> Tensor:
    """Return the output of a DeltaNet layer for normed inputs [rows, length, hidden_size]."""
    rows, length, _ = normed.shape
    positions = torch.arange(length, device=normed.device).repeat(rows)
    maps, *rest = layer.linear_attn.project(normed.flatten(0, 1), positions)
    return layer.linear_attn.read(states_before(maps, rows), *rest).view(normed.shape)


def layers_loss(model: Hybrid, source: Qwen3ForCausalLM, batch: Batch) -> Tensor:
    """Return how far DeltaNet layers are from attention layers, relative to their outputs."""
    seen: list[tuple[Tensor, Tensor]] = []
    hooks = [
        layer.self_attn.register_forward_hook(
            lambda _module, _args, given, out: seen.append((given["hidden_states"], out[0])),
            with_kwargs=True,
        )
        for layer in source.model.layers
    ]
    with torch.no_grad():
        source.model(batch.token_ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    total = torch.zeros(())
    for layer, (normed, expected) in zip(model.model.layers, seen, strict=True):
        if layer.has_state:
            error = (mixed(layer, normed) - expected).square().mean()
            total = total + error / expected.square().mean()
    return total


def train(
    name: str,
    parameters: list[nn.Parameter],
    loss_of: Callable[[Batch], Tensor],
    batches: Iterator[list[Batch]],
    peak: float,
    seconds: float,
) -> None:
    """Trains some parameters, one batch a step, with a learning rate that follows the clock."""
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    started, recent = time.monotonic(), []
    for step, batch in enumerate(itertools.chain.from_iterable(batches)):
        progress = (time.monotonic() - started) / seconds
        if progress >= 1:
            break
        warm = min(1.0, (step + 1) / WARMUP_STEPS)
        for group in optimizer.param_groups:
            group["lr"] = peak * warm * 0.5 * (1 + math.cos(math.pi * progress))
        loss = loss_of(batch.to(parameters[0].device))
        torch.autograd.backward(loss, inputs=parameters)
        torch.nn.utils.clip_grad_norm_(parameters, MAX_GRADIENT_NORM)
        optimizer.step()
        optimizer.zero_grad()
        recent.append(loss.item())
        if (step + 1) % 60 == 0:
            print(f"{name}: step {step + 1}, loss {sum(recent) / len(recent):.4f}", flush=True)
            recent.clear()


def mtp_loss(model: Hybrid, batch: Batch) -> Tensor:
    """Return the losses of the MTP layer's passes."""
    with torch.no_grad():
        hidden = model.hidden(batch.token_ids)
    return sum(losses_of(model, batch, hidden)[1:])


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Make the hybrid demo model of the other one.")
    parser.add_argument("--minutes", type=float, default=15.0, help="of training")
    parser.add_argument("--output", type=Path, default=HYBRID_FOLDER)
    parser.add_argument("--start-from", type=Path, help="a checkpoint to continue from")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=1280, help="of a step")
    parser.add_argument("--fraction", type=float, default=0.02, help="of the evaluation's prompts")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    source = load_model(CHECKPOINT_FOLDER)
    model = load_hybrid(args.start_from) if args.start_from else converted(source)
    short, middle, long, *_ = buckets_of(args.tokens)
    batches = training_batches(args.seed, 0, (short, short, middle, short, long))
    seconds = args.minutes * 60
    named = model.model.named_parameters()
    stages = (
        (
            "DeltaNet",
            [parameter for name, parameter in named if "linear_attn" in name],
            lambda batch: layers_loss(model, source, batch),
            3e-3,
            0.0 if args.start_from else 0.3,
        ),
        (
            "decoder",
            list(model.model.parameters()),
            lambda batch: cross_entropy(model.logits(model.hidden(batch.token_ids)), batch.targets),
            6e-4,
            0.7 if args.start_from else 0.4,
        ),
        (
            "MTP",
            list(model.mtp.parameters()),
            lambda batch: mtp_loss(model, batch),
            3e-3,
            0.3,
        ),
    )
    for name, parameters, loss_of, peak, share in stages:
        if not share:
            continue
        train(name, parameters, loss_of, batches, peak, share * seconds)
        save_checkpoint(model, args.output)
    saved = load_hybrid(args.output)
    print_drafts(measure_drafts(saved, args.fraction, batch_tokens=16384))
    print_table(evaluate(saved, args.fraction, batch_tokens=16384), num_wrong_shown=3)


if __name__ == "__main__":
    main()
