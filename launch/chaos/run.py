"""`launch chaos`: undisturbed answers, the load with kills, and leftovers at the end."""

import asyncio
import contextlib
import sys
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
from msgspec import Struct

from penstock.launch.bench.figures import hardware, versions
from penstock.launch.chaos.load import Flight, Load
from penstock.launch.chaos.mix import END_OF_THOUGHT, HTTP_KINDS, MIX, Model, make_calls
from penstock.launch.chaos.processes import (
    KINDS,
    Changes,
    ChaosOptions,
    Event,
    Processes,
    make_schedule,
)
from penstock.launch.chaos.report import Outcome, Recovery, as_table, faults, make_report
from penstock.launch.commands.status import as_json
from penstock.launch.pipeline.options import add_options, add_pipeline_options, given_options
from penstock.launch.pipeline.procfile import kind_of
from penstock.launch.pipeline.run_folder import base_url, is_running, model_name
from penstock.launch.pipeline.target import free_port, target
from penstock.protocol.checkpoint import read_model_config
from penstock.protocol.client.async_client import AsyncClient
from penstock.protocol.config import OPTIONS, Config, run_folder
from penstock.protocol.messages.status import StatusReply

OWN_DEFAULTS: dict[str, Any] = {"http": 0, "hang_timeout": 3.0, "log_level": "error"}
MAX_DEATHS = 1_000_000
EXIT_CODE = (
    "Exits with 1 if anything was lost or doubled, or is still there afterwards; on a CPU also if "
    "an answer differs from that of the undisturbed run."
)
RUNNING = (
    "test this running pipeline instead of starting one. Start the pipeline with a large "
    "--max-deaths: it ends when one process dies that many times within 60 s (default: 5)"
)
ANSWERS = (
    "compare with the answers in this file; a missing file is written, such as by a run with other "
    "options of the pipeline"
)
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 only read


def add_arguments(command: ArgumentParser) -> None:
    """Add the arguments of `launch chaos`."""
    command.set_defaults(run=_chaos)
    command.epilog = EXIT_CODE
    add_options(command, ChaosOptions)
    text = f"kinds of processes to kill (default: all; {' '.join(KINDS)})"
    command.add_argument(
        "--only", nargs="+", choices=KINDS, default=KINDS, metavar="KIND", help=text
    )
    command.add_argument(
        "--mix",
        nargs="+",
        choices=[*MIX, "all"],
        default=["plain"],
        metavar="KIND",
        help=f"kinds of requests (default: plain; all, or any of {' '.join(MIX)})",
    )
    command.add_argument("--answers", type=Path, metavar="FILE", help=ANSWERS)
    command.add_argument("--json", action="store_true", help="print the report as JSON")
    command.add_argument("--name", default=SUPPRESS, help=RUNNING)
    own = [field for field in OPTIONS if field not in ("name", "endpoint")]
    add_pipeline_options(command, own)


def _chaos(arguments: Namespace) -> int:
    options = ChaosOptions(**given_options(arguments, ChaosOptions))
    mix = [*MIX] if "all" in arguments.mix else arguments.mix
    report = chaos(arguments, options, arguments.only, mix)
    print(as_json(report) if arguments.json else as_table(report))
    return 1 if report["faults"] else 0


def chaos(
    arguments: Namespace, options: ChaosOptions, kinds: list[str], mix: list[str]
) -> dict[str, Any]:
    """Run `launch chaos` and return the whole report. Raises LaunchError."""
    machine, shared = hardware(), shared_memory()
    given = given_options(arguments, Config)
    defaults = OWN_DEFAULTS | ({"http": 1, "http_port": free_port()} if HTTP_KINDS & {*mix} else {})
    with target(given, "chaos", defaults, "--max-deaths", str(MAX_DEATHS)) as config:
        outcome = asyncio.run(run_chaos(config, options, kinds, mix, arguments.answers))
    is_own = not getattr(arguments, "name", None)
    is_gpu = config.device == "cuda" or (config.device == "auto" and config.tp == 1)
    report = make_report(outcome, is_exact=not (is_gpu and machine["gpus"]))
    report |= {
        "model": model_name(config),
        "tp": config.tp,
        "dp": config.dp,
        "hardware": machine,
        "versions": versions(),
        "options": {
            "only": " ".join(kinds),
            "mix": " ".join(mix),
            **msgspec.structs.asdict(options),
        },
        "left": left_behind(config.name, outcome.processes, shared) if is_own else [],
    }
    return report | {"faults": faults(report)}


