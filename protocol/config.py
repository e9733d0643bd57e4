"""The configuration of a pipeline: every option with its type, default, limit and description.

`launch` makes a flag of each field and writes the result as `config.json` into the run folder;
every process reads it from there. A process started without `launch` (by another Procfile runner)
takes `PENSTOCK_<FIELD>` variables instead.

A run folder in a place where everybody may write (/tmp) is opened only if it belongs to this user
alone.
"""

import os
import re
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from penstock.protocol.decoding import explain
from penstock.protocol.messages.plan import MAX_BLOCKS, MAX_SLOTS
from penstock.protocol.processors import threads_of_worker

DISTRIBUTION = "penstock-llm"  # the name on PyPI; `penstock` is another project there
DEFAULT_CLIENT = "client"  # name of the client whose key is used by default
HYBRID_DEMO = "demo-hybrid"  # value of `model` for the second demo model

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,32}$")]
Count = Annotated[int, Meta(ge=1)]
Number = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0)]
MAX_PROCESSES = 256  # limit of processes of a kind; each takes descriptors of the supervisor
Processes = Annotated[int, Meta(ge=1, le=MAX_PROCESSES)]
ProcessesOrNone = Annotated[int, Meta(ge=0, le=MAX_PROCESSES)]


class Config(Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Every option of a pipeline; options before `name` may differ between its models."""

    model: str = ""
    """folder of a Qwen3 checkpoint, its name on the Hugging Face Hub, or a GGUF file; empty: the
    demo model; demo-hybrid: the hybrid demo model"""
    revision: str = ""
    """branch, tag or commit of --model on the hub; empty: its main branch"""
    served_model_name: str | tuple[str, ...] = ""
    """names by which requests choose the model; replies have the first one. Empty: its name on the
    hub, or its folder's"""
    trust_request_chat_template: bool = False
    """accept a `chat_template` in requests, which is a program that a tokenizer runs"""
    default_chat_template_kwargs: str = ""
    """variables of the chat template unless a request sets them, as a JSON map, such as
    `{"preserve_thinking": true}`"""
    tool_call_parser: Literal["auto", "hermes", "qwen3_coder", "json"] = "auto"
    """format of the model's tool calls; auto: taken from its chat template"""
    tp: Processes = 1
    """tensor-parallel size: number of workers"""
    dp: Processes = 1
    """data-parallel replicas: schedulers, each with --tp workers"""
    routing: Literal["prefix", "load", "random"] = "prefix"
    """how the replica of a request is chosen; prefix: most of the prompt in its cache, unless its
    load is much higher; load: fewest requests"""
    enable_expert_parallel: bool = False
    """distribute whole experts over the workers instead of a part of every expert (MoE)"""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """data type of computations; auto: on GPUs float16 for checkpoints in float16, otherwise
    bfloat16. CPUs compute in float32; float32 given explicitly also dequantizes integers"""
    quantization: Literal["none", "fp8", "int8", "int4"] = "none"
    """quantize the layers while loading: fp8, or on CPUs int8 and int4. Quantized checkpoints are
    recognised without this option"""
    quantize_lm_head: bool = False
    """quantize the output head to 8 bits, too: fp8 (e4m3), or int8 on CPUs with int8 or int4"""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """data type of the KV cache; auto: that of the model; fp8: e4m3"""
    speculative_method: Literal["auto", "none", "ngram", "mtp"] = "auto"
    """speculative decoding; ngram: draft the tokens that followed the same n-gram earlier; mtp: let
    the checkpoint's layer of multi-token prediction draft; auto: mtp on GPUs, if there is one"""
    num_speculative_tokens: Annotated[int, Meta(ge=1, le=32)] = 5
    """maximum number of draft tokens for a sequence in one step"""
    spare_workers: ProcessesOrNone = 0
    """additional workers of each replica that replace workers that die; at least --tp of them form
    a standby group that is ready to continue"""
    tokenizers: Processes = 1
    """tokenizer processes at start"""
    detokenizers: Processes = 1
    """detokenizer processes at start"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """device of the model; auto: GPUs if there is one for each worker, otherwise the CPU"""
    attention: Literal["auto", "flash-attn", "triton", "torch"] = "auto"
    """attention back end; auto: the fastest that is installed"""
    block_size: Number = 0
    """tokens in a KV block; 0: default of the attention back end"""
    num_blocks: Annotated[int, Meta(ge=0, le=MAX_BLOCKS)] = 0
    """KV blocks; 0: as many as --kv-cache-gib holds"""
    kv_cache_gib: Annotated[float, Meta(ge=0)] = 0.0
    """memory for the KV cache of each worker, GiB; 0: what --gpu-memory-utilization leaves, or
    1 on a CPU"""
    kv_offload_gib: Annotated[float, Meta(ge=0)] = 0.0
    """host memory of each worker for KV blocks that the prefix cache evicts, GiB; 0: none"""
    kv_offload_folder: str = ""
    """folder where KV blocks of the host tier are also kept in files, which outlive the pipeline;
    needs --kv-offload-gib"""
    kv_offload_folder_gib: Annotated[float, Meta(gt=0)] = 64.0
    """maximum size of each worker's files in --kv-offload-folder, GiB"""
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] = 0.9
    """share of the GPU's memory that may be in use, by other processes too"""
    deterministic: bool = False
    """use batch-invariant kernels on GPUs: slower, but a sequence has the same logits, bit by bit,
    in every batch and after every recovery. Always the case on CPUs"""
    enable_cuda_graphs: bool = True
    """replay steps as CUDA graphs"""
    max_model_len: Number = 0
    """maximum length of prompt and output together, tokens; 0: the model's context"""
    max_num_seqs: Annotated[int, Meta(ge=1, le=MAX_SLOTS)] = 256
    """maximum number of sequences in the running batch"""
    max_num_batched_tokens: Count = 2048
    """maximum number of tokens in one step; longer prompts are processed in chunks"""
    target_itl_ms: Annotated[float, Meta(ge=0)] = 0.0
    """longest time between two tokens of a stream beside prompts of others, ms: chunks of prompts
    are as short as this needs; 0: steps take up to 32 times as long as decoding alone, and over a
    second only 8 times"""
    max_waiting_requests: Number = 1024
    """maximum number of waiting requests; further ones are refused as `overloaded`"""
    max_waiting_tokens: Count = 1 << 22
    """maximum number of prompt tokens of waiting requests; further requests are `overloaded`"""
    max_open_bytes: Count = 1 << 30
    """maximum size of open requests and their answers, bytes; further requests are `overloaded`"""
    num_plans_in_flight: Annotated[int, Meta(ge=1, le=8)] = 4
    """maximum number of plans sent ahead of their results; more than 2 only if steps are short"""
    enable_prefix_caching: bool = True
    """reuse the KV blocks of prompts that begin with the same tokens"""
    watermark: Annotated[float, Meta(ge=0, lt=1)] = 0.01
    """share of KV blocks that stays free when a request is admitted"""
    num_threads: Number = 0
    """CPU threads of each worker; 0: (cores - 1) / (tp * dp), of those that affinity and cgroup
    leave to the pipeline"""

    name: Name = "default"
    """name of the pipeline and of its run folder"""
    backend: Literal["local", "ray"] = "local"
    """where processes run; local: on this machine; ray: on a Ray cluster"""
    address: str = "auto"
    """address of the Ray cluster, HOST:PORT; auto: the cluster of this machine"""
    endpoint: str = "tcp://127.0.0.1:5555"
    """address of the ZeroMQ socket for clients"""
    curve_keys: str = ""
    """folder made by `launch keys`; connections are encrypted and need a client key"""
    insecure: bool = False
    """allow addresses of other machines without --curve-keys and --api-key: anyone may send
    requests, and the network sees prompts and answers"""
    http: ProcessesOrNone = 1
    """HTTP processes at start, which serve the HTTP APIs, metrics and the chat page"""
    http_host: str = "127.0.0.1"
    """address of the HTTP server"""
    http_port: Annotated[int, Meta(ge=1, le=65535)] = 8000
    """port of the HTTP server, which all HTTP processes share"""
    api_key: str = ""
    """API key that HTTP clients send (`Authorization: Bearer` or `X-API-Key`). Prefer
    PENSTOCK_API_KEY or --api-key-file, which are not visible in the list of processes"""
    api_key_file: str = ""
    """file whose first line is the API key"""
    allowed_origins: str = ""
    """origins of web pages that may use the API: a JSON list, or `*` for all"""
    max_unread_bytes: Count = 1 << 24
    """bytes that a client may leave unread before it is disconnected"""
    max_request_bytes: Number = 0
    """maximum size of a request, bytes; 0: 16 for each token of the context, at least 1 MiB"""
    hang_timeout: Seconds = 5.0
    """seconds after which a process without heartbeat and CPU use is killed"""
    step_timeout: Seconds = 60.0
    """seconds after which a process is killed that makes no progress in a step, starts, or computes
    without a heartbeat"""
    lease_timeout: Seconds = 30.0
    """seconds within which clients must resubmit running requests after a restart of the gateway"""
    drain_timeout: Annotated[float, Meta(ge=0)] = 30.0
    """seconds that open requests have to finish when the pipeline stops"""
    profile: Number = 0
    """number of steps that each worker profiles, beginning with step 100; 0: none"""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """lowest level of log lines that are shown"""
    log_format: Literal["text", "json"] = "text"
    """format of log lines; json: one JSON map a line"""
    otlp_endpoint: str = ""
    """HTTP address of an OpenTelemetry collector that receives traces of requests"""
    models: tuple["Config", ...] = ()
    """configuration of each of several models; options of models in this one are the first's"""

    def __post_init__(self) -> None:
        """Remove the brackets of an IPv6 address, which URLs need."""
        if self.http_host.startswith("[") and self.http_host.endswith("]"):
            msgspec.structs.force_setattr(self, "http_host", self.http_host[1:-1])

    @property
    def model_name(self) -> str:
        """The model's name in replies, metrics and commands."""
        return self.model_names[0]

    @property
    def model_names(self) -> list[str]:
        """Names by which requests choose the model."""
        given = self.served_model_name
        names = [given] if isinstance(given, str) else given
        own = Path(self.model).name if self.model else "qwen3-demo"
        return [*dict.fromkeys(filter(None, names))] or [own]

    @property
    def group(self) -> str:
        """Folder name of the model, with which the names of its processes begin."""
        return re.sub(r"[^A-Za-z0-9_.-]", "-", self.model_name.rpartition("/")[2])[-64:]

    @property
    def max_running(self) -> int:
        """Maximum number of running sequences in all replicas."""
        return self.max_num_seqs * self.dp

    @property
    def origins(self) -> list[str]:
        """The list in `allowed_origins`. Raises msgspec.DecodeError."""
        if not self.allowed_origins.startswith("["):
            return [self.allowed_origins] if self.allowed_origins else []
        return msgspec.json.decode(self.allowed_origins, type=list[str])

    @property
    def template_defaults(self) -> dict[str, Any]:
        """The map in `default_chat_template_kwargs`. Raises msgspec.DecodeError."""
        return msgspec.json.decode(self.default_chat_template_kwargs or "{}", type=dict[str, Any])

    @property
    def run_folder(self) -> Path:
        """The folder of the sockets, with mode 0700."""
        return run_folder(self.name)

    @property
    def pipeline_folder(self) -> Path:
        """The folder of the sockets of all models and of `config.json`."""
        return run_folder(self.name.partition("/")[0])

    @property
    def prefix(self) -> str:
        """The prefix of the names of the model's processes; empty for a single model."""
        return self.name.partition("/")[2] and f"{self.group}/"

    def by_model(self) -> "list[Config]":
        """Return the configuration of each model; with several models, each has its own folder."""
        if not self.models:
            return [self]
        pipeline = {option: getattr(self, option) for option in PIPELINE_OPTIONS}
        num_threads = threads_of_worker(sum(model.tp * model.dp for model in self.models))
        return [
            msgspec.structs.replace(
                model,
                **pipeline
                | {
                    "name": f"{self.name}/@{model.group}",
                    "num_threads": model.num_threads or num_threads,
                },
            )
            for model in self.models
        ]

    def of_process(self, name: str) -> "Config":
        """Return the configuration of a process: with several models, its model's configuration."""
        models = (model for model in self.by_model() if model.prefix)
        return next((model for model in models if name.startswith(model.prefix)), self)

    @property
    def model_folder(self) -> Path:
        """The checkpoint to serve."""
        demos = Path(__file__).parents[1] / "models" / "demo"
        if self.model == HYBRID_DEMO:
            return demos / "hybrid"
        return Path(self.model) if self.model else demos / "checkpoint"


