"""`launch batch`: runs a file of requests in OpenAI's batch format over HTTP.

Results are written as they arrive. A stopped run can be repeated: lines with a result are skipped,
and an incomplete last line is cut off. Errors among the results fail each run.
"""

import asyncio
import contextlib
import os
import sys
from argparse import ArgumentParser, Namespace
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal

import httpx
import msgspec
from msgspec import Struct
from tqdm import tqdm

from penstock.launch.pipeline.control_client import list_processes
from penstock.launch.pipeline.errors import LaunchError
from penstock.launch.pipeline.options import add_pipeline_options, given_options
from penstock.launch.pipeline.procfile import kind_of
from penstock.launch.pipeline.run_folder import base_url
from penstock.launch.pipeline.target import free_port, target
from penstock.protocol.client.session import ClientError
from penstock.protocol.config import OPTIONS, Config
from penstock.protocol.transport.channel import DECODE_ERRORS

TRIES = 5  # attempts for a request whose connection is lost
# attempts to connect again, within 7 s; a restarted process listens again by then
CONNECT_RETRIES = 4
TRY_AGAIN = (429, 503)  # the pipeline is overloaded, or one of its processes is being restarted

START = b'{"id":"batch_req_'  # start of each line of the output

EARLIER = "in an earlier run"


class Line(Struct):
    """Line of the input."""

    custom_id: str
    url: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]
    body: dict[str, Any]
    method: Literal["POST"] = "POST"


class Outcome(Struct):
    """Line of the output."""

    id: str  # id with the number of the line
    custom_id: str | None
    # status_code, request_id and body; None if the line's request was not sent
    response: dict[str, Any] | None
    error: dict[str, str] | None


class Results(Struct):
    """Lines with a result in the output."""

    done: set[str | None] = msgspec.field(default_factory=set)  # by custom_id
    refused: set[str | None] = msgspec.field(default_factory=set)  # by custom_id
    bad: set[str] = msgspec.field(default_factory=set)  # by id, since the custom_id may be missing

    def add(self, outcome: Outcome) -> None:
        """Add an outcome's line."""
        if outcome.response is None:
            self.bad.add(outcome.id)
        elif outcome.response.get("status_code") == httpx.codes.OK:
            self.done.add(outcome.custom_id)
        else:
            self.refused.add(outcome.custom_id)


def add_arguments(command: ArgumentParser) -> None:
    """Add the arguments of `launch batch`."""
    command.set_defaults(run=_run)
    command.add_argument("input", type=Path, metavar="IN.jsonl")
    command.add_argument(
        "output", type=Path, metavar="OUT.jsonl", help="results are appended to this file"
    )
    command.add_argument(
        "--concurrency", type=int, default=256, help="requests in flight (default: 256)"
    )
    add_pipeline_options(command, [field for field in OPTIONS if field != "endpoint"])


def _run(arguments: Namespace) -> int:
    """Run a batch; return 1 for errors in the output, old or new.

    Raises LaunchError, ClientError.
    """
    if arguments.concurrency < 1:
        raise LaunchError(f"--concurrency: got {arguments.concurrency}, expected 1 or more")
    output = arguments.output
    if os.path.exists(output) and not output.is_file():  # noqa: PTH110  errors follow in `_open`
        raise LaunchError(
            f"OUT.jsonl: got {output}, expected a file, which is read and appended to"
        )
    with _target(arguments) as config, _open(arguments) as (lines, output):
        counts = asyncio.run(Batch(config, output).run(lines, arguments.concurrency))
    parts = ", ".join(f"{number} {name}" for name, number in sorted(counts.items()))
    print(f"{arguments.output}: {parts or 'nothing to do'}", file=sys.stderr)
    return 1 if set(counts) - {"done", "skipped"} else 0


@contextlib.contextmanager
def _target(arguments: Namespace) -> Iterator[Config]:
    """Yield the running pipeline, or with --model a pipeline that ends with the block."""
    options = given_options(arguments, Config)
    name = options.pop("name", Config().name)
    if "model" not in options:
        options["name"] = name
    defaults = {"http": 1, "http_port": free_port(), "log_level": "warning"}
    with target(options, "batch", defaults) as config:
        yield _with_http(config)


def _with_http(config: Config) -> Config:
    """Raise LaunchError if no HTTP process runs, since another server may use the port."""
    if any(kind_of(process.name) == "http" for process in list_processes(config.name)):
        return config
    command = f"launch scale http 1 --name {config.name}"
    raise LaunchError(f"pipeline {config.name!r} has no HTTP process; `{command}` starts one")


@contextlib.contextmanager
def _open(arguments: Namespace) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    try:
        with arguments.input.open("rb") as lines, arguments.output.open("a+b") as output:
            yield lines, output
    except OSError as error:
        path = error.filename or arguments.output  # a write error has no filename
        raise LaunchError(f"{path}: {error.strerror}") from error


class _Named(Struct):
    custom_id: str | None = None


