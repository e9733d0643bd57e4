"""Attacks by clients and on files, while streams of others run: no token of theirs changes.

Each attack is bounded, and goes to loopback only. Memory of gateway and http stays bounded, too.
"""

import contextlib
import gzip
import re
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest
import zmq

from penstock.launch.pipeline.control_client import scale
from penstock.launch.pipeline.errors import LaunchError
from penstock.protocol.client.client import Client
from penstock.protocol.messages.client import GenerateRequest, StatusRequest, TokenizePromptRequest
from penstock.protocol.messages.structured import StructuredOutputs
from penstock.protocol.transport.process import raise_descriptor_limit
from tests.chaos.conftest import Start
from tests.pipeline.conftest import PATIENT, Pipeline
from tests.pipeline.load import Load
from tests.pipeline.ports import free_port

pytestmark = [pytest.mark.chaos, pytest.mark.long]
NUM_STREAMS = 4
MAX_OPEN_BYTES = 100 << 20
MAX_PROCESS_BYTES = 4 * MAX_OPEN_BYTES
"""of the gateway, and of http: 280 to 300 MiB were measured, and 610 MiB without MAX_OPEN_BYTES"""
MANY = 1_000_000
"""lists or maps: a frame of a megabyte, and 70 as objects"""
ALLOWED = 65_000
"""lists or maps, which a request may have"""
STATUS = b'{"type":"status"}'
PATIENCE = 60.0
"""seconds"""
LONG = {"max_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module")
def served(pipeline: Start) -> Pipeline:
    where = f"tcp://127.0.0.1:{free_port()}"
    flags = ("--http", "1", "--http-port", str(free_port()), "--max-deaths", "100")
    limit = ("--max-open-bytes", str(MAX_OPEN_BYTES))
    return pipeline(*PATIENT, *flags, *limit, endpoint=where)


@pytest.fixture
def attacked(served: Pipeline) -> Iterator[Pipeline]:
    """Yield a pipeline in which others stream; after the attack a new client is answered."""
    with Load(served.endpoint, NUM_STREAMS):
        yield served
        with served.client() as client:
            assert client.generate("17+25=").text == "42"
    for name in ("gateway.1", "http.1"):
        assert peak_bytes(served, name) < MAX_PROCESS_BYTES


def peak_bytes(served: Pipeline, name: str) -> int:
    """Return the most bytes that a process has had resident."""
    lines = Path(f"/proc/{served.processes()[name]}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


@contextlib.contextmanager
def dealer(served: Pipeline, **options: Any) -> "Iterator[zmq.Socket[bytes]]":
    with zmq.Context() as context, context.socket(zmq.DEALER) as one:
        for option, value in ({"LINGER": 0, "SNDTIMEO": 10_000} | options).items():
            one.setsockopt(getattr(zmq, option), value)
        one.connect(served.endpoint)
        yield one


def connect(stack: contextlib.ExitStack, port: int) -> socket.socket:
    return stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))


def gateway_port(served: Pipeline) -> int:
    return int(served.endpoint.rpartition(":")[2])


def http_port(served: Pipeline) -> int:
    return int(served.url.rpartition(":")[2])


def test_several_first_grammars_at_once(attacked: Pipeline) -> None:
    schema = StructuredOutputs(json={"type": "object", "properties": {"a": {"type": "array"}}})
    with attacked.client() as client:
        answers = [
            client.submit("repeat: {}", structured_outputs=schema, max_tokens=20) for _ in range(4)
        ]
        assert {answer.result().finish_reason for answer in answers} <= {"stop", "length"}


def test_grammars_that_take_long_while_the_worker_dies(attacked: Pipeline) -> None:
    """Others, and a new request, do not wait for them; all are answered, also equal ones."""
    schemas = [
        {"properties": {f"a{number}": {"multipleOf": 39989}}, "required": [f"a{number}"]}
        for number in range(6)
    ]
    schemas += [{"patternProperties": {f"^k{n}_[a-z]+$": {} for n in range(165)}}] * 30
    with attacked.client() as client, attacked.client() as other:
        answers = [
            client.submit("?", structured_outputs=StructuredOutputs(json=schema), max_tokens=9)
            for schema in schemas
        ]
        assert client.status().num_requests > NUM_STREAMS
        assert other.generate("17+25=").text == "42"
        assert client.status().num_requests > NUM_STREAMS, "grammars are still being compiled"
        attacked.kill("worker.1")
        assert other.generate("17+25=").text == "42"
        assert {answer.result().finish_reason for answer in answers} <= {"stop", "length"}


