"""Arguments of `LLM` that can't be served: the field, its value and what is expected."""

from collections.abc import Callable
from typing import Any

import pytest

from penstock.launch.offline.llm import _config_fields, _messages, _one_for_each
from penstock.launch.offline.outputs import prompts_of
from penstock.protocol.messages.client import ChatMessage
from penstock.protocol.messages.sampling import SamplingParams

IMAGE = {"role": "user", "content": [{"type": "image_url"}]}


@pytest.mark.parametrize(
    ("read", "value", "message"),
    [
        (_config_fields, {"tp": "a"}, "tensor_parallel_size: got 'a', expected `int`"),
        (_config_fields, {"max_model_len": -3}, "max_model_len: got -3, expected `int` >= 0"),
        (
            _config_fields,
            {"device": "tpu"},
            "device: got 'tpu', expected 'auto' or 'cpu' or 'cuda'",
        ),
        (_messages, "hi", "messages: got 'hi', expected `array`"),
        (_messages, [{"role": "user"}], "messages[0].content: got null, expected a string or a "),
        (_messages, [{"role": "user", "content": 5}], "messages[0].content: got 5, expected `str"),
        (_messages, [IMAGE], "messages[0].content[0].type: got 'image_url', expected 'text': the"),
    ],
)
def test_what_is_refused(read: Callable[[Any], Any], value: Any, message: str) -> None:
    with pytest.raises(ValueError, match="expected") as caught:
        read(value)
    assert str(caught.value).startswith(message)


def test_messages_of_openai() -> None:
    parts = [{"type": "text", "text": "17+"}, {"type": "text", "text": "25="}]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    asked, called = _messages(
        [{"role": "user", "content": parts}, {"role": "assistant", "tool_calls": [call]}]
    )
    assert asked == ChatMessage(role="user", content=["17+", "25="])  # joined as the template does
    assert called.tool_calls
    assert called.tool_calls[0]["function"]["arguments"] == '{"a": 1}'  # a map for the template


@pytest.mark.parametrize("prompts", [5, None, 1.5])
def test_prompts(prompts: Any) -> None:
    with pytest.raises(TypeError, match=r"prompts: got .*, expected text, token ids, a map, or a"):
        prompts_of(prompts)


def test_sampling_params() -> None:
    with pytest.raises(TypeError, match="sampling_params: got dict, expected SamplingParams"):
        _one_for_each({"temperature": 1}, 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sampling_params: got 2, expected one, or one for each"):
        _one_for_each([SamplingParams()] * 2, 1)
