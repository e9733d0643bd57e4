"""Clients in Python: the row of the table that one of them makes.

`python_clients.py NAME URL KEY MODEL EMBEDDING_URL` runs with the interpreter that has the client.
A row maps each cell to "yes", or to what went wrong. Cells that the client does not have are left
out.
"""

import json
import traceback
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from cells import (
    CALL_MESSAGES,
    COUNT,
    COUNTED,
    EMBEDDING_V1,
    KEY,
    MESSAGES,
    MODEL,
    NAME,
    PARAMETERS,
    REPEAT,
    TOOL,
    URL,
    V1,
    Answer,
    check,
    check_answer,
    check_pieces,
    check_vectors,
)
from python_frameworks import Instructor, LlamaIndex, LmEval, OpenaiAgents, PydanticAi


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


CLIENTS: dict[str, Callable[[], Any]] = {
    kind.package: kind
    for kind in (
        *(Openai, Anthropic, OpenaiAgents, Litellm, Instructor, PydanticAi, Langchain),
        *(LlamaIndex, LmEval),
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
