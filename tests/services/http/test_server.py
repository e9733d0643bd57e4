"""The server over real connections: bodies, and its end."""

import asyncio
import contextlib
import gzip
import http.client
import itertools
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest

from penstock.protocol.checkpoint import max_request_bytes
from penstock.protocol.config import Config
from penstock.protocol.messages.client import (
    AbortRequest,
    ErrorReply,
    GenerateRequest,
    PromptFields,
    Reply,
    Request,
    TokenizePromptRequest,
    TokenizeReply,
)
from penstock.services.http import app
from penstock.services.http.app import LARGE_BODY_BYTES
from penstock.services.http.generation import generation
from penstock.services.http.shared import app_state
from penstock.services.http.shared.app_state import AppState, Singletons
from penstock.services.http.shared.body import decode_body
from penstock.services.http.shared.errors import ApiError
from tests.launch.fake_gateway import delta, reply
from tests.services.http.conftest import NUM_AT_START, Serve, behave, silent
from tests.services.http.test_apis import Unfinished, events_in

pytestmark = pytest.mark.slow

PROMPT = {"prompt": "one two"}
IMAGE = {"type": "image_url"}


def two_pieces(request: Request) -> list[Reply]:
    """Generate two pieces of a text."""
    if not isinstance(request, GenerateRequest):
        return behave(request)
    return [delta(request, 0, 3), delta(request, 3, 7), reply(request, "one two")]


def test_what_is_not_finished_when_the_server_stops_is_a_503(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    """Its requests are aborted before the client of the pipeline is closed."""
    served = serve(silent, drain_timeout=0)
    asked = [
        ("/v1/completions", PROMPT),
        ("/v1/completions", PROMPT | {"stream": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/detokenize", {"tokens": [1]}),
    ]
    with served.client() as client, ThreadPoolExecutor() as threads:
        waiting = [threads.submit(client.post, path, json=body) for path, body in asked]
        served.asked.wait_for(NUM_AT_START + len(asked))
        served.stop()
        answers = [one.result() for one in waiting]
    served.join()
    assert [one.status_code for one in answers] == [503] * 4
    assert [one.headers["Retry-After"] for one in answers] == ["1"] * 4
    assert {one.json()["error"]["message"] for one in answers} == {"the server is stopping"}
    assert caplog.messages == []  # an ordinary stop is not an error


def test_gzip(serve: Serve) -> None:
    served = serve(max_request_bytes=1000)
    body = msgspec.json.encode(PROMPT)
    with served.client() as client:

        def post(content: bytes, encoding: str = "gzip") -> httpx.Response:
            headers = {"Content-Encoding": encoding}
            return client.post("/v1/completions", content=content, headers=headers)

        for good in (gzip.compress(body), gzip.compress(body[:5]) + gzip.compress(body[5:])):
            assert post(good).json()["choices"][0]["text"] == "one two"
        for encoding in ("identity", ""):
            assert post(body, encoding).status_code == 200
        for bad, status in (
            (body, 400),
            (gzip.compress(body)[:-9], 400),
            (gzip.compress(body) + gzip.compress(b"") * 16, 400),
            (gzip.compress(b" " * 1_000_000), 413),
            (gzip.compress(b" " * 600) * 2, 413),
            (b"x" * 2000, 413),
        ):
            assert post(bad).status_code == status
        refused = post(body, "br")
        assert (refused.status_code, refused.headers["accept-encoding"]) == (415, "gzip, identity")
        assert "got 'br', expected gzip" in refused.json()["error"]["message"]


@pytest.mark.parametrize("context", [4096, 40_960, 131_072, 262_144])
def test_a_prompt_as_long_as_the_context_fits(tmp_path: Path, context: int) -> None:
    made = msgspec.json.decode((Config().model_folder / "config.json").read_bytes())
    made["max_position_embeddings"] = context
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(made))
    config = Config(model=str(tmp_path))
    prompt = {"prompt": [151_643] * context, "max_tokens": 1}
    text = {"prompt": "\\u4f60\\u597d" * context}
    for one in (prompt, text):
        assert len(msgspec.json.encode(one)) <= max_request_bytes(config)
    assert max_request_bytes(Config()) >= 1 << 20
    assert max_request_bytes(Config(max_request_bytes=2000)) == 2000


@pytest.mark.parametrize("has_usage", [True, False])
def test_continuous_usage_counts_the_tokens_of_each_chunk(serve: Serve, has_usage: bool) -> None:
    """The first chunk of a chat has the role, and no token yet."""
    options = {"continuous_usage_stats": True} | ({} if has_usage else {"include_usage": False})
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    with serve(two_pieces).client() as client:
        lines = client.post("/v1/chat/completions", json=body | {"stream_options": options}).text
    chunks = events_in(lines)
    if not has_usage:
        assert all("usage" not in chunk for chunk in chunks)
        return
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    texts = itertools.accumulate(one.get("content", "") for one in deltas)
    assert counts == [len(text) for text in texts]
    assert counts[-1] == 7
    assert [chunk["usage"]["total_tokens"] for chunk in chunks] == [1 + n for n in counts]


def test_strings_of_tokens(serve: Serve) -> None:
    def tokenize(request: Request) -> list[Reply]:
        if isinstance(request, TokenizePromptRequest) and request.return_token_strs:
            return [TokenizeReply(token_ids=[7], max_model_len=9, token_strs=["Ġa"])]
        return behave(request)

    with serve(tokenize).client() as client:
        body = {"prompt": " a", "return_token_strs": True}
        assert client.post("/tokenize", json=body).json()["token_strs"] == ["Ġa"]
        assert "token_strs" not in client.post("/tokenize", json={"prompt": "a"}).json()


CALLED = {"id": "c", "function": {"name": "f", "arguments": '{"a": 1}'}}
ASKED: list[Any] = [
    {"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [CALLED]},
    {"role": "tool", "content": "2", "tool_call_id": "c"},
]
USE = {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}
ASKED_OF_MESSAGES: list[Any] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, USE]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "2"}]},
]


