"""A line of the log for each HTTP request, without its text."""

import logging
import re

import pytest

from penstock.protocol.messages.client import ErrorReply, GenerateRequest, Reply, Request
from tests.launch.fake_gateway import delta
from tests.services.http.conftest import Serve, behave


def fail_streams(request: Request) -> list[Reply]:
    """Fails streams after their first text."""
    match request:
        case GenerateRequest(stream=True, request_id=request_id):
            error = ErrorReply(code="failed", message="secret", request_id=request_id)
            return [delta(request, 0, 3), error]
    return behave(request)


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    """Return the level and the text of each line, without the time that the request took."""
    records = [record for record in caplog.records if record.name == "http"]
    texts = [re.sub(r"after \d+ ms", "after N ms", record.getMessage()) for record in records]
    return [(record.levelname, text) for record, text in zip(records, texts, strict=True)]


def test_requests_are_lines_at_debug_and_failures_at_info(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "http")
    with serve(fail_streams).client() as client:
        client.headers["X-Request-Id"] = "mine"
        client.post("/v1/completions", json={"prompt": "secret"})
        client.post("/v1/completions", json={"prompt": "secret", "temperature": 9})
        client.post("/v1/completions", json={"prompt": "secret", "stream": True})
        client.get("/no%0Aroute" + "e" * 200)
    text = "127.0.0.1 {}: {} after N ms, X-Request-Id 'mine'{}"
    post = "POST '/v1/completions'"
    assert lines(caplog) == [
        ("DEBUG", text.format(post, 200, "")),
        ("INFO", text.format(post, 400, ": invalid_request_error of 'temperature'")),
        ("INFO", text.format(post, 200, ": server_error")),
        ("INFO", text.format(f"GET '/no\\nroute{'e' * 91}'", 404, ": not_found_error")),
    ]
    caplog.clear()
    caplog.set_level(logging.INFO, "http")
    with serve().client() as client:
        client.post("/v1/completions", json={"prompt": "x"})
    assert lines(caplog) == []
