"""Measure the checkpoint on held-out prompts: `python -m tests.tools.demo.evaluate`.

An answer counts if greedy decoding gives every token of it and then the end token. That is
the case exactly if at every position, after the right tokens so far, the right one is the
likeliest; so one forward pass over prompt and answer decides it, and no text is generated.
The margin is the logit of the right token less that of the next likeliest: rounding that
differs between devices or batches can't change an answer whose margins are large.
"""

import argparse
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import Qwen3ForCausalLM

from tests.tools.demo.batches import collate
from tests.tools.demo.dialogues import IGNORED, Dialogue, Format, plain, random_chat
from tests.tools.demo.model_files import CHECKPOINT_FOLDER, load_model
from tests.tools.demo.tasks import (
    DEFAULT_SIZES,
    MAX_COUNTED,
    Example,
    Sizes,
    TaskName,
    make_example,
)

SEED = 2024
LONG_ROOM = 3000  # tokens of history that still leave room for the longest answers measured


@dataclass(frozen=True)
class Row:
    """A measurement: one line of the table for each format."""

    label: str
    task: TaskName
    sizes: Sizes
    num_examples: int
    formats: tuple[Format, ...]


@dataclass(frozen=True)
class Score:
    """Result of one row in one format."""

    row: Row
    format: Format
    num_right: int
    smallest_margin: float
    wrong: list[str]

    @property
    def accuracy(self) -> float:
        """The share of answers that are right as a whole."""
        return self.num_right / self.row.num_examples


_SHORT: tuple[Format, ...] = ("plain", "chat")
_LONG: tuple[Format, ...] = ("long chat",)
_LABELS: dict[TaskName, str] = {
    "sum": "sum, up to 3 digits",
    "reverse": "reverse, up to 24 characters",
    "repeat": "repeat, up to 200 bytes",
    "count": "count, up to 100 numbers",
}
ROWS = (
    *(Row(label, task, DEFAULT_SIZES[task], 4000, _SHORT) for task, label in _LABELS.items()),
    Row("count, 300 to 450 numbers", "count", Sizes(300, 450), 500, _SHORT),
    Row("count, 451 to 1000 numbers", "count", Sizes(451, MAX_COUNTED), 500, _SHORT),
    *(Row(label, task, DEFAULT_SIZES[task], 1000, _LONG) for task, label in _LABELS.items()),
)
_FORMATTERS: dict[Format, Callable[[random.Random, Example], Dialogue]] = {
    "plain": lambda _rng, example: plain(example),
    "chat": random_chat,
    "long chat": lambda rng, example: random_chat(rng, example, LONG_ROOM),
}


def evaluate(model: Qwen3ForCausalLM, fraction: float, batch_tokens: int) -> Iterator[Score]:
    """Yield the score of each row and format, on a fraction of the examples."""
    for row in ROWS:
        smaller = replace(row, num_examples=max(1, round(row.num_examples * fraction)))
        for format_name in row.formats:
            yield _score(model, smaller, format_name, batch_tokens)


def _score(model: Qwen3ForCausalLM, row: Row, format_name: Format, batch_tokens: int) -> Score:
    rng = random.Random(f"{SEED}/{row.label}/{format_name}")
    examples = [
        make_example(rng, row.task, row.sizes, held_out=True) for _ in range(row.num_examples)
    ]
    dialogues = [_FORMATTERS[format_name](rng, example) for example in examples]
    longest = max(len(dialogue.token_ids) for dialogue in dialogues)
    margins: list[float] = []
    num_rows = max(1, batch_tokens // longest)
    for start in range(0, len(dialogues), num_rows):
        margins += answer_margins(model, dialogues[start : start + num_rows])
    right = [margin for margin in margins if margin > 0]
    wrong = [
        example.prompt for example, margin in zip(examples, margins, strict=True) if margin <= 0
    ]
    return Score(row, format_name, len(right), min(right, default=0.0), wrong)


@torch.inference_mode()
def answer_margins(model: Qwen3ForCausalLM, dialogues: list[Dialogue]) -> list[float]:
    """Return the smallest margin in each dialogue's last answer: negative if it is wrong."""
    last_answers = [_with_last_answer_only(dialogue) for dialogue in dialogues]
    longest = max(len(dialogue.token_ids) for dialogue in dialogues)
    batch = collate(last_answers, longest).to(model.device)
    logits = model(batch.token_ids, use_cache=False).logits
    is_answer = batch.targets != IGNORED
    right_tokens = batch.targets.clamp(min=0).unsqueeze(-1)
    right_logits = logits.gather(-1, right_tokens).squeeze(-1)
    rivals = logits.scatter(-1, right_tokens, -torch.inf).amax(-1)
    margins = (right_logits - rivals).masked_fill(~is_answer, torch.inf).amin(-1)
    return [float(margin) for margin in margins.cpu()]


def _with_last_answer_only(dialogue: Dialogue) -> Dialogue:
    """Return a dialogue without the labels of its earlier turns."""
    start = len(dialogue.labels)
    while start > 0 and dialogue.labels[start - 1] != IGNORED:
        start -= 1
    labels = [IGNORED] * start + dialogue.labels[start:]
    return Dialogue(dialogue.token_ids, labels)


def print_table(scores: Iterator[Score], num_wrong_shown: int) -> None:
    """Print the scores as a Markdown table, and some prompts answered wrongly below it."""
    print("| task | format | held-out prompts | right | smallest margin |")
    print("|---|---|--:|--:|--:|", flush=True)
    wrong: list[str] = []
    for score in scores:
        print(
            f"| {score.row.label} | {score.format} | {score.row.num_examples} "
            f"| {score.accuracy:.2%} | {score.smallest_margin:.2f} |",
            flush=True,
        )
        wrong += score.wrong[:num_wrong_shown]
    for prompt in wrong:
        print(f"wrong: {prompt!r}")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Measure the demo model on held-out prompts.")
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT_FOLDER)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--fraction", type=float, default=1.0, help="share of the examples; less is quicker"
    )
    parser.add_argument("--batch-tokens", type=int, default=16384)
    parser.add_argument("--show-wrong", type=int, default=0, help="wrong prompts shown per row")
    args = parser.parse_args()
    model = load_model(args.checkpoint).to(args.device)
    print_table(evaluate(model, args.fraction, args.batch_tokens), args.show_wrong)


if __name__ == "__main__":
    main()
