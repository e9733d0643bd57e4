"""Every refusal names the field, the value and the limit; frames of any bytes are refused."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.inspect import AnyType, type_info

from penstock.protocol.config import Config
from penstock.protocol.decoding import MAX_CONTAINERS, MAX_DEPTH, MAX_STRINGS
from penstock.protocol.fair_queue import RESERVED, exceeds
from penstock.protocol.messages.client import (
    JSON,
    MSGPACK,
    REQUEST_TYPES,
    ChatMessage,
    Codec,
    DetokenizeRequest,
    ErrorReply,
    GenerateRequest,
    TokenizePromptRequest,
    codec_of,
)
from penstock.services.gateway.admission import (
    NUM_SAMPLES,
    UNTYPED,
    Admission,
    RefusedError,
    Validation,
    decode_request,
)
from penstock.services.gateway.ledger import Ledger
from penstock.services.gateway.request import Request, Share
from tests.services.gateway.conftest import Harness, Socket, Start, accepted, delta

MAX_BYTES = 100_000
MESSAGES = [ChatMessage(role="user", content="x")]
TWO_ENDS: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": True}
Encode = Callable[[Any], bytes]
both_encodings = pytest.mark.parametrize("encode", [msgspec.json.encode, msgspec.msgpack.encode])


def codec(frame: bytes) -> Codec:
    return JSON if frame[:1] < b"\x80" else MSGPACK


def refusal(frame: bytes, max_bytes: int = MAX_BYTES) -> RefusedError:
    with pytest.raises(RefusedError) as caught:
        decode_request(codec(frame), frame, max_bytes)
    return caught.value


def validate(message: Any, is_req_socket: bool = False, **options: Any) -> None:
    """Check a request or query with the facts of the demo model."""
    validation = Validation(Config(**options))
    if isinstance(message, GenerateRequest):
        validation.check(message, is_req_socket)
    else:
        validation.check_query(message)


# ---- fields ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "field", "value", "limit"),
    [
        ({"max_tokens": 0}, "max_tokens", "0", ">= 1"),
        ({"max_tokens": "many"}, "max_tokens", "'many'", "`int"),
        ({"request_id": "a\n"}, "request_id", r"'a\n'", "expected no control characters"),
        ({"temperature": 2.1}, "temperature", "2.1", "<= 2"),
        ({"temperature": -0.1}, "temperature", "-0.1", ">= 0"),
        ({"top_p": 0}, "top_p", "0", "> 0"),
        ({"top_p": 1.1}, "top_p", "1.1", "<= 1"),
        ({"top_k": -2}, "top_k", "-2", ">= -1"),
        ({"min_p": 1.5}, "min_p", "1.5", "<= 1"),
        ({"n": 129}, "n", "129", "<= 128"),
        ({"n": 0}, "n", "0", ">= 1"),
        *(({"timeout": value}, "timeout", str(value), "> 0") for value in (0, -1)),
        ({"stream": "yes"}, "stream", "'yes'", "`bool`"),
        ({"messages": []}, "messages", "[]", ">= 1"),
        ({"prompt": ""}, "prompt", "''", ">= 1"),
        ({"prompt": []}, "prompt", "[]", ">= 1"),
        ({"prompt": [1, -5]}, "prompt[1]", "-5", ">= 0"),
        ({"prompt": 7}, "prompt", "7", "`str"),
        ({"stop": ["a", ""]}, "stop[1]", "''", ">= 1"),
        ({"messages": [{"role": "cook"}]}, "messages[0].role", "'cook'", "'system' or"),
        ({"colour": "red"}, "colour", "colour", "max_tokens"),
        ({"type": "tokenize", "stream": True}, "stream", "stream", "prompt, messages, tools,"),
        ({"structured_outputs": {"xml": 1}}, "structured_outputs.xml", "xml: got", "an unknown"),
        ({"logit_bias": {5: 900.0}}, "logit_bias.5", "got 900.0", "<= 100"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "got []", "length >= 1"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids[0]", "got -1", ">= 0"),
        ({"bad_words": [""]}, "bad_words[0]", "got ''", "length >= 1"),
        ({"bad_words": ["x" * 129]}, "bad_words[0]", "got 'xxx", "length <= 128"),
        ({"bad_words": ["x"] * 65}, "bad_words", "got ['x'", "length <= 64"),
        ({"logit_bias": {"five": 1.0}}, "logit_bias", "'five'", "the key 'five', expected `int`"),
        ({"prompt": {"a": 5}}, "prompt", "prompt: got {'a': 5}, expected", "`str | array | null`"),
        ({"structured_outputs": {"json": "5"}}, "structured_outputs.json", "got 5", "a map"),
        ({"type": "steal"}, "type", "'steal'", "'detokenize' or"),
    ],
)
@both_encodings
def test_bad_fields(encode: Encode, fields: Any, field: str, value: str, limit: str) -> None:
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
    large = {"a": 1 << 64}
    values: dict[str, Any] = {
        "messages": [{"role": "user", "content": "a", "tool_calls": [large]}],
        "tools": [large],
        "structured_outputs": {"json": large},
    }
    assert refusal(msgspec.json.encode({field: values.get(field, large)})).reply.field == field


@pytest.mark.parametrize("key", [None, True, b"x", (1, 2)])
@pytest.mark.parametrize("field", ["tools", "chat_template_kwargs", "structured_outputs"])
def test_keys_of_untyped_maps_are_strings(field: str, key: object) -> None:
    """MessagePack has other keys. A poison request's digest needs keys that can be sorted."""
    value: Any = {"json": {"x": {key: 1}}}
    fields = {field: [value] if field == "tools" else value, "prompt": "a"}
    assert str(refusal(msgspec.msgpack.encode(fields)).reply.field).startswith(field)