OPTIONS = Config.__struct_fields__[:-1]  # all but `models`, which no flag sets
MODEL_OPTIONS = OPTIONS[: OPTIONS.index("name")]
PIPELINE_OPTIONS = OPTIONS[len(MODEL_OPTIONS) :]
RUN_FOLDER_VARIABLES = "XDG_RUNTIME_DIR", "TMPDIR"  # the first that is set names the parent folder


def run_folder(name: str) -> Path:
    """Return the run folder of the pipeline `name` of this user."""
    # not `tempfile.gettempdir`, which tries the folder with a file: a process killed then leaves it
    parents = (path for name in RUN_FOLDER_VARIABLES if (path := os.environ.get(name)))
    return Path(next(parents, "/tmp")).absolute() / f"penstock-{os.getuid()}" / name  # noqa: S108 - ours is 0700


def replica_of(name: str, config: Config) -> int:
    """Return the replica's index of a scheduler or worker, by its name; 0 for other processes.

    A replica is a scheduler with its own workers; the other processes serve all replicas.
    `scheduler.1` is replica 0. The first `tp` workers belong to replica 0, the next `tp` to replica
    1; workers beyond `tp * dp` are spare workers, assigned to the replicas in turn.
    """
    kind, _, number = name.rpartition("/")[2].partition(".")
    if kind not in ("scheduler", "worker") or not number.isdecimal():
        return 0
    index = int(number) - 1
    if kind == "worker" and index < config.tp * config.dp:
        index //= config.tp
    return index % config.dp