@pytest.mark.parametrize("victim", ["worker.1", "scheduler.1", "tokenizer.1"])
def test_grammars_outlive_processes(attacked: Pipeline, victim: str) -> None:
    """A text in its grammar is the undisturbed one; many tiny grammars wait at the same time."""
    fields: dict[str, Any] = {
        "structured_outputs": StructuredOutputs(regex="[0-9 ]{300}"),
        "max_tokens": 400,
    }
    with attacked.client() as client:
        undisturbed = client.generate("count from 1 to 99", **fields).text
        stream = client.stream("count from 1 to 99", **fields)
        deltas = iter(stream)
        text = next(deltas).text
        tiny = [
            client.submit("?", structured_outputs=StructuredOutputs(choice=[f"{victim} {number}"]))
            for number in range(40)
        ]
        for answer in tiny[:10]:
            answer.abort()
        attacked.kill(victim)
        assert text + "".join(delta.text for delta in deltas) == undisturbed
        texts = [answer.result().text for answer in tiny[10:]]
        assert texts == [f"{victim} {number}" for number in range(10, 40)]


def test_json_as_deep_as_decoders_allow_while_the_scheduler_dies(attacked: Pipeline) -> None:
    with dealer(attacked) as hostile:
        for depth in (60, 200, 500, 900, 990):
            for text in (b'{"a":' * depth + b"1" + b"}" * depth, b"[" * depth + b"]" * depth):
                message = b'{"messages":[{"role":"user","content":"?"}],"chat_template_kwargs":'
                rest = b',"max_tokens":400,"ignore_eos":true}'
                hostile.send(message + b'{"x":' + text + b"}" + rest)
        attacked.kill("scheduler.1")


def test_messages_mostly_of_envelope(attacked: Pipeline) -> None:
    with dealer(attacked, SNDHWM=4) as hostile, contextlib.suppress(zmq.Again):
        for _ in range(30):
            hostile.send_multipart([bytes(4 << 20)] * 3 + [STATUS])


def chat(number: int, **fields: Any) -> dict[str, Any]:
    """Return a chat whose template gets this number of maps."""
    message = {"role": "user", "content": "count from 1 to 99"}
    return {"messages": [message], "chat_template_kwargs": {"x": [{}] * number}} | LONG | fields


def test_requests_of_a_million_maps(attacked: Pipeline) -> None:
    frames = [msgspec.msgpack.encode(chat(MANY)), msgspec.msgpack.encode(chat(ALLOWED))]
    frames += [msgspec.msgpack.encode({"type": "detokenize", "token_ids": [5] * MANY})]
    frames += [msgspec.json.encode({"prompt": "x", "colour": [{}] * 340_000})]
    with dealer(attacked) as hostile:
        for frame in frames * 40:
            hostile.send(frame)
        hostile.send(STATUS)
        while b"status_reply" not in hostile.recv():  # after the others have been read
            pass


def test_requests_of_many_connections_of_one_address(attacked: Pipeline) -> None:
    """A client at another address does not wait for them."""
    question = msgspec.msgpack.encode(GenerateRequest(prompt="count from 10 to 60", max_tokens=64))
    elsewhere = f"tcp://127.0.0.2:0;127.0.0.1:{gateway_port(attacked)}"
    with contextlib.ExitStack() as stack, Client(elsewhere, timeout=PATIENCE) as other:
        for _ in range(120):
            hostile = stack.enter_context(dealer(attacked))
            for _ in range(8):
                hostile.send(question)
        assert other.generate("count from 1 to 5").text == "1 2 3 4 5"
        assert other.status().num_requests > NUM_STREAMS + 1


def test_streams_that_nobody_reads(attacked: Pipeline) -> None:
    question = msgspec.msgpack.encode(
        GenerateRequest(prompt="count from 1 to 99", stream=True, **LONG)
    )
    with dealer(attacked, RCVHWM=1) as hostile, attacked.client() as client:
        for number in range(60):
            hostile.send_multipart([bytes(1000), b"%d" % number, question])
        assert client.generate("17+25=").text == "42"


def test_long_prompts_of_clients_that_leave(attacked: Pipeline) -> None:
    question = msgspec.msgpack.encode(TokenizePromptRequest(prompt="word " * 190_000))
    with dealer(attacked) as hostile:
        for _ in range(30):
            hostile.send(question)


def test_questions_for_a_report_that_does_not_come(attacked: Pipeline) -> None:
    question = msgspec.msgpack.encode(StatusRequest(fresh=True))
    with dealer(attacked, SNDHWM=0) as hostile, attacked.suspended("scheduler.1"):
        for _ in range(150_000):
            hostile.send(question)
        with attacked.client() as client:
            assert client.status().num_requests >= NUM_STREAMS


def test_more_silent_connections_than_descriptors(attacked: Pipeline) -> None:
    with contextlib.ExitStack() as stack, attacked.client() as client:
        with contextlib.suppress(OSError):  # of this process
            for _ in range(1100):
                connect(stack, gateway_port(attacked))
        assert client.generate("17+25=").text == "42"


def test_http_headers_without_an_end(attacked: Pipeline) -> None:
    with contextlib.ExitStack() as stack:
        hostile = connect(stack, http_port(attacked))
        hostile.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n")
        with pytest.raises(ConnectionError):
            for number in range(50_000):
                hostile.sendall(b"x-%08d: " % number + b"y" * 8000 + b"\r\n")


