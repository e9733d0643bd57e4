"""Anthropic's Messages API with the `anthropic` package."""

import json
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import jsonschema
import pydantic
import pytest

from tests.pipeline.http_api import COUNT, COUNTED, KEY, MODEL, SCHEMA, TIMEOUT

pytestmark = pytest.mark.pipeline
COUNT_MESSAGES: list[Any] = [{"role": "user", "content": COUNT}]
ADD: Any = {"name": "add", "description": "Adds.", "input_schema": SCHEMA}
CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
CALL_MESSAGES: list[Any] = [{"role": "user", "content": f"repeat: {CALL}"}]
F: Any = {"name": "f", "input_schema": {"type": "object"}}


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0, timeout=TIMEOUT) as one:
        yield one


def create(client: anthropic.Anthropic, messages: Any = COUNT_MESSAGES, **fields: Any) -> Any:
    """Return the whole message, which the stream must equal."""
    fields = {"model": MODEL, "messages": messages, "max_tokens": 100} | fields
    whole = client.messages.create(**fields)
    with client.messages.stream(**fields) as stream:
        streamed = stream.get_final_message()
    assert contents(streamed) == contents(whole)
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    for name in ("stop_reason", "stop_sequence"):
        assert getattr(streamed, name) == getattr(whole, name)
    return whole


def contents(message: Any) -> Any:
    """Return the blocks without what differs by design: ids of calls, and the client's marks."""
    left_out = {"id", "parsed_output"}
    return [one.model_dump(exclude=left_out) for one in message.content]


def prompt_tokens(usage: Any) -> int:
    cached = usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    return int(usage.input_tokens + cached)


def test_text(client: anthropic.Anthropic) -> None:
    message = create(client)
    (block,) = message.content
    assert (block.type, block.text) == ("text", COUNTED)
    assert (message.role, message.model, message.stop_reason) == ("assistant", MODEL, "end_turn")
    counted = client.messages.count_tokens(model=MODEL, messages=COUNT_MESSAGES)
    assert prompt_tokens(message.usage) == counted.input_tokens
    first, *_ = create_only(client, stream=True)
    assert prompt_tokens(first.message.usage) == counted.input_tokens  # before the first text


def test_what_ends_a_message(client: anthropic.Anthropic) -> None:
    stopped = create(client, stop_sequences=["7", "zz"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "7")
    assert stopped.content[0].text == COUNTED.partition("7")[0]
    assert create(client, max_tokens=3).stop_reason == "max_tokens"


def test_an_answer_is_continued(client: anthropic.Anthropic) -> None:
    begun = [*COUNT_MESSAGES, {"role": "assistant", "content": COUNTED[:7]}]
    assert create(client, begun).content[0].text == COUNTED[7:]


def test_a_prompt_without_an_answer_fills_the_prefix_cache(client: anthropic.Anthropic) -> None:
    messages = [{"role": "user", "content": "a prompt that comes twice, " * 5}]
    fields: Any = {"model": MODEL, "messages": messages, "max_tokens": 0}
    message = client.messages.create(**fields)
    assert (message.content, message.stop_reason) == ([], "max_tokens")
    assert message.usage.output_tokens == 0
    created = message.usage.cache_creation_input_tokens
    again = client.messages.create(**fields).usage
    assert created
    assert again.cache_read_input_tokens == created + message.usage.cache_read_input_tokens
    assert not again.cache_creation_input_tokens
    assert 0 < again.input_tokens == message.usage.input_tokens
    with client.messages.stream(**fields) as stream:
        assert stream.get_final_message().content == []


def test_calls(client: anthropic.Anthropic) -> None:
    message = create(client, CALL_MESSAGES, tools=[F])
    (call,) = message.content
    assert (call.type, call.name, call.input) == ("tool_use", "f", {"x": 1})
    assert message.stop_reason == "tool_use"
    assert create(client, CALL_MESSAGES).content[0].text.startswith("<tool_call>")
    none = create(client, CALL_MESSAGES, tools=[F], tool_choice={"type": "none"})
    assert none.stop_reason == "end_turn"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "2"}
    answered = [
        *CALL_MESSAGES,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]
    fields: Any = {"model": MODEL, "tools": [F]}
    longer = client.messages.count_tokens(messages=answered, **fields).input_tokens
    assert longer > client.messages.count_tokens(messages=CALL_MESSAGES, **fields).input_tokens
    assert create(client, answered, tools=[F], max_tokens=5).usage.output_tokens


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "add"}])
def test_forced_calls(client: anthropic.Anthropic, choice: Any) -> None:
    choice = choice | {"disable_parallel_tool_use": True}
    (call,) = create(client, tools=[ADD], tool_choice=choice).content
    assert call.name == "add"
    jsonschema.validate(call.input, SCHEMA)


