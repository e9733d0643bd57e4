"""Every refusal names the field, the value and the limit."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from penstock.protocol.config import Config
from penstock.protocol.messages.client import (
    JSON,
    MSGPACK,
    ChatMessage,
    DetokenizeRequest,
    ErrorReply,
    GenerateRequest,
    TokenizePromptRequest,
    codec_of,
)
from penstock.services.gateway.admission import (
    UNTYPED,
    RefusedError,
    Validation,
    decode_request,
)
from tests.services.gateway.conftest import GatewayHarness

MAX_BYTES = 100_000


def admission() -> Validation:
    """Return the validation of the demo model."""
    config = Config()
    return Validation(config)


def refusal(frame: bytes, max_bytes: int = MAX_BYTES) -> RefusedError:
    with pytest.raises(RefusedError) as caught:
        decode_request(JSON if frame[:1] < b"\x80" else MSGPACK, frame, max_bytes)
    return caught.value


@pytest.mark.parametrize(
    ("fields", "field", "value", "limit"),
    [
        ({"max_tokens": 0}, "max_tokens", "0", ">= 1"),
        ({"max_tokens": "many"}, "max_tokens", "'many'", "`int"),
        ({"request_id": "a\n"}, "request_id", r"'a\n'", "expected no control characters"),
        ({"temperature": 3.5}, "temperature", "3.5", "<= 2"),
        ({"top_p": 0}, "top_p", "0", "> 0"),
        ({"n": 129}, "n", "129", "<= 128"),
        ({"prompt": ""}, "prompt", "''", ">= 1"),
        ({"prompt": [1, -5]}, "prompt[1]", "-5", ">= 0"),
        ({"prompt": 7}, "prompt", "7", "`str"),
        ({"stop": ["a", ""]}, "stop[1]", "''", ">= 1"),
        (
            {"messages": [{"role": "cook", "content": "x"}]},
            "messages[0].role",
            "'cook'",
            "'system' or",
        ),
        ({"colour": "red"}, "colour", "colour", "max_tokens"),
        ({"type": "tokenize", "stream": True}, "stream", "stream", "prompt, messages, tools,"),
        (
            {"structured_outputs": {"xml": 1}},
            "structured_outputs.xml",
            "xml: got",
            "an unknown field",
        ),
        ({"logit_bias": {5: 900.0}}, "logit_bias.5", "got 900.0", "<= 100"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "got []", "length >= 1"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids[0]", "got -1", ">= 0"),
        ({"bad_words": [""]}, "bad_words[0]", "got ''", "length >= 1"),
        ({"bad_words": ["x" * 129]}, "bad_words[0]", "got 'xxx", "length <= 128"),
        ({"bad_words": ["x"] * 65}, "bad_words", "got ['x'", "length <= 64"),
        ({"logit_bias": {"five": 1.0}}, "logit_bias", "'five'", "the key 'five', expected `int`"),
        ({"prompt": {"a": 5}}, "prompt", "prompt: got {'a': 5}, expected", "`str | array | null`"),
        (
            {"structured_outputs": {"json": "5"}},
            "structured_outputs.json",
            "json: got 5",
            "a map",
        ),
        ({"type": "steal"}, "type", "'steal'", "'detokenize' or"),
    ],
)
@pytest.mark.parametrize("encode", [msgspec.json.encode, msgspec.msgpack.encode])
def test_bad_fields(encode, fields, field, value, limit) -> None:  # type: ignore[no-untyped-def]
    error = refusal(encode({"prompt": "p"} | fields))
    assert error.reply.field == field
    assert value in str(error)
    assert limit in str(error)


@pytest.mark.parametrize(("kind", "field"), [("detokenize", "token_ids"), ("abort", "request_id")])
def test_a_missing_field_is_named(kind: str, field: str) -> None:
    error = refusal(msgspec.json.encode({"type": kind}))
    assert error.reply.field == field
    assert str(error) == f"{field}: got nothing, expected a value; the field is required"


@pytest.mark.parametrize("field", UNTYPED)
def test_what_cannot_be_sent_on_is_named(field: str) -> None:
    """MessagePack has no integers of over 64 bits; JSON has."""
    values: dict[str, Any] = {
        "messages": [{"role": "user", "content": "a", "tool_calls": [{"a": 1 << 64}]}],
        "tools": [{"a": 1 << 64}],
        "structured_outputs": {"json": {"a": 1 << 64}},
    }
    frame = msgspec.json.encode({field: values.get(field, {"a": 1 << 64})})
    with pytest.raises(RefusedError) as caught:
        decode_request(JSON, frame, MAX_BYTES)
    assert caught.value.reply.field == field


@pytest.mark.parametrize("key", [None, True, b"x", (1, 2)])
@pytest.mark.parametrize("field", ["tools", "chat_template_kwargs", "structured_outputs"])
def test_keys_of_untyped_maps_are_strings(field: str, key: object) -> None:
    """MessagePack has other keys. A poison request's digest needs keys that can be sorted."""
    value: Any = {"json": {"x": {key: 1}}}
    fields = {field: [value] if field == "tools" else value, "prompt": "a"}
    assert str(refusal(msgspec.msgpack.encode(fields)).reply.field).startswith(field)


