"""Arguments of `LLM` that can't be served: the field, its value and what is expected."""

from typing import Any

import pytest

from penstock.launch.offline.llm import _config_fields, _messages, _one_for_each
from penstock.launch.offline.outputs import prompts_of
from penstock.protocol.messages.client import ChatMessage
from penstock.protocol.messages.sampling import SamplingParams


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp": "banana"}, "tensor_parallel_size: got 'banana', expected `int`"),
        ({"max_model_len": -3}, "max_model_len: got -3, expected `int` >= 0"),
        ({"device": "tpu"}, "device: got 'tpu', expected 'auto' or 'cpu' or 'cuda'"),
    ],
)
def test_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="expected") as caught:
        _config_fields(options)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hi", "messages: got 'hi', expected `array`"),
        (
            [{"role": "user"}],
            "messages[0].content: got null, expected a string or a list of text parts",
        ),
        (
            [{"role": "user", "content": 5}],
            "messages[0].content: got 5, expected `str | array | null`",
        ),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            "messages[0].content[0].type: got 'image_url', expected 'text': the model reads text "
            "only",
        ),
    ],
)
def test_messages(messages: Any, message: str) -> None:
    with pytest.raises(ValueError, match="messages") as caught:
        _messages(messages)
    assert str(caught.value) == message


def test_messages_of_openai() -> None:
    parts = [{"type": "text", "text": "17+"}, {"type": "text", "text": "25="}]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    asked, called = _messages(
        [{"role": "user", "content": parts}, {"role": "assistant", "tool_calls": [call]}]
    )
    assert asked == ChatMessage(role="user", content="17+\n25=")
    assert called.tool_calls
    assert called.tool_calls[0]["function"]["arguments"] == {"a": 1}


@pytest.mark.parametrize("prompts", [5, None, 1.5])
def test_prompts(prompts: Any) -> None:
    with pytest.raises(TypeError, match=r"prompts: got .*, expected text, token ids, a map, or a"):
        prompts_of(prompts)


def test_sampling_params() -> None:
    with pytest.raises(TypeError, match="sampling_params: got dict, expected SamplingParams"):
        _one_for_each({"temperature": 1}, 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sampling_params: got 2, expected one, or one for each"):
        _one_for_each([SamplingParams()] * 2, 1)