def test_a_long_value_is_cut() -> None:
    assert len(str(refusal(msgspec.json.encode({"prompt": "p", "n": "9" * 900})))) < 200


def test_tokens_that_the_client_has_got_are_not_too_many_bytes() -> None:
    assert str(refusal(b" " * 100_001)) == "request: got 100001 bytes, expected up to 100000"
    request = GenerateRequest(prompt="x" * 50, output_token_ids=[100_000] * 20)
    frame = MSGPACK.encode(request)
    assert decode_request(MSGPACK, frame, 100, max_output_tokens=20) == request
    for max_bytes, max_output_tokens in ((100, 10), (40, 40)):
        with pytest.raises(RefusedError, match=f"expected up to {max_bytes}"):
            decode_request(MSGPACK, frame, max_bytes, max_output_tokens)


# ---- frames of any bytes -----------------------------------------------------------------------

DEEP = [b'{"tools": [' + b"[" * 50_000, b"\x81\xa5tools" + b"\x91" * 50_000 + b"\xc0"]
GARBAGE = [
    *(b"", b"hello", b"\xff\xfe", b"\xc1", b"[1]", b"\x93\x01"),
    b"[" * 5000,
    b'{"prompt":' + b"[" * 5000 + b"]" * 5000 + b"}",
    b"\x91" * 5000,
    b"\x81\xa6prompt" + b"\x91" * 5000,
]


@pytest.mark.parametrize(
    ("frame", "field", "message"),
    [
        (b"[]", None, "the request: got `array`, expected an object of the fields"),
        (b'{"prompt": "x", "temperature": NaN}', "temperature", "temperature: got NaN or a number"),
        (b'{"prompt": "x", "top_p": 1e999}', "top_p", "top_p: got NaN or a number beyond 64 bits"),
        (b"\x81\xa7timeout\xcb\x7f\xf8" + bytes(6), "timeout", "timeout: got nan, expected"),
        (b'{"prompt": "\\ud800"}', "prompt", "prompt: got an invalid UTF-16 surrogate"),
        *((frame, None, "the request: got an undecodable frame") for frame in (b"{", *DEEP)),
        *((frame, None, "") for frame in GARBAGE),
    ],
)
def test_what_is_no_object_of_finite_numbers(frame: bytes, field: str | None, message: str) -> None:
    error = refusal(frame)
    assert (error.reply.code, error.reply.field) == ("invalid", field)
    assert str(error).startswith(message)


@pytest.mark.parametrize(
    ("frame", "field"),
    [
        (b'{"messages": [{"role": 5}], "messages": 3}', "messages[0].role"),
        (b'{"messages": [{"role": 5}], "messages": [["user"]]}', "messages[0].role"),
        (b'{"stop": ["a", 5], "stop": []}', "stop[1]"),
        (b'{"stop": ["a", 5], "stop": "b"}', "stop[1]"),
    ],
)
def test_a_key_twice(frame: bytes, field: str) -> None:
    """The first value is invalid; the frame without a type has the second only."""
    error = refusal(frame)
    assert error.reply.field == field
    assert str(error).startswith(f"{field}: expected")