async def run_chaos(
    config: Config,
    options: ChaosOptions,
    kinds: list[str],
    mix: list[str],
    answers: Path | None = None,
) -> Outcome:
    """Run the load and the kills in a running pipeline; answers: file of expected answers."""
    changes = Changes()
    async with (
        Processes(config.name, changes) as processes,
        AsyncClient(config.endpoint, keys=config.curve_keys) as client,
        http_client(config) as http,
    ):
        before = await client.status(wait=True)
        models = [await model_of(model, client) for model in config.by_model()]
        load = Load(client, http, make_calls(options, models, mix), options, changes)
        expected = await load.expected(answers)
        memory = processes.memory()
        load.start()
        names = [name for name in processes.pids if kind_of(name) in kinds]
        chaos = Chaos(config, options, load, processes, changes, client)
        await chaos.run(make_schedule(names, options))
        await load.end()
        after = await _idle_status(client, _used_blocks(before), options.recovery_timeout)
        return Outcome(
            expected=expected,
            flights=load.done,
            recoveries=chaos.recoveries,
            num_restarts=dict(processes.num_restarts),
            memory=(memory, processes.memory()),
            processes=processes.seen,
            is_answering=after is not None,
            used_blocks=_used_blocks(after) - _used_blocks(before) if after else 0,
            num_open=_num_open(after) if after else 0,
        )


def http_client(config: Config) -> httpx.AsyncClient:
    """Return a client of the HTTP APIs that waits without a limit for an answer."""
    headers = {"Authorization": f"Bearer {config.api_key}"} if config.api_key else {}
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(
        base_url=base_url(config),
        headers=headers,
        timeout=httpx.Timeout(None),
        limits=limits,
        trust_env=False,
    )


async def model_of(config: Config, client: AsyncClient) -> Model:
    """Return the properties of a model on which requests depend."""
    checkpoint, name = read_model_config(config.model_folder), config.model_name
    thought = await client.tokenize(END_OF_THOUGHT, model=name, add_special_tokens=False)
    return Model(
        name=name,
        vocab_size=checkpoint.vocab_size,
        is_demo=config.model_folder.samefile(Config().model_folder),
        is_embedding=checkpoint.is_embedding_model,
        end_of_thought=thought.token_ids[0] if len(thought.token_ids) == 1 else None,
    )


