"""Pages of docs/reference, generated from the code. `make docs` writes them."""

import sys
from itertools import chain
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from penstock.launch.pipeline import errors as launch_errors
from penstock.launch.pipeline.options import _description, _fields, _shown, flag
from penstock.protocol.client import session
from penstock.protocol.config import MODEL_OPTIONS, OPTIONS, Config
from penstock.protocol.messages.client import ErrorReply
from penstock.protocol.messages.sampling import SamplingParams
from penstock.protocol.messages.status import (
    Histogram,
    Metrics,
    ProcessStatus,
    SchedulerStatus,
    StatusReply,
)
from penstock.services.http.shared.errors import ApiError, as_api_error
from penstock.services.http.status import render
from tests.docs.command_reference import commands
from tests.docs.markdown import page, table
from tests.docs.model_pages import memory, models
from tests.launch.fake_gateway import STATUS

FOLDER = Path(__file__).parents[2] / "docs" / "reference"
CODES = {
    "invalid": "The request breaks a rule. `field` names the field. Correct the request.",
    "overloaded": "A limit of waiting or open requests is reached, or the pipeline is stopping "
    "(HTTP status 503). Retry after `retry_after` seconds.",
    "failed": "The pipeline could not answer, for example because the request killed workers. "
    "The log names the reason.",
}
STATUSES = {
    400: "invalid request",
    401: "missing or wrong API key",
    403: "the web page's origin, or the name of the host, is not allowed without an API key",
    404: "unknown model or route",
    405: "wrong method",
    408: "the request did not arrive in time",
    413: "the body is too large",
    415: "unknown `Content-Encoding`",
    429: "`overloaded`, with the header `Retry-After`",
    431: "the headers are too large",
    499: "the client disconnected; nobody reads the response",
    500: "`failed`, or a defect; the server's log names the reason",
    503: "the pipeline is not ready, or is stopping; with the header `Retry-After`",
}
EXIT_CODES = {
    0: "success; `launch all`: also stopped by Ctrl-C or SIGTERM, ready or not",
    1: "a request, a check or the pipeline failed",
    2: "the command was refused: unknown option, invalid value, missing file",
    130: "another command: interrupted by Ctrl-C",
    143: "another command: ended by SIGTERM",
}
PROCESS_COUNTERS = {
    "all": ["messages_sent_total", "messages_received_total", "bad_frames_total"],
    "gateway": ["connections", "disconnected_clients_total", "open_queries", "open_requests"],
    "scheduler": [
        *("accepted_tokens_total", "draft_tokens_total", "plan_bytes_total", "queue_age_seconds")
    ],
    "worker": ["standby_ready"],
}
"""`ProcessStatus.counters`, by kind of process; the test of a running pipeline compares them"""


def options() -> str:
    """Return the page of `launch all`'s options."""
    return page(
        "Options",
        "The options of `launch all`. `LLM` takes them as arguments; `launch bench`, `launch "
        "batch` and `launch chaos` take them as options. Processes that are started without "
        "`launch` read them from the environment: `PENSTOCK_MAX_NUM_SEQS` for `--max-num-seqs`. "
        f"Options up to `{flag(MODEL_OPTIONS[-1])}` belong to a model; with "
        "[several models](../guides/several-models.md) each may have its own. The others belong to "
        "the pipeline. `--procfile` and `--max-deaths` are only for "
        "[`launch all`](commands.md#launch-all).",
        table("option | default | description", map(option_row, OPTIONS)),
    )


def option_row(field: str) -> str:
    off = f", `--no-{flag(field)[2:]}`" if _fields(Config)[field].default is True else ""
    return f"`{flag(field)}`{off} | {_shown(Config, field)} | {_description(Config, field)}"


def sampling_parameters() -> str:
    """Return the page of the fields of SamplingParams."""
    schema = msgspec.json.schema(SamplingParams)["$defs"]["SamplingParams"]["properties"]
    rows = [
        f"`{name}` | {one.get('description', '')} | {limits(one)} | {default(one)}"
        for name, one in schema.items()
    ]
    return page(
        "Sampling parameters",
        "Fields of requests over ZeroMQ and HTTP, of `SamplingParams` in programs, and, as options "
        "(`--max-tokens`), of `launch ask` and `launch chat`. `null` in `temperature`, `top_k`, "
        "`top_p`, `min_p`, `presence_penalty` and `repetition_penalty` means the value of the "
        "model's `generation_config.json`.",
        table("field | description | type and limits | default", rows),
        "## Notes",
        "- **EOS** ids: those of `generation_config.json` or `config.json`, and the tokenizer's.",
        "- **`allowed_token_ids`** without EOS: the answer ends at `max_tokens` or a stop.",
        "- **`bad_words`** are excluded with and without a preceding space. The last token of a "
        "word is not sampled where the answer ends with its other tokens.",
        "- **`n`**: over HTTP, in `LLM`, and in `generate_n` and `submit_n` of the Python clients. "
        "Elsewhere 1: [a ZeroMQ request has one "
        "answer](../guides/zeromq-api.md#several-answers-to-a-prompt).",
        "- **`stop`**: the text ends before the string, or after it with "
        "`include_stop_str_in_output`. In chats it applies to the answer, not to the "
        "[reasoning](../guides/http-api.md#reasoning), as `stop_token_ids` does.",
    )