def test_a_long_value_is_cut() -> None:
    assert len(str(refusal(msgspec.json.encode({"prompt": "p", "n": "9" * 900})))) < 200


NESTED = [
    b"[" * 5000,
    b'{"prompt":' + b"[" * 5000 + b"]" * 5000 + b"}",
    b"\x91" * 5000,
    b"\x81\xa6prompt" + b"\x91" * 5000,
]


@pytest.mark.parametrize(
    "frame",
    [
        b'{"messages": [{"role": 5}], "messages": 3}',
        b'{"messages": [{"role": 5}], "messages": [["user"]]}',
        b'{"stop": ["a", 5], "stop": []}',
        b'{"stop": ["a", 5], "stop": "b"}',
    ],
)
def test_a_key_twice(frame: bytes) -> None:
    """The first value is invalid; the frame without a type has the second only."""
    error = refusal(frame)
    field = error.reply.field or ""
    assert field in ("messages[0].role", "stop[1]")
    assert str(error).startswith(f"{field}: expected")


def test_any_depth() -> None:
    """At some depth a value can be decoded, and is too deep to be shown."""
    for depth in range(900, 1100):
        assert refusal(b"\x81\xa6prompt" + b"\x81\xa1a" * depth + b"\x01").reply.code == "invalid"


@pytest.mark.parametrize(
    "frame", [b"", b"hello", b"\xff\xfe", b"\xc1", b"[1]", b"\x93\x01", b"{", *NESTED]
)
def test_garbage(frame: bytes) -> None:
    assert refusal(frame).reply.code == "invalid"


def test_too_many_bytes() -> None:
    assert str(refusal(b" " * 100_001)) == "request: got 100001 bytes, expected up to 100000"


def test_tokens_that_the_client_has_got_are_not_too_many_bytes() -> None:
    request = GenerateRequest(prompt="x" * 50, output_token_ids=[100_000] * 20)
    frame = MSGPACK.encode(request)
    assert decode_request(MSGPACK, frame, 100, max_output_tokens=20) == request
    for max_bytes, max_output_tokens in ((100, 10), (40, 40)):
        with pytest.raises(RefusedError, match=f"expected up to {max_bytes}"):
            decode_request(MSGPACK, frame, max_bytes, max_output_tokens)


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        (GenerateRequest(), "got neither of prompt"),
        (GenerateRequest(prompt="a", messages=[]), "got both of prompt"),
        (GenerateRequest(prompt="a", stream=True), "got true on a REQ socket"),
        (GenerateRequest(prompt="a", max_tokens=4097), "max_tokens: got 4097, expected up to 4096"),
        (GenerateRequest(prompt=[1, 264]), r"prompt\[1\]: got 264, expected a token id up to 263"),
        (GenerateRequest(prompt="a", output_token_ids=[264]), r"output_token_ids\[0\]: got 264"),
        (GenerateRequest(prompt="a", stop_token_ids=[1, 264]), r"stop_token_ids\[1\]: got 264"),
        (
            GenerateRequest(prompt="a", logit_bias={264: 1.0, 3: 1.0}),
            r"logit_bias: got the key 264",
        ),
        (
            GenerateRequest(prompt="a", allowed_token_ids=[3, 264]),
            r"allowed_token_ids\[1\]: got 264",
        ),
        (
            GenerateRequest(prompt="a", max_tokens=5, min_tokens=6),
            "min_tokens: got 6, expected up to max_tokens, 5",
        ),
        (GenerateRequest(prompt="a", tools=[{}, {}]), "tools: got 2 without messages"),
    ],
)
def test_what_the_model_can_not_do(request_: GenerateRequest, sentence: str) -> None:
    with pytest.raises(RefusedError, match=sentence):
        admission().check(request_, is_req_socket=True)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 6, "min_tokens": 6},
        {"min_tokens": 9000},
        {"stop_token_ids": [263], "logit_bias": {263: 1.0}, "allowed_token_ids": [263]},
    ],
)
def test_what_the_model_can_do(fields: dict[str, Any]) -> None:
    admission().check(GenerateRequest(prompt="a", **fields), is_req_socket=False)