def test_any_depth() -> None:
    """At some depth a value can be decoded, and is too deep to be shown."""
    for depth in range(900, 1100):
        assert refusal(b"\x81\xa6prompt" + b"\x81\xa1a" * depth + b"\x01").reply.code == "invalid"


@both_encodings
@pytest.mark.parametrize("field", ["tools", "chat_template_kwargs", "messages"])
def test_depth_has_a_limit(encode: Encode, field: str) -> None:
    def frame(depth: int) -> bytes:
        untyped: Any = 1
        for level in range(depth - 1):
            untyped = [untyped] if level % 2 else {"a": untyped}
        around = {
            "tools": [{"a": untyped}],
            "chat_template_kwargs": {"a": untyped},
            "messages": [{"role": "user", "content": "x", "tool_calls": [{"a": untyped}]}],
        }
        return encode({"messages": [{"role": "user", "content": "x"}]} | {field: around[field]})

    fits = MAX_DEPTH - {"tools": 1, "chat_template_kwargs": 0, "messages": 3}[field]
    decode_request(codec(frame(fits)), frame(fits), MAX_BYTES)
    for depth in (fits + 1, 900):
        error = refusal(frame(depth))
        assert error.reply.field == field
        assert str(error) == f"{field}: got a deeper nesting, expected up to 64 levels"