@pytest.mark.parametrize(
    ("count", "answer", "body"),
    [
        (
            "/tokenize",
            "/v1/chat/completions",
            {
                "messages": ASKED,
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
                "reasoning_effort": "low",
                "chat_template_kwargs": {"preserve_thinking": True},
            },
        ),
        (
            "/v1/messages/count_tokens",
            "/v1/messages",
            {
                "messages": ASKED_OF_MESSAGES,
                "tools": [{"name": "f", "input_schema": {}}],
                "thinking": {"type": "adaptive"},
                "output_config": {"effort": "high"},
                "max_tokens": 9,
            },
        ),
    ],
)
def test_the_same_prompt_is_counted(
    serve: Serve, count: str, answer: str, body: dict[str, Any]
) -> None:
    """Clients reckon the room of an answer with this count."""
    served = serve(two_pieces)
    with served.client() as client:
        for path in (count, answer):
            assert client.post(path, json=body).status_code == 200
    *_, counted, answered = served.asked.heard
    assert isinstance(counted, TokenizePromptRequest)
    assert isinstance(answered, GenerateRequest)
    for name in PromptFields.__struct_fields__:
        assert getattr(counted, name) == getattr(answered, name), name
    assert counted.messages
    assert counted.messages[-2].reasoning_content == "hm"
    assert "reasoning_effort" in counted.chat_template_kwargs


