"""Requests to a running pipeline: what a client can ask, and what it can do wrong."""

import json
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import msgspec
import pytest
import zmq

from penstock.protocol.client.client import Client
from penstock.protocol.client.session import RequestError
from penstock.protocol.config import Config
from penstock.protocol.messages.client import GenerateReply, codec_of
from penstock.protocol.messages.pipeline import Heartbeat, ToDetokenizer, ToTokenizer
from penstock.protocol.messages.worker import ToWorker, WorkerState
from penstock.protocol.transport.context import Context, endpoints
from tests.pipeline.conftest import Pipeline
from tests.pipeline.http_api import in_pieces
from tests.tools.demo.tasks import TASK_NAMES, Sizes, answer_to, make_example

pytestmark = pytest.mark.pipeline
ANSWER_TIMEOUT_MS = 30_000


@pytest.fixture(scope="module")
def served(pipeline: Callable[..., Pipeline]) -> Pipeline:
    """Small limits, so that they can be reached."""
    return pipeline("--max-num-seqs", "24", "--max-waiting-requests", "40")


@pytest.fixture(scope="module")
def client(served: Pipeline) -> Iterator[Client]:
    with served.client() as client:
        yield client


@pytest.fixture
def req(served: Pipeline) -> Iterator["zmq.Socket[bytes]"]:
    with Context() as context, context.socket(zmq.REQ) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, ANSWER_TIMEOUT_MS)
        socket.connect(served.endpoint)
        yield socket


def ask(socket: "zmq.Socket[bytes]", frame: bytes) -> dict[str, Any]:
    socket.send(frame)
    answer = socket.recv()
    assert codec_of(answer) is codec_of(frame)
    reply: dict[str, Any] = codec_of(answer).decode_any(answer)
    return reply


# ---- what a client can ask -------------------------------------------------------------------


def test_json_over_req(req: "zmq.Socket[bytes]") -> None:
    reply = ask(req, b'{"prompt": "count from 3 to 9", "max_tokens": 64}')
    assert reply["text"] == "3 4 5 6 7 8 9"
    assert reply["finish_reason"] == "stop"
    assert reply["usage"]["prompt_tokens"] == len("count from 3 to 9")
    assert reply["usage"]["output_tokens"] == len(reply["token_ids"])


def test_messagepack_over_req(req: "zmq.Socket[bytes]") -> None:
    assert ask(req, msgspec.msgpack.encode({"prompt": "17+25="}))["text"] == "42"


def test_token_ids(client: Client) -> None:
    assert client.generate(list(b"17+25=")).text == "42"


def test_a_conversation(client: Client) -> None:
    messages = [{"role": "user", "content": "reverse: penstock"}]
    assert client.generate(messages=messages).text == "kcotsnep"


def test_characters_that_span_tokens(client: Client) -> None:
    text = "水力发电 🏞️ → ⚡"
    prompt = f"repeat: {text}"
    *deltas, reply = in_pieces(lambda: [*(one := client.stream(prompt)), one.result()], 3)
    assert "".join(delta.text for delta in deltas) == reply.text == text
    assert all("\ufffd" not in delta.text for delta in deltas)


def test_streams_of_many_tasks_at_once(client: Client) -> None:
    rng = Random(1)
    examples = [make_example(rng, TASK_NAMES[n % 4], Sizes(3, 20)) for n in range(24)]
    streams = [client.stream(example.prompt) for example in examples]
    for example, stream in zip(examples, streams, strict=True):
        assert "".join(delta.text for delta in stream) == example.answer


def test_max_tokens(client: Client) -> None:
    reply = client.generate("count from 1 to 90", max_tokens=5)
    assert (len(reply.token_ids), reply.finish_reason) == (5, "length")


def test_a_stop_string_over_token_borders(client: Client) -> None:
    reply = client.generate("count from 1 to 90", stop=["zzz", "10 11"])
    assert reply.text == "1 2 3 4 5 6 7 8 9 "
    assert reply.finish_reason == "stop"
    assert client.generate("count from 1 to 3", stop="zzz").text == "1 2 3"


def test_stop_token_ids(client: Client) -> None:
    reply = client.generate("count from 1 to 90", stop_token_ids=[ord("5")])
    assert reply.token_ids[-1] == ord("5")
    assert reply.finish_reason == "stop"


