"""Startup of a worker: device, group, weights, KV cache, CUDA graphs."""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from functools import partial

import torch

from penstock.kernels.attention.backends import choose_attention
from penstock.kernels.attention.reference import AttentionBackend
from penstock.kernels.determinism import use_deterministic_kernels
from penstock.kernels.layouts.forward_batch import BatchShape
from penstock.kernels.quantize.types import FP8
from penstock.models.allocation import with_integers
from penstock.models.moe import MoE
from penstock.models.qwen3 import Qwen3
from penstock.models.tensor_parallel import TensorParallel
from penstock.models.weights import load_weights
from penstock.protocol.checkpoint import (
    ModelConfig,
    ModelError,
    check_tp,
    quantized,
    read_model_config,
)
from penstock.protocol.config import Config
from penstock.protocol.messages.packed import pack
from penstock.protocol.messages.plan import BatchPlan, RowAdded, RowExtras
from penstock.protocol.messages.structured import StructuredOutputs
from penstock.protocol.messages.worker import WorkerAssignment
from penstock.protocol.run_folder import make_run_folder
from penstock.protocol.transport.kept_memory import MemoryClient
from penstock.services.worker.compiling import (
    INTEGER_BITS,
    compile_layers,
    may_compile,
    narrow_weights,
    takes_integers,
)
from penstock.services.worker.cuda_graphs import decode_shapes, prefill_shapes
from penstock.services.worker.determinism import checked
from penstock.services.worker.device import check_capability, choose_device, compute_dtype
from penstock.services.worker.grammars import Grammars
from penstock.services.worker.kept_memory import KeptMemory, Region, load_model
from penstock.services.worker.kv_cache import (
    allocate_kv_cache,
    free_gpu_bytes,
    kv_block_bytes,
    num_fitting_blocks,
)
from penstock.services.worker.kv_offload import make_offload
from penstock.services.worker.model_runner import ModelRunner
from penstock.services.worker.persistent_batch import PersistentBatch
from penstock.services.worker.timings import StartTimes, step_profiler

log = logging.getLogger(__name__)
CPU_KV_BYTES = 1 << 30
"""size of the KV cache on a CPU by default"""