@both_encodings
@pytest.mark.parametrize("part", [[], {}, {"a": [1]}, ["\\", "[", {'"': "]"}]])
def test_the_number_of_lists_and_maps_has_a_limit(encode: Encode, part: Any) -> None:
    per_part = {0: 1, 1: 2, 3: 2}[len(part)]

    def frame(num_parts: int, scalar: Any = 1) -> bytes:
        text = '[{"\\"' * MAX_CONTAINERS
        untyped = {"x": [part] * num_parts, "y": [scalar] * 100_000, "z": text}
        message = {"role": "user", "content": "x"}
        return encode({"messages": [message], "chat_template_kwargs": untyped})

    for scalar in (1, 300, 70_000, 2**40, -1, -200, -(2**40), 1.5, None, True, "é", "y" * 40):
        fits = frame((MAX_CONTAINERS - 6) // per_part, scalar)
        decode_request(codec(fits), fits, 1 << 24)
    error = refusal(frame((MAX_CONTAINERS + 1) // per_part), 1 << 24)
    assert str(error).startswith(f"the request: got more than {MAX_CONTAINERS} lists and maps")


def test_the_number_of_strings_in_json_has_a_limit() -> None:
    frame = b'{"prompt": ["%b"]}' % b'","'.join([b"\\"] * (2 * MAX_STRINGS + 1))
    assert "or 262144 strings" in str(refusal(frame, 1 << 24))


def test_parts_of_broken_frames_are_counted_in_linear_time() -> None:
    for frame in (
        b'{"x":"' + b'\\"' * 1_000_000 + b"[" * (MAX_CONTAINERS + 1),
        b'"' * 200_000 + b"[" * MAX_CONTAINERS,
        b"\xdd" * 1_000_000,
        b"\xdb\xff\xff\xff\xff" * 100_000,
        b"\xc1" * 100_000,
    ):
        assert isinstance(refusal(frame, 1 << 24), RefusedError)


def test_every_field_that_takes_anything_has_its_depth_checked() -> None:
    found = {
        field.name
        for kind in REQUEST_TYPES.values()
        for field in type_info(kind).fields  # type: ignore[attr-defined]
        if takes_anything(field.type)
    }
    assert found == set(UNTYPED)


def takes_anything(info: Any) -> bool:
    if isinstance(info, AnyType):
        return True
    inner = [getattr(info, name, None) for name in ("type", "item_type", "value_type", "key_type")]
    inner += getattr(info, "types", ())
    inner += [field.type for field in getattr(info, "fields", ())]
    return any(takes_anything(part) for part in inner if isinstance(part, msgspec.inspect.Type))


# ---- what the model can do ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        (GenerateRequest(), "got neither of prompt"),
        (GenerateRequest(prompt="a", messages=[]), "got both of prompt"),
        (GenerateRequest(prompt="a", stream=True), "got true on a REQ socket"),
        (GenerateRequest(prompt="a", max_tokens=4097), "max_tokens: got 4097, expected up to 4096"),
        (GenerateRequest(prompt=[1, 264]), "prompt[1]: got 264, expected a token id up to 263"),
        (GenerateRequest(prompt="a", output_token_ids=[264]), "output_token_ids[0]: got 264"),
        (GenerateRequest(prompt="a", stop_token_ids=[1, 264]), "stop_token_ids[1]: got 264"),
        (GenerateRequest(prompt="a", logit_bias={264: 1.0, 3: 1.0}), "logit_bias: got the key 264"),
        (GenerateRequest(prompt="a", allowed_token_ids=[3, 264]), "allowed_token_ids[1]: got 264"),
        (GenerateRequest(prompt="a", max_tokens=5, min_tokens=6), "min_tokens: got 6, expected up"),
        (GenerateRequest(prompt="a", tools=[{}, {}]), "tools: got 2 without messages"),
        (GenerateRequest(messages=MESSAGES, chat_template="{{ 1 }}"), "--trust-request"),
        (GenerateRequest(messages=MESSAGES, **TWO_ENDS), "got true, as add_generation_prompt"),
        (TokenizePromptRequest(), "got neither of prompt"),
        (TokenizePromptRequest(prompt=[264]), "prompt[0]: got 264"),
        (DetokenizeRequest(token_ids=[5, 264]), "token_ids[1]: got 264, expected a token id"),
    ],
)
def test_what_the_model_can_not_do(message: Any, sentence: str) -> None:
    with pytest.raises(RefusedError) as caught:
        validate(message, is_req_socket=True)
    assert sentence in str(caught.value)
    assert str(caught.value).startswith(str(caught.value.reply.field))


@pytest.mark.parametrize(
    "message",
    [
        GenerateRequest(prompt="a", max_tokens=6, min_tokens=6),
        GenerateRequest(prompt="a", min_tokens=9000),
        GenerateRequest(
            prompt="a", stop_token_ids=[263], logit_bias={263: 1.0}, allowed_token_ids=[263]
        ),
        GenerateRequest(messages=MESSAGES, chat_template="{{ 1 }}"),
        TokenizePromptRequest(messages=MESSAGES, tools=[{}]),
        DetokenizeRequest(token_ids=[]),
    ],
)
def test_what_the_model_can_do(message: Any) -> None:
    validate(message, trust_request_chat_template=True)


# ---- the reply ---------------------------------------------------------------------------------


@both_encodings
@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"max_tokens": 0}, {}),
        ({"prompt": None}, {}),
        ({"model": "another"}, {}),
        ({"prompt": "x" * 5000}, {}),
        ({"prompt": None, "messages": [{"role": "user", "content": "x", "tool_calls": []}]}, {}),
        ({"chat_template_kwargs": {"x": [[]] * 70_000}}, {"max_request_bytes": 1 << 20}),
        ({"chat_template_kwargs": {"x": [[[]]]}}, {"max_open_bytes": 10}),
        ({"client": "10.0.0.1"}, {}),
    ],
)
def test_a_refusal_has_the_id_of_its_request(
    start_gateway: Start, encode: Encode, fields: Any, options: Any
) -> None:
    harness = start_gateway(**{"max_request_bytes": 4000} | options)
    client = harness.connect()
    frame = encode({"request_id": "mine", "prompt": "x", "n": 2} | fields)
    client.send(frame)
    reply = harness.receive_reply(client, codec(frame))
    assert (type(reply), reply.request_id) == (ErrorReply, "mine")


def test_a_request_whose_id_is_not_known_is_refused_without_one(
    harness: Harness, client: Socket
) -> None:
    for frame in (b'{"request_id": "mine"', b'{"request_id": 7}', b"[]", b"\x81", *DEEP):
        client.send(frame)
        assert harness.receive_reply(client, codec_of(frame)).request_id is None


# ---- limits on open work -----------------------------------------------------------------------


