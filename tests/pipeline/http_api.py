"""OpenAI's API of a running pipeline, asked with the `openai` package: sync, async, streams."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import openai
import pytest

T = TypeVar("T")

KEY = "a key"
MODEL = "demo"
TIMEOUT = 60.0
COUNTED = "3 4 5 6 7 8 9"
COUNT = "count from 3 to 9"
COUNT_MESSAGES: list[Any] = [{"role": "user", "content": COUNT}]
SUM_MESSAGES: list[Any] = [{"role": "user", "content": "17+25="}]
UNKNOWN_MESSAGES: list[Any] = [{"role": "user", "content": "zq"}]
"""not what the demo model was trained on: what it says depends on the draw"""
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"enum": [1, 2]}, "is_long": {"type": "boolean"}},
            "required": ["a", "is_long"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = TOOL["function"]["parameters"]  # type: ignore[index]


def in_pieces(ask: Callable[[], list[T]], least: int = 2) -> list[T]:
    """Ask until a stream comes in several pieces: tokens that wait for a busy process share one."""
    while len(pieces := ask()) < least:
        pass
    return pieces


class Api:
    """The `openai` package, blocking or not."""

    def __init__(self, url: str, is_async: bool) -> None:
        self.url = url
        self.is_async = is_async
        self.fields = {
            "base_url": f"{url}/v1",
            "api_key": KEY,
            "max_retries": 0,
            "timeout": TIMEOUT,
        }

    def chat(self, messages: list[Any] = COUNT_MESSAGES, **fields: Any) -> Any:
        """Return the answer; with `stream`, the list of its pieces."""
        return self._create("chat.completions", messages=messages, **fields)

    def complete(self, prompt: Any = COUNT, **fields: Any) -> Any:
        """Likewise; room enough for the demo model's answers."""
        return self._create("completions", prompt=prompt, **{"max_tokens": 50} | fields)

    def text(self, messages: list[Any] = COUNT_MESSAGES, **fields: Any) -> str:
        """Return the text of the assistant."""
        content: str = self.chat(messages, **fields).choices[0].message.content
        return content

    def _create(self, what: str, **fields: Any) -> Any:
        fields = {"model": MODEL} | fields
        if self.is_async:
            return asyncio.run(self._create_async(what, fields))
        with openai.OpenAI(**self.fields) as client:  # type: ignore[arg-type]
            resource: Any = client.chat.completions if "chat" in what else client.completions
            answer = resource.create(**fields)
            return list(answer) if fields.get("stream") else answer

    async def _create_async(self, what: str, fields: dict[str, Any]) -> Any:
        async with openai.AsyncOpenAI(**self.fields) as client:  # type: ignore[arg-type]
            resource: Any = client.chat.completions if "chat" in what else client.completions
            answer = await resource.create(**fields)
            return [piece async for piece in answer] if fields.get("stream") else answer


BOTH_CLIENTS = pytest.mark.parametrize("api", ["sync", "async"], indirect=True)
"""for answers of each shape; other fields are the same bytes from either client"""


def content_of(chunks: list[Any], field: str = "content") -> str:
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    return "".join(getattr(delta, field, None) or "" for delta in deltas)
