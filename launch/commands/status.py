"""`launch status`: the processes as reported by the supervisor, the queues by the gateway."""

from argparse import ArgumentParser, Namespace
from typing import Any

import msgspec

from penstock.launch.pipeline.control_client import list_processes
from penstock.launch.pipeline.options import add_name, name_of
from penstock.launch.pipeline.procfile import stem_of
from penstock.launch.pipeline.run_folder import model_name, running_config
from penstock.launch.supervisor.output import at_node
from penstock.protocol.client.client import Client
from penstock.protocol.client.session import NoAnswer
from penstock.protocol.config import Config
from penstock.protocol.messages.status import (
    ModelStatus,
    ProcessStatus,
    SchedulerStatus,
    StatusReply,
)

TIMEOUT = 2.0  # seconds within which the gateway must answer


def add_arguments(command: ArgumentParser) -> None:
    """Add the arguments of `launch status`."""
    command.set_defaults(run=_run)
    command.epilog = "Exits with 1 if the pipeline is not ready."
    command.add_argument("--json", action="store_true", help="print JSON")
    add_name(command)


def _run(arguments: Namespace) -> int:
    status = read_status(name_of(arguments))
    print(as_json(status) if arguments.json else as_text(status))
    return 0 if _is_ready(status) else 1


def read_status(pipeline: str) -> dict[str, Any]:
    """Return all known facts about a running pipeline; `gateway` is None if it does not answer."""
    config = running_config(pipeline)
    processes = list_processes(pipeline)
    try:
        with Client(config.endpoint, timeout=TIMEOUT, keys=config.curve_keys) as client:
            gateway = client.status()
    except NoAnswer:
        gateway = None
    return {"config": config, "processes": processes, "gateway": gateway}


def _is_ready(status: dict[str, Any]) -> bool:
    return bool(status["gateway"] and status["gateway"].ready)


def as_json(status: dict[str, Any]) -> str:
    """Return the status as JSON."""
    return msgspec.json.format(msgspec.json.encode(status)).decode()


def as_text(status: dict[str, Any]) -> str:
    """Return the status as text for people."""
    config, gateway = status["config"], status["gateway"]
    state = "ready" if _is_ready(status) else "not ready"
    return "\n".join(
        [
            f"{config.name}: {state}, {model_name(config)} on {config.endpoint}",
            "",
            *_process_lines(status["processes"], _loads(config, gateway, status["processes"])),
            *_model_lines(gateway),
        ]
    )


def _loads(
    config: Config, gateway: StatusReply | None, processes: list[ProcessStatus]
) -> dict[str, int | str]:
    """Return the number of requests by process name, or the word that marks a spare worker."""
    if gateway is None:
        return {}
    standby = {process.name for process in processes if process.counters.get("standby_ready")}
    loads: dict[str, int | str] = {"gateway.1": gateway.num_requests, **gateway.tokenizers}
    for its, model in zip(config.by_model(), gateway.by_model, strict=True):
        for scheduler in model.schedulers:
            name = f"{its.prefix}scheduler.{1 + scheduler.replica}"
            loads[name] = scheduler.num_waiting + scheduler.num_running
        if model.scheduler and model.ready:
            workers = [
                process.name
                for process in processes
                if stem_of(process.name) == f"{its.prefix}worker"
            ]
            spare = set(workers).difference(model.scheduler.workers)
            loads |= {name: "standby" if name in standby else "spare" for name in spare}
        loads |= model.scheduler.detokenizers if model.scheduler else {}
    return loads


def _model_lines(gateway: StatusReply | None) -> list[str]:
    if gateway is None:
        return ["", "the gateway does not answer"]
    lines = []
    num_bad_frames = gateway.num_bad_frames  # shown for the first model
    for model in gateway.by_model:
        state = "ready" if model.ready else "not ready"
        title = [f"{model.name}: {state}"] if gateway.models else []
        lines += ["", *title, *_queue_lines(model, num_bad_frames)]
        num_bad_frames = 0
    return lines


def _process_lines(processes: list[ProcessStatus], loads: dict[str, int | str]) -> list[str]:
    labels = [at_node(process.name, process.node) for process in processes]
    width = max([15, *map(len, labels)])
    lines = [f"{'process':<{width}} {'pid':>8} {'uptime':>9} {'restarts':>8} {'requests':>8}"]
    for label, process in zip(labels, processes, strict=True):
        lines.append(
            f"{label:<{width}} {process.pid:>8} {_duration(process.uptime):>9} "
            f"{process.restarts:>8} {loads.get(process.name, '-'):>8}"
        )
    return lines


def _queue_lines(model: ModelStatus, num_bad_frames: int) -> list[str]:
    scheduler = model.scheduler
    if scheduler is None:
        return [f"requests {model.num_requests}; the scheduler has not reported yet"]
    used = scheduler.num_blocks - scheduler.num_free_blocks
    median, p99 = scheduler.gpu_idle_us
    return [
        f"waiting   {scheduler.num_waiting}",
        f"running   {scheduler.num_running}",
        f"KV blocks {used} of {scheduler.num_blocks} in use ({scheduler.kv_usage:.0%})",
        f"steps     {scheduler.num_steps}, preemptions {scheduler.num_preemptions}"
        + (f", GPU idle between them {median:.1f} µs (p99 {p99:.1f})" if median else ""),
        f"dropped   {num_bad_frames + scheduler.num_bad_frames} bad frames",
        *(_replica_line(scheduler) for scheduler in model.schedulers if len(model.schedulers) > 1),
    ]


def _replica_line(scheduler: SchedulerStatus) -> str:
    state = "ready" if scheduler.ready else "not ready"
    parts = [
        f"waiting {scheduler.num_waiting}",
        f"running {scheduler.num_running}",
        f"KV blocks {scheduler.kv_usage:.0%}",
        f"steps {scheduler.num_steps}",
        *scheduler.workers,
    ]
    return f"replica {scheduler.replica} {state}: {', '.join(parts)}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