CONFIG_FILE = "config.json"
CONFIG_VARIABLE = "PENSTOCK_CONFIG"
API_KEY_VARIABLE = "PENSTOCK_API_KEY"
_OTHERS_WRITE = 0o022
_INSTEAD = "set XDG_RUNTIME_DIR to a folder that only you may write into"


def make_own_folder(path: Path) -> None:
    """Make a folder with mode 0700. Raises OSError, and PermissionError like `check_own_folder`."""
    try:
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise OSError(f"{path}: {error.strerror}; {_INSTEAD}") from error
    check_own_folder(path, make_private=True)


def check_own_folder(path: Path, *, make_private: bool = False, instead: str = _INSTEAD) -> None:
    """Raise PermissionError for a symbolic link, or a folder that is not this user's alone.

    Raises FileNotFoundError for a missing folder. make_private: give the folder mode 0700.
    instead: advice for the case that the folder can't be removed.
    """
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except NotADirectoryError:
        what = "a symbolic link" if path.is_symlink() else "a file"
        raise _refused(path, f"is {what}", instead) from None
    try:
        if problem := foreign(folder):
            raise _refused(path, problem, instead)
        if make_private:
            os.fchmod(folder, 0o700)
    finally:
        os.close(folder)


def foreign(descriptor: int) -> str:
    """Return the reason why an open file or folder is not this user's alone; empty: no reason."""
    status = os.fstat(descriptor)
    if status.st_uid != os.getuid():
        return f"belongs to user {status.st_uid}"
    others_write = status.st_mode & _OTHERS_WRITE
    return f"has mode {status.st_mode & 0o777:o}, so that others may write" if others_write else ""


