"""Log lines as JSON maps, one a line."""

import json
import logging
import time
from datetime import UTC, datetime
from typing import Any


def json_line(process: str, message: str, moment: float | None = None, **more: Any) -> str:
    """One line of ASCII, without its end. `moment`: seconds since 1970; None: now."""
    seconds = time.time() if moment is None else moment
    stamp = datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
    return json.dumps({"time": stamp, **more, "process": process, "message": message})


class JsonFormatter(logging.Formatter):
    """A record with its traceback, and the request that it names by `extra`."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """As `json_line`."""
        more = {"level": record.levelname.lower()}
        if request_id := getattr(record, "request_id", None):
            more["request_id"] = request_id
        return json_line(self._process, super().format(record), record.created, **more)
