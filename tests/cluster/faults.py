"""Effects of a cluster's faults on streams that run: `python -P -m tests.cluster.faults`.

A head node without CPUs holds the launcher and the clients; a node with a whole replica of two
workers and three smaller ones, over which the other replica and the rest are spread, hold the
pipeline; one more, which comes later, is free. 64 streams are kept up. Each event hits a node and
waits until all moves again and the pipeline is whole; then comes a new free node, if one was lost.
Prints a table in Markdown. It needs what `machines.py` needs, and about half a minute an event.
"""

import argparse
import asyncio
import contextlib
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from penstock.launch.bench.figures import hardware
from penstock.launch.chaos.load import Content, Flight, Load, Verdict, check
from penstock.launch.chaos.mix import Call
from penstock.launch.chaos.processes import Changes, ChaosOptions
from penstock.protocol.client.async_client import AsyncClient
from penstock.protocol.messages.client import GenerateRequest
from tests.cluster.machines import Cluster, Machine, wait_for_ray
from tests.cluster.pipeline import PORT, Pipeline

CPUS = (0, 3, 2, 2, 2, 3)
"""of the machines; the last one is free at first"""
NUM_LENGTHS = 16
STOOD = 1.0
"""seconds without a piece after which a stream counts as hit"""
GIVING_UP = 30.0
"""seconds that a node may take to see that Ray has given it up"""
LINGER = 5.0
"""seconds that processes have to end when Ray has lost their node"""
STEADY = 20.0
"""seconds for which a link is slow or lossy"""
EVENTS: dict[str, tuple[float, dict[str, float]]] = {
    "killed": (0, {}),
    "cut 3 s": (3, {"is_cut": True}),
    "cut 8 s": (8, {"is_cut": True}),
    "cut 20 s": (20, {"is_cut": True}),
    "+50 ms": (STEADY, {"delay_ms": 50}),
    "5 % lost": (STEADY, {"loss": 0.05}),
    "+50 ms and 5 % lost": (STEADY, {"delay_ms": 50, "loss": 0.05}),
}
"""seconds for which it lasts, and what it does to a link"""
MENDED: dict[str, float] = {"is_cut": False, "delay_ms": 0, "loss": 0}
PARTS = {"whole replica": "scheduler.1", "half of a group": "scheduler.2", "gateway": "gateway.1"}
"""a process of the node that is hit"""
COLUMNS = (
    *("node with", "processes there", "event", "streams open", "requests lost"),
    *("tokens lost", "doubled", "different"),
    *("streams that stood > 1 s", "longest gap s, median", "max", "ready again s", "restarts"),
)


@dataclass
class Hit:
    """An event and what came of it."""

    part: str
    event: str
    num_open: int = 0
    silences: list[float] = field(default_factory=list)
    ready: float | None = None
    """seconds from its beginning; None: nothing was restarted"""
    there: str = ""
    """the processes on that node"""
    num_restarts: int = 0
    is_over: bool = False
    num_bad: int = 0
    """streams that were no beginning of the answer when it was over"""

    def row(self, done: list[Flight], expected: list[Content]) -> list[str]:
        """Return a row of the table; done: requests that ended after it, before the next one."""
        verdicts = [check(one.received, expected[one.number]) for one in done]
        stood = [silence for silence in self.silences if silence > STOOD]
        gaps = stood or self.silences
        ready = "–" if self.ready is None else f"{self.ready:.1f}"
        return [
            *(self.part, self.there, self.event, str(self.num_open)),
            str(sum(bool(one.lost) for one in verdicts)),
            str(sum(one.tokens_lost for one in verdicts)),
            str(sum(one.tokens_doubled for one in verdicts)),
            str(self.num_bad + sum(one.is_different or one.is_torn for one in verdicts)),
            *(str(len(stood)), f"{statistics.median(gaps):.1f}", f"{max(gaps):.1f}"),
            ready if self.is_over else "never",
            str(self.num_restarts),
        ]


