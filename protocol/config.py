"""The configuration of a pipeline: every option with its type, default, limit and description.

`launch` makes a flag of each field and writes the result as `config.json` into the run folder;
every process reads it from there. A process started without `launch` (by another Procfile runner)
takes `PENSTOCK_<FIELD>` variables instead.
"""

import os
import re
import tempfile
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import asdict

from penstock.protocol.messages.plan import MAX_BLOCKS, MAX_SLOTS

DEFAULT_CLIENT = "client"
"""whose key is used where no client is named"""

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,32}$")]
Count = Annotated[int, Meta(ge=1)]
Number = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0)]
Processes = Annotated[int, Meta(ge=1, le=256)]
MAX_PROCESSES = 256
"""of one kind; each takes some descriptors of the supervisor"""


class ModelOptions(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The options that each model of a pipeline may have for itself."""

    model: str = ""
    """folder of a Qwen3 checkpoint, its name on the Hugging Face Hub, or a GGUF file; empty: the
    demo model"""
    revision: str = ""
    """branch, tag or commit of --model on the hub; empty: its main branch"""
    served_model_name: str = ""
    """name by which requests choose the model; empty: its name on the hub, or its folder's"""
    trust_request_chat_template: bool = False
    """let requests bring a `chat_template`: a program that a tokenizer runs"""
    tool_call_parser: Literal["auto", "hermes", "qwen3_coder", "json"] = "auto"
    """how the model writes tool calls; auto: as its chat template does"""
    tp: Count = 1
    """tensor-parallel size: number of workers"""
    dp: Count = 1
    """data-parallel replicas: schedulers, each with --tp workers"""
    routing: Literal["prefix", "load", "random"] = "prefix"
    """the replica of a request; prefix: one that has the beginning of its prompt, unless others
    have much less to do; load: the one with the fewest"""
    enable_expert_parallel: bool = False
    """each worker has whole experts instead of a part of every expert (MoE)"""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """type in which the model computes; auto: on GPUs the checkpoint's if it is float16, otherwise
    bfloat16; on CPUs float32: the only one there, which dequantizes integers if it is given"""
    quantization: Literal["none", "fp8", "int8", "int4"] = "none"
    """weights of the layers in 8 bits, on CPUs also as integers of 8 or 4 bits; a checkpoint in fp8
    is known as such"""
    quantize_lm_head: bool = False
    """the head in 8 bits (e4m3, on CPUs with integers: integers), too"""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """keys and values as the model computes them, or in 8 bits (e4m3)"""
    speculative_method: Literal["none", "ngram"] = "none"
    """ngram: guess tokens that followed the same ones before, check them"""
    num_speculative_tokens: Annotated[int, Meta(ge=1, le=32)] = 5
    """most tokens guessed for a row in one step"""
    spare_workers: Number = 0
    """workers more of each replica that wait, prepared as a standby group if they are enough for
    one (--tp), to take the place of those that die"""
    tokenizers: Processes = 1
    """tokenizer processes at start"""
    detokenizers: Processes = 1
    """detokenizer processes at start"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """where the model runs; auto: on GPUs if there is one for each worker"""
    attention: Literal["auto", "flash-attn", "triton", "torch"] = "auto"
    """attention back end; auto: the fastest that is installed"""
    block_size: Number = 0
    """tokens per KV block; 0: the default of the attention back end"""
    num_blocks: Annotated[int, Meta(ge=0, le=MAX_BLOCKS)] = 0
    """KV blocks; 0: as many as --kv-cache-gib holds"""
    kv_cache_gib: Annotated[float, Meta(ge=0)] = 0.0
    """memory for the KV cache of each worker, GiB; 0: what --gpu-memory-utilization leaves; 1 on a
    CPU"""
    kv_offload_gib: Annotated[float, Meta(ge=0)] = 0.0
    """host memory of each worker for KV blocks that the prefix cache evicts, GiB; 0: none"""
    kv_offload_folder: str = ""
    """folder of files with KV blocks of the host tier, which outlive the pipeline; needs
    --kv-offload-gib"""
    kv_offload_folder_gib: Annotated[float, Meta(gt=0)] = 64.0
    """most that each worker writes there, GiB"""
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] = 0.9
    """share of the GPU's memory that may be in use"""
    deterministic: bool = False
    """on GPUs, compute the same bits of a sequence's logits in every batch, after every recovery,
    by slower kernels; on CPUs they always are the same"""
    enable_cuda_graphs: bool = True
    """replay steps as CUDA graphs"""
    max_model_len: Number = 0
    """longest prompt and output, tokens; 0: the model's context"""
    max_num_seqs: Annotated[int, Meta(ge=1, le=MAX_SLOTS)] = 256
    """most sequences that run at once"""
    max_num_batched_tokens: Count = 2048
    """most tokens in one step"""
    max_waiting_requests: Number = 1024
    """requests accepted beyond what runs; more are `overloaded`"""
    max_waiting_tokens: Count = 1 << 22
    """prompt tokens of requests that wait; more are `overloaded`"""
    max_open_bytes: Count = 1 << 30
    """bytes of open requests and their answers; more are `overloaded`"""
    num_plans_in_flight: Annotated[int, Meta(ge=1, le=8)] = 4
    """most plans sent ahead of their results; more than 2 where steps are short"""
    enable_prefix_caching: bool = True
    """share the KV blocks of equal prefixes"""
    watermark: Annotated[float, Meta(ge=0, lt=1)] = 0.01
    """share of blocks kept free when a request is admitted"""
    num_threads: Number = 0
    """CPU threads of each worker; 0: (cores - 1) / (tp * dp)"""

    @property
    def model_name(self) -> str:
        """Name by which requests choose the model."""
        return self.served_model_name or (Path(self.model).name if self.model else "qwen3-demo")

    @property
    def group(self) -> str:
        """Name of the model as a folder, which begins the names of its processes."""
        return re.sub(r"[^A-Za-z0-9_.-]", "-", self.model_name.rpartition("/")[2])[-64:]


class Config(ModelOptions, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Every option of a pipeline."""

    name: Name = "default"
    """name of the pipeline and of its run folder"""
    backend: Literal["local", "ray"] = "local"
    """where processes run; local: on this machine; ray: on a Ray cluster"""
    address: str = "auto"
    """of the Ray cluster, HOST:PORT; auto: the one this machine is in"""
    endpoint: str = "tcp://127.0.0.1:5555"
    """where clients connect"""
    curve_keys: str = ""
    """folder of `launch keys`: only clients with a key connect, encrypted"""
    insecure: bool = False
    """let other machines reach --endpoint without keys, and --http-host without --api-key: anyone
    may ask, and anyone on the way reads prompts and answers"""
    http: Annotated[int, Meta(ge=0, le=256)] = 1
    """HTTP processes at start: OpenAI's API, metrics, a page"""
    http_host: str = "127.0.0.1"
    """address where they listen"""
    http_port: Annotated[int, Meta(ge=1, le=65535)] = 8000
    """port where they listen, all at the same one"""
    api_key: str = ""
    """key of HTTP clients, `Authorization: Bearer …` or `X-API-Key: …`; better PENSTOCK_API_KEY or
    --api-key-file, which no list of processes shows"""
    api_key_file: str = ""
    """file whose first line is the key"""
    allowed_origins: str = ""
    """web pages that may use the API: a JSON list of origins, or `*` for all"""
    max_unread_bytes: Count = 1 << 24
    """bytes of answers that a client leaves unread before it is cut off"""
    max_request_bytes: Number = 0
    """longest request, bytes; 0: 16 a token of the longest context, at least 1 MiB"""
    hang_timeout: Seconds = 5.0
    """seconds without a sign of life or use of a CPU after which a process is killed"""
    step_timeout: Seconds = 60.0
    """seconds after which a process that is at one piece of work is killed, or computes without a
    sign of life"""
    lease_timeout: Seconds = 30.0
    """seconds after a restart of the gateway in which clients must send running requests again"""
    drain_timeout: Annotated[float, Meta(ge=0)] = 30.0
    """seconds that open requests have when a pipeline stops"""
    profile: Number = 0
    """steps, from the 100th on, that each worker writes a trace of"""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """least log level shown"""
    log_format: Literal["text", "json"] = "text"
    """log lines as text, or a JSON map each"""
    otlp_endpoint: str = ""
    """where traces of requests go: an OpenTelemetry collector's HTTP address"""

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
        """Where the sockets are; of mode 0700."""
        return run_folder(self.name)

    @property
    def pipeline_folder(self) -> Path:
        """Where the sockets of all models and `config.json` are."""
        return run_folder(self.name.partition("/")[0])

    @property
    def prefix(self) -> str:
        """The beginning of the names of the model's processes; empty where it is the only one."""
        return self.name.partition("/")[2] and f"{self.group}/"

    def by_model(self) -> "list[Config]":
        """Return the configuration of each model; with several, a model's folder is its name."""
        return [self]

    def of_process(self, name: str) -> "Config":
        """Return the configuration of a process: that of its model, if it is of one of several."""
        return next(
            (one for one in self.by_model() if one.prefix and name.startswith(one.prefix)), self
        )

    @property
    def model_folder(self) -> Path:
        """The checkpoint to serve."""
        if self.model:
            return Path(self.model)
        return Path(__file__).parents[1] / "models" / "demo" / "checkpoint"


class PipelineConfig(Config, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The configuration of a pipeline that serves several models."""

    models: tuple[ModelOptions, ...] = ()
    """of each model; the options of `Config` itself are those of the first one"""

    def by_model(self) -> list[Config]:
        pipeline = {field: getattr(self, field) for field in Config.__struct_fields__}
        num_workers = sum(one.tp * one.dp for one in self.models)
        num_threads = max(1, ((os.cpu_count() or 1) - 1) // num_workers)
        return [
            Config(
                **pipeline
                | asdict(one)
                | {
                    "name": f"{self.name}/@{one.group}",
                    "num_threads": one.num_threads or num_threads,
                }
            )
            for one in self.models
        ]


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
    kind, _, number = name.rpartition("/")[2].partition(".")
    if kind not in ("scheduler", "worker") or not number.isdecimal():
        return 0
    index = int(number) - 1
    if kind == "worker" and index < config.tp * config.dp:
        index //= config.tp
    return index % config.dp
