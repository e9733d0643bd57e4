"""Startup of a worker: device, process group, weights, KV cache, CUDA graphs."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from msgspec.structs import replace

from penstock.kernels.attention.backends import AttentionBackend, choose_attention
from penstock.kernels.extras import use_deterministic_kernels, use_rank_memory
from penstock.kernels.matrices import FP8
from penstock.models.architecture import Architecture, Ranks, describe
from penstock.models.layers import Setup
from penstock.models.model import Model
from penstock.models.parallel import with_integers
from penstock.models.tensor_parallel import TensorParallel
from penstock.models.weights import load_weights, with_own_head
from penstock.protocol.checkpoint import ModelConfig, ModelError, read_model_config
from penstock.protocol.config import Config
from penstock.protocol.messages.plan import BatchPlan
from penstock.protocol.messages.worker import WorkerAssignment
from penstock.protocol.processors import threads_of_worker
from penstock.protocol.transport.socket_pairs import MemoryClient
from penstock.services.worker.cuda_graphs import graph_shapes
from penstock.services.worker.grammars import Grammars
from penstock.services.worker.hardware import (
    INTEGER_BITS,
    check_capability,
    check_integers,
    checked,
    choose_device,
    compile_layers,
    compute_dtype,
    may_compile,
    narrow_weights,
    takes_integers,
)
from penstock.services.worker.memory.kv_cache import (
    KVLayout,
    free_gpu_bytes,
    worst_case_plan,
    zeros,
)
from penstock.services.worker.memory.kv_offload import make_offload
from penstock.services.worker.memory.persistent_memory import PersistentMemory, Region, load_model
from penstock.services.worker.memory.state_memory import StateLayout, check_step_size
from penstock.services.worker.model_runner import ModelRunner
from penstock.services.worker.persistent_batch import PersistentBatch
from penstock.services.worker.timings import StartTimes, step_profiler

log = logging.getLogger(__name__)
CPU_KV_BYTES = 1 << 30  # size of the KV cache on a CPU by default


class Rank(NamedTuple):
    """The facts of a rank that are known before its weights are loaded."""

    config: Config
    assignment: WorkerAssignment
    model_config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    tp: TensorParallel
    attention: AttentionBackend
    memory: PersistentMemory

    @property
    def max_blocks(self) -> int:
        """Number of KV blocks of the longest sequence."""
        max_model_len = self.model_config.context(self.config.max_model_len)
        return -(-max_model_len // self.attention.block_size)

    @property
    def num_positions(self) -> int:
        """Number of tokens of the longest sequence, rounded up to whole blocks."""
        return self.max_blocks * self.attention.block_size


def load(
    config: Config, assignment: WorkerAssignment, on_progress: Callable[[], None]
) -> ModelRunner:
    """Join the group, load weights, allocate the KV cache, and capture CUDA graphs.

    Calls `on_progress` repeatedly. Raises ModelError, GroupError.
    """
    times = StartTimes()
    times.end("place")
    index = assignment.replica * config.tp + assignment.rank
    device = choose_device(config.device, index, config.tp, config.dp)
    check_capability(device)
    use_deterministic_kernels(config.deterministic and device.type == "cuda")
    if device.type == "cpu":
        use_rank_memory()
    torch.set_num_threads(config.num_threads or threads_of_worker(config.tp * config.dp))
    options = config.quantization, config.speculative_method
    model_config = read_model_config(config.model_folder, *options)
    model_config = with_own_head(model_config, config.model_folder)
    architecture = describe(model_config)
    architecture.check_ranks(assignment.tp_size, config.enable_expert_parallel)
    dtype = compute_dtype(model_config, config.dtype, device)
    # Another thread loads the tokenizer while this thread waits for the group, device and disk.
    grammars = None if assignment.rank else Grammars(config.model_folder)
    tp = TensorParallel.join(
        assignment.rendezvous, assignment.rank, assignment.tp_size, device, assignment.spans_nodes
    )
    check_integers(config, device)
    attention = _attention(config, architecture, assignment.tp_size, device)
    log.info("%s, %s, attention: %s", device, dtype, attention.name)
    times.end("group")
    num_tokens = max(config.max_num_batched_tokens, config.max_num_seqs)
    tp.reserve(num_tokens * model_config.hidden_size, dtype)
    memory = PersistentMemory(config, assignment, device, MemoryClient.from_environment())
    rank = Rank(config, assignment, model_config, device, dtype, tp, attention, memory)
    model = _load_model(rank, on_progress)
    times.end("weights")
    if device.type == "cpu":
        compile_layers(config, model_config, model)
        times.end("compilation")
    runner = _make_runner(rank, model, grammars)
    if config.kv_offload_gib or config.kv_offload_folder:
        runner.offload = make_offload(config, memory, runner.kv.tensors, runner.states)
    times.end("KV cache")
    on_progress()
    if device.type == "cuda" and (shapes := graph_shapes(config, model, rank.num_positions)):
        runner.use_graphs(shapes)
        if not (assignment.standby or assignment.num_blocks):
            for _ in runner.capture_graphs():  # other graphs are captured at their first use
                on_progress()
        times.end("CUDA graphs")
    if grammars:
        grammars.wait()
        times.end("grammars")
    if config.profile:
        trace = f"trace-{config.name.replace('/', '-')}-{index}.json"
        parent = config.pipeline_folder.parent  # the run folder is removed with the pipeline
        runner.profiler = step_profiler(config.profile, parent / trace)
    log.info("ready after %s", times)
    return runner


def _load_model(rank: Rank, on_progress: Callable[[], None]) -> Model:
    """Make the model with the last worker's weights, or load the checkpoint's weights."""
    config, model_config = rank.config, rank.model_config
    on_cpu = rank.device.type == "cpu"
    integers = on_cpu and takes_integers(config, model_config, rank.tp.size)
    makes_integers = config.quantization in INTEGER_BITS or (integers and model_config.is_packed)

    def make() -> Model:
        keep = with_integers() if integers else contextlib.nullcontext()
        with torch.device(rank.device), default_dtype(rank.dtype), keep:
            return Model(
                Setup(model_config, rank.tp, rank.attention, config.enable_expert_parallel),
                rank.num_positions,
                quantize_lm_head=config.quantize_lm_head and not makes_integers,
            )

    def fill(model: Model) -> None:
        load_weights(
            model,
            config.model_folder,
            on_progress,
            model_config.weight_format,
            log_files=rank.assignment.rank == 0,
        )
        if on_cpu and may_compile(config) and not model_config.fp8:
            narrow_weights(model)

    return checked(load_model(rank.memory, config, make, fill))


def _attention(
    config: Config, architecture: Architecture, tp_size: int, device: torch.device
) -> AttentionBackend:
    heads, kv_heads = architecture.heads
    ranks = Ranks(tp_size)
    try:
        return choose_attention(
            config.attention,
            config.block_size,
            num_heads=heads.units_of_rank(ranks),
            num_kv_heads=kv_heads.units_of_rank(ranks),
            head_dim=kv_heads.unit_size,
            max_rows=config.max_num_seqs,
            device=device,
            kv_cache_dtype=config.kv_cache_dtype,
        )
    except ValueError as error:
        raise ModelError(str(error)) from error


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set the default type of floating-point tensors in a block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _make_runner(rank: Rank, model: Model, grammars: Grammars | None) -> ModelRunner:
    """Make a runner with the last worker's KV cache, or with a new KV cache."""
    config, memory, attention = rank.config, rank.memory, rank.attention
    kv_dtype = FP8 if config.kv_cache_dtype == "fp8" else rank.dtype
    architecture = describe(rank.model_config)
    if architecture.state_layers:
        check_step_size(config, attention.block_size)
    layout = KVLayout(architecture, rank.tp.size, attention.block_size, kv_dtype)
    layouts = StateLayout(layout, config.max_num_seqs, is_shared=not config.num_blocks)
    facts = layout.tp_size, layout.block_size, str(kv_dtype), attention.name, bool(model.compiled)
    kept = memory.take("kv", *facts)
    if kept and kept.manifest.num_blocks < rank.assignment.num_blocks:
        memory.drop("kv")
        kept = None

    def make(
        num_blocks: int, region: Region | None = None, layouts: StateLayout = layouts
    ) -> ModelRunner:
        sizes = rank.max_blocks, layout.block_size, num_blocks, rank.model_config.vocab_size
        batch = PersistentBatch(config.max_num_seqs, *sizes, layouts.num_states(num_blocks))
        held = region.memory if region else zeros(layouts.num_bytes(num_blocks), rank.device)
        kv = layout.allocate(layouts.num_allocated(num_blocks), held)
        return ModelRunner(
            model,
            batch,
            kv,
            config.max_num_batched_tokens,
            grammars,
            memory_id=region.manifest.number if region else 0,
            take_over=memory.take_over,
            states=layouts.allocate(num_blocks, kv, held),
            max_drafts=config.num_speculative_tokens,
            blocks_per_state=layouts.is_shared * layouts.blocks_per_state,
        )

    if kept:
        return make(kept.manifest.num_blocks, kept)
    num_blocks = rank.assignment.num_blocks or config.num_blocks
    if not num_blocks:
        trial = layouts._replace(num_rows=0, is_shared=False)  # without states, as nothing is kept
        make_trial = partial(make, 1, layouts=trial)
        num_bytes = _kv_bytes(rank, model, make_trial, trial.num_bytes(1))
        num_blocks = layouts.num_fitting_blocks(num_bytes)
    new = memory.allocate("kv", layouts.num_bytes(num_blocks), *facts)
    if new is None:
        return make(num_blocks)
    new.region.manifest.num_blocks = num_blocks
    new.keep()
    return make(num_blocks, new.region)