def _refused(path: Path, what: str, instead: str) -> PermissionError:
    return PermissionError(
        f"{path} {what}, expected a folder of user {os.getuid()} alone; remove it, or {instead}"
    )


def make_run_folder(config: Config) -> Path:
    """Create the run folder, for this user only. Raises PermissionError like `check_own_folder`.

    The umask is set, so that files of this process and its children are also for this user only.
    Sockets get their mode from the umask when they are bound.
    """
    make_parent_folder(config)
    make_own_folder(config.run_folder)
    return config.run_folder


def make_parent_folder(config: Config) -> Path:
    """Create the folder of all run folders, like `make_run_folder`."""
    os.umask(0o077)
    make_own_folder(config.run_folder.parent)
    return config.run_folder.parent


def write_config(config: Config) -> Path:
    """Write `config.json` into the run folder, atomically. Return its path."""
    path = make_run_folder(config) / CONFIG_FILE
    descriptor, new = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(config)))
    return Path(new).rename(path)


def read_config(path: Path) -> Config:
    """Read a configuration. Raises msgspec.ValidationError for an invalid file."""
    return msgspec.json.decode(path.read_bytes(), type=Config)


def config_from_environment() -> Config:
    """Return the configuration that `launch` wrote, or the `PENSTOCK_<FIELD>` variables.

    Raises msgspec.ValidationError; OSError and ValueError for an unusable API key file.
    """
    if path := os.environ.get(CONFIG_VARIABLE):
        return read_config(Path(path))
    given: dict[str, str | list[str]] = {
        field: os.environ[f"PENSTOCK_{field.upper()}"]
        for field in OPTIONS
        if f"PENSTOCK_{field.upper()}" in os.environ
    }
    if names := given.get("served_model_name"):
        given["served_model_name"] = str(names).split()
    try:
        config = msgspec.convert(given, Config, strict=False)
    except msgspec.ValidationError as error:
        field, _, reason = explain(str(error), given, Config)[1].partition(":")
        raise msgspec.ValidationError(f"PENSTOCK_{field.upper()}:{reason}") from None
    return with_api_key(config)


def with_api_key(config: Config) -> Config:
    """Return `config` with the API key from `api_key`, `api_key_file` or the environment.

    Raises OSError for an unreadable file, and ValueError for a file without a key.
    """
    key = config.api_key
    if not key and config.api_key_file:
        key = Path(config.api_key_file).read_text().partition("\n")[0].strip()
        if not key:
            raise ValueError(f"api_key_file: the first line of {config.api_key_file} is empty")
    return msgspec.structs.replace(config, api_key=key or os.getenv(API_KEY_VARIABLE, "").strip())
