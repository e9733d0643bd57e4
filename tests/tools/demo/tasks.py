"""The tasks of the demo model: prompts, their only right answers, and seeded generators.

| prompt              | answer          |
|---------------------|-----------------|
| `17+25=`            | `42`            |
| `count from 3 to 9` | `3 4 5 6 7 8 9` |
| `reverse: penstock` | `kcotsnep`      |
| `repeat: 你好 👋`    | `你好 👋`        |

Every answer follows from its prompt (`answer_to`), so whoever sends a prompt can check what
comes back. Prompts fall into a training and a held-out part by a hash (`is_held_out`): the
model has never been trained on a held-out prompt.
"""

import hashlib
import random
import re
from string import ascii_letters, ascii_lowercase, digits, punctuation
from typing import Literal, NamedTuple, get_args

from tests.tools.demo.texts import COMMON_WORDS, random_text, random_word

TaskName = Literal["sum", "count", "reverse", "repeat"]
TASK_NAMES: tuple[TaskName, ...] = get_args(TaskName)

MAX_NUMBER = 999
MAX_COUNTED = MAX_NUMBER + 1
MAX_REVERSED_CHARACTERS = 24
MAX_REPEATED_BYTES = 200

HELD_OUT_ONE_IN = 16
# There are so few prompts below this length (sums such as `2+2=`) that all are trained on.
MIN_HELD_OUT_CHARACTERS = 6

_SUM = re.compile(r"(\d{1,3})\+(\d{1,3})=")
_COUNT = re.compile(r"count from (\d{1,3}) to (\d{1,3})")
_REVERSE_PREFIX = "reverse: "
_REPEAT_PREFIX = "repeat: "
_REVERSED_ALPHABETS = (
    ascii_lowercase,
    ascii_lowercase + digits,
    digits,
    ascii_letters,
    ascii_letters + digits + punctuation,
)
_REVERSED_SHARES = (50, 20, 10, 10, 10)


class Example(NamedTuple):
    """A prompt and the one answer that is right."""

    task: TaskName
    prompt: str
    answer: str


class Sizes(NamedTuple):
    """Bounds of an example's length, both included.

    Numbers for `count`, characters for `reverse`, bytes for `repeat`; a sum has no size.
    """

    smallest: int
    largest: int


DEFAULT_SIZES: dict[TaskName, Sizes] = {
    "sum": Sizes(1, 1),
    "count": Sizes(1, 100),
    "reverse": Sizes(1, MAX_REVERSED_CHARACTERS),
    "repeat": Sizes(1, MAX_REPEATED_BYTES),
}


def answer_to(prompt: str) -> str:
    """Return the right answer, or raises ValueError for a prompt that is none of the tasks."""
    if prompt.startswith(_REPEAT_PREFIX):
        return prompt.removeprefix(_REPEAT_PREFIX)
    if prompt.startswith(_REVERSE_PREFIX):
        return prompt.removeprefix(_REVERSE_PREFIX)[::-1]
    if operands := _SUM.fullmatch(prompt):
        return str(int(operands[1]) + int(operands[2]))
    if ends := _COUNT.fullmatch(prompt):
        return " ".join(str(number) for number in range(int(ends[1]), int(ends[2]) + 1))
    raise ValueError(f"not a prompt of the demo model: {prompt!r}")


def is_right(prompt: str, completion: str) -> bool:
    """Return True if a completion is exactly the answer to its prompt."""
    return completion == answer_to(prompt)


def is_held_out(prompt: str) -> bool:
    """Return True for a held-out prompt; the same on every machine and in every run."""
    if len(prompt) < MIN_HELD_OUT_CHARACTERS:
        return False
    digest = hashlib.blake2b(prompt.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % HELD_OUT_ONE_IN == 0


def make_example(
    rng: random.Random,
    task: TaskName,
    sizes: Sizes | None = None,
    *,
    held_out: bool = False,
) -> Example:
    """Draws an example from the training part, or from the held-out part."""
    sizes = sizes or DEFAULT_SIZES[task]
    while True:
        prompt = _PROMPT_MAKERS[task](rng, sizes)
        if is_held_out(prompt) == held_out:
            return Example(task, prompt, answer_to(prompt))


def count_prompt(first: int, last: int) -> str:
    """Return the prompt that asks for the numbers from `first` to `last`."""
    if not 0 <= first <= last <= MAX_NUMBER:
        raise ValueError(f"the model counts upwards from 0 to {MAX_NUMBER}: {first} to {last}")
    return f"count from {first} to {last}"


def _random_number(rng: random.Random, limit: int) -> int:
    """Draws from 0 to limit, short numbers as often as long ones in half of the draws."""
    if rng.random() < 0.5:
        return rng.randint(0, limit)
    return min(rng.randrange(10 ** rng.randint(1, 3)), limit)


def _sum_prompt(rng: random.Random, _sizes: Sizes) -> str:
    return f"{_random_number(rng, MAX_NUMBER)}+{_random_number(rng, MAX_NUMBER)}="


def _count_prompt(rng: random.Random, sizes: Sizes) -> str:
    num_counted = rng.randint(*sizes)
    first = _random_number(rng, MAX_COUNTED - num_counted)
    return count_prompt(first, first + num_counted - 1)


def _reverse_prompt(rng: random.Random, sizes: Sizes) -> str:
    num_characters = rng.randint(*sizes)
    if rng.random() < 0.65:
        alphabet = rng.choices(_REVERSED_ALPHABETS, _REVERSED_SHARES)[0]
        return _REVERSE_PREFIX + "".join(rng.choices(alphabet, k=num_characters))
    return _REVERSE_PREFIX + _words(rng, num_characters, separator=rng.choice(("", " ")))


def _words(rng: random.Random, num_characters: int, separator: str) -> str:
    """Return words cut to a length, without blanks at the ends."""
    words = ""
    while len(words) < num_characters:
        word = rng.choice(COMMON_WORDS) if rng.random() < 0.5 else random_word(rng)
        words += word + separator
    return words[:num_characters].strip()


def _repeat_prompt(rng: random.Random, sizes: Sizes) -> str:
    # Some texts look like the other tasks; they are to be repeated all the same.
    if rng.random() < 0.02:
        other = rng.choice((_sum_prompt, _reverse_prompt, _count_prompt))
        text = other(rng, Sizes(1, max(1, min(sizes.largest - 9, 24))))
        if sizes.smallest <= len(text.encode()) <= sizes.largest:
            return _REPEAT_PREFIX + text
    return _REPEAT_PREFIX + random_text(rng, rng.randint(*sizes))


_PROMPT_MAKERS = {
    "sum": _sum_prompt,
    "count": _count_prompt,
    "reverse": _reverse_prompt,
    "repeat": _repeat_prompt,
}
