"""Formats in which models write tool calls."""

from typing import Literal, NamedTuple

OPENING, CLOSING = "<tool_call>", "</tool_call>"
FUNCTION = "<function="  # the beginning of a call in Qwen3-Coder's format
FormatName = Literal["hermes", "qwen3_coder", "json"]


class ToolFormat(NamedTuple):
    """Form in which the model writes calls."""

    name: FormatName = "hermes"
    # the vocabulary has `<tool_call>`, which llguidance does not treat as text
    tags_are_tokens: bool = False


HERMES = ToolFormat()


def format_of(chat_template: str) -> FormatName:
    """Return the format that a chat template shows to the model."""
    if FUNCTION in chat_template:
        return "qwen3_coder"
    return "json" if "tools" in chat_template and OPENING not in chat_template else "hermes"
