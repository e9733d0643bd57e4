"""Decisions of a worker before it runs."""

import shutil
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from llguidance import LLTokenizer
from safetensors.torch import load_file, save_file

from penstock.kernels.back_ends import CHOSEN, is_deterministic
from penstock.kernels.cpu import compiled_step
from penstock.kernels.layouts.forward_batch import BatchShape
from penstock.kernels.layouts.sampling import BIAS, DEFERRED, MASK, PENALTIES
from penstock.models.model import Model
from penstock.models.weights import SINGLE_FILE
from penstock.protocol.checkpoint import ModelError
from penstock.protocol.config import Config
from penstock.protocol.messages.structured import StructuredOutputs
from penstock.protocol.messages.worker import WorkerAssignment
from penstock.protocol.transport.process import NODE_VARIABLE
from penstock.services.worker import grammars, hardware
from penstock.services.worker.cuda_graphs import choose, decode_shapes, order, prefill_shapes
from penstock.services.worker.hardware import GPU_VARIABLE, choose_device
from penstock.services.worker.loading import load
from penstock.services.worker.logits_processor import MAX_PROMPT_TOKENS
from penstock.services.worker.memory.kv_cache import worst_case_plan
from penstock.services.worker.model_runner import ModelRunner
from penstock.services.worker.persistent_batch import PersistentBatch, shape_of
from tests.models.checkpoints import save_checkpoint
from tests.models.forward import load_model
from tests.models.hybrid import EXPERTS, SMALL, save_hybrid

ASSIGNMENT = WorkerAssignment(1, "g", 0, 1, "")


def start(**options: object) -> ModelRunner:
    config = Config(device="cpu", **options)  # type: ignore[arg-type]
    return load(config, ASSIGNMENT, lambda: None)


def loaded_model(**options: object) -> Model:
    return start(**options)._model


def test_layers_of_a_cpu_are_compiled_with_the_checkpoints_16_bits() -> None:
    runner = start()
    assert runner._model.compiled is not None
    assert runner._model.head.weight.dtype == torch.bfloat16
    assert {cache.k.dtype for cache in runner._kv_caches} == {torch.float32}


def test_a_cpu_needs_no_other_kernels_to_be_deterministic() -> None:
    assert loaded_model(deterministic=True).compiled is not None
    assert not is_deterministic()


def test_the_output_layer_in_8_bits_is_checked_as_well_as_the_embedding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU, `checked` stands without products."""
    save_checkpoint(tmp_path, tie_word_embeddings=False)
    model = load_model(tmp_path, quantize_lm_head=True, is_compiled=False)
    multiplied = []

    def product(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        multiplied.append(module)
        return x

    monkeypatch.setattr(hardware, "is_deterministic", lambda: True)
    monkeypatch.setattr(hardware, "_product", product)
    assert hardware.checked(model) is model
    assert {model.head, model.model.embed_tokens} <= set(multiplied)


@torch.inference_mode()
def test_the_check_computes_experts_as_the_model_does(tmp_path: Path) -> None:
    save_hybrid(tmp_path, **EXPERTS)
    layer = load_model(tmp_path, is_compiled=False).model.layers[0]
    layer.post_attention_layernorm.weight.fill_(1.0)
    x = torch.randn(5, SMALL["hidden_size"])
    expected = layer.mlp(x, layer.post_attention_layernorm)
    assert torch.equal(hardware._product(layer.mlp, x), expected)


def test_without_a_compiled_step_layers_are_compiled_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the functions around the layers, a step runs without them, also while decoding."""

    def fails() -> None:
        raise OSError("cannot be linked")

    monkeypatch.setattr(compiled_step, "compiled_step", fails)
    monkeypatch.setattr(CHOSEN, "compiled_step", None)
    runner = start()
    assert runner._model.compiled is not None
    assert runner._decode is None


def test_weights_of_32_bits_stay(tmp_path: Path) -> None:
    save_checkpoint(tmp_path)
    model = loaded_model(model=str(tmp_path))
    assert model.compiled is not None
    assert model.head.weight.dtype == torch.float32