def test_the_tool_runner(client: anthropic.Anthropic) -> None:
    calls = []

    @anthropic.beta_tool
    def f(x: int) -> str:
        """Take a number."""
        calls.append(x)
        return "done"

    runner = client.beta.messages.tool_runner(
        model=MODEL, messages=CALL_MESSAGES, max_tokens=100, tools=[f], max_iterations=2
    )
    first, *_ = runner
    assert first.stop_reason == "tool_use"
    assert set(calls) == {1}


class Sum(pydantic.BaseModel):
    """The form of the answer."""

    a: Literal[1, 2]
    is_long: bool


def test_structured_output(client: anthropic.Anthropic) -> None:
    bias = {"format": {"type": "json_schema", "schema": SCHEMA}}
    message = create(client, output_config=bias)
    jsonschema.validate(json.loads(message.content[0].text), SCHEMA)
    parsed = client.messages.parse(
        model=MODEL, messages=COUNT_MESSAGES, max_tokens=100, output_format=Sum
    )
    assert isinstance(parsed.parsed_output, Sum)


def test_errors(client: anthropic.Anthropic, url: str) -> None:
    image: Any = [{"role": "user", "content": [{"type": "image", "source": {}}]}]
    asked: Any
    for kind, name, asked in (
        (anthropic.BadRequestError, "invalid_request_error", {"messages": image}),
        (anthropic.BadRequestError, "invalid_request_error", {"extra_body": {"max_token": 1}}),
        (anthropic.NotFoundError, "not_found_error", {"model": "claude"}),
        (
            anthropic.ContentTooLargeError,
            "request_too_large",
            {"messages": [{"role": "user", "content": "x" * 100_000}]},
        ),
    ):
        for stream in (False, True):
            with pytest.raises(kind) as caught:
                create_only(client, stream=stream, **asked)
            assert caught.value.type == name
            assert caught.value.request_id
    with pytest.raises(anthropic.AuthenticationError, match="API key"):
        create_only(anthropic.Anthropic(base_url=url, api_key="another", max_retries=0))
    with anthropic.Anthropic(base_url=url, auth_token=KEY, api_key=None) as bearer:
        assert create_only(bearer).content[0].text == COUNTED


def create_only(client: anthropic.Anthropic, **fields: Any) -> Any:
    return client.messages.create(
        **{"model": MODEL, "messages": COUNT_MESSAGES, "max_tokens": 100} | fields
    )


def test_an_error_within_a_stream(client: anthropic.Anthropic) -> None:
    """Only where its last item begins, the grammar has too many states."""
    items = [{"const": 1}, {"const": 2}, {"type": "string", "pattern": "^(a{1000}){1000}$"}]
    schema = {"type": "array", "prefixItems": items, "minItems": 3}
    form = {"format": {"type": "json_schema", "schema": schema}}
    with pytest.raises(anthropic.APIStatusError, match=r"output_config\.format\.schema"):
        list(create_only(client, output_config=form, stream=True))
