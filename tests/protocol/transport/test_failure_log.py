"""Log lines of failures: few, whoever causes them."""

import logging
import time

import pytest

from penstock.protocol.transport.process import MAX_FAILURE_LINES, FailureLog


def test_lines_of_a_second_are_limited_and_the_others_are_counted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    caplog.set_level("INFO")
    failures = FailureLog(logging.getLogger("x"))
    for number in range(MAX_FAILURE_LINES + 3):
        failures.write("number %d", number, request_id="a")
    assert caplog.messages == [f"number {number}" for number in range(MAX_FAILURE_LINES)]
    now = 1001.0
    failures.write("number %d", 99)
    failures.write("number %d", 100)
    last = ["3 more requests failed and have no line", "number 99", "number 100"]
    assert caplog.messages[MAX_FAILURE_LINES:] == last
    assert caplog.records[0].__dict__["request_id"] == "a"
