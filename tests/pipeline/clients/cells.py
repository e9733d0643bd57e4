"""Arguments of the scripts, what they ask, and checks of the answers."""

import sys
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import BaseModel

_, NAME, URL, KEY, MODEL, EMBEDDING_URL = sys.argv
V1, EMBEDDING_V1 = f"{URL}/v1", f"{EMBEDDING_URL}/v1"
COUNT, COUNTED = "count from 3 to 30", " ".join(map(str, range(3, 31)))
"""long enough to be streamed in several pieces by a busy machine"""
MESSAGES: Any = [{"role": "user", "content": COUNT}]
REPEAT = 'repeat: <tool_call>{"name": "take", "arguments": {"x": 1}}</tool_call>'
CALL_MESSAGES: Any = [{"role": "user", "content": REPEAT}]
PARAMETERS: Any = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
TOOL: Any = {"type": "function", "function": {"name": "take", "parameters": PARAMETERS}}


class Answer(BaseModel):
    """Form of a structured answer."""

    size: Literal[1, 2]
    is_long: bool


def check(found: object, expected: object) -> None:
    if found != expected:
        raise ValueError(f"got {found!r}, expected {expected!r}")


def check_pieces(pieces: Iterator[str | None]) -> None:
    """Check a streamed text, which must come in several pieces."""
    texts = [piece for piece in pieces if piece]
    check("".join(texts), COUNTED)
    check(len(texts) > 1, True)


def check_answer(found: object) -> None:
    check(isinstance(found, Answer), True)


def check_vectors(vectors: list[list[float]]) -> None:
    check(len(vectors), 2)
    check(len(vectors[0]) == len(vectors[1]) > 1, True)
    check(all(isinstance(one, float) for one in vectors[0]), True)