class Batch:
    """Lines of a file in flight, and their results."""

    def __init__(self, config: Config, output: BinaryIO) -> None:
        """Cut off an incomplete last line."""
        self._config = config
        self._output = output
        self._earlier = _read_results(output)
        self._numbers: dict[str, int] = {}  # numbers of the input's lines, by custom_id
        errors = {"bad": len(self._earlier.bad), "refused": len(self._earlier.refused)}
        self._counts = Counter({f"{what} {EARLIER}": n for what, n in errors.items() if n})

    async def run(self, lines: BinaryIO, concurrency: int) -> Counter[str]:
        """Run up to `concurrency` requests at a time; return the number of lines by result.

        A pipe can be read only once, so the progress shows no total.
        """
        total = None
        if lines.seekable():
            total = sum(not line.isspace() for line in lines)
            lines.seek(0)
        numbered = enumerate(lines, 1)
        with tqdm(desc="requests", total=total, dynamic_ncols=True) as self._bar:
            async with _client(self._config, concurrency) as client:
                workers = (self._work(client, numbered) for _ in range(concurrency))
                await asyncio.gather(*workers)
        return self._counts

    async def _work(self, client: httpx.AsyncClient, numbered: Iterator[tuple[int, bytes]]) -> None:
        for number, text in numbered:
            if text.strip():
                await self._line(client, number, text)

    async def _line(self, client: httpx.AsyncClient, number: int, text: bytes) -> None:
        name = f"batch_req_{number}"
        try:
            line = self._decode(number, text)
        except DECODE_ERRORS as error:
            if name in self._earlier.bad:
                self._pass_over()
                return
            reason = {"code": "invalid_line", "message": str(error)}
            self._write("bad", Outcome(name, _custom_id(text), None, reason))
            return
        if line.custom_id in self._earlier.done:
            self._counts["skipped"] += 1
            self._pass_over()
            return
        if line.custom_id in self._earlier.refused:  # already counted
            self._pass_over()
            return
        answer = await _post(client, line)
        response = {
            "status_code": answer.status_code,
            "request_id": answer.headers.get("x-request-id", name),
            "body": _json(answer.content),
        }
        what = "done" if answer.status_code == httpx.codes.OK else "refused"
        self._write(what, Outcome(name, line.custom_id, response, None))

    def _pass_over(self) -> None:
        """Show a line with an earlier result as done, without counting it in the speed."""
        self._bar.initial += 1
        self._bar.update()

    def _decode(self, number: int, text: bytes) -> Line:
        """Return a line of the input. Raises ValidationError, also for a repeated custom_id."""
        line = msgspec.json.decode(text.removeprefix(BOM_UTF8), type=Line)
        if line.body.get("stream"):
            raise msgspec.ValidationError("a batch has no streams")
        first = self._numbers.setdefault(line.custom_id, number)
        if first != number:
            raise msgspec.ValidationError(
                f"custom_id: got {line.custom_id!r} on lines {first} and {number}, expected a "
                "different one on each line"
            )
        return line

    def _write(self, what: str, outcome: Outcome) -> None:
        self._output.write(msgspec.json.encode(outcome) + b"\n")
        self._output.flush()
        self._counts[what] += 1
        self._bar.update()


def _client(config: Config, concurrency: int) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=base_url(config),
        headers={"Authorization": f"Bearer {config.api_key}"} if config.api_key else {},
        timeout=None,  # noqa: S113  an answer may take hours
        trust_env=False,
        transport=httpx.AsyncHTTPTransport(
            retries=CONNECT_RETRIES, limits=httpx.Limits(max_connections=concurrency)
        ),
    )


async def _post(client: httpx.AsyncClient, line: Line) -> httpx.Response:
    """Return the answer to a line. Raises ClientError if no answer arrives."""
    num_lost = 0
    while True:
        try:
            answer = await client.post(line.url, json=line.body)
        except httpx.ConnectError as error:
            raise ClientError(f"{client.base_url} can't be reached: {error}") from error
        except httpx.TransportError as error:
            num_lost += 1
            if num_lost == TRIES:
                raise ClientError(f"{client.base_url} hung up: {error}") from error
            continue
        if answer.status_code not in TRY_AGAIN:
            return answer
        await asyncio.sleep(float(answer.headers.get("retry-after", 1)))


def _json(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except msgspec.DecodeError:
        return body.decode(errors="replace")


def _custom_id(text: bytes) -> str | None:
    with contextlib.suppress(*DECODE_ERRORS):
        return msgspec.json.decode(text, type=_Named).custom_id
    return None


def _read_results(output: BinaryIO) -> Results:
    """Return the lines with a result; cut off an incomplete last line.

    Raises LaunchError for a file with other content.
    """
    results = Results()
    end = 0
    output.seek(0)
    for number, text in enumerate(output, 1):
        if not text.endswith(b"\n") and START.startswith(text[: len(START)]):
            break
        try:
            outcome = msgspec.json.decode(text, type=Outcome)
        except DECODE_ERRORS as error:
            raise LaunchError(
                f"{output.name}:{number} is not a result of a batch: {error}"
            ) from None
        results.add(outcome)
        end += len(text)
    output.truncate(end)
    return results