def test_both_eos_ids_end_and_ignore_eos_goes_on(client: Client) -> None:
    plain = client.generate("17+25=")
    chat = client.generate(messages=[{"role": "user", "content": "17+25="}])
    assert {plain.token_ids[-1], chat.token_ids[-1]} == {256, 258}
    reply = client.generate("17+25=", ignore_eos=True, max_tokens=10)
    assert (len(reply.token_ids), reply.finish_reason) == (10, "length")


def test_a_seed_decides(client: Client) -> None:
    def sampled(seed: int) -> list[int]:
        return client.generate(
            "ab", temperature=2, seed=seed, ignore_eos=True, max_tokens=20
        ).token_ids

    assert sampled(1) == sampled(1) != sampled(2)


def test_a_prefix_is_found_in_the_cache(client: Client) -> None:
    prompt = "repeat: What has been computed once need not be computed again, until it is evicted."
    first, second = (client.generate(prompt, max_tokens=8) for _ in range(2))
    assert first.token_ids == second.token_ids
    assert second.usage.cached_tokens == (len(prompt) - 1) // 16 * 16
    assert first.usage.prompt_tokens == second.usage.prompt_tokens == len(prompt)


def test_up_to_the_context_limit_and_one_more(client: Client) -> None:
    reply = client.generate([65] * 4095)
    assert (len(reply.token_ids), reply.finish_reason) == (1, "length")
    with pytest.raises(RequestError, match="4096 tokens, expected up to 4095"):
        client.generate([65] * 4096)


# ---- abort -----------------------------------------------------------------------------------


def test_abort_in_the_middle(client: Client) -> None:
    stream = client.stream("count from 1 to 999", request_id="long")
    pieces = iter(stream)
    text = next(pieces).text + next(pieces).text
    assert client.abort("long")
    reply = stream.result()
    assert reply.finish_reason == "abort"
    assert reply.text.startswith(text)
    assert not client.abort("long")


def test_abort_before_anything_ran(client: Client) -> None:
    streams = [client.submit("count from 1 to 300", max_tokens=200) for _ in range(40)]
    assert client.abort(streams[-1].request_id)
    assert streams[-1].result().finish_reason == "abort"
    for stream in streams[:-1]:
        stream.abort()
    assert {stream.result().finish_reason for stream in streams} <= {"abort", "length"}


def test_abort_of_an_unknown_request(client: Client) -> None:
    assert not client.abort("nobody")


# ---- what a client can do wrong --------------------------------------------------------------

BAD = [
    (b"hello", None, "got an undecodable frame"),
    (b"\xc1\xc1", None, "got an undecodable frame"),
    (b"[1, 2]", None, "array"),
    (b"[" * 5000, None, "array"),
    (b"{}", "prompt", "got neither of prompt and messages"),
    (b'{"prompt": ""}', "prompt", ">= 1"),
    (b'{"prompt": []}', "prompt", ">= 1"),
    (b'{"prompt": 5}', "prompt", "got 5"),
    (b'{"prompt": [1, 264]}', "prompt", "got 264, expected a token id up to 263"),
    (b'{"prompt": "a", "n": 3}', "n", "n: got 3, expected 1; send a request for each"),
    (b'{"prompt": "a", "max_tokens": 0}', "max_tokens", "max_tokens: got 0"),
    (b'{"prompt": "a", "max_tokens": 5000}', "max_tokens", "got 5000, expected up to"),
    (b'{"prompt": "a", "temperature": -1}', "temperature", "temperature: got -1"),
    (b'{"prompt": "a", "top_p": 2}', "top_p", "top_p: got 2"),
    (b'{"prompt": "a", "colour": 2}', "colour", "got an unknown field"),
    (b'{"prompt": "a", "stream": true}', "stream", "DEALER"),
    (b'{"prompt": "a", "messages": [{"role": "user", "content": "a"}]}', "prompt", "both"),
    (b'{"messages": [{"role": "user"}]}', "messages[0].content", "got nothing"),
    (b'{"type": "dance"}', "type", "dance"),
]