def test_http_requests_that_do_not_arrive(attacked: Pipeline) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            connect(stack, http_port(attacked)).sendall(b"GET /")
        assert httpx.get(f"{attacked.url}/health", timeout=20, trust_env=False).status_code == 200


def post(connection: socket.socket, path: str, size: int, body: bytes) -> None:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}\r\n\r\n"
    connection.sendall(head.encode() + body)


def answers(attacked: Pipeline) -> bool:
    """Return whether a new client of HTTP is answered, and a health check."""
    with httpx.Client(base_url=attacked.url, timeout=PATIENCE, trust_env=False) as client:
        reply = client.post("/v1/completions", json={"prompt": "17+25="})
        is_right = reply.json()["choices"][0]["text"] == "42"
        return is_right and client.get("/health").status_code == 200


def test_more_slow_bodies_than_places(attacked: Pipeline) -> None:
    raise_descriptor_limit()
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # of this process
            for _ in range(6500):
                post(connect(stack, http_port(attacked)), "/v1/completions", 1000, b"{")
        assert answers(attacked)


def test_long_bodies_without_an_end(attacked: Pipeline) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(60):
            hostile = connect(stack, http_port(attacked))
            with contextlib.suppress(ConnectionError):  # it has given way
                post(hostile, "/v1/embeddings", 8_000_000, b" " * 7_900_000)
        assert answers(attacked)


def test_bodies_of_many_maps(attacked: Pipeline) -> None:
    with contextlib.ExitStack() as stack:
        for number in (340_000, ALLOWED):
            body = msgspec.json.encode(chat(number, stream=True))
            for _ in range(40):
                hostile = connect(stack, http_port(attacked))
                post(hostile, "/v1/chat/completions", len(body), body)
        assert answers(attacked)


def test_bodies_that_take_long_to_read(attacked: Pipeline) -> None:
    lists = b'{"input":[' + b"[1]," * 1_900_000 + b"[1]]}"
    members = gzip.compress(b"") * 50_000
    for body, headers in ((lists, {}), (members, {"Content-Encoding": "gzip"})):
        url = f"{attacked.url}/v1/embeddings"
        answer = httpx.post(url, content=body, headers=headers, timeout=PATIENCE, trust_env=False)
        assert answer.status_code == 400


def test_handshakes_of_websockets(attacked: Pipeline) -> None:
    start = len(attacked.output)
    headers = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    with httpx.Client(base_url=attacked.url, headers=headers, trust_env=False) as hostile:
        for _ in range(200):
            assert hostile.get("/v1/responses").status_code == 405
    lines = [line for line in attacked.output[start:] if line.startswith("http.1")]
    # the lines of refused requests, at most 20 a second; libraries add none
    assert all(re.search("GET .*: 405|have no line", line) for line in lines)


def test_peers_of_an_older_protocol(attacked: Pipeline) -> None:
    for _ in range(100):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            hostile = connect(stack, gateway_port(attacked))
            hostile.sendall(b"\x01\x00" + bytes([1 + len(STATUS), 0]) + STATUS * 10)


def test_a_thousand_requests_of_one_client(attacked: Pipeline) -> None:
    """Another client does not wait for them."""
    with attacked.client() as many, attacked.client() as single:
        answers = [many.submit("count from 10 to 60", max_tokens=64) for _ in range(1000)]
        assert single.generate("count from 1 to 5").text == "1 2 3 4 5"
        assert many.status().num_requests > NUM_STREAMS + 1
        assert {answer.result().usage.output_tokens for answer in answers} == {64}


def test_a_configuration_that_is_removed_before_a_process_dies(attacked: Pipeline) -> None:
    tokenizer = psutil.Process(attacked.processes()["tokenizer.1"])
    (attacked.run_folder / "config.json").unlink()
    start = len(attacked.output)
    tokenizer.send_signal(signal.SIGKILL)
    attacked.wait_for(r"launch +\| .* tokenizer\.1 died", start)
    with attacked.client() as client:  # the next tokenizer has read the configuration
        assert client.generate("17+25=").text == "42"
    assert attacked.processes()["tokenizer.1"] != tokenizer.pid


def test_five_changes_of_one_number_at_once(attacked: Pipeline) -> None:
    wanted = [1, 2, 3, 1, 2]
    with ThreadPoolExecutor(len(wanted)) as threads:
        futures = [threads.submit(scale, attacked.name, "tokenizer", number) for number in wanted]
    errors = [error for future in futures if (error := future.exception())]
    assert not [error for error in errors if not isinstance(error, LaunchError)]
    assert sorted(future.result() for future in futures) == sorted(wanted)
    found = [name for name in attacked.processes() if name.startswith("tokenizer.")]
    assert len(found) in wanted