def load(
    config: Config, assignment: WorkerAssignment, on_progress: Callable[[], None]
) -> ModelRunner:
    """Join the group, load this rank's weights, allocate its KV cache, capture its graphs.

    Calls `on_progress` repeatedly. Raises ModelError, GroupError.
    """
    times = StartTimes()
    times.end("place")
    index = assignment.replica * config.tp + assignment.rank
    device = choose_device(config.device, index, config.tp, config.dp)
    check_capability(device)
    # One core is for the other processes: waiting for a thread without a core is slow.
    num_cores = ((os.cpu_count() or 1) - 1) // (config.tp * config.dp)
    torch.set_num_threads(config.num_threads or max(1, num_cores))
    model_config = quantized(read_model_config(config.model_folder), config.quantization)
    check_tp(model_config, assignment.tp_size, config.enable_expert_parallel)
    dtype = compute_dtype(model_config, config.dtype, device)
    # Its thread loads while this thread waits for the group, the device and the disk.
    grammars = None if assignment.rank else Grammars(config.model_folder)
    place = assignment.rendezvous, assignment.rank, assignment.tp_size
    tp = TensorParallel.join(*place, device, assignment.spans_nodes)
    _check_integers(config, device)
    attention = _attention(config, model_config, assignment.tp_size, device)
    log.info("%s, %s, attention: %s", device, dtype, attention.name)
    times.end("group")
    max_model_len = model_config.context(config.max_model_len)
    max_blocks = -(-max_model_len // attention.block_size)
    num_tokens = max(config.max_num_batched_tokens, config.max_num_seqs)
    tp.reserve(num_tokens * model_config.hidden_size, dtype)
    memory = KeptMemory(config, assignment, device, MemoryClient.from_environment())
    sizes = dtype, max_blocks * attention.block_size
    model = _load_model(config, model_config, memory, tp, attention, *sizes, on_progress)
    times.end("weights")
    if device.type == "cpu":
        compile_layers(config, model_config, model)
        times.end("compilation")
    blocks = dtype, max_blocks, assignment.num_blocks
    runner = _make_runner(config, model_config, model, *blocks, grammars, memory)
    if config.kv_offload_gib or config.kv_offload_folder:
        runner.offload = make_offload(config, memory, runner.kv.tensors)
    times.end("KV cache")
    on_progress()
    if device.type == "cuda" and config.enable_cuda_graphs and attention.can_be_captured:
        runner.use_graphs(_graph_shapes(config, model, max_blocks * attention.block_size))
        if not (assignment.standby or assignment.num_blocks):
            for _ in runner.capture_graphs():  # otherwise each is captured at its first use
                on_progress()
        times.end("CUDA graphs")
    if grammars:
        grammars.wait()
        times.end("grammars")
    if config.profile:
        path = make_run_folder(config) / f"trace-{index}.json"
        runner.profiler = step_profiler(config.profile, path)
    log.info("ready after %s", times)
    return runner


def _load_model(
    config: Config,
    model_config: ModelConfig,
    memory: KeptMemory,
    tp: TensorParallel,
    attention: AttentionBackend,
    dtype: torch.dtype,
    num_positions: int,
    on_progress: Callable[[], None],
) -> Qwen3:
    on_cpu = memory.device.type == "cpu"
    integers = on_cpu and takes_integers(config, model_config, tp.size)
    makes_integers = config.quantization in INTEGER_BITS or (integers and model_config.is_packed)
    choices = config.enable_expert_parallel, config.quantize_lm_head and not makes_integers

    def make() -> Qwen3:
        keep = with_integers() if integers else contextlib.nullcontext()
        with torch.device(memory.device), default_dtype(dtype), keep:
            return Qwen3(model_config, tp, attention, num_positions, *choices)

    def fill(model: Qwen3) -> None:
        load_weights(model, config.model_folder, on_progress, model_config.weight_format)
        if on_cpu and may_compile(config) and not model_config.fp8:
            narrow_weights(model)

    return checked(load_model(memory, config, make, fill))


def _check_integers(config: Config, device: torch.device) -> None:
    """Raise ModelError for weights of integers where layers are not compiled."""
    if config.quantization not in INTEGER_BITS:
        return
    if device.type != "cpu":
        raise ModelError(f"--quantization: got {config.quantization} on a GPU, expected fp8")
    if config.attention != "auto" or config.kv_cache_dtype == "fp8":
        raise ModelError(
            f"--quantization: got {config.quantization} with --attention {config.attention} "
            f"and --kv-cache-dtype {config.kv_cache_dtype}, expected auto for both"
        )


def _attention(
    config: Config, model: ModelConfig, tp_size: int, device: torch.device
) -> AttentionBackend:
    use_deterministic_kernels(config.deterministic and device.type == "cuda")
    try:
        return choose_attention(
            config.attention,
            config.block_size,
            num_heads=model.num_attention_heads // tp_size,
            num_kv_heads=max(1, model.num_key_value_heads // tp_size),
            head_dim=model.head_dim,
            max_rows=config.max_num_seqs,
            device=device,
            kv_cache_dtype=config.kv_cache_dtype,
        )
    except ValueError as error:
        raise ModelError(str(error)) from error


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make floating-point tensors of this type by default."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _make_runner(
    config: Config,
    model_config: ModelConfig,
    model: Qwen3,
    dtype: torch.dtype,
    max_blocks: int,
    num_blocks: int,
    grammars: Grammars | None,
    memory: KeptMemory,
) -> ModelRunner:
    """Make a runner with the last worker's KV cache, or with `num_blocks`; 0: as many as fit."""
    weight, block_size = model.model.embed_tokens.weight, model.attention.block_size
    vocab_size = model_config.vocab_size
    shape = (model_config, model.tp.size, block_size)
    kv_dtype = FP8 if config.kv_cache_dtype == "fp8" else dtype

    facts = *shape[1:], str(kv_dtype), model.attention.name, model.compiled is not None
    kept = memory.take("kv", *facts)
    if kept and kept.manifest.num_blocks < num_blocks:
        memory.drop("kv")
        kept = None

    def make(num_blocks: int, region: Region | None = None) -> ModelRunner:
        sizes = config.max_num_seqs, max_blocks, block_size, num_blocks, vocab_size
        kv = allocate_kv_cache(*shape, num_blocks, kv_dtype, weight.device, region)
        keeps = region.manifest.number if region else 0, memory.take_over
        max_tokens = config.max_num_batched_tokens
        return ModelRunner(model, PersistentBatch(*sizes), kv, max_tokens, grammars, *keeps)

    if kept:
        return make(kept.manifest.num_blocks, kept)
    if not (num_blocks := num_blocks or config.num_blocks):
        num_bytes = config.kv_cache_gib * 2**30
        if weight.is_cuda and not num_bytes:
            trial = make(1)
            sizes = config, max_blocks * block_size, block_size
            plans = [worst_case_plan(*sizes)]
            if model.has_head:
                plans.append(worst_case_plan(*sizes, with_extras=True))
            steps = [partial(_run_alone, trial, plan) for plan in plans]
            limits = config.gpu_memory_utilization, weight.device
            has_standby = memory.lasts and config.spare_workers >= config.tp
            num_bytes = free_gpu_bytes(steps, *limits, has_standby=has_standby)
            del trial, steps
        num_blocks = num_fitting_blocks(num_bytes or CPU_KV_BYTES, *shape, kv_dtype)
    new = memory.allocate("kv", num_blocks * kv_block_bytes(*shape, kv_dtype), *facts)
    if new is None:
        return make(num_blocks)
    new.region.manifest.num_blocks = num_blocks
    new.keep()
    return make(num_blocks, new.region)


def _graph_shapes(config: Config, model: Qwen3, max_model_len: int) -> list[BatchShape]:
    shapes = decode_shapes(config.max_num_seqs, max_model_len)
    if model.attention.can_capture_prefill:
        num_weights = sum(parameter.numel() for parameter in model.parameters())
        num_weights -= sum(moe.num_idle_weights for moe in model.modules() if isinstance(moe, MoE))
        sizes = config.max_num_seqs, config.max_num_batched_tokens
        shapes += prefill_shapes(*sizes, num_weights, max_model_len)
    return shapes


def _run_alone(runner: ModelRunner, plan: BatchPlan) -> None:
    runner.launch(plan).output()
    runner.clear()


def worst_case_plan(
    config: Config, max_model_len: int, block_size: int, with_extras: bool = False
) -> BatchPlan:
    """Return a plan with the maximum tokens and rows of a step, all in block 0.

    with_extras: one row has most of the tokens, and all rows have all extras.
    """
    num_rows = min(config.max_num_seqs, config.max_num_batched_tokens)
    lengths = [1 if with_extras else config.max_num_batched_tokens // num_rows] * num_rows
    lengths[0] += config.max_num_batched_tokens - sum(lengths)
    lengths = [min(length, max_model_len) for length in lengths]
    added = [
        RowAdded(
            slot=slot,
            token_ids=bytes(4 * length),
            block_ids=bytes(4 * -(-length // block_size)),
            num_computed_tokens=0,
            temperature=1.0,
            top_k=20,
            top_p=0.95,
            min_p=0.0,
            seed=slot,
            extras=_all_extras(length) if with_extras else None,
        )
        for slot, length in enumerate(lengths)
    ]
    chunks = pack(number for pair in enumerate(lengths) for number in pair)
    return BatchPlan(epoch=0, step=0, added=added, chunks=chunks)


def _all_extras(num_prompt_tokens: int) -> RowExtras:
    grammar = StructuredOutputs(regex="a*")
    return RowExtras(
        num_prompt_tokens, 1.0, 1.0, 1.5, {0: 1.0}, 0, [], 20, 20, grammar, bad_words=[[1], [2, 3]]
    )