MESSAGES = [ChatMessage(role="user", content="x")]


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        (TokenizePromptRequest(), "got neither of prompt"),
        (TokenizePromptRequest(prompt="a", messages=MESSAGES), "got both of prompt"),
        (TokenizePromptRequest(prompt=[264]), r"prompt\[0\]: got 264"),
        (TokenizePromptRequest(prompt="a", tools=[{}]), "tools: got 1 without"),
        (DetokenizeRequest(token_ids=[5, 264]), r"token_ids\[1\]: got 264, expected a token id"),
    ],
)
def test_what_a_tokenizer_can_not_answer(
    query: TokenizePromptRequest | DetokenizeRequest, sentence: str
) -> None:
    with pytest.raises(RefusedError, match=sentence):
        admission().check_query(query)


def test_what_a_tokenizer_can_answer() -> None:
    admission().check_query(TokenizePromptRequest(messages=MESSAGES, tools=[{}]))
    admission().check_query(DetokenizeRequest(token_ids=[]))


def test_templates_of_requests_need_an_option() -> None:
    request = GenerateRequest(messages=MESSAGES, chat_template="{{ 1 }}")
    with pytest.raises(RefusedError, match="start the pipeline with --trust-request") as caught:
        admission().check(request, is_req_socket=False)
    assert caught.value.reply.field == "chat_template"
    config = Config(trust_request_chat_template=True)
    Validation(config).check(request, is_req_socket=False)


def test_a_message_is_continued_or_answered() -> None:
    request = GenerateRequest(
        messages=MESSAGES, continue_final_message=True, add_generation_prompt=True
    )
    with pytest.raises(RefusedError, match="got true, as add_generation_prompt"):
        admission().check(request, is_req_socket=False)


REFUSALS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"max_tokens": 0}, {}),
    ({"prompt": None}, {}),
    ({"model": "another"}, {}),
    ({"prompt": "x" * 5000}, {}),
    ({"prompt": None, "messages": [{"role": "user", "content": "x", "tool_calls": []}]}, {}),
    ({"chat_template_kwargs": {"x": [[]] * 70_000}}, {"max_request_bytes": 1 << 20}),
    ({"chat_template_kwargs": {"x": [[[]]]}}, {"max_open_bytes": 10}),
    ({"client": "10.0.0.1"}, {}),
]


@pytest.mark.parametrize("encode", [msgspec.json.encode, msgspec.msgpack.encode])
@pytest.mark.parametrize(("fields", "options"), REFUSALS)
def test_a_refusal_has_the_id_of_its_request(
    start_gateway: Callable[..., GatewayHarness], encode: Any, fields: Any, options: Any
) -> None:
    harness = start_gateway(**{"max_request_bytes": 4000} | options)
    socket = harness.connect()
    socket.send(encode({"request_id": "mine", "prompt": "x", "n": 2} | fields))
    reply = harness.receive_reply(socket, JSON if encode is msgspec.json.encode else MSGPACK)
    assert (type(reply), reply.request_id) == (ErrorReply, "mine")


@pytest.mark.parametrize(
    "frame",
    [
        b'{"request_id": "mine"',
        b'{"request_id": 7}',
        b"[]",
        b"\x81",
        b'{"tools": ' + b"[" * 50_000,
        b"\x81\xa5tools" + b"\x91" * 50_000 + b"\xc0",
    ],
)
def test_a_request_whose_id_is_not_known_is_refused_without_one(
    start_gateway: Callable[..., GatewayHarness], frame: bytes
) -> None:
    harness = start_gateway()
    socket = harness.connect()
    socket.send(frame)
    codec = codec_of(frame)
    assert harness.receive_reply(socket, codec).request_id is None
