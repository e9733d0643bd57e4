"""`launch bench capacity`: how many GPUs one front (gateway, tokenizers, detokenizers) carries.

A calculation: a process spends so many microseconds of CPU for each request, token and message
(`COSTS`, measured); how many there are follows from the GPUs' speed. Assumptions:

- All replicas are busy and alike. Each step gives each row one token.
- A scheduler spreads its streams over all detokenizers of the front. So a step is one message to
  each of them (or to as many as there are rows), and each sends one to the gateway.
- A scheduler sleeps between the GPU's steps, and waking costs most of its time for a step. A front
  that is busy finds its next message there already. The costs are fitted accordingly.
- A process may be busy for the share `utilization` of a core. Its queue is M/D/1: at 0.7 a message
  waits for 1.2 times its own time on the mean, at 0.9 for 4.5 times.
- Several gateways have a front each. Heartbeats (0.3 % of a core each) and bursts are left out.
"""

import math
from argparse import Namespace
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from penstock.launch.errors import LaunchError


class Cost(Struct, frozen=True, forbid_unknown_fields=True):
    """Microseconds of CPU of one process, its I/O thread included."""

    request: float = 0.0
    prompt_token: float = 0.0
    message: float = 0.0
    """one step of one replica, or as much of it as goes by one detokenizer"""
    token: float = 0.0
    streamed_token: float = 0.0
    """on top of `token`"""


COSTS = {
    "gateway": Cost(request=150, prompt_token=0.14, message=36, token=3.8, streamed_token=22),
    "tokenizer": Cost(request=74, prompt_token=2.5),
    "detokenizer": Cost(request=31, message=49, token=2.9),
    "http": Cost(request=560, streamed_token=66),
    "scheduler": Cost(request=96, prompt_token=0.68, message=530, token=2.8),
}
"""fitted to two cores of a shared virtual machine (README says how); others by `--costs`"""
BYTES = Cost(request=1800, prompt_token=12, message=25, token=138, streamed_token=175)
"""in and out of the gateway: a prompt comes and goes to a tokenizer, deltas come and go on"""


class Capacity(Struct):
    """The model, for GPUs of one speed; but for `costs` the fields are the options."""

    tokens_per_gpu: float
    tp: int
    rows: int
    input_tokens: int
    output_tokens: int
    stream_share: float
    utilization: float
    costs: dict[str, Cost]

    def use(self, cost: Cost, gpus: float, copies: int = 0) -> float:
        """Cores, or MB a second of BYTES, if a step is so many messages."""
        of_request = cost.request + cost.prompt_token * self.input_tokens
        of_token = cost.token + cost.streamed_token * self.stream_share
        each = of_request / self.output_tokens + of_token + cost.message * copies / self.rows
        return 1e-6 * gpus * self.tokens_per_gpu * each

    def detokenizers(self, gpus: float) -> int:
        """The fewest for one front. Up to the number of rows, each hears of every step."""
        cost = self.costs["detokenizer"]
        left = self.utilization - self.use(Cost(message=cost.message), gpus, 1)
        if left > 0 and (number := math.ceil(self.use(cost, gpus) / left)) <= self.rows:
            return max(number, 1)
        return math.ceil(self.use(cost, gpus, self.rows) / self.utilization)

    def gateway(self, gpus: float) -> float:
        """Share of a core that the gateway of one front needs."""
        return self.use(self.costs["gateway"], gpus, min(self.detokenizers(gpus), self.rows))

    def limits(self) -> dict[str, float]:
        """With how many GPUs that which is there but once, or can't be shared, is at its limit."""
        low, high = 0.0, 1e6
        while high - low > 1e-6 * high:
            middle = (low + high) / 2
            low, high = (middle, high) if self.gateway(middle) < self.utilization else (low, middle)
        hearing = self.use(Cost(message=self.costs["detokenizer"].message), 1, 1)
        most = self.utilization / hearing if hearing else math.inf
        return {"the gateway's core": low, "a detokenizer that hears of every step": most}

    def point(self, gpus: int) -> dict[str, float]:
        """A row of the table; cores of gateways are summed, those of a scheduler are each one's."""
        limit, fronts = self.utilization, math.ceil(gpus / self.limits()["the gateway's core"])
        front = gpus / fronts
        detokenizers, busy = self.detokenizers(front), self.gateway(front)
        copies = min(detokenizers, self.rows)
        messages = front * self.tokens_per_gpu / self.rows * copies
        return {
            "GPUs": gpus,
            "output tokens/s": gpus * self.tokens_per_gpu,
            "requests/s": gpus * self.tokens_per_gpu / self.output_tokens,
            "gateway cores": busy * fronts,
            "gateways": fronts,
            "tokenizers": fronts * math.ceil(self.use(self.costs["tokenizer"], front) / limit),
            "detokenizers": fronts * detokenizers,
            "http": math.ceil(self.use(self.costs["http"], gpus) / limit),
            "cores of a scheduler": self.use(self.costs["scheduler"], self.tp, 1),
            "wait ms": 1e3 * busy / messages * busy / (2 * (1 - busy)),
            "gateway MB/s": self.use(BYTES, gpus, copies),
        }


def bench_capacity(arguments: Namespace) -> list[dict[str, Any]]:
    """Model, points and limits for each of --tokens-per-gpu. Raises LaunchError."""
    speeds, sizes = arguments.tokens_per_gpu, arguments.tp
    if len(speeds) != len(sizes):
        raise LaunchError(f"--tp has {len(sizes)} numbers, --tokens-per-gpu {len(speeds)}")
    costs = COSTS | (_read_costs(arguments.costs) if arguments.costs else {})
    options = {name: getattr(arguments, name) for name in Capacity.__struct_fields__[2:-1]}
    report = []
    for speed, tp in zip(speeds, sizes, strict=True):
        model = Capacity(speed, tp, **options, costs=costs)
        points = [model.point(gpus) for gpus in arguments.gpus]
        report.append({"model": model, "points": points, "limits": model.limits()})
    return report


def _read_costs(file: Path) -> dict[str, Cost]:
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Cost])
    except (OSError, msgspec.DecodeError) as error:
        raise LaunchError(f"--costs {file}: {error}") from error


def as_table(report: list[dict[str, Any]]) -> str:
    """A table for each speed, and what breaks first."""
    lines: list[str] = []
    for one in report:
        model, points = one["model"], one["points"]
        rows = [points[0], ["--:"] * len(points[0]), *(map(_cell, p.values()) for p in points)]
        lines += [f"{model.tokens_per_gpu:,g} tokens/s a GPU, --tp {model.tp}", ""]
        limits = sorted(one["limits"].items(), key=lambda item: item[1])
        breaks = ", ".join(f"{name} at {_cell(gpus)} GPUs" for name, gpus in limits)
        lines += [*(f"| {' | '.join(row)} |" for row in rows), "", f"First to break: {breaks}.", ""]
    return "\n".join(lines)


def _cell(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.{2 if value < 10 else 0}f}"
