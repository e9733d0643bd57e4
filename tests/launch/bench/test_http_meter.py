"""`launch bench serve --base-url`, with a server of another kind."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from penstock.launch.bench.http_meter import HttpMeter
from penstock.launch.bench.model import _warm_up
from penstock.launch.bench.options import Item, ServeOptions
from penstock.launch.pipeline.errors import LaunchError
from tests.launch.conftest import Launch

BROKEN, REFUSED, NO_DONE = 1, 2, 3
"""first tokens of prompts whose stream breaks off, that are refused, and that end without DONE"""


class Foreign(ThreadingHTTPServer):
    """A server with 256 tokens that answers `max_tokens` words."""

    daemon_threads = True

    def __init__(self, has_usage: bool = True) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.has_usage = has_usage
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.num_open = self.most_open = 0
        self.lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    """Answers as OpenAI's server."""

    server: Foreign

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        self._reply(200, {"data": [{"id": "foreign"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.keys.add(self.headers["authorization"])
        with self.server.lock:
            self.server.bodies.append(body)
            self.server.num_open += 1
            self.server.most_open = max(self.server.most_open, self.server.num_open)
        prompt = body["prompt"]
        if max(prompt) > 255 or (body.get("stream") and prompt[0] == REFUSED):
            self._end()
            self._reply(400, {"error": {"message": "no such token"}})
        elif not body.get("stream"):
            self._end()
            self._reply(200, {"choices": [{"text": "x"}]})
        else:
            self._stream(body)

    def _end(self) -> None:
        """Count a request as ended, before the client can know it and send the next one."""
        with self.server.lock:
            self.server.num_open -= 1

    def _reply(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, body: dict[str, Any]) -> None:
        number, prompt = body["max_tokens"], body["prompt"]
        chunks: list[dict[str, Any]] = [{"choices": [{"text": " word"}]}] * number
        if prompt[0] != BROKEN:
            chunks.append({"choices": [{"text": "", "finish_reason": "length"}]})
        if self.server.has_usage:
            details = {"cached_tokens": 1}
            usage = {"prompt_tokens": len(prompt), "completion_tokens": number}
            chunks.append({"choices": [], "usage": usage | {"prompt_tokens_details": details}})
        events = [": hello\n\n", *(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)]
        events += ["data: [DONE]\n\n"] * (prompt[0] not in (BROKEN, NO_DONE))
        self.send_response(200)
        self.end_headers()
        self.wfile.write("".join(events[:number]).encode())
        self._end()  # from the finish reason on, the client knows
        self.wfile.write("".join(events[number:]).encode())


@pytest.fixture(params=[True, False])
def foreign(request: pytest.FixtureRequest) -> Iterator[Foreign]:
    with Foreign(request.param) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(("most", "expected"), [(0, [7]), (3, [3, 3, 1])])
def test_the_requests_before_a_load_are_as_many_at_once(
    monkeypatch: pytest.MonkeyPatch, most: int, expected: list[int]
) -> None:
    sent: list[list[Item]] = []
    monkeypatch.setattr(HttpMeter, "run", lambda _, items: sent.append(items))
    items = [Item([number], 4) for number in range(7)]
    _warm_up(object.__new__(HttpMeter), items, 256, most)
    assert [len(some) for some in sent] == expected


def test_a_foreign_server_is_measured(
    foreign: Foreign, monkeypatch: pytest.MonkeyPatch, launch: Launch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    lengths = ("--num-prompts", "8", "--random-input-len", "6", "--random-output-len", "4")
    words = ("--base-url", f"{foreign.url}/v1/", *lengths, "--max-concurrency", "3", "--json")
    report = json.loads(launch("bench", "serve", *words).out)
    assert (report["model"], report["base_url"]) == ("foreign", f"{foreign.url}/v1/")
    assert (report["completed"], report["failed"]) == (8, 0)
    assert (report["total_input_tokens"], report["total_output_tokens"]) == (48, 32)
    assert report["cached_tokens"] == 8 * foreign.has_usage
    assert 0 < report["request_throughput"] < report["output_throughput"]
    assert 0 < report["median_ttft_ms"] <= report["p99_ttft_ms"] <= report["p99_e2el_ms"]
    assert report["kinds"]["short"]["requests"] == 8
    streams = [body for body in foreign.bodies if body.get("stream")]
    assert {len(body["prompt"]) for body in streams} == {6}
    assert {body["model"] for body in streams} == {"foreign"}
    assert foreign.most_open <= 3
    assert foreign.keys == {"Bearer key"}


def test_failures_are_counted_and_told(foreign: Foreign, capsys: Any) -> None:
    with HttpMeter(foreign.url, "", "a-model", ServeOptions()) as meter:
        items = [Item([first, 9], 2) for first in (5, BROKEN, REFUSED, 6)]
        run, stamps = meter.run_load(items, [0.0] * 4, 1)
        assert (run["completed"], run["failed"], run["total_output_tokens"]) == (2, 2, 4)
        assert [len(stamp.times) for stamp in stamps] == [2, 0, 0, 2]
        said = capsys.readouterr().err
        assert "2 requests failed; the last one: /v1/completions answers 400: " in said
        with pytest.raises(LaunchError, match=r"every request failed; .*broke off before its end"):
            meter.run_load([Item([BROKEN], 2)], [0.0])


def test_a_stream_with_finish_reason_and_usage_needs_no_done(foreign: Foreign) -> None:
    with HttpMeter(foreign.url, "", "a-model", ServeOptions()) as meter:
        run, _ = meter.run_load([Item([first, 9], 2) for first in (5, NO_DONE)], [0.0] * 2)
    assert run["completed"] == 1 + foreign.has_usage
