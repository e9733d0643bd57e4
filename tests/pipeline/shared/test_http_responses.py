"""The Responses API of a running pipeline, with OpenAI's client and its agents."""

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.pipeline.http_api import COUNT, COUNTED, KEY, MODEL, SCHEMA, TIMEOUT

pytestmark = pytest.mark.pipeline
TOOL: dict[str, Any] = {"type": "function", "name": "add", "parameters": SCHEMA, "strict": True}
CALLS: dict[str, Any] = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}


class Sum(BaseModel):
    a: Literal[1, 2]
    is_long: bool


class Client:
    """OpenAI's client of the pipeline."""

    def __init__(self, client: openai.OpenAI) -> None:
        self.responses = client.responses

    def create(self, given: Any = COUNT, **fields: Any) -> Any:
        return self.responses.create(model=MODEL, input=given, **fields)


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    fields: Any = {"api_key": KEY, "max_retries": 0, "timeout": TIMEOUT}
    with openai.OpenAI(base_url=f"{url}/v1", **fields) as one:
        yield Client(one)


def test_a_response(client: Client) -> None:
    response = client.create(max_output_tokens=40, metadata={"a": "b"})
    assert response.output_text == COUNTED
    assert (response.status, response.model, response.metadata) == ("completed", MODEL, {"a": "b"})
    assert response.usage.output_tokens == len(COUNTED) + 1
    cut = client.create(max_output_tokens=3)
    assert cut.output_text == COUNTED[:3]
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_a_stream(client: Client) -> None:
    with client.responses.stream(model=MODEL, input=COUNT) as stream:
        kinds = [event.type for event in stream]
        response = stream.get_final_response()
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    assert response.output_text == COUNTED


def test_a_conversation(client: Client) -> None:
    first = client.create(instructions="x")
    second = client.create("17+25=", previous_response_id=first.id)
    assert second.output_text == "42"
    history = [{"role": "user", "content": COUNT}, *first.output]
    same = client.create([*history, {"role": "user", "content": "17+25="}])
    assert same.output_text == "42"
    assert same.usage.input_tokens == second.usage.input_tokens
    assert client.responses.retrieve(first.id).output_text == COUNTED
    client.responses.delete(first.id)
    with pytest.raises(openai.BadRequestError, match="previous_response_id: got 'resp_"):
        client.create("17+25=", previous_response_id=first.id)


@pytest.mark.parametrize("stream", [False, True])
def test_tools(client: Client, stream: bool) -> None:
    if stream:
        with client.responses.stream(model=MODEL, input="x", **CALLS) as events:
            for _ in events:
                pass
            response: Any = events.get_final_response()
    else:
        response = client.create("x", **CALLS)
    (call,) = response.output
    assert (call.type, call.name, call.status) == ("function_call", "add", "completed")
    assert Sum.model_validate_json(call.arguments)
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "2"}
    items = [{"role": "user", "content": "x"}, call, output]
    assert client.create(items, max_output_tokens=2).output_text


def test_a_schema(client: Client) -> None:
    response = client.responses.parse(model=MODEL, input="x", text_format=Sum)
    assert response.output_parsed


def test_errors_name_the_field(client: Client) -> None:
    """The pipeline's own refusals, of the tokenizer and of the grammar."""
    with pytest.raises(openai.BadRequestError, match="input: got 5019 tokens, expected up to"):
        client.create("x" * 5000)
    bad = TOOL | {"parameters": {"type": "object", "properties": {"a": {"type": "zzz"}}}}
    with pytest.raises(openai.BadRequestError, match=r"tools\[0\].parameters: got one that can't"):
        client.create(tools=[bad], tool_choice="required")


@pytest.mark.parametrize("is_streamed", [False, True])
def test_agents(url: str, is_streamed: bool) -> None:
    """The Agents SDK calls a function, and sends its result."""
    from agents import (  # takes long: only the process that runs this pays
        Agent,
        ModelSettings,
        OpenAIResponsesModel,
        RunConfig,
        Runner,
        function_tool,
    )

    called = []

    @function_tool
    def add(a: Literal[1], is_long: bool) -> str:
        """Return a sum."""
        called.append((a, is_long))
        return "x"

    async def run() -> Any:
        fields: Any = {"api_key": KEY, "max_retries": 0, "timeout": TIMEOUT}
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", **fields) as one:
            settings = ModelSettings(
                tool_choice="required", parallel_tool_calls=False, max_tokens=100, temperature=0
            )
            agent = Agent(
                name="A",
                tools=[add],
                model_settings=settings,
                model=OpenAIResponsesModel(MODEL, one),
            )
            silent = RunConfig(tracing_disabled=True)
            if not is_streamed:
                return (await Runner.run(agent, "17+25=", run_config=silent)).final_output
            result = Runner.run_streamed(agent, "17+25=", run_config=silent)
            async for _ in result.stream_events():
                pass
            return result.final_output

    assert asyncio.run(run()) == "x"
    assert len(called) == 1


def test_input_tokens_and_items(client: Client) -> None:
    fields: dict[str, Any] = {"instructions": "Count.", "tools": [TOOL]}
    first = client.create(max_output_tokens=4, **fields)
    count = client.responses.input_tokens.count
    assert count(model=MODEL, input=COUNT, **fields).input_tokens == first.usage.input_tokens
    later: dict[str, Any] = {"previous_response_id": first.id, "input": "17+25="}
    second = client.create(later.pop("input"), max_output_tokens=4, **later)
    found = count(model=MODEL, input="17+25=", **later).input_tokens
    assert found == second.usage.input_tokens > first.usage.input_tokens
    items = list(client.responses.input_items.list(second.id, limit=2, order="asc"))
    assert [one.type for one in items] == [
        "message",
        *(one.type for one in first.output),
        "message",
    ]
