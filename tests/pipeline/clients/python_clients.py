"""Clients in Python: the row of the table that one of them makes.

`python_clients.py NAME URL KEY MODEL EMBEDDING_URL` runs with the interpreter that has the client.
A row maps each cell to "yes", or to what went wrong. Cells that the client does not have are left
out.
"""

import asyncio
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any, Literal

from pydantic import BaseModel

_, NAME, URL, KEY, MODEL, EMBEDDING_URL = sys.argv
V1, EMBEDDING_V1 = f"{URL}/v1", f"{EMBEDDING_URL}/v1"
COUNT, COUNTED = "count from 3 to 9", "3 4 5 6 7 8 9"
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


class Openai:
    package = "openai"

    def __init__(self) -> None:
        import openai

        self.openai: Any = openai
        self.client: Any = openai.OpenAI(base_url=V1, api_key=KEY, max_retries=0)

    def text(self) -> None:
        answer = self.client.chat.completions.create(model=MODEL, messages=MESSAGES)
        check(answer.choices[0].message.content, COUNTED)
        check(self.client.responses.create(model=MODEL, input=COUNT).output_text, COUNTED)

    def stream(self) -> None:
        chunks = self.client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        check_pieces(chunk.choices[0].delta.content for chunk in chunks if chunk.choices)
        events = self.client.responses.create(model=MODEL, input=COUNT, stream=True)
        kind = "response.output_text.delta"
        check_pieces(event.delta for event in events if event.type == kind)

    def tools(self) -> None:
        answer = self.client.chat.completions.create(
            model=MODEL, messages=CALL_MESSAGES, tools=[TOOL]
        )
        (call,) = answer.choices[0].message.tool_calls
        check((call.function.name, json.loads(call.function.arguments)), ("take", {"x": 1}))

    def schema(self) -> None:
        answer = self.client.chat.completions.parse(
            model=MODEL, messages=MESSAGES, response_format=Answer
        )
        check_answer(answer.choices[0].message.parsed)
        response = self.client.responses.parse(model=MODEL, input=COUNT, text_format=Answer)
        check_answer(response.output_parsed)

    def embeddings(self) -> None:
        client = self.openai.OpenAI(base_url=EMBEDDING_V1, api_key=KEY, max_retries=0)
        reply = client.embeddings.create(model=MODEL, input=["one", "two"])
        check_vectors([one.embedding for one in reply.data])


class Anthropic:
    package = "anthropic"

    def __init__(self) -> None:
        import anthropic

        client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)
        self.messages: Any = client.messages
        self.fields: Any = {"model": MODEL, "max_tokens": 200}

    def text(self) -> None:
        message = self.messages.create(messages=MESSAGES, **self.fields)
        check(message.content[0].text, COUNTED)

    def stream(self) -> None:
        with self.messages.stream(messages=MESSAGES, **self.fields) as stream:
            check_pieces(stream.text_stream)

    def tools(self) -> None:
        tool = {"name": "take", "input_schema": PARAMETERS}
        message = self.messages.create(messages=CALL_MESSAGES, tools=[tool], **self.fields)
        (call,) = message.content
        check((call.name, call.input), ("take", {"x": 1}))

    def schema(self) -> None:
        message = self.messages.parse(messages=MESSAGES, output_format=Answer, **self.fields)
        check_answer(message.parsed_output)