def limits(schema: dict[str, Any]) -> str:
    """Return the type of a JSON schema and its limits, in words."""
    if "anyOf" in schema:
        kinds = [limits(one) for one in schema["anyOf"] if one.get("type") != "null"]
        return " or ".join(kinds)
    if "$ref" in schema:
        return "map, see [Structured output](../guides/structured-output.md)"
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {limits(schema['items'])}{_up_to(schema, 'Items')}"
    if kind == "object":
        values = limits(schema.get("additionalProperties", {}))
        return f"map of token ids to {values}{_up_to(schema, 'Properties')}"
    return f"{kind}{_up_to(schema, 'Length')}{_range(schema)}"


def _up_to(schema: dict[str, Any], what: str) -> str:
    most = schema.get(f"max{what}")
    units = {"Items": "entries", "Properties": "entries", "Length": "characters"}
    return f", up to {most:,} {units[what]}" if most else ""


def _range(schema: dict[str, Any]) -> str:
    low, above = schema.get("minimum"), schema.get("exclusiveMinimum")
    high, below = schema.get("maximum"), schema.get("exclusiveMaximum")
    if (high or below or 0) >= 1 << 31:
        high = below = None
    if low is not None and low <= -(1 << 31):
        low = None
    if (low, above, high, below) == (None,) * 4:
        return ""
    if high is None and below is None:
        return f", ≥ {low}" if low is not None else f", > {above}"
    left = f"[{low}" if low is not None else f"({above}"
    return f", {left}, {high}]" if high is not None else f", {left}, {below})"


def default(schema: dict[str, Any]) -> str:
    """Return the default of a JSON schema, as JSON."""
    value = schema.get("default")
    return "" if value is None else f"`{msgspec.json.encode(value).decode()}`"


def error_page() -> str:
    """Return the page of error codes, statuses and exceptions."""
    codes = get_args(get_type_hints(ErrorReply)["code"])
    assert set(codes) == set(CODES)
    replies = {
        code: as_api_error(session.RequestError(ErrorReply(code=code, message="", retry_after=1.0)))
        for code in codes
    }
    return page(
        "Errors",
        "Messages name the field, its value and the limit. Errors over ZeroMQ are maps with the "
        "fields of `ErrorReply`: "
        + ", ".join(f"`{one}`" for one in ErrorReply.__struct_fields__)
        + ".",
        "## Codes",
        table(
            "code | HTTP status | meaning",
            [f"`{code}` | {replies[code].status} | {CODES[code]}" for code in codes],
        ),
        "## HTTP statuses",
        'Errors over HTTP have OpenAI\'s shape: `{"error": {"message", "type", "param", "code"}}`.',
        table(
            "status | `type` | meaning",
            [
                f"{status} | `{ApiError(status, '').body.error.type}` | {text}"
                for status, text in STATUSES.items()
            ],
        ),
        "## Python exceptions",
        "Clients and `LLM` raise subclasses of `ClientError`: `from penstock import RequestError`. "
        "`LLM` raises `penstock.LaunchError` where its pipeline does not start. Arguments of a "
        "wrong type, which are found before anything is sent, raise `TypeError` or `ValueError`.",
        table(
            "exception | base | meaning",
            [
                f"`{name}` | `{one.__bases__[0].__name__}` | {(one.__doc__ or '').splitlines()[0]}"
                for module in (launch_errors, session)
                for name, one in vars(module).items()
                if isinstance(one, type) and issubclass(one, Exception)
            ],
        ),
        "## Exit codes of `launch`",
        table("code | meaning", [f"{code} | {text}" for code, text in EXIT_CODES.items()]),
    )


def metrics() -> str:
    """Return the page of `/metrics`."""
    histogram = Histogram.of([1.0])
    hints = get_type_hints(Metrics)
    counted = {name: histogram for name, kind in hints.items() if kind is Histogram}
    counters = dict.fromkeys(chain.from_iterable(PROCESS_COUNTERS.values()), 0.0)
    process = ProcessStatus(name="", pid=0, uptime=0.0, restarts=0, counters=counters)
    reported = {
        "schedulers": [SchedulerStatus(epoch=0, ready=True, step_tokens=histogram)],
        "processes": [process],
        "metrics": Metrics(request_success={"stop": 0}, request_failed={"invalid": 0}, **counted),
    }
    status = StatusReply(ready=True, **STATUS | reported)
    rows = []
    for family in text_string_to_metric_families(render(status, Config()).decode()):
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        suffix = "_total" if family.type == "counter" else ""
        labelled = ", ".join(f"`{one}`" for one in sorted(labels))
        rows.append(
            f"`{family.name}{suffix}` | {family.type} | {labelled} | {family.documentation}"
        )
    return page(
        "Metrics",
        "`GET /metrics` in Prometheus's text format. Names are vLLM's, with the prefix "
        "`penstock:`, where the meaning is the same.",
        table("name | type | labels | meaning", rows),
        "`penstock:process_*` are values of each process. Only "
        + "; only ".join(
            f"the {kind} has {', '.join(f'`{one}`' for one in names)}"
            for kind, names in PROCESS_COUNTERS.items()
            if kind != "all"
        )
        + ".",
    )


PAGES = {
    "options.md": options,
    "sampling-parameters.md": sampling_parameters,
    "commands.md": commands,
    "errors.md": error_page,
    "metrics.md": metrics,
    "models.md": models,
    "memory.md": memory,
}


def main() -> None:
    """Write the pages; with `--check`, exit with an error if one is not up to date."""
    pages = {FOLDER / name: make() for name, make in PAGES.items()}
    if "--check" in sys.argv:
        stale = [path.name for path, text in pages.items() if path.read_text() != text]
        sys.exit(f"docs/reference is not up to date: {stale}; run `make docs`" if stale else 0)
    for path, text in pages.items():
        path.write_text(text)


if __name__ == "__main__":
    main()