def test_bad_input_is_told_while_others_go_on(client: Client, req: "zmq.Socket[bytes]") -> None:
    going_on = client.submit("count from 1 to 999")
    for frame, field, sentence in BAD:
        reply = ask(req, frame)
        assert (reply["type"], reply["code"], reply["field"]) == ("error", "invalid", field), reply
        assert sentence in reply["message"]
    going_on.abort()
    reply = going_on.result()
    assert reply.finish_reason == "abort"
    assert answer_to("count from 1 to 999").startswith(reply.text)


def test_four_megabytes_are_refused_by_their_length(req: "zmq.Socket[bytes]") -> None:
    reply = ask(req, json.dumps({"prompt": "x" * 4_000_000}).encode())
    assert "got 4000014 bytes, expected up to 1048576" in reply["message"]


def test_a_prompt_over_the_context(req: "zmq.Socket[bytes]") -> None:
    reply = ask(req, json.dumps({"prompt": "x" * 5000}).encode())
    assert "5000 tokens, expected up to 4095" in reply["message"]


def test_a_request_id_twice(client: Client, req: "zmq.Socket[bytes]") -> None:
    stream = client.stream("count from 1 to 999", request_id="twice")
    next(iter(stream))
    reply = ask(req, b'{"prompt": "a", "request_id": "twice"}')
    assert "'twice', which another open request has" in reply["message"]
    stream.abort()
    assert stream.result().finish_reason == "abort"


def test_too_many_requests_at_once(client: Client) -> None:
    streams = [client.submit("count from 1 to 12", max_tokens=30) for _ in range(80)]
    replies: list[GenerateReply] = []
    refused: list[RequestError] = []
    for stream in streams:
        try:
            replies.append(stream.result())
        except RequestError as error:
            refused.append(error)
    assert len(replies) >= 64
    assert {reply.text for reply in replies} == {"1 2 3 4 5 6 7 8 9 10 11 12"}
    assert refused
    assert all("the limit is 64" in str(error) for error in refused)


def test_garbage_on_internal_sockets_is_counted(served: Pipeline, client: Client) -> None:
    at = endpoints(Config(name=served.name, endpoint=served.endpoint))
    with Context() as context:
        for address, kind in (
            (at.tokenizers, zmq.DEALER),
            (at.requests, zmq.PUSH),
            (at.workers, zmq.DEALER),
            (at.detokenizers, zmq.DEALER),
            (at.results, zmq.PUSH),
        ):
            with context.socket(kind) as socket:
                socket.connect(address)
                for frame in (b"", b"garbage", b"\x81\xa4type\xa4None", b"\xff" * 100):
                    socket.send(frame)
                socket.send_multipart([b"a", b"b", b"c"])
    assert client.generate("17+25=").text == "42"
    gateway = served.status()["gateway"]
    while gateway["num_bad_frames"] < 10 or gateway["schedulers"][0]["num_bad_frames"] < 15:
        gateway = served.status()["gateway"]
    assert gateway["num_bad_frames"] == 10
    assert gateway["schedulers"][0]["num_bad_frames"] == 15


@pytest.mark.parametrize(
    ("where", "message", "answers"),
    [
        ("tokenizers", Heartbeat("old", version=0), ToTokenizer),
        ("detokenizers", Heartbeat("old", version=0), ToDetokenizer),
        ("workers", WorkerState("old", version=0), ToWorker),
    ],
)
def test_another_version_of_the_protocol_is_refused(
    served: Pipeline, where: str, message: msgspec.Struct, answers: Any
) -> None:
    at = endpoints(Config(name=served.name, endpoint=served.endpoint))
    with Context() as context:
        channel = context.connect(zmq.DEALER, getattr(at, where), answers)
        channel.send(message)
        assert channel.socket.poll(ANSWER_TIMEOUT_MS)
        [(_, refused)] = channel.receive()
        channel.socket.close()
    assert refused.reason.startswith("old speaks version 0 of the protocol; this pipeline speaks v")
    served.wait_for(r".*refused: old speaks version 0")


def test_nothing_is_left_of_all_this(served: Pipeline, client: Client) -> None:
    """The scheduler's reports come twice a second: they are read until one is of the end."""
    assert client.generate("17+25=").text == "42"
    assert served.status()["gateway"]["num_requests"] == 0
    while one := client.status(fresh=True).scheduler:
        idle = one.num_running == one.num_waiting == 0
        if idle and one.num_free_blocks == one.num_blocks:
            break