def _kv_bytes(rank: Rank, model: Model, make: Callable[[], ModelRunner], trial_bytes: int) -> float:
    """Return the size of the KV cache: the configured size, or the free memory of a GPU.

    make: makes a runner with few KV blocks, to measure the memory of its largest steps.
    trial_bytes: size of the KV cache and states of such a runner.
    """
    config = rank.config
    if config.kv_cache_gib or rank.device.type == "cpu":
        return config.kv_cache_gib * 2**30 or CPU_KV_BYTES
    return _free_bytes(rank, model, make, trial_bytes)


def _free_bytes(
    rank: Rank, model: Model, make: Callable[[], ModelRunner], trial_bytes: int
) -> float:
    """Return the free memory of a GPU, as `_kv_bytes` does."""
    config = rank.config
    torch.cuda.empty_cache()  # small buffers would keep large segments from the KV cache
    trial = make()
    shapes = graph_shapes(config, model, rank.num_positions)
    most = max((shape.num_tokens for shape in shapes), default=1)
    of_graphs = replace(config, max_num_batched_tokens=most)
    sizes = rank.num_positions, rank.attention.block_size
    plans = [worst_case_plan(of_graphs, *sizes), worst_case_plan(config, *sizes)]
    if model.has_head:
        plans.append(worst_case_plan(config, *sizes, with_extras=True))
    for plan in plans:
        plan.num_drafts = min(1, trial.max_drafts)
    num_bytes = free_gpu_bytes(
        [partial(_run_alone, trial, plan) for plan in plans],
        config.gpu_memory_utilization,
        rank.device,
        trial_bytes=trial_bytes,
        has_standby=rank.memory.lasts and config.spare_workers >= config.tp,
    )
    del trial
    torch.cuda.empty_cache()  # else torch would keep the memory of its states
    return num_bytes


def _run_alone(runner: ModelRunner, plan: BatchPlan) -> None:
    runner.launch(plan).output()
    runner.clear()
