"""Log lines as JSON."""

import json
import logging
import sys
from datetime import UTC, datetime

from penstock.protocol.transport.process import JsonFormatter, json_line


def record(message: str, *values: object, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("gateway", logging.WARNING, "p", 1, message, values, None)
    vars(made).update(fields)
    return made


def shown(one: logging.LogRecord) -> dict[str, str]:
    line = JsonFormatter("gateway.1").format(one)
    assert "\n" not in line
    fields: dict[str, str] = json.loads(line)
    return fields


def test_the_fields_of_a_line() -> None:
    one = record("%s: é \udcff", "a", request_id="a", created=0.25)
    assert shown(one) == {
        "time": "1970-01-01T00:00:00.250+00:00",
        "level": "warning",
        "request_id": "a",
        "process": "gateway.1",
        "message": "a: é \udcff",
    }


def test_most_lines_name_no_request() -> None:
    assert list(shown(record("up"))) == ["time", "level", "process", "message"]


def test_a_traceback_is_in_the_message() -> None:
    try:
        raise ValueError("no")
    except ValueError:
        one = record("failed", exc_info=sys.exc_info())
    assert shown(one)["message"].startswith("failed\nTraceback")
    assert shown(one)["message"].endswith("ValueError: no")


def test_now() -> None:
    fields = json.loads(json_line("launch", "up"))
    assert (fields["process"], fields["message"]) == ("launch", "up")
    moment = datetime.fromisoformat(fields["time"])
    assert abs((datetime.now(UTC) - moment).total_seconds()) < 3600
