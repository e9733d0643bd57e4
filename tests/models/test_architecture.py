"""The description of a model: tensors as transformers writes them, and how ranks divide them."""

from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from penstock.kernels.layouts.sampling import shard_size
from penstock.models.architecture import FAMILIES, Axis, Ranks, describe
from penstock.protocol.checkpoint import SERVED, ModelError, read_model_config
from tests.models.checkpoints import EXPERTS, check_tensors, save_checkpoint, save_embedding_model
from tests.protocol.test_checkpoint import DEMO, MOE, changed


def written(folder: Path) -> dict[str, list[int]]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize("shape", [{}, {"tie_word_embeddings": True}, EXPERTS])
def test_tensors_of_models_that_generate(tmp_path: Path, shape: dict[str, Any]) -> None:
    save_checkpoint(tmp_path, **shape)
    tensors = describe(read_model_config(tmp_path)).tensors()
    assert {name: sizes for name, sizes, _ in tensors} == written(tmp_path)
    check_tensors(tmp_path)


def test_tensors_of_an_embedding_model(tmp_path: Path) -> None:
    save_embedding_model(tmp_path)
    tensors = describe(read_model_config(tmp_path)).tensors()
    assert {name.removeprefix("model."): sizes for name, sizes, _ in tensors} == written(tmp_path)
    check_tensors(tmp_path)


def test_what_is_served_is_described() -> None:
    assert set(SERVED) <= set(FAMILIES)


def test_a_model_without_experts() -> None:
    architecture = describe(read_model_config(DEMO))
    for size in (1, 2, 4, 8):  # of 8, two have the same KV head
        architecture.check_ranks(size)
    for size in (3, 16):
        with pytest.raises(ModelError, match=rf"tp: got {size}, .* num_.*_heads"):
            architecture.check_ranks(size)
    with pytest.raises(ModelError, match="enable_expert_parallel: got true"):
        architecture.check_ranks(1, expert_parallel=True)
    assert not architecture.of_kind("experts")


def test_experts_are_cut_or_spread(tmp_path: Path) -> None:
    architecture = describe(read_model_config(changed(tmp_path, **MOE)))
    architecture.check_ranks(4)
    architecture.check_ranks(4, expert_parallel=True)
    with pytest.raises(ModelError, match=r"tp: got 8, .* moe_intermediate_size, 100"):
        architecture.check_ranks(8)
    with pytest.raises(ModelError, match=r"tp: got 8, .* num_experts, 60"):
        architecture.check_ranks(8, expert_parallel=True)


def test_layers_with_experts(tmp_path: Path) -> None:
    fields = {**MOE, "decoder_sparse_step": 2, "mlp_only_layers": [3], "intermediate_size": 90}
    config = read_model_config(changed(tmp_path, **fields, num_local_experts=9))
    architecture = describe(config)
    halves = architecture.of_kind("mlp", "experts")
    sparse = [index for index, layer in enumerate(halves) if layer.kind == "experts"]
    assert sparse == [index for index in (1, 5) if index < config.num_hidden_layers]
    (number,) = {weight.experts for weight in halves[1].pick("up_proj", "down_proj")}
    assert number
    assert number.units == 9
    with pytest.raises(ModelError, match=r"tp: got 4, .* intermediate_size, 90"):
        architecture.check_ranks(4)


@pytest.mark.parametrize(
    ("axis", "spans"),
    [
        (Axis("heads", 8, 16), [(0, 32), (32, 64), (64, 96), (96, 128)]),
        (Axis("heads", 2, 16, "shared"), [(0, 16), (0, 16), (16, 32), (16, 32)]),
        (Axis("heads", 8, 16, "shared"), [(0, 32), (32, 64), (64, 96), (96, 128)]),
        (Axis("tokens", 10, division="padded"), [(0, 3), (3, 6), (6, 9), (9, 10)]),
        (Axis("tokens", 2, division="padded"), [(0, 1), (1, 2), (2, 2), (2, 2)]),
    ],
)
def test_spans_of_four_ranks(axis: Axis, spans: list[tuple[int, int]]) -> None:
    ranks = [Ranks(4, rank) for rank in range(4)]
    assert [axis.part(rank)[:2] for rank in ranks] == spans
    assert axis.part(ranks[0]).length == spans[0][1]


@pytest.mark.parametrize("vocab_size", [1, 4096, 4097, 151_936])
def test_the_vocabulary_on_gpus_is_cut_as_the_sampler_needs(vocab_size: int) -> None:
    axis = Axis("vocab_size", vocab_size, division="padded")
    for size in (2, 4, 8):
        assert axis.part(Ranks(size, on_gpus=True)).length == shard_size(vocab_size, size)
    assert axis.part(Ranks(on_gpus=True)).length == vocab_size