class OpenaiAgents:
    """The agents use /v1/responses by default."""

    package = "openai-agents"

    def __init__(self) -> None:
        import agents

        agents.set_tracing_disabled(True)
        self.agents: Any = agents

    def agent(self, **fields: Any) -> Any:
        from openai import AsyncOpenAI

        client = AsyncOpenAI(base_url=V1, api_key=KEY, max_retries=0)  # one for each event loop
        self.agents.set_default_openai_client(client, use_for_tracing=False)
        return self.agents.Agent(name="a", model=MODEL, **fields)

    def run(self, agent: Any, prompt: str = COUNT) -> Any:
        return asyncio.run(self.agents.Runner.run(agent, prompt)).final_output

    def text(self) -> None:
        check(self.run(self.agent()), COUNTED)

    def stream(self) -> None:
        async def pieces() -> list[str]:
            result = self.agents.Runner.run_streamed(self.agent(), COUNT)
            events = [one.data async for one in result.stream_events() if hasattr(one, "data")]
            return [one.delta for one in events if one.type == "response.output_text.delta"]

        check_pieces(iter(asyncio.run(pieces())))

    def tools(self) -> None:
        @self.agents.function_tool  # type: ignore[untyped-decorator]
        def take(x: int) -> str:
            """Take a number."""
            return f"took {x}"

        agent = self.agent(tools=[take], tool_use_behavior="stop_on_first_tool")
        check(self.run(agent, REPEAT), "took 1")

    def schema(self) -> None:
        check_answer(self.run(self.agent(output_type=Answer)))


class Litellm:
    package = "litellm"

    def __init__(self) -> None:
        import litellm

        self.litellm: Any = litellm
        self.fields: Any = {"model": f"openai/{MODEL}", "api_base": V1, "api_key": KEY}

    def ask(self, messages: Any = MESSAGES, **fields: Any) -> Any:
        return self.litellm.completion(messages=messages, **self.fields, **fields)

    def text(self) -> None:
        check(self.ask().choices[0].message.content, COUNTED)

    def stream(self) -> None:
        check_pieces(chunk.choices[0].delta.content for chunk in self.ask(stream=True))

    def tools(self) -> None:
        (call,) = self.ask(CALL_MESSAGES, tools=[TOOL]).choices[0].message.tool_calls
        check((call.function.name, json.loads(call.function.arguments)), ("take", {"x": 1}))

    def schema(self) -> None:
        answer = self.ask(response_format=Answer).choices[0].message.content
        check_answer(Answer.model_validate_json(answer))

    def embeddings(self) -> None:
        fields = self.fields | {"api_base": EMBEDDING_V1, "encoding_format": "float"}
        reply = self.litellm.embedding(input=["one", "two"], **fields)
        check_vectors([one["embedding"] for one in reply.data])


class Instructor:
    """Its default mode is a forced call; another is a schema."""

    package = "instructor"

    def ask(self, mode: str, **fields: Any) -> Any:
        import instructor
        from openai import OpenAI

        openai = OpenAI(base_url=V1, api_key=KEY, max_retries=0)
        client: Any = instructor.from_openai(openai, mode=getattr(instructor.Mode, mode))
        return client.chat.completions.create(
            **{"model": MODEL, "messages": MESSAGES, "max_retries": 0} | fields
        )

    def text(self) -> None:
        answer = self.ask("TOOLS", response_model=None)
        check(answer.choices[0].message.content, COUNTED)

    def stream(self) -> None:
        import instructor

        kind = instructor.Partial[Answer]  # type: ignore[type-var]
        *_, last = self.ask("TOOLS", response_model=kind, stream=True)
        check_answer(Answer.model_validate(last.model_dump()))

    def tools(self) -> None:
        check_answer(self.ask("TOOLS", response_model=Answer))

    def schema(self) -> None:
        check_answer(self.ask("JSON_SCHEMA", response_model=Answer))


class PydanticAi:
    package = "pydantic-ai-slim"

    def agent(self, **fields: Any) -> Any:
        from pydantic_ai import Agent
        from pydantic_ai.models.openai import OpenAIChatModel
        from pydantic_ai.providers.openai import OpenAIProvider

        provider = OpenAIProvider(base_url=V1, api_key=KEY)
        return Agent(OpenAIChatModel(MODEL, provider=provider), **fields)

    def text(self) -> None:
        check(self.agent().run_sync(COUNT).output, COUNTED)

    def stream(self) -> None:
        async def pieces() -> list[str]:
            async with self.agent().run_stream(COUNT) as result:
                return [one async for one in result.stream_text(delta=True, debounce_by=None)]

        check_pieces(iter(asyncio.run(pieces())))

    def tools(self) -> None:
        from pydantic_ai import UsageLimitExceeded, UsageLimits

        agent, taken = self.agent(), []

        @agent.tool_plain  # type: ignore[untyped-decorator]
        def take(x: int) -> str:
            taken.append(x)
            return "done"

        try:
            agent.run_sync(REPEAT, usage_limits=UsageLimits(request_limit=1))
        except UsageLimitExceeded:  # the tool's result is not sent back
            check(taken, [1])

    def schema(self) -> None:
        from pydantic_ai import NativeOutput

        check_answer(self.agent(output_type=NativeOutput(Answer)).run_sync(COUNT).output)
        check_answer(self.agent(output_type=Answer).run_sync(COUNT).output)


