"""Checkpoints of every form are loaded, wrong ones refused by name, and no rank reads too much."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Qwen3ForCausalLM

from penstock.models import weights
from penstock.models.tensor_parallel import TensorParallel
from penstock.protocol.checkpoint import ModelError
from penstock.protocol.checkpoint_files import INDEX_FILE, SINGLE_FILE
from tests.models.checkpoints import check_tensors, save_checkpoint, write_embedding_files
from tests.models.forward import load_model
from tests.search import diagonal

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def change(folder: Path, **tensors: Tensor | None) -> None:
    """Replace tensors of a checkpoint in one file; None removes it."""
    changed = {**load_file(folder / SINGLE_FILE), **tensors}
    kept = {name: tensor for name, tensor in changed.items() if tensor is not None}
    save_file(kept, folder / SINGLE_FILE)


def test_shards_and_a_single_file_hold_the_same(tmp_path: Path) -> None:
    single, sharded = tmp_path / "single", tmp_path / "sharded"
    save_checkpoint(single)
    save_checkpoint(sharded, max_shard_size="40KB")
    assert not (sharded / SINGLE_FILE).exists()
    assert len(list(sharded.glob("*.safetensors"))) > 2
    expected = load_model(single).state_dict()
    for name, tensor in load_model(sharded).state_dict().items():
        assert tensor.any()
        assert torch.equal(tensor, expected[name])


def test_an_index_of_older_shards_is_left(tmp_path: Path) -> None:
    """A file was saved later than the shards; transformers reads only that file."""
    save_checkpoint(tmp_path, max_shard_size="40KB")
    save_checkpoint(tmp_path)
    change(tmp_path, **{Q_PROJ: torch.full((128, 64), 2.0)})
    min(tmp_path.glob("model-*.safetensors")).unlink()
    reference = Qwen3ForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(reference.state_dict()[Q_PROJ], torch.full((128, 64), 2.0))
    check_tensors(tmp_path)
    weight = load_model(tmp_path).model.layers[0].self_attn.qkv_proj.weight
    assert torch.equal(weight[:128], torch.full((128, 64), 2.0))


def test_bfloat16_is_widened(tmp_path: Path) -> None:
    save_checkpoint(tmp_path)
    narrow = torch.randn(128, 64).bfloat16()
    change(tmp_path, **{Q_PROJ: narrow})
    weight = load_model(tmp_path).model.layers[0].self_attn.qkv_proj.weight
    assert weight.dtype == torch.float32
    assert torch.equal(weight[:128], narrow.float())


def test_frequencies_that_old_checkpoints_hold_are_left(tmp_path: Path) -> None:
    save_checkpoint(tmp_path)
    expected = load_model(tmp_path).state_dict()
    change(tmp_path, **{"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    assert all(
        torch.equal(one, expected[n]) for n, one in load_model(tmp_path).state_dict().items()
    )


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_are_refused(tmp_path: Path, number: float) -> None:
    save_checkpoint(tmp_path)
    weight = torch.randn(128, 64)
    weight[-1, -1] = number
    change(tmp_path, **{Q_PROJ: weight})
    sentence = f"{Q_PROJ} in .*: got NaN or infinite numbers, expected finite ones"
    with pytest.raises(ModelError, match=sentence):
        load_model(tmp_path)


def test_models_that_do_not_generate_say_so(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, tie_word_embeddings=True)
    change(tmp_path, **{"score.weight": torch.ones(1, 64)})
    with pytest.raises(ModelError, match=r"has score.weight: a reranker or classifier"):
        load_model(tmp_path)
    tensors = load_file(tmp_path / SINGLE_FILE)
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(bare, tmp_path / SINGLE_FILE)
    with pytest.raises(ModelError, match=r"without 'model.' before it, as embedding models"):
        load_model(tmp_path)
    del bare["score.weight"]
    save_file(bare, tmp_path / SINGLE_FILE)
    write_embedding_files(tmp_path)
    check_tensors(tmp_path)
    loaded = load_model(tmp_path).state_dict()
    assert torch.equal(loaded["model.norm.weight"], bare["norm.weight"])
    save_file(tensors, tmp_path / SINGLE_FILE)  # with the score, which an embedding model lacks
    with pytest.raises(ModelError, match=r"has score.weight"):
        load_model(tmp_path)


def test_progress_is_told_for_every_tensor(tmp_path: Path) -> None:
    reference = save_checkpoint(tmp_path)
    calls: list[None] = []
    model = load_model(tmp_path)
    weights.load_weights(model, tmp_path, lambda: calls.append(None))
    assert len(calls) == len(reference.state_dict())


def test_each_file_of_several_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, weights.__name__)
    save_checkpoint(tmp_path, max_shard_size="40KB")
    model = load_model(tmp_path)
    assert not caplog.messages
    weights.load_weights(model, tmp_path, lambda: None, log_files=True)
    number = len(list(tmp_path.glob("*.safetensors")))
    assert caplog.messages == [f"weights: {n} of {number} files" for n in range(1, number + 1)]


@pytest.mark.parametrize(
    ("size", "vocab_size", "tie_word_embeddings"), diagonal([2, 4], [264, 333, 5], [False, True])
)
def test_the_ranks_parts_make_up_the_whole(
    tmp_path: Path, size: int, vocab_size: int, tie_word_embeddings: bool
) -> None:
    shape = {"vocab_size": vocab_size, "tie_word_embeddings": tie_word_embeddings}
    checkpoint = save_checkpoint(tmp_path, **shape).state_dict()
    ranks = [load_model(tmp_path, TensorParallel(rank, size)) for rank in range(size)]
    layers = [rank.model.layers[1] for rank in ranks]

    def assert_whole(name: str, parts: list[Tensor], dim: int = 0) -> None:
        expected = checkpoint[f"model.{name}.weight"]
        assert torch.equal(torch.cat(parts, dim)[: len(expected)], expected)

    for index, name in enumerate(("q_proj", "k_proj", "v_proj")):
        merged = [layer.self_attn.qkv_proj for layer in layers]
        parts = [linear.weight.split(linear.sizes)[index] for linear in merged]
        assert_whole(f"layers.1.self_attn.{name}", parts)
    for index, name in enumerate(("gate_proj", "up_proj")):
        parts = [layer.mlp.gate_up_proj.weight.chunk(2)[index] for layer in layers]
        assert_whole(f"layers.1.mlp.{name}", parts)
    assert_whole("layers.1.mlp.down_proj", [layer.mlp.down_proj.weight for layer in layers], 1)
    assert_whole("layers.1.self_attn.o_proj", [x.self_attn.o_proj.weight for x in layers], 1)
    assert_whole("embed_tokens", [rank.model.embed_tokens.weight for rank in ranks])
    assert all(hasattr(rank, "lm_head") != tie_word_embeddings for rank in ranks)
    for layer in layers:
        assert torch.equal(layer.self_attn.q_norm.weight, checkpoint[Q_NORM])


Q_NORM = "model.layers.1.self_attn.q_norm.weight"


class CountingSlice:
    """A slice of safetensors that counts the elements read through it."""

    def __init__(self, source: Any, counts: list[int]) -> None:
        self._source = source
        self._counts = counts
        self.get_shape = source.get_shape

    def __getitem__(self, index: Any) -> Tensor:
        part: Tensor = self._source[index]
        self._counts.append(part.numel())
        return part


def test_a_rank_reads_its_part_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path)
    counts: list[int] = []

    class CountingFile:
        def __init__(self, file: Any) -> None:
            self.keys = file.keys
            self.get_slice = lambda name: CountingSlice(file.get_slice(name), counts)

    def counting_open(path: Path, framework: str) -> CountingFile:
        return CountingFile(safe_open(path, framework))

    monkeypatch.setattr(weights, "safe_open", counting_open)
    model: nn.Module = load_model(tmp_path, TensorParallel(1, 4))
    assert sum(counts) == sum(parameter.numel() for parameter in model.parameters())


def test_a_tied_head_in_the_file_is_passed_over(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, tie_word_embeddings=True)
    change(tmp_path, **{"lm_head.weight": torch.zeros(264, 64)})
    assert load_model(tmp_path).model.embed_tokens.weight.any()


def test_refuses_a_checkpoint_that_does_not_fit(tmp_path: Path) -> None:
    save_checkpoint(tmp_path)
    change(tmp_path, **{Q_PROJ: torch.zeros(128, 63)})
    with pytest.raises(ModelError, match=r"q_proj.*: got shape \[128, 63\], expected \[128, 64\]"):
        load_model(tmp_path)
    change(tmp_path, **{Q_PROJ: None})
    with pytest.raises(ModelError, match=f"lacks 1 tensors, such as {Q_PROJ}"):
        load_model(tmp_path)
    change(tmp_path, **{Q_PROJ: torch.zeros(128, 64), "model.extra": torch.zeros(1)})
    with pytest.raises(ModelError, match=r"has 1 unknown tensors, such as model\.extra"):
        load_model(tmp_path)


def test_refuses_files_that_can_not_be_read(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, max_shard_size="40KB")
    shard = min(tmp_path.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:1000])
    with pytest.raises(ModelError, match=shard.name):
        load_model(tmp_path)
    shard.unlink()
    with pytest.raises(ModelError, match=shard.name):
        load_model(tmp_path)
    (tmp_path / INDEX_FILE).write_text("{}")
    with pytest.raises(ModelError, match="weight_map"):
        load_model(tmp_path)
    (tmp_path / INDEX_FILE).unlink()
    with pytest.raises(ModelError, match=SINGLE_FILE):
        load_model(tmp_path)
