"""Calls and their results in Anthropic's conversations: each call has one."""

from typing import Any

import pytest

from tests.services.http.messages.test_to_chat_request import CALL, HELLO, refusal, templated


def calls(*ids: str) -> dict[str, Any]:
    return {"role": "assistant", "content": [CALL | {"id": one} for one in ids]}


def results(*ids: str) -> dict[str, Any]:
    content = [{"type": "tool_result", "tool_use_id": one} for one in ids]
    return {"role": "user", "content": content}


OK = {"role": "assistant", "content": "ok"}
LAST = "expected the id of a tool_use in the assistant's last message, once"


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ([results("a")], f"messages[0].content[0].tool_use_id: got 'a', {LAST}"),
        (
            [*HELLO, calls("a", "b"), results("b", "c")],
            f"messages[2].content[1].tool_use_id: got 'c', {LAST}",
        ),
        (
            [calls("a"), results("a", "a")],
            f"messages[1].content[1].tool_use_id: got 'a', {LAST}",
        ),
        (
            [calls("a"), results("a"), OK, results("a")],
            f"messages[3].content[0].tool_use_id: got 'a', {LAST}",
        ),
        (
            [calls("a", "b"), results("b"), OK],
            "messages[0].content[0].id: got 'a', expected its tool_result in the user's next",
        ),
        ([calls("a"), *HELLO, OK], "messages[0].content[0].id: got 'a', expected its tool_result"),
        ([calls("a", "a")], "messages[0].content[1].id: got 'a' again, expected another id"),
    ],
)
def test_a_call_has_one_result(messages: Any, sentence: str) -> None:
    assert refusal(messages).startswith(sentence)


def test_ids_of_calls_may_come_again() -> None:
    turns = [calls("a"), results("a"), calls("a", "b"), results("b"), results("a"), OK]
    roles = [one["role"] for one in templated(turns)]
    assert roles == ["assistant", "tool", "assistant", "tool", "tool", "assistant"]
