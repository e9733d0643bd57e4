"""The configuration of a pipeline: every option with its type, default, limit and description.

`launch` makes a flag of each field and writes the result as `config.json` into the run folder;
every process reads it from there. A process started without `launch` (by another Procfile runner)
takes `PENSTOCK_<FIELD>` variables instead.
"""

import os
import tempfile
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from penstock.protocol.messages.plan import MAX_BLOCKS, MAX_SLOTS

DEFAULT_CLIENT = "client"
"""whose key is used where no client is named"""

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,32}$")]
Count = Annotated[int, Meta(ge=1)]
MAX_PROCESSES = 256
"""of one kind; each takes some descriptors of the supervisor"""


class Config(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Every option of a pipeline."""

    name: Annotated[Name, Meta(description="name of the pipeline and of its run folder")] = (
        "default"
    )
    backend: Annotated[
        Literal["local", "ray"],
        Meta(description="where processes run; local: on this machine; ray: on a Ray cluster"),
    ] = "local"
    address: Annotated[
        str, Meta(description="of the Ray cluster, HOST:PORT; auto: the one this machine is in")
    ] = "auto"
    model: Annotated[
        str, Meta(description="folder of a Qwen3 checkpoint; empty: the demo model")
    ] = ""
    endpoint: Annotated[str, Meta(description="where clients connect")] = "tcp://127.0.0.1:5555"
    curve_keys: Annotated[
        str,
        Meta(description="folder of `launch keys`: only clients with a key connect, encrypted"),
    ] = ""
    insecure: Annotated[
        bool,
        Meta(
            description="let other machines reach --endpoint without keys, and --http-host without "
            "--api-key: anyone may ask, and anyone on the way reads prompts and answers"
        ),
    ] = False
    http: Annotated[
        int,
        Meta(ge=0, le=256, description="HTTP processes at start: OpenAI's API, metrics, a page"),
    ] = 1
    http_host: Annotated[str, Meta(description="address where they listen")] = "127.0.0.1"
    http_port: Annotated[
        int, Meta(ge=1, le=65535, description="port where they listen, all at the same one")
    ] = 8000
    api_key: Annotated[
        str,
        Meta(
            description="key of HTTP clients, `Authorization: Bearer …` or `X-API-Key: …`; better "
            "PENSTOCK_API_KEY or --api-key-file, which no list of processes shows"
        ),
    ] = ""
    api_key_file: Annotated[str, Meta(description="file whose first line is the key")] = ""
    allowed_origins: Annotated[
        str,
        Meta(description="web pages that may use the API: a JSON list of origins, or `*` for all"),
    ] = ""
    served_model_name: Annotated[
        str, Meta(description="name of the model over HTTP; empty: its folder's")
    ] = ""
    trust_request_chat_template: Annotated[
        bool,
        Meta(description="let requests bring a `chat_template`: a program that a tokenizer runs"),
    ] = False
    tp: Annotated[Count, Meta(description="tensor-parallel size: number of workers")] = 1
    dp: Annotated[
        Count, Meta(description="data-parallel replicas: schedulers, each with --tp workers")
    ] = 1
    routing: Annotated[
        Literal["prefix", "load", "random"],
        Meta(
            description="the replica of a request; prefix: one that has the beginning of its "
            "prompt, unless others have much less to do; load: the one with the fewest"
        ),
    ] = "prefix"
    enable_expert_parallel: Annotated[
        bool,
        Meta(description="each worker has whole experts instead of a part of every expert (MoE)"),
    ] = False
    quantization: Annotated[
        Literal["none", "fp8"],
        Meta(description="weights of the layers in 8 bits; a checkpoint in fp8 is known as such"),
    ] = "none"
    quantize_lm_head: Annotated[
        bool, Meta(description="the head in 8 bits (e4m3), too, whatever the layers are in")
    ] = False
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8"],
        Meta(description="keys and values as the model computes them, or in 8 bits (e4m3)"),
    ] = "auto"
    speculative_method: Annotated[
        Literal["none", "ngram"],
        Meta(description="ngram: guess tokens that followed the same ones before, check them"),
    ] = "none"
    num_speculative_tokens: Annotated[
        int, Meta(ge=1, le=32, description="most tokens guessed for a row in one step")
    ] = 5
    spare_workers: Annotated[
        int,
        Meta(
            ge=0,
            description="workers more of each replica that wait, everything imported, to take the "
            "place of those that die",
        ),
    ] = 0
    tokenizers: Annotated[Count, Meta(le=256, description="tokenizer processes at start")] = 1
    detokenizers: Annotated[Count, Meta(le=256, description="detokenizer processes at start")] = 1
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        Meta(description="where the model runs; auto: on GPUs if there is one for each worker"),
    ] = "auto"
    attention: Annotated[
        Literal["auto", "flash-attn", "triton", "torch"],
        Meta(description="attention back end; auto: what measured best of what is installed"),
    ] = "auto"
    block_size: Annotated[
        int, Meta(ge=0, description="tokens per KV block; 0: what the attention back end likes")
    ] = 0
    num_blocks: Annotated[
        int,
        Meta(ge=0, le=MAX_BLOCKS, description="KV blocks; 0: as many as --kv-cache-gib holds"),
    ] = 0
    kv_cache_gib: Annotated[
        float,
        Meta(
            ge=0,
            description="memory for the KV cache of each worker, GiB; 0: what "
            "--gpu-memory-utilization leaves; 1 on a CPU",
        ),
    ] = 0.0
    gpu_memory_utilization: Annotated[
        float, Meta(gt=0, le=1, description="share of the GPU's memory that may be in use")
    ] = 0.9
    enable_cuda_graphs: Annotated[bool, Meta(description="replay steps as CUDA graphs")] = True
    max_model_len: Annotated[
        int, Meta(ge=0, description="longest prompt and output, tokens; 0: the model's context")
    ] = 0
    max_num_seqs: Annotated[
        int, Meta(ge=1, le=MAX_SLOTS, description="most sequences that run at once")
    ] = 256
    max_num_batched_tokens: Annotated[Count, Meta(description="most tokens in one step")] = 2048
    max_waiting_requests: Annotated[
        int, Meta(ge=0, description="requests accepted beyond what runs; more are `overloaded`")
    ] = 1024
    max_waiting_tokens: Annotated[
        Count, Meta(description="prompt tokens of requests that wait; more are `overloaded`")
    ] = 1 << 22
    max_open_bytes: Annotated[
        Count,
        Meta(description="bytes of open requests and their answers; more are `overloaded`"),
    ] = 1 << 30
    max_unread_bytes: Annotated[
        Count,
        Meta(description="bytes of answers that a client leaves unread before it is cut off"),
    ] = 1 << 24
    max_request_bytes: Annotated[
        int,
        Meta(
            ge=0,
            description="longest request, bytes; 0: 16 a token of the context, at least 1 MiB",
        ),
    ] = 0
    num_plans_in_flight: Annotated[
        int,
        Meta(
            ge=1,
            le=8,
            description="most plans sent ahead of their results; more than 2 where steps are short",
        ),
    ] = 4
    enable_prefix_caching: Annotated[
        bool, Meta(description="share the KV blocks of equal prefixes")
    ] = True
    watermark: Annotated[
        float, Meta(ge=0, lt=1, description="share of blocks kept free when a request is admitted")
    ] = 0.01
    num_threads: Annotated[
        int, Meta(ge=0, description="CPU threads of each worker; 0: (cores - 1) / (tp * dp)")
    ] = 0
    hang_timeout: Annotated[
        float,
        Meta(
            gt=0,
            description="seconds without a sign of life or use of a CPU after which a process is "
            "killed",
        ),
    ] = 5.0
    step_timeout: Annotated[
        float,
        Meta(
            gt=0,
            description="seconds after which a process that is at one piece of work is killed, or "
            "computes without a sign of life",
        ),
    ] = 60.0
    lease_timeout: Annotated[
        float,
        Meta(
            gt=0,
            description="seconds after a restart of the gateway in which a client must ask again "
            "for a request that runs",
        ),
    ] = 30.0
    drain_timeout: Annotated[
        float,
        Meta(ge=0, description="seconds that open requests have when a pipeline stops"),
    ] = 30.0
    profile: Annotated[
        int,
        Meta(ge=0, description="steps, from the 100th on, that each worker writes a trace of"),
    ] = 0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="least log level shown")
    ] = "info"
    log_format: Annotated[
        Literal["text", "json"], Meta(description="log lines as text, or a JSON map each")
    ] = "text"
    otlp_endpoint: Annotated[
        str,
        Meta(description="where traces of requests go: an OpenTelemetry collector's HTTP address"),
    ] = ""

    @property
    def max_running(self) -> int:
        """Limit of sequences that run at once, in all replicas."""
        return self.max_num_seqs * self.dp

    @property
    def origins(self) -> list[str]:
        """The list in `allowed_origins`. Raises msgspec.DecodeError."""
        if not self.allowed_origins.startswith("["):
            return [self.allowed_origins] if self.allowed_origins else []
        return msgspec.json.decode(self.allowed_origins, type=list[str])

    @property
    def run_folder(self) -> Path:
        """Where the pipeline's sockets and `config.json` are; of mode 0700."""
        return run_folder(self.name)

    @property
    def model_folder(self) -> Path:
        """The checkpoint to serve."""
        if self.model:
            return Path(self.model)
        return Path(__file__).parents[1] / "models" / "demo" / "checkpoint"


def run_folder(name: str) -> Path:
    """Return the run folder of the pipeline `name` of this user."""
    parent = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(parent) / f"penstock-{os.getuid()}" / name


def replica_of(name: str, config: Config) -> int:
    """Return the replica of a scheduler or worker, from 0 on, by its name; 0 for other processes.

    A replica is a scheduler with its own workers; the other processes serve all replicas.
    `scheduler.1` is replica 0. The first `tp` workers are of replica 0, the next `tp` of replica 1;
    workers beyond `tp * dp` wait as spare ones, for each replica in turn.
    """
    kind, _, number = name.partition(".")
    if kind not in ("scheduler", "worker") or not number.isdecimal():
        return 0
    index = int(number) - 1
    if kind == "worker" and index < config.tp * config.dp:
        index //= config.tp
    return index % config.dp
