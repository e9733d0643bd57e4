"""Beginnings of answers, by Qwen3's own vocabulary and template."""

from typing import Any

import pytest

from penstock.protocol.messages.client import ChatMessage
from penstock.protocol.messages.pipeline import TokenizedRequest, TokenizeRequest
from penstock.protocol.messages.sampling import SamplingParams
from penstock.protocol.messages.structured import StructuredOutputs
from tests.services.conftest import WithTemplate

USER = ChatMessage(role="user", content="What do <think> and </think> mean? <think>")
THINKING = """{%- for message in messages -%}
{{- "<|im_start|>" + message.role + "\n" + message.content + "<|im_end|>\n" -}}
{%- endfor -%}{{- "<|im_start|>assistant\n<think>\n" -}}"""
"""ends as that of Qwen3-Thinking-2507"""
NEVER = THINKING.replace("<think>\n", "")
"""and as that of Qwen3-Instruct-2507"""


def continued(content: str) -> dict[str, Any]:
    messages = [USER, ChatMessage(role="assistant", content=content)]
    return {"messages": messages, "continue_final_message": True}


def hybrid(**kwargs: bool) -> dict[str, Any]:
    return {"messages": [USER], "chat_template_kwargs": kwargs}


REASONING: dict[str, tuple[str | None, dict[str, Any], str]] = {
    "hybrid": (None, hybrid(), "optional"),
    "hybrid, on": (None, hybrid(enable_thinking=True), "optional"),
    "hybrid, off": (None, hybrid(enable_thinking=False), "none"),
    "no answer wanted": (None, {"messages": [USER], "add_generation_prompt": False}, "none"),
    "thinking": (THINKING, {"messages": [USER]}, "open"),
    "never": (NEVER, {"messages": [USER]}, "none"),
    "cut off": (None, continued("<think>\nWell, <b>"), "open"),
    "done": (None, continued("<think>a</think>\n\nb"), "none"),
    "text": (None, {"prompt": "What does <think> mean?"}, "none"),
    "text that thinks": (None, {"prompt": "2 + 2\n<think>\n"}, "open"),
    "text of a turn": (None, {"prompt": "<|im_start|>assistant\n"}, "optional"),
}


@pytest.mark.parametrize(("template", "asked", "reasoning"), REASONING.values(), ids=REASONING)
def test_how_an_answer_begins(
    with_template: WithTemplate, template: str | None, asked: dict[str, Any], reasoning: str
) -> None:
    """Text of the user does not count."""
    tokenizer = with_template(template)
    own = TokenizedRequest("r", 0, SamplingParams())
    token_ids, found = tokenizer.encode(TokenizeRequest(own, **asked))
    assert found == reasoning
    ids = TokenizeRequest(own, prompt=token_ids)
    assert tokenizer.encode(ids)[1] == "none"  # it is of no use
    own.sampling.structured_outputs = StructuredOutputs(regex="a")
    expected = "optional" if template is None and reasoning == "optional" else reasoning
    assert tokenizer.encode(ids)[1] == expected