class Doorman:
    """Admission control, whose open requests the test makes."""

    def __init__(self, **options: Any) -> None:
        self.ledger, self.totals = Ledger(), Share()
        self.admission = Admission(Config(**options), self.totals)

    def fill(self, number: int, num_tokens: int = 1, num_bytes: int = 0) -> list[Request]:
        """Open `number` requests."""
        names = (f"{len(self.ledger) + index}" for index in range(number))
        requests = [accepted(name, num_bytes, prompt=[1] * num_tokens) for name in names]
        for request in requests:
            self.ledger.open(request, self.totals)
        return requests

    def start(self, requests: list[Request]) -> None:
        """Append the first token of each."""
        for request in requests:
            num_bytes = request.num_bytes
            request.append(delta(0, 1, request.request_id, text="", attempt=request.attempt))
            self.ledger.record_growth(request, num_bytes)

    def check(self, num_bytes: int = 0, num_tokens: int = 1) -> None:
        self.admission.check(num_bytes, num_tokens, Share())

    def refusal(self, num_bytes: int = 0, num_tokens: int = 1) -> RefusedError:
        """Return the refusal of a client that has all open work."""
        share = Share()
        share.num_open = share.num_waiting_tokens = share.num_bytes = 1 << 40
        with pytest.raises(RefusedError) as caught:
            self.admission.check(num_bytes, num_tokens, share)
        assert caught.value.reply.code == "overloaded"
        return caught.value

    def retry_after(self) -> float | None:
        return self.refusal().reply.retry_after


def test_requests() -> None:
    doorman = Doorman(max_num_seqs=2, max_waiting_requests=3)
    doorman.fill(4)
    doorman.check()
    (last,) = doorman.fill(1)
    assert str(doorman.refusal()) == "overloaded: 5 requests are open; the limit is 5"
    doorman.ledger.answer(last, last.reply("stop"))
    doorman.check()


def test_prompt_tokens_that_wait() -> None:
    doorman = Doorman(max_waiting_tokens=100)
    doorman.check(0, 5000)  # nothing waits
    requests = doorman.fill(2, num_tokens=40)
    doorman.check(0, 20)
    assert str(doorman.refusal(num_tokens=21)) == (
        "overloaded: 101 prompt tokens would wait, 21 of this request; the limit is 100"
    )
    doorman.ledger.record_tokenized(requests[0], 60, b"")
    doorman.refusal(num_tokens=1)
    doorman.start(requests[:1])
    doorman.check(0, 60)
    doorman.start(requests[1:])
    doorman.check(0, 5000)


def test_bytes() -> None:
    doorman = Doorman(max_open_bytes=1000)
    requests = doorman.fill(3, num_bytes=300)
    doorman.check(100)
    doorman.start(requests[:1])  # 8 bytes for its token
    assert str(doorman.refusal(num_bytes=100)) == (
        "overloaded: open requests and their answers have 908 bytes, this request has 100; "
        "the limit is 1000"
    )
    doorman.ledger.remove(requests[0])
    doorman.check(100)


def test_when_to_come_again() -> None:
    """30 wait, and 2 a second were started: in 15 seconds."""
    doorman = Doorman(max_num_seqs=1, max_waiting_requests=0)
    requests = doorman.fill(40)
    assert doorman.retry_after() == 1.0  # nothing is known
    doorman.admission.sample(100.0)
    assert doorman.retry_after() == 1.0
    doorman.start(requests[:10])
    doorman.admission.sample(105.0)
    assert doorman.retry_after() == 15.0
    doorman.admission.sample(205.0)
    assert doorman.retry_after() == 60.0  # the most
    doorman.start(requests[10:39])
    doorman.admission.sample(205.5)
    assert doorman.retry_after() == pytest.approx(105.5 / 39)
    doorman.start(requests[39:])
    assert doorman.retry_after() == 1.0  # the least
    doorman.fill(10)
    for second in range(NUM_SAMPLES):
        doorman.admission.sample(300.0 + second)
    assert doorman.retry_after() == 1.0  # what started before is forgotten


@given(st.lists(st.sampled_from("abcd"), max_size=200), st.integers(1, 40))
def test_whoever_has_few_gets_a_place_after_one_has_filled_the_limit(
    asking: str, limit: int
) -> None:
    """Each client leaves as much of the reserve free as it has, as far as possible."""
    own = dict.fromkeys(["greedy", *"abcd"], 0)

    def ask(client: str) -> bool:
        is_let_in = not exceeds(1, own[client], sum(own.values()), limit)
        own[client] += is_let_in
        return is_let_in

    while ask("greedy"):
        pass
    assert own["greedy"] == limit
    reserved = -(-limit // RESERVED)
    for client in asking:
        has_few = own[client] < limit + reserved - sum(own.values())
        assert ask(client) == has_few
    assert sum(own.values()) <= limit + reserved
