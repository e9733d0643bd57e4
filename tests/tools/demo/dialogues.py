"""Examples as token ids: the plain prompt and Qwen3's chat format, with what is to be learned."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from tests.tools.demo import tokenizer
from tests.tools.demo.tasks import TASK_NAMES, Example, Sizes, make_example
from tests.tools.demo.texts import random_text

Format = Literal["plain", "chat", "long chat"]

IGNORED = -100  # the label that cross entropy leaves out

SHORT_ROOM = 100
_EARLIER_SIZES = Sizes(1, 12)
_TOKENS_PER_TURN = 50
# Whether there is a system message, whether there are earlier turns.
_HISTORIES = ((False, False), (True, False), (False, True), (True, True))
_SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
    "Answer with the result only.",
    "Be brief.",
)


@dataclass
class Dialogue:
    """Token ids and, for each, its label: itself where the model writes it, else ignored."""

    token_ids: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)

    def read(self, *parts: str | int) -> None:
        """Append what the model is given."""
        token_ids = _encode(parts)
        self.token_ids += token_ids
        self.labels += [IGNORED] * len(token_ids)

    def write(self, *parts: str | int) -> None:
        """Append what the model has to answer."""
        token_ids = _encode(parts)
        self.token_ids += token_ids
        self.labels += token_ids


def plain(example: Example) -> Dialogue:
    """Return a raw prompt and its answer."""
    dialogue = Dialogue()
    dialogue.read(example.prompt)
    # A sum ends in `=` and needs no mark.
    if example.task != "sum":
        dialogue.write(tokenizer.ANSWER_ID)
    dialogue.write(example.answer, tokenizer.END_OF_TEXT_ID)
    return dialogue


def chat(
    examples: Sequence[Example], system: str | None = None, enable_thinking: bool = True
) -> Dialogue:
    """Return a conversation as the chat template writes it; the last answer is open to thought.

    With `enable_thinking` the model may think before its answer, but this one never does;
    without it, an empty thought is part of the prompt.
    """
    dialogue = Dialogue()
    if system is not None:
        _read_message(dialogue, "system", system)
    for i, example in enumerate(examples):
        _read_message(dialogue, "user", example.prompt)
        dialogue.read(tokenizer.IM_START_ID, "assistant\n")
        is_last = i == len(examples) - 1
        if is_last and not enable_thinking:
            dialogue.read(tokenizer.THINK_ID, "\n\n", tokenizer.END_THINK_ID, "\n\n")
        dialogue.write(example.answer, tokenizer.IM_END_ID)
        if not is_last:
            dialogue.read("\n")
    return dialogue


def random_chat(rng: random.Random, example: Example, room: int = SHORT_ROOM) -> Dialogue:
    """Return a conversation that ends with an example.

    Some have a system message, earlier turns, or thinking turned off. `room` is about how many
    tokens the system message and the earlier turns may take; if it is long, some of it is used.
    """
    system, turns = None, []
    weights = (50, 18, 18, 14) if room <= SHORT_ROOM else (0, 40, 40, 20)
    has_system, has_turns = rng.choices(_HISTORIES, weights)[0]
    if has_system:
        system = _random_system(rng, room)
        room -= len(system.encode())
    if has_turns:
        turns = _earlier_turns(rng, room)
    return chat([*turns, example], system, enable_thinking=rng.random() < 0.6)


def random_dialogue(rng: random.Random, example: Example, room: int) -> Dialogue:
    """Return an example in one of the two formats; a plain prompt has no use for long room."""
    if room <= SHORT_ROOM and rng.random() < 0.45:
        return plain(example)
    return random_chat(rng, example, room)


def _random_system(rng: random.Random, room: int) -> str:
    if room <= SHORT_ROOM and rng.random() < 0.3:
        return rng.choice(_SYSTEM_MESSAGES)
    return random_text(rng, rng.randint(1, room))


def _earlier_turns(rng: random.Random, room: int) -> list[Example]:
    """Return at least one turn."""
    num_turns = rng.randint(1, max(1, room // _TOKENS_PER_TURN))
    return [make_example(rng, rng.choice(TASK_NAMES), _EARLIER_SIZES) for _ in range(num_turns)]


def _read_message(dialogue: Dialogue, role: str, content: str) -> None:
    dialogue.read(tokenizer.IM_START_ID, f"{role}\n{content}", tokenizer.IM_END_ID, "\n")


def _encode(parts: Sequence[str | int]) -> list[int]:
    """Return the ids of texts and single tokens: a byte's id is its value."""
    token_ids: list[int] = []
    for part in parts:
        token_ids += [part] if isinstance(part, int) else part.encode()
    return token_ids
