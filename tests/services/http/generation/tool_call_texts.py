"""Answers with tool calls: valid ones, broken ones, cut ones, and what looks like them."""

import json
import random
import re
from typing import Any

FORMATS = ("hermes", "qwen3_coder", "json")
SCHEMA = {
    "properties": {
        "text": {"type": "string"},
        "number": {"type": "integer"},
        "list": {"type": "array"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "any": {},
    }
}
MARKERS = [
    "<tool_call>",
    "</tool_call>",
    "<function=f>",
    "</function>",
    "<parameter=text>",
    "</parameter>",
    "<",
    ">",
    "\n",
    " ",
    '"',
    "\\",
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    "ü",
    "日",
    "🙂",
    "\\u00e9",
    "a",
    "null",
    "5",
    '{"name": "f", "arguments": {',
    '{"name": "f"}',
    '{"arguments": {"a": 1}, "name": "g"}',
]


class Texts:
    """Random answers of one format."""

    def __init__(self, form: str, seed: int) -> None:
        self.form = form
        self.random = random.Random(seed)

    def arguments(self) -> dict[str, Any]:
        keys = self.random.sample(sorted(SCHEMA["properties"]), self.random.randrange(4))
        return {key: self._value(key) for key in keys}

    def call(self, arguments: dict[str, Any]) -> str:
        """Return the text of a call of `f`, as the model should write it."""
        if self.form == "qwen3_coder":
            parameters = "".join(
                f"<parameter={key}>\n{one if isinstance(one, str) else json.dumps(one)}\n"
                "</parameter>\n"
                for key, one in arguments.items()
            )
            return f"<tool_call>\n<function=f>\n{parameters}</function>\n</tool_call>"
        body = json.dumps(
            {"name": "f", "arguments": arguments}, ensure_ascii=self.random.random() < 0.5
        )
        if self.random.random() < 0.3 and "\\n</tool_call>" not in body:
            escapes = {r"\n": "\n", r"\t": "\t"}  # models forget them
            body = re.sub(r"\\.", lambda found: escapes.get(found[0], found[0]), body)
        return body if self.form == "json" else f"<tool_call>\n{body}\n</tool_call>"

    def answer(self) -> str:
        """Return calls and other text, often with mistakes."""
        parts = [
            self.call(self.arguments()) if self.random.random() < 0.6 else self._noise()
            for _ in range(self.random.randrange(1, 4))
        ]
        text = self.random.choice(["", "\n", "\n\n", " ", ", "]).join(parts)
        for _ in range(self.random.choice([0, 0, 1, 1, 2, 3])):
            at = self.random.randrange(len(text) + 1)
            end = min(len(text), at + self.random.choice([0, 0, 1, 3, 12]))
            text = text[:at] + self.random.choice([*MARKERS, ""]) + text[end:]
        return text

    def cuts(self, text: str) -> list[str]:
        """Return the text in pieces."""
        pieces = []
        while text:
            size = self.random.choice([1, 1, 2, 3, 7, 40])
            pieces.append(text[:size])
            text = text[size:]
        return pieces

    def _noise(self) -> str:
        return "".join(self.random.choices(MARKERS, k=self.random.randrange(12)))

    def _value(self, key: str) -> Any:
        if key == "any" and self.form == "qwen3_coder":  # where a number may be a string
            return self.random.choice([[-5], {"a": 10**20}, None])
        if key in ("number", "any"):
            return self.random.choice([0, -5, 10**20])
        if key == "list":
            return self.random.choice([[], [1, "]"], [{"a": ["}"]}]])
        words = [*MARKERS[:1], *MARKERS[6:-3], "x\ty"]
        if self.form != "qwen3_coder":  # which has no way to write them in a value
            words += MARKERS
        return "v" + "".join(self.random.choices(words, k=self.random.randrange(6))) + "w"