class Langchain:
    package = "langchain-openai"

    def __init__(self) -> None:
        from langchain_openai import ChatOpenAI

        self.fields: Any = {"base_url": V1, "api_key": KEY, "model": MODEL, "max_retries": 0}
        self.model: Any = ChatOpenAI(temperature=0, **self.fields)

    def text(self) -> None:
        check(self.model.invoke(COUNT).content, COUNTED)

    def stream(self) -> None:
        check_pieces(chunk.content for chunk in self.model.stream(COUNT))

    def tools(self) -> None:
        (call,) = self.model.bind_tools([TOOL]).invoke(REPEAT).tool_calls
        check((call["name"], call["args"]), ("take", {"x": 1}))

    def schema(self) -> None:
        for method in ("json_schema", "function_calling"):
            check_answer(self.model.with_structured_output(Answer, method=method).invoke(COUNT))

    def embeddings(self) -> None:
        from langchain_openai import OpenAIEmbeddings

        # otherwise it downloads OpenAI's vocabulary, and sends ids of it
        fields = self.fields | {"base_url": EMBEDDING_V1, "check_embedding_ctx_length": False}
        model = OpenAIEmbeddings(**fields)
        check_vectors(model.embed_documents(["one", "two"]))


class LlamaIndex:
    package = "llama-index-llms-openai-like"

    def __init__(self) -> None:
        from llama_index.llms.openai_like import OpenAILike

        self.model: Any = OpenAILike(
            model=MODEL,
            api_base=V1,
            api_key=KEY,
            is_chat_model=True,
            is_function_calling_model=True,
            max_retries=0,
        )

    def text(self) -> None:
        check(self.model.complete(COUNT).text, COUNTED)

    def stream(self) -> None:
        check_pieces(chunk.delta for chunk in self.model.stream_complete(COUNT))

    def tools(self) -> None:
        from llama_index.core.tools import FunctionTool

        def take(x: int) -> int:
            """Take a number."""
            return x

        tool = FunctionTool.from_defaults(take)
        answer = self.model.chat_with_tools([tool], user_msg=REPEAT)
        (call,) = self.model.get_tool_calls_from_response(answer)
        check((call.tool_name, call.tool_kwargs), ("take", {"x": 1}))

    def schema(self) -> None:
        check_answer(self.model.as_structured_llm(Answer).complete(COUNT).raw)

    def embeddings(self) -> None:
        from llama_index.embeddings.openai_like import OpenAILikeEmbedding

        model = OpenAILikeEmbedding(
            model_name=MODEL, api_base=EMBEDDING_V1, api_key=KEY, max_retries=0
        )
        check_vectors(model.get_text_embedding_batch(["one", "two"]))


CLIENTS: dict[str, Callable[[], Any]] = {
    kind.package: kind
    for kind in (
        *(Openai, Anthropic, OpenaiAgents, Litellm, Instructor, PydanticAi, Langchain),
        LlamaIndex,
    )
}
CELLS = ("text", "stream", "tools", "schema", "embeddings")


def outcome(run: Callable[[], None]) -> str:
    try:
        run()
    except Exception as error:  # noqa: BLE001  whatever the client raises belongs into the table
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"
    return "yes"


def main() -> None:
    """Print the row of one client as JSON, in the last line."""
    client = CLIENTS[NAME]()
    runs = {cell: getattr(client, cell) for cell in CELLS if hasattr(client, cell)}
    row = {cell: outcome(run) for cell, run in runs.items()}
    print(json.dumps({"version": version(NAME)} | row))


if __name__ == "__main__":
    main()