def test_large_bodies_leave_turns_to_other_requests(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All bodies are ready at one moment. Two large ones are not decoded in one turn."""
    served = serve()
    events: list[str] = []

    def decode(content: bytes, kind: type[Any]) -> Any:
        events.append("large" if len(content) > LARGE_BODY_BYTES else "small")
        served.loop.call_soon(events.append, "turn")
        return decode_body(content, kind)

    monkeypatch.setattr(app, "decode_body", decode)
    large = msgspec.json.encode({"model": "unknown", "prompt": "x" * LARGE_BODY_BYTES})
    invalid = large[:-1]
    bodies = [large, large, invalid, invalid, b'{"model": "unknown", "prompt": "x"}']
    with contextlib.ExitStack() as stack:
        with served.standing_still():
            connections = [
                stack.enter_context(contextlib.closing(http.client.HTTPConnection(*served.address)))
                for _ in bodies
            ]
            for connection, body in zip(connections, bodies, strict=True):
                connection.request("POST", "/v1/completions", body)
        assert [one.getresponse().status for one in connections] == [404, 404, 400, 400, 404]
    assert events.count("large") == 4
    assert ("large", "large") not in itertools.pairwise(events)
    assert events.index("small") < events.index("large", events.index("large") + 1)


def test_an_unknown_route_names_itself(serve: Serve) -> None:
    with serve().client() as client:
        for answer, status, problem in (
            (client.get("/v2/models"), 404, "got GET /v2/models, which is not a route"),
            (client.get("/tokenize"), 405, "got GET /tokenize, expected POST"),
            (client.put("/ping"), 405, "got PUT /ping, expected GET, HEAD, POST"),
        ):
            assert answer.status_code == status
            sentence = f"{problem}; /openapi.json lists the routes"
            assert answer.json()["error"]["message"] == sentence
        of_anthropic = client.post("/v1/messages/batches").json()
        assert (of_anthropic["type"], of_anthropic["error"]["type"]) == ("error", "not_found_error")
        refused = client.post("/v1/responses/x")
    assert refused.headers["allow"] == "DELETE, GET, HEAD"


def test_the_page_about_security_names_the_paths_without_a_key(serve: Serve) -> None:
    """Every GET route that answers without a key is on the page, and no other."""
    served = serve(api_key="key")
    with served.client() as client:
        document = client.get("/openapi.json").json()
        paths = [path for path, methods in document["paths"].items() if "get" in methods]
        paths = [path for path in [*paths, "/openapi.json", "/"] if "{" not in path]
        is_open = {path for path in paths if client.get(path).status_code != 401}
    page = (Path(__file__).parents[3] / "docs/operations/security.md").read_text()
    sentence = page.partition("No key is needed")[2].partition(",\nwhich")[0].split("asks for")[0]
    assert set(re.findall(r"`(/[^`]*)`", sentence)) == is_open


def test_openapi_refuses_no_unknown_field(serve: Serve) -> None:
    """Bodies may have unknown fields, which are ignored and named."""
    with serve().client() as client:
        schemas = client.get("/openapi.json").json()["components"]["schemas"]
        body = {"input": "hi", "colour": "red"}
        counted = client.post("/v1/responses/input_tokens", json=body)
    assert counted.json() == {"object": "response.input_tokens", "input_tokens": 1}
    assert counted.headers["x-ignored-fields"] == "colour"
    closed = [name for name, one in schemas.items() if one.get("additionalProperties") is False]
    assert not closed


def test_a_connection_outlives_refusals_and_unexpected_exceptions(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: object) -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr("penstock.services.http.generation.completions.completion_fields", fail)
    connection = http.client.HTTPConnection(*serve().address, timeout=60)
    with contextlib.closing(connection):
        connection.connect()
        socket = connection.sock
        for path, body, status in (
            ("/v1/completions", PROMPT, 500),
            ("/tokenize", {"messages": [{"role": "user", "content": [IMAGE]}]}, 400),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": [IMAGE]}]}, 400),
            ("/detokenize", {}, 400),
            ("/tokenize", PROMPT, 200),
        ):
            connection.request("POST", path, msgspec.json.encode(body))
            answer = connection.getresponse()
            assert (answer.status, b"secret" in answer.read()) == (status, False)
            assert connection.sock is socket
    assert "ZeroDivisionError: secret" in caplog.text


@pytest.mark.parametrize("num_chunks", [0, 1])
def test_an_unexpected_exception_in_a_stream_is_answered_and_logged(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, num_chunks: int
) -> None:
    """Answers are a 500 before the first event, and an event afterwards; the connection stays."""
    original, left = generation._chunks, [None] * num_chunks

    def fail(*given: Any) -> Any:
        if left:
            left.pop()
            return original(*given)
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(generation, "_chunks", fail)
    connection = http.client.HTTPConnection(*serve(two_pieces).address, timeout=60)
    with contextlib.closing(connection):
        connection.connect()
        socket = connection.sock
        body = msgspec.json.encode(PROMPT | {"stream": True})
        connection.request("POST", "/v1/completions", body)
        answer = connection.getresponse()
        text = answer.read()
        assert (answer.status, text.endswith(b"data: [DONE]\n\n")) == ((500, False), (200, True))[
            num_chunks
        ]
        assert (b"internal error" in text, b"secret" in text) == (True, False)
        connection.request("GET", "/version")
        assert connection.getresponse().status == 200
        assert connection.sock is socket
    assert caplog.text.count("ZeroDivisionError: secret") == 1
    assert "ASGI" not in caplog.text


def test_an_unexpected_exception_aborts_its_request(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "_chunks", lambda *_: 1 // 0)
    served = serve(Unfinished())
    with served.client() as client:
        assert client.post("/v1/completions", json=PROMPT | {"stream": True}).status_code == 500
        served.asked.wait_for(NUM_AT_START + 2)
    assert isinstance(served.asked.heard[-1], AbortRequest)


@pytest.mark.parametrize("echo", [False, True])
def test_too_many_prompts_are_refused_before_anything_is_asked(serve: Serve, echo: bool) -> None:
    served = serve()
    body = {"prompt": [[1]] * 5000, "echo": echo, "truncate_prompt_tokens": 1}
    with served.client() as client:
        answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert "got 5000 answers to 5000 prompts" in answer.text
    assert len(served.asked.heard) == NUM_AT_START


@pytest.mark.parametrize("stream", [False, True])
def test_counting_a_prompt_is_work_for_its_client(serve: Serve, stream: bool) -> None:
    """The gateway shares its room between clients, not between HTTP servers only."""
    served = serve()
    with served.client() as client:
        client.post("/v1/completions", json=PROMPT | {"return_token_ids": True, "stream": stream})
    asked = served.asked.heard[NUM_AT_START:]
    kinds = (GenerateRequest, TokenizePromptRequest)
    clients = [request.client for request in asked if isinstance(request, kinds)]
    assert len(clients) == 2
    assert clients[0] is not None
    assert clients[0] == clients[1]


def test_a_server_starts_while_the_pipeline_is_overloaded(serve: Serve) -> None:
    """The gateway refuses the first questions of the server, which asks again."""
    refusals = [ErrorReply(code="overloaded", message="full", retry_after=0.01)] * 3

    def overloaded(request: Request) -> list[Reply]:
        if isinstance(request, TokenizePromptRequest) and refusals:
            return [refusals.pop()]
        return behave(request)

    with serve(overloaded).client() as client:
        body = {"prompt": "a", "max_tokens": 1}
        assert client.post("/v1/completions", json=body).status_code == 200


def test_a_start_may_take_as_long_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Retry-After` is what the start has taken so far, up to a minute."""
    clock = iter((100.0, 120.5, 1000.0))
    monkeypatch.setattr(
        app_state, "time", SimpleNamespace(time=lambda: 0, monotonic=clock.__next__)
    )
    monkeypatch.setattr(app_state, "START_TIMEOUT", 0.0)
    client: Any = SimpleNamespace(of_model=lambda _: None)

    async def refused(state: AppState) -> ApiError:
        with pytest.raises(ApiError, match="the pipeline is starting") as error:
            await state.check_start()
        return error.value

    state = AppState(Config(), client, Singletons())
    assert asyncio.run(refused(state)).headers == {"Retry-After": "21"}
    assert asyncio.run(refused(state)).headers == {"Retry-After": "60"}