@pytest.mark.parametrize("options", [{}, {"quantization": "int8"}, {"attention": "torch"}], ids=str)
def test_a_head_that_is_not_the_embedding_is_used(
    tmp_path: Path, options: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever `tie_word_embeddings` says; equal tensors share their memory."""
    save_checkpoint(tmp_path, tie_word_embeddings=True, intermediate_size=128)
    tensors = load_file(tmp_path / SINGLE_FILE)
    head = tensors["model.embed_tokens.weight"].clone()
    save_file({**tensors, "lm_head.weight": head}, tmp_path / SINGLE_FILE)
    model = loaded_model(model=str(tmp_path), **options)
    assert model.head is model.model.embed_tokens
    head[-1, -1] += 1.0
    save_file({**tensors, "lm_head.weight": head}, tmp_path / SINGLE_FILE)
    model = loaded_model(model=str(tmp_path), **options)
    assert torch.equal(model.head.weight, head)
    assert torch.equal(model.model.embed_tokens.weight, tensors["model.embed_tokens.weight"])
    assert "tie_word_embeddings: got true, but lm_head.weight differs" in caplog.text


@pytest.mark.parametrize(
    "options",
    [{"attention": "torch"}, {"kv_cache_dtype": "fp8"}, {"quantization": "fp8"}],
    ids=str,
)
def test_layers_that_are_not_compiled_run_in_torch(options: dict[str, object]) -> None:
    assert loaded_model(**options).compiled is None


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_integers_replace_the_weights_of_the_layers(quantization: str) -> None:
    model = loaded_model(quantization=quantization)
    assert model.compiled is not None
    matrices = [one for one in model.model.layers.parameters() if one.ndim == 2]
    assert not matrices
    assert model.model.embed_tokens.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("options", [{"attention": "torch"}, {"kv_cache_dtype": "fp8"}], ids=str)
def test_integers_without_compiled_layers_are_refused(options: dict[str, str]) -> None:
    with pytest.raises(ModelError, match="--quantization: got int8 with --attention"):
        loaded_model(quantization="int8", **options)


def test_without_a_compiler_integers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "penstock.models.compiled", None)
    with pytest.raises(ModelError, match="--quantization int4: "):
        loaded_model(quantization="int4")


def test_without_a_compiler_layers_run_in_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "penstock.models.compiled", None)
    assert loaded_model().compiled is None
    assert [record.levelname for record in caplog.records].count("WARNING") == 1
    assert "layers run in torch, not compiled" in caplog.text


@pytest.mark.parametrize(
    ("wanted", "num_gpus", "tp_size", "device"),
    [
        ("auto", 0, 1, "cpu"),
        ("auto", 1, 1, "cuda:0"),
        ("auto", 2, 2, "cuda:1"),
        ("auto", 1, 2, "cpu"),
        ("cpu", 8, 1, "cpu"),
        ("cuda", 4, 2, "cuda:1"),
    ],
)
def test_the_device_of_the_last_rank(
    monkeypatch: pytest.MonkeyPatch, wanted: str, num_gpus: int, tp_size: int, device: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    assert str(choose_device(wanted, tp_size - 1, tp_size)) == device


@pytest.fixture
def on_cluster(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Return a node with four GPUs."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setenv(NODE_VARIABLE, "/nowhere")
    return monkeypatch


def test_too_few_gpus_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ModelError, match="--tp 2 needs 2 GPUs; this machine has 1"):
        choose_device("cuda", 0, 2)
    with pytest.raises(ModelError, match="--tp 1 with --dp 2 needs 2 GPUs; this machine has 1"):
        choose_device("cuda", 0, 1, 2)


@pytest.mark.parametrize(
    ("wanted", "given", "device"),
    [
        ("auto", "3", "cuda:3"),
        ("cuda", "0", "cuda:0"),
        ("cpu", "3", "cpu"),
        ("auto", None, "cpu"),
    ],
)
def test_on_a_cluster_a_worker_has_the_gpu_that_it_is_given(
    on_cluster: pytest.MonkeyPatch, wanted: str, given: str | None, device: str
) -> None:
    """Not that of its rank: here it is the first of 16."""
    if given:
        on_cluster.setenv(GPU_VARIABLE, given)
    assert str(choose_device(wanted, 0, 8, 2)) == device


def test_a_gpu_that_can_not_be_had_on_a_cluster_is_told(on_cluster: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="--device: got cuda, but the cluster assigned no GPU"):
        choose_device("cuda", 0, 1)
    on_cluster.setenv(GPU_VARIABLE, "4")
    with pytest.raises(ModelError, match="PENSTOCK_GPU: got 4, expected an index of 4 GPUs"):
        choose_device("auto", 0, 1)


def test_the_group_knows_whether_it_spans_nodes(folder: Path) -> None:
    config = Config(model=str(folder), device="cpu", num_blocks=1)
    for spans_nodes in (False, True):
        place = WorkerAssignment(1, "group", 0, 1, "", spans_nodes=spans_nodes)
        assert load(config, place, lambda: None)._model.tp.spans_nodes == spans_nodes


def test_a_back_end_that_can_not_be_had_is_told(folder: Path) -> None:
    with pytest.raises(ModelError, match="attention: got 'triton' without a GPU"):
        start(model=str(folder), attention="triton")


def test_a_worker_that_is_ready_has_loaded_the_grammars_tokenizer(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading a real vocabulary takes over a second, in which no other thread runs.

    A first request must not pay it.
    """
    loads: list[str] = []
    is_awaited, wait = threading.Event(), grammars.Grammars.wait

    def load_when_awaited(path: str) -> LLTokenizer:
        loads.append(path)
        assert is_awaited.wait(60)
        return LLTokenizer(path)

    monkeypatch.setattr(grammars, "LLTokenizer", load_when_awaited)
    monkeypatch.setattr(grammars.Grammars, "wait", lambda own: is_awaited.set() or wait(own))
    matchers = start(model=str(folder), num_blocks=1).logits_processor.grammars
    assert matchers is not None
    assert matchers._tokenizer.done()
    matchers.add(0, StructuredOutputs(regex="a"), [], [])
    matchers.fill(np.zeros((1, matchers.num_words), np.int32), {0: 0})
    assert loads == [str(folder / "tokenizer.json")]


def test_a_tokenizer_that_grammars_can_not_read_is_told(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json: llguidance could not read it: "):
        start(model=str(tmp_path), num_blocks=1)


def test_graphs_are_of_every_size_that_the_design_names() -> None:
    def sizes(max_num_seqs: int) -> list[int]:
        shapes = decode_shapes(max_num_seqs, 1000)
        assert all(
            one == BatchShape(one.num_rows, one[0], one[0], 0, 64, 1, 1000) for one in shapes
        )
        return [one.num_rows for one in shapes]

    assert sizes(1) == [1]
    assert sizes(30) == [1, 2, 4, 8, 16, 24, 30]
    assert sizes(256) == [1, 2, 4, *range(8, 257, 8)]
    assert sizes(300) == [1, 2, 4, *range(8, 257, 8), 272, 288, 300]


def test_graphs_that_prefill_are_for_what_a_host_launches_too_slowly() -> None:
    large = prefill_shapes(256, 8192, 7_000_000_000, 1000)
    sizes = {64, 128, 192, 256, 384, 512, 640, 768, 896, 1024}
    assert {one.num_tokens for one in large} == sizes
    assert {one.num_rows for one in large if one.num_tokens == 256} == {16, 64, 256}
    assert {one.num_rows for one in large if one.num_tokens == 64} == {16, 64}
    assert {shape.tile_size for shape in large if shape.num_tokens == 64} == {64}
    assert {shape.tile_size for shape in large if shape.num_tokens == 128} == {64, 128}
    assert {shape.tile_size for shape in large if shape.num_tokens == 512} == {64, 128}
    assert {shape.tile_size for shape in large if shape.num_tokens > 512} == {128}
    assert min(shape.num_rows for shape in large if shape.tile_size == 128) == 64
    for number in (1, 16, 17):
        shapes = [shape for shape in prefill_shapes(number, 128, 1, 1000) if shape[1] == 128]
        assert [shape.tile_size for shape in shapes if shape.num_rows == number] == [64, 128]
    assert max(one.num_tokens for one in prefill_shapes(8, 8192, 600_000_000, 1000)) == 4096
    assert max(one.num_tokens for one in prefill_shapes(8, 300, 600_000_000, 1000)) == 256
    assert len(set(large)) == len(large)


@pytest.mark.parametrize(
    ("step", "rows_tokens"),
    [
        (BatchShape(3, 3, 3, 0, 64, 1, 9), (4, 4)),
        (BatchShape(20, 20, 20, 0, 64, 1, 9), (24, 24)),
        (BatchShape(31, 31, 31, 0, 64, 1, 9), None),
        (BatchShape(1, 3, 0, 1, 64, 3, 9), (16, 64)),
        (BatchShape(17, 64, 16, 1, 64, 48, 99), (30, 64)),
        (BatchShape(17, 65, 16, 1, 64, 49, 99), (30, 128)),
        (BatchShape(17, 144, 16, 1, 128, 128, 199), (30, 192)),
        (BatchShape(30, 300, 0, 30, 64, 10, 10), None),
        (BatchShape(1, 513, 0, 9, 64, 513, 513), None),
    ],
)
def test_a_step_takes_the_smallest_graph_that_it_fits(
    step: BatchShape, rows_tokens: tuple[int, int] | None
) -> None:
    shapes = decode_shapes(30, 1000) + prefill_shapes(30, 600, 600_000_000, 1000)
    chosen = choose(sorted(shapes, key=order), step)
    assert (chosen and chosen[:2]) == rows_tokens
    assert chosen is None or chosen.tile_size == step.tile_size


@pytest.mark.parametrize(("tile", "rows_tokens"), [(64, None), (128, (30, 896))])
def test_no_graph_has_other_tiles(tile: int, rows_tokens: tuple[int, int] | None) -> None:
    """All graphs with room for 300 tokens of 30 rows have large tiles."""
    shapes = sorted(prefill_shapes(30, 4096, 1, 1000), key=order)
    chosen = choose(shapes, BatchShape(30, 300, 0, 30, tile, 10, 10))
    assert (chosen and chosen[:2]) == rows_tokens


def test_a_graph_that_only_decodes_is_for_any_tile() -> None:
    step = shape_of(np.ones(600, int), 600, 9)
    chosen = choose(sorted(decode_shapes(1000, 1000), key=order), step)
    assert chosen and chosen[:2] == (608, 608)


@pytest.mark.parametrize(("max_tokens", "max_seqs"), [(64, 8), (10, 64), (100, 7)])
def test_the_worst_case_is_a_full_step(max_tokens: int, max_seqs: int) -> None:
    config = Config(max_num_batched_tokens=max_tokens, max_num_seqs=max_seqs)
    plan = worst_case_plan(config, 200, 16)
    batch = PersistentBatch(max_seqs, 20, 16, 1, 50)
    batch.apply(plan)
    rows = batch.advance(plan.chunks)
    assert rows is not None
    assert (rows.shape.num_tokens, len(rows.sampled)) == (max_tokens, min(max_seqs, max_tokens))


def test_the_worst_case_asks_for_all_that_takes_memory(folder: Path) -> None:
    """So that the profile run measures what rows that ask take: nothing grows later."""
    config = Config(
        model=str(folder), device="cpu", max_num_seqs=80, max_num_batched_tokens=400, num_blocks=30
    )
    runner = load(config, WorkerAssignment(1, "group", 0, 1, ""), lambda: None)
    state = runner.logits_processor.state
    assert state.occurrences.shape == (80, 264)
    where = [tensor.data_ptr() for tensor in state[1:]]
    plan = worst_case_plan(config, 512, runner.block_size, with_extras=True)
    output = runner.launch(plan).output()
    assert len(output.logprobs) == 80
    assert not output.failed
    ((slot, of_prompt),) = output.prompt_logprobs
    assert (slot, len(of_prompt)) == (0, 400 - 79 - 1)
    assert len(of_prompt) > MAX_PROMPT_TOKENS
    flags = {row.flags for row in runner.logits_processor.rows.values()}
    assert flags == {PENALTIES | BIAS | MASK | DEFERRED}
    runner.clear()
    runner.launch(plan).output()
    assert where == [tensor.data_ptr() for tensor in runner.logits_processor.state[1:]]