class Chaos(Struct):
    """Execution of a schedule."""

    config: Config
    options: ChaosOptions
    load: Load
    processes: Processes
    changes: Changes
    client: AsyncClient
    recoveries: list[Recovery] = []

    async def run(self, schedule: list[Event]) -> None:
        """Run every event after recovery from the previous event; stop after a failed recovery."""
        try:
            for event in schedule:
                await self._receive(event.num_tokens)
                self.recoveries.append(await self._carry_out(event))
                self._show(len(schedule))
                if not self.recoveries[-1].is_over:
                    return
            await self._until(lambda: len(self.load.done) >= self.options.num_requests)
        except TimeoutError:
            print("the load gets nothing any more", file=sys.stderr)

    async def _carry_out(self, event: Event) -> Recovery:
        flights = list(self.load.open)
        self.load.event = len(self.recoveries)
        for flight in flights:
            flight.begin_silence()
        is_over = True
        try:
            async with asyncio.timeout(self.options.recovery_timeout):
                await self._kill(event)
                await self._whole()
                await self._moved(flights)
        except TimeoutError:
            is_over = False
        silences = [flight.silence_until_now() for flight in flights if flight.received.is_stream]
        return Recovery(event, len(flights), is_over, max(silences, default=0.0))

    async def _kill(self, event: Event) -> None:
        """Send an event's kills, and wait until all killed processes were restarted."""
        hit = {kill.process: self.processes.send(kill) for kill in event.kills}
        if event.again:
            await self.changes.until(lambda: self.processes.is_replaced(hit))
            if event.moment == "token":
                await self._receive(1)
            hit = {event.again.process: self.processes.send(event.again)}
        await self.changes.until(lambda: self.processes.is_replaced(hit))

    async def _whole(self) -> None:
        """Wait until every process is back in the pipeline and a new request is answered."""
        names = {n for n in self.processes.pids if kind_of(n) in ("tokenizer", "detokenizer")}
        while not names <= _present(await self.client.status(fresh=True)):
            pass
        await self.load.send(self.load.shortest)

    async def _moved(self, flights: list[Flight]) -> None:
        """Wait until every stream has received another token or has ended."""
        before = [(flight, flight.num_tokens) for flight in flights if flight.received.is_stream]
        await self.changes.until(
            lambda: all(flight.is_over or flight.num_tokens > number for flight, number in before)
        )

    async def _receive(self, num_tokens: int) -> None:
        """Wait until the load has received this number of tokens. Raises TimeoutError."""
        moment = self.load.num_tokens + num_tokens
        await self._until(lambda: self.load.num_tokens >= moment)

    async def _until(self, true: Callable[[], bool]) -> None:
        await self.changes.until(true, self.options.recovery_timeout)

    def _show(self, number: int) -> None:
        recovery = self.recoveries[-1]
        kills = " and ".join(f"{kill.process} {kill.how}" for kill in recovery.event.kills)
        if recovery.event.again:
            again, moment = recovery.event.again, recovery.event.moment
            kills += f", {again.process} {again.how} at the first {moment}"
        end = self._what_is_missing()
        if recovery.is_over:
            end = f"longest silence {recovery.silence:.1f} s"
        place = f"{len(self.recoveries)}/{number}"
        print(
            f"{place} {kills}: {recovery.num_running} running, {end}", file=sys.stderr, flush=True
        )

    def _what_is_missing(self) -> str:
        if not is_running(self.config.name):
            return "the pipeline has ended"
        return f"NOT RECOVERED FROM within {self.options.recovery_timeout:g} s"


async def _idle_status(client: AsyncClient, used_blocks: int, seconds: float) -> StatusReply | None:
    """Return the first report without open requests and without more used blocks than before.

    Else return the last report within `seconds`, or None if no report came.
    """
    status = None
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while status is None or _num_open(status) or _used_blocks(status) > used_blocks:
                status = await client.status(fresh=True)
    return status


def _present(status: StatusReply) -> set[str]:
    """Return the tokenizers and detokenizers of a pipeline that is ready."""
    if not status.ready:
        return set()
    present = set(status.tokenizers)
    for model in status.by_model:
        present |= set.intersection(*(set(its.detokenizers) for its in model.schedulers))
    return present


def _used_blocks(status: StatusReply) -> int:
    scheduler = status.scheduler
    return scheduler.num_blocks - scheduler.num_free_blocks if scheduler else 0


def _num_open(status: StatusReply) -> int:
    scheduler = status.scheduler
    num_known = scheduler.num_waiting + scheduler.num_running if scheduler else 0
    return status.num_requests + num_known


def shared_memory() -> set[str]:
    """Return the names of the files in /dev/shm."""
    return {path.name for path in SHARED_MEMORY.iterdir()} if SHARED_MEMORY.exists() else set()


def left_behind(name: str, processes: list[psutil.Process], shared_before: set[str]) -> list[str]:
    """Return resources left by an ended pipeline. A GPU's memory ends with its processes."""
    folder = run_folder(name)
    return [
        *(f"process {process.pid}" for process in processes if process.is_running()),
        *([str(folder)] if folder.exists() else []),
        *(str(SHARED_MEMORY / name) for name in sorted(shared_memory() - shared_before)),
    ]
