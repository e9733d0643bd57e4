"""A line of the log for each request of the gateway, without its text."""

import logging
import re
from collections.abc import Callable

import pytest

from penstock.protocol.messages.client import ErrorReply
from tests.services.gateway.conftest import GatewayHarness, request


def test_requests_are_lines_at_debug_and_failures_at_info(
    start_gateway: Callable[..., GatewayHarness], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "gateway")
    harness = start_gateway()
    client = harness.connect()
    harness.submit(client, "a", "b")
    harness.send_tokens("a", 0, 4, finish_reason="stop", cached_tokens=3)
    assert harness.receive_reply(client).request_id == "a"
    harness.gateway.default.answer(
        harness.gateway.ledger.get("b"), ErrorReply(code="failed", message="secret")
    )
    harness.send(client, request("c", max_tokens=9999))
    assert [harness.receive_reply(client).code for _ in range(2)] == ["failed", "invalid"]
    name = harness.gateway.default.name
    shown = [(record.levelname, record.getMessage()) for record in caplog.records]
    (level, line), *others = [one for one in shown if "request" in one[1]]
    expected = rf"request a of {name}: \d+ prompt tokens, 3 of them cached, 4 output tokens, stop, "
    assert re.fullmatch(rf"{expected}first token after \d+ ms, whole after \d+ ms", line)
    assert level == "DEBUG"
    assert others == [
        ("INFO", f"request b of {name} fails after 0 tokens: failed"),
        ("INFO", "a request is refused: invalid, field max_tokens"),
    ]
