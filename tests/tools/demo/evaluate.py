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
from torch import Tensor, nn
from torch.nn import functional

from tests.tools.demo.batches import collate
from tests.tools.demo.dialogues import IGNORED, Dialogue, Format, plain, random_chat
from tests.tools.demo.hybrid import CHUNK, Hybrid, Pass
from tests.tools.demo.model_files import CHECKPOINT_FOLDER, load_trained, logits_of
from tests.tools.demo.tasks import (
    DEFAULT_SIZES,
    MAX_COUNTED,
    Example,
    Sizes,
    TaskName,
    make_example,
)

SEED = 2024
MAX_DRAFTS = 3
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


def evaluate(model: nn.Module, fraction: float, batch_tokens: int) -> Iterator[Score]:
    """Yield the score of each row and format, on a fraction of the examples."""
    for row in ROWS:
        smaller = replace(row, num_examples=max(1, round(row.num_examples * fraction)))
        for format_name in row.formats:
            yield _score(model, smaller, format_name, batch_tokens)


def _score(model: nn.Module, row: Row, format_name: Format, batch_tokens: int) -> Score:
    examples, dialogues = _held_out(row, format_name)
    margins: list[float] = []
    for batch in _batches(dialogues, batch_tokens):
        margins += answer_margins(model, batch)
    right = [margin for margin in margins if margin > 0]
    wrong = [
        example.prompt for example, margin in zip(examples, margins, strict=True) if margin <= 0
    ]
    return Score(row, format_name, len(right), min(right, default=0.0), wrong)


def _held_out(row: Row, format_name: Format) -> tuple[list[Example], list[Dialogue]]:
    """Return the examples of a row, and their dialogues."""
    rng = random.Random(f"{SEED}/{row.label}/{format_name}")
    examples = [
        make_example(rng, row.task, row.sizes, held_out=True) for _ in range(row.num_examples)
    ]
    return examples, [_FORMATTERS[format_name](rng, example) for example in examples]


def _batches(dialogues: list[Dialogue], batch_tokens: int) -> Iterator[list[Dialogue]]:
    longest = max(len(dialogue.token_ids) for dialogue in dialogues)
    num_rows = max(1, batch_tokens // longest)
    for start in range(0, len(dialogues), num_rows):
        yield dialogues[start : start + num_rows]


@torch.inference_mode()
def answer_margins(model: nn.Module, dialogues: list[Dialogue]) -> list[float]:
    """Return the smallest margin in each dialogue's last answer: negative if it is wrong."""
    last_answers = [_with_last_answer_only(dialogue) for dialogue in dialogues]
    longest = max(len(dialogue.token_ids) for dialogue in dialogues)
    device = next(model.parameters()).device
    batch = collate(last_answers, longest).to(device)
    logits = logits_of(model, batch.token_ids)
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


@dataclass(frozen=True)
class Drafts:
    """Drafts of the MTP layer that are the model's next tokens, in the answers of one row."""

    row: Row
    format: Format
    num_accepted: list[int]  # of places where the first, the first two … drafts are right
    num_places: list[int]  # where the answer is long enough for these drafts

    @property
    def shares(self) -> list[float]:
        """The shares of places at which the first, the first two … drafts are right."""
        pairs = zip(self.num_accepted, self.num_places, strict=True)
        return [accepted / max(1, places) for accepted, places in pairs]


def measure_drafts(model: Hybrid, fraction: float, batch_tokens: int) -> Iterator[Drafts]:
    """Yield the accepted drafts of each row and format, on a fraction of the examples."""
    for row in ROWS:
        smaller = replace(row, num_examples=max(1, round(row.num_examples * fraction)))
        for format_name in row.formats:
            _, dialogues = _held_out(smaller, format_name)
            total = torch.zeros(2, MAX_DRAFTS, dtype=torch.long)
            for batch in _batches(dialogues, batch_tokens):
                total += accepted_drafts(model, batch)
            yield Drafts(smaller, format_name, *total.tolist())


@torch.inference_mode()
def accepted_drafts(model: Hybrid, dialogues: list[Dialogue]) -> Tensor:
    """Return the numbers of places where all of the first drafts are right, and of places.

    Int64 [2, MAX_DRAFTS]. A place is a token of a last answer after which drafts are made. A draft
    is right if the model itself, after the right tokens, gives the same token. The next tokens are
    those of the answer, so drafts after a wrong one do not count.
    """
    longest = max(len(dialogue.token_ids) for dialogue in dialogues)
    last_answers = [_with_last_answer_only(dialogue) for dialogue in dialogues]
    batch = collate(last_answers, longest + -longest % CHUNK).to(model.device)
    hidden = model.hidden(batch.token_ids)
    is_answer = batch.targets != IGNORED
    own = model.logits(hidden).argmax(-1).view(is_answer.shape)  # row p: token p + 1
    passes: list[Pass] = []
    accepted = torch.ones_like(is_answer)
    numbers = []
    for number in range(1, MAX_DRAFTS + 1):
        passes.append(model.mtp_pass(batch.token_ids, hidden, passes))
        drafts = model.logits(passes[-1].hidden).argmax(-1).view(is_answer.shape)
        # Row p has the draft of token p + 2 that follows from token p + 2 - number.
        is_right = (drafts == _earlier(own, 1)) & _earlier(is_answer, 1)
        accepted = is_right & (functional.pad(accepted[:, :-1], (1, 0)) if number > 1 else True)
        places = _earlier(is_answer, 1).clone()
        places[:, : number - 1] = False
        places[:, number - 1 :] &= is_answer[:, : is_answer.shape[1] - number + 1]
        accepted = accepted & places
        numbers.append(torch.stack([accepted.sum(), places.sum()]))
    return torch.stack(numbers, 1).cpu()


def _earlier(x: Tensor, distance: int) -> Tensor:
    """Return the columns moved to the left; zeros follow."""
    return functional.pad(x[:, distance:], (0, distance))


def print_drafts(measured: Iterator[Drafts]) -> None:
    """Print the shares of accepted drafts as a Markdown table."""
    print("| task | format | drafts | first | first two | first three |")
    print("|---|---|--:|--:|--:|--:|", flush=True)
    for drafts in measured:
        shares = " | ".join(f"{share:.1%}" for share in drafts.shares)
        label, number = drafts.row.label, drafts.num_places[0]
        print(f"| {label} | {drafts.format} | {number} | {shares} |", flush=True)


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
    model = load_trained(args.checkpoint).to(args.device)
    if isinstance(model, Hybrid):
        print_drafts(measure_drafts(model, args.fraction, args.batch_tokens))
    print_table(evaluate(model, args.fraction, args.batch_tokens), args.show_wrong)


if __name__ == "__main__":
    main()