class Faults:
    """A cluster, the pipeline on it, and its load."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._changes = Changes()
        self._num_seen = 0
        """lines of the pipeline before the last event"""
        self.hits: list[Hit] = []

    async def run(self) -> bool:
        """Everything; False if something was lost."""
        options = ChaosOptions(concurrency=self._arguments.streams)
        with Cluster(len(CPUS)) as self._cluster:
            self._head, *_, self._free = self._cluster.machines
            for machine, num_cpus in zip(self._cluster.machines[:-1], CPUS, strict=False):
                wait_for_ray(self._start_ray(machine, num_cpus))
            public = ("--endpoint", f"tcp://0.0.0.0:{PORT}", "--insecure", "--tp", "2", "--dp", "2")
            endless = ("--max-deaths", "1000000", "--routing", "load")
            whole = ("--kv-cache-gib", "0.5")  # a stream that waits for room would look hit
            flags = (*public, *endless, *whole, *self._arguments.flags.split())
            with Pipeline(self._cluster, *flags) as self._pipeline:
                try:
                    wait_for_ray(self._start_ray(self._free, CPUS[-1]))
                    async with contextlib.AsyncExitStack() as stack:
                        self._client = await self._connect(stack)
                        http = await stack.enter_async_context(httpx.AsyncClient())  # unused
                        calls = [Call("plain", request) for request in self._requests()]
                        self._load = Load(self._client, http, calls, options, self._changes)
                        self._expected = await self._load.expected()
                        self._check_expected()
                        await self._under_load()
                finally:
                    self._arguments.log.parent.mkdir(parents=True, exist_ok=True)
                    self._arguments.log.write_text(self._log())
        return self._report()

    @property
    def _firsts(self) -> list[int]:
        """The numbers at which streams begin to count: they do not end all at once."""
        return list(range(1, self._arguments.count, max(self._arguments.count // NUM_LENGTHS, 1)))

    def _requests(self) -> list[GenerateRequest]:
        fields = {"max_tokens": 4000, "temperature": 0.0, "stream": True}
        last = self._arguments.count
        return [GenerateRequest(prompt=f"count from {n} to {last}", **fields) for n in self._firsts]

    def _check_expected(self) -> None:
        for first, expected in zip(self._firsts, self._expected, strict=True):
            numbers = map(str, range(first, self._arguments.count + 1))
            assert expected.text.strip() == " ".join(numbers)

    async def _connect(self, stack: contextlib.AsyncExitStack) -> AsyncClient:
        others = self._cluster.machines[1:]
        endpoints = ",".join(f"tcp://{machine.address}:{PORT}" for machine in others)
        with self._head.entered():
            return await stack.enter_async_context(AsyncClient(endpoints))

    async def _under_load(self) -> None:
        self._started = time.monotonic()
        self._load.start()
        await self._moved(await self._all_open())
        for part in self._arguments.nodes:
            for event in self._arguments.events:
                await self._carry_out(Hit(part, event))
                if not self.hits[-1].is_over:
                    break
        await self._load.end()

    async def _all_open(self) -> list[Flight]:
        number = self._arguments.streams
        await self._changes.until(lambda: len(self._load.open) >= number)
        return list(self._load.open)

    async def _carry_out(self, hit: Hit) -> None:
        await self._replace_lost()
        await self._balanced()
        nodes = await asyncio.to_thread(self._pipeline.nodes)
        flights = await self._all_open()
        address = nodes[PARTS[hit.part]]
        machine = next(one for one in self._cluster.machines if one.address == address)
        self._tell(f"{hit.part} on {address}: {hit.event}; {nodes}")
        hit.there = " ".join(name for name, node in nodes.items() if node == address)
        start, self._num_seen = time.monotonic(), len(self._pipeline.output)
        self._load.event = len(self.hits)
        self.hits.append(hit)
        for flight in flights:
            flight.begin_silence()
        hit.num_open = len(flights)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._arguments.timeout):
                await self._hit(machine, hit.event)
                await self._moved(flights)
                await self._whole()
                await self._moved(flights)
                hit.is_over = True
        hit.silences = [flight.silence_until_now() for flight in flights]
        lines = self._pipeline.output[self._num_seen :]
        hit.num_restarts = sum("; restarted" in line for _, line in lines)
        if hit.num_restarts:
            marks = ("workers ready", "; restarted", "resubmitting")
            moments = (at for at, line in lines if any(mark in line for mark in marks))
            hit.ready = max(moments) - start
        hit.num_bad = sum(
            not self._is_beginning(flight) for flight in flights if not flight.is_over
        )
        self._tell(" | ".join(hit.row([], self._expected)))

    async def _hit(self, machine: Machine, event: str) -> None:
        """Return when the event is over."""
        seconds, values = EVENTS[event]
        if not seconds:
            await asyncio.to_thread(machine.kill)
            return
        index = self._cluster.machines.index(machine)
        self._cluster.wire.set_link(index, **values)
        await asyncio.sleep(seconds)
        self._cluster.wire.set_link(index, **MENDED)

    async def _moved(self, flights: list[Flight]) -> None:
        before = [(flight, flight.num_tokens) for flight in flights]
        await self._changes.until(
            lambda: all(flight.is_over or flight.num_tokens > number for flight, number in before)
        )

    async def _whole(self) -> None:
        """Every replica, the tokenizer and the detokenizer are there."""
        while True:
            status = await self._client.status(fresh=True)
            ready = [one.ready for one in status.schedulers]
            if status.ready and ready == [True, True] and status.tokenizers:
                return

    async def _balanced(self) -> None:
        """Both replicas have streams, which they get where others end."""
        least = self._arguments.streams // 8
        while min(await self._num_running()) < least:
            pass

    async def _num_running(self) -> list[int]:
        status = await self._client.status(fresh=True)
        return [one.num_running for one in status.schedulers]

    async def _replace_lost(self) -> None:
        """Nodes that Ray has given up come back as new ones, which are free."""
        for machine in self._cluster.machines:
            await asyncio.to_thread(self._wait_if_lost, machine)
            if machine.ray is None or machine.ray.poll() is not None:
                if left := await asyncio.to_thread(machine.remain, LINGER):
                    self._tell(f"LEFT on {machine.address}, which Ray has lost: {left}")
                await asyncio.to_thread(machine.kill)
                node = await asyncio.to_thread(self._start_ray, machine, CPUS[-1])
                await asyncio.to_thread(wait_for_ray, node)
                self._tell(f"{machine.address} is a new node")

    def _wait_if_lost(self, machine: Machine) -> None:
        """When Ray has lost an actor, it has mostly given up the node, which sees it later."""
        lost = f"its Ray actor on {machine.address};"
        if machine.ray and any(lost in line for _, line in self._pipeline.output[self._num_seen :]):
            with contextlib.suppress(subprocess.TimeoutExpired):
                machine.ray.wait(GIVING_UP)

    def _is_beginning(self, flight: Flight) -> bool:
        return flight.received.streamed.begins(self._expected[flight.number])

    def _tell(self, text: str) -> None:
        self._pipeline.output.append((time.monotonic(), f"==== {text}\n"))
        print(f"{time.monotonic() - self._started:6.1f} {text}", file=sys.stderr, flush=True)  # noqa: T201

    def _start_ray(self, machine: Machine, num_cpus: int) -> "subprocess.Popen[str]":
        return machine.start_ray(None if machine is self._head else self._head, num_cpus)

    def _log(self) -> str:
        lines = list(self._pipeline.output)
        return "".join(f"{at - lines[0][0]:7.2f} {line}" for at, line in lines)

    def _report(self) -> bool:
        rows = [
            hit.row([one for one in self._load.done if one.event == number], self._expected)
            for number, hit in enumerate(self.hits)
        ]
        print(f"{len(self._load.done)} requests, {self._load.num_tokens} tokens; {hardware()}")  # noqa: T201
        for row in ([*COLUMNS], ["---"] * len(COLUMNS), *rows):
            print(f"| {' | '.join(row)} |")  # noqa: T201
        verdicts = [check(one.received, self._expected[one.number]) for one in self._load.done]
        return all(hit.is_over for hit in self.hits) and verdicts == [Verdict()] * len(verdicts)


def main() -> int:
    """Return the exit code: 1 if anything was lost, doubled or different."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", nargs="+", choices=EVENTS, default=list(EVENTS))
    parser.add_argument("--nodes", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--count", type=int, default=400, help="how far they count")
    parser.add_argument("--timeout", type=float, default=120, help="seconds an event may take")
    parser.add_argument("--log", type=Path, default=Path("build/faults.log"))
    parser.add_argument("--flags", default="", help="more of `launch all`'s, as one word")
    return 0 if asyncio.run(Faults(parser.parse_args()).run()) else 1


if __name__ == "__main__":
    sys.exit(main())
