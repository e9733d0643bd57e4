"""Gaps of streams when a running worker is killed and a standby group continues.

    python -m tests.tools.recovery_gaps --model work/0.6B --spare-workers 1
    python -m tests.tools.recovery_gaps --kills 10 --model work/8B --tp 2 --spare-workers 2

Options that are not listed by `--help` are those of `launch all`. Each kill hits a random rank of
the running group, at a random moment after the standby group is ready. The gap of a stream is its
longest silence from the signal until all streams have received `NUM_MORE` further tokens.
"""

import argparse
import asyncio
import contextlib
import random
import re
import signal
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from statistics import median
from typing import NamedTuple

from penstock.launch.bench.figures import hardware, table
from penstock.launch.chaos.processes import Changes
from penstock.launch.pipeline.control_client import list_processes, send_signal
from penstock.protocol.client.async_client import AsyncClient
from penstock.protocol.config import run_folder

NUM_MORE = 20
"""tokens, more than are on their way when the signal is sent"""
MAX_WAIT = 120.0
READY = re.compile(r"standby for rank (\d+) of (\d+): ready")
NAME = "recovery-gaps"


class Gap(NamedTuple):
    """The cost of one signal, in seconds and in tokens."""

    how: str
    median: float
    longest: float
    recomputed: int


class Stream:
    """A client that asks again and again, and knows its longest silence since a moment."""

    def __init__(self, prompt: list[int], num_tokens: int, changes: Changes) -> None:
        self.prompt, self.num_output = prompt, num_tokens
        self.num_tokens = 0
        """since the moment"""
        self.silence = 0.0
        self._changes = changes
        self._last = time.monotonic()

    def begin(self) -> None:
        self.num_tokens, self.silence, self._last = 0, 0.0, time.monotonic()

    async def run(self, client: AsyncClient) -> None:
        fields = {"max_tokens": self.num_output, "ignore_eos": True, "temperature": 1.0}
        while True:
            async for delta in client.stream(self.prompt, **fields):
                now = time.monotonic()
                self.silence, self._last = max(self.silence, now - self._last), now
                self.num_tokens += len(delta.token_ids)
                self._changes.notify()


class Standby:
    """Follows the log of a pipeline: whether every rank of a standby group is ready."""

    def __init__(self, changes: Changes) -> None:
        self.lines: list[str] = []
        self._changes = changes
        self._ready: set[int] = set()
        self._tp = 0

    @property
    def is_ready(self) -> bool:
        return 0 < self._tp == len(self._ready)

    def forget(self) -> None:
        self._ready.clear()

    async def follow(self, log: asyncio.StreamReader) -> None:
        async for line in log:
            self.lines.append(line.decode(errors="replace"))
            if found := READY.search(self.lines[-1]):
                self._ready.add(int(found[1]))
                self._tp = int(found[2])
            self._changes.notify()


async def measure(arguments: argparse.Namespace, flags: list[str]) -> list[Gap]:
    """Run the pipeline and its streams; return a gap for each signal."""
    endpoint = f"ipc://{run_folder(NAME)}/clients"
    own = ["--name", NAME, "--endpoint", endpoint, "--http", "0", "--max-deaths", "1000"]
    launch = [sys.executable, "-m", "penstock.launch", "all", *own, *flags]
    process = await asyncio.create_subprocess_exec(
        *launch, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    changes = Changes()
    standby = Standby(changes)
    assert process.stdout
    log = asyncio.create_task(standby.follow(process.stdout))
    try:
        async with AsyncClient(endpoint) as client:
            streams = make_streams(arguments, changes)
            await client.status(wait=True)
            tasks = [asyncio.create_task(stream.run(client)) for stream in streams]
            try:
                return [
                    await one_gap(client, streams, standby, changes, how)
                    for how in signals(arguments)
                ]
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        await log
        await process.wait()
        if arguments.log:
            print(*standby.lines, sep="", file=sys.stderr)


def make_streams(arguments: argparse.Namespace, changes: Changes) -> list[Stream]:
    """Return streams whose prompts share all but their last tokens."""
    own = min(arguments.context, arguments.own_tokens)
    shared = [random.randint(0, 255) for _ in range(arguments.context - own)]
    return [
        Stream(
            shared + [random.randint(0, 255) for _ in range(own)], arguments.output_tokens, changes
        )
        for _ in range(arguments.streams)
    ]


def signals(arguments: argparse.Namespace) -> Iterator[str]:
    """Yield the names of the signals in turn."""
    for number in range(arguments.kills):
        yield arguments.signals[number % len(arguments.signals)]


async def one_gap(
    client: AsyncClient,
    streams: list[Stream],
    standby: Standby,
    changes: Changes,
    how: str,
) -> Gap:
    """Wait until the standby group is ready, then kill a rank and measure."""
    await changes.until(lambda: standby.is_ready, MAX_WAIT)
    for stream in streams:
        stream.begin()
    moment = random.randint(1, 200)
    await changes.until(lambda: all(one.num_tokens >= moment for one in streams), MAX_WAIT)
    before = (await client.status(fresh=True)).scheduler
    assert before
    standby.forget()
    name = random.choice(before.workers)
    pid = next(one.pid for one in list_processes(NAME) if one.name == name)
    for stream in streams:
        stream.begin()
    sent_at = datetime.now()
    send_signal(NAME, name, pid, getattr(signal, how))
    await changes.until(lambda: all(one.num_tokens >= NUM_MORE for one in streams), MAX_WAIT)
    after = (await client.status(fresh=True)).scheduler
    assert after
    silences = [one.silence for one in streams]
    recomputed = after.num_recomputed_tokens - before.num_recomputed_tokens
    gap = f"{median(silences):.2f} ({max(silences):.2f}) s"
    print(f"{name} {how} at {sent_at.time()}: {gap}", file=sys.stderr)
    return Gap(how, median(silences), max(silences), recomputed)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--signals", nargs="+", default=["SIGKILL"])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--context", type=int, default=500, help="tokens of a prompt")
    parser.add_argument("--own-tokens", type=int, default=100, help="of a prompt, not shared")
    parser.add_argument("--output-tokens", type=int, default=2000)
    parser.add_argument("--log", action="store_true", help="print the pipeline's log at the end")
    arguments, flags = parser.parse_known_args()
    gaps = asyncio.run(measure(arguments, flags))
    print(hardware())
    rows = []
    for how in dict.fromkeys(gap.how for gap in gaps):
        some = [gap for gap in gaps if gap.how == how]
        longest = [gap.longest for gap in some]
        computed = max(gap.recomputed for gap in some)
        seconds = [median(gap.median for gap in some), median(longest), max(longest)]
        rows.append([how, str(len(some)), *(f"{one:.2f}" for one in seconds), str(computed)])
    columns = ["signal", "number", "median of all streams", "median of kills, slowest stream"]
    columns += ["slowest of all", "tokens computed again, at most"]
    print(*table(columns, rows), sep="\n")


if __name__ == "__main__":
    main()
