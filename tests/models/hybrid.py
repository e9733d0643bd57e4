"""Random checkpoints of Qwen3.5 as transformers writes them, and their sequences step by step."""

import copy
import functools
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from penstock.kernels.layouts.forward_batch import BatchShape, ForwardBatch
from penstock.kernels.layouts.kv_cache import KVCache
from penstock.kernels.layouts.states import pack_states
from penstock.models.model import Model
from penstock.protocol.checkpoint_files import SINGLE_FILE, fused_parts, is_fused
from penstock.protocol.config import Config
from tests.models import checkpoints
from tests.models.forward import allocate_states

SMALL = {
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    # large enough that every weight shows in the logits; with 0.2 the recurrence amplifies the
    # rounding of float32 to more than 1e-4
    "initializer_range": 0.1,
}
EXPERTS = {
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 40,
}
# (experts, multimodal) → configuration and model
KINDS = {
    (False, False): (Qwen3_5TextConfig, Qwen3_5ForCausalLM),
    (False, True): (Qwen3_5Config, Qwen3_5ForConditionalGeneration),
    (True, False): (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM),
    (True, True): (Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration),
}
_DIMS = {"head_dim": 256, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
_LONG = {
    **_DIMS,
    "max_position_embeddings": 16384,
    "linear_num_key_heads": 2,
}
# the published sizes, shrunken: with their dimensions of heads, and the ratios of their numbers
SIZES = {
    "0.8B": {"num_key_value_heads": 1, "linear_num_value_heads": 2, "tie_word_embeddings": True},
    "4B": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "9B": {"num_key_value_heads": 1},
    "27B": {
        "num_attention_heads": 6,
        "num_key_value_heads": 1,
        "linear_num_value_heads": 6,
        "num_hidden_layers": 8,
    },
    "35B-A3B": {"num_key_value_heads": 1, **EXPERTS},
    "Next-80B-A3B": {
        "num_key_value_heads": 1,
        "family": "Next",
        **EXPERTS,
        "num_experts": 10,
        "shared_expert_intermediate_size": 48,
    },
}
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 4,
}


def shape_of(size: str) -> dict[str, object]:
    return {**_LONG, **SIZES[size]}


def save_hybrid(folder: Path, is_multimodal: bool = False, **shape: object) -> PreTrainedModel:
    """Write a random checkpoint of `SMALL`, changed by `shape`, and return its model.

    The tokenizer is the demo model's. A process makes each checkpoint once.
    """
    made, model = _made(json.dumps({**SMALL, **shape}), is_multimodal)
    shutil.copytree(made, folder, dirs_exist_ok=True)
    return model


@functools.cache
@torch.inference_mode(False)
def _made(shape_json: str, is_multimodal: bool) -> tuple[Path, PreTrainedModel]:
    torch.manual_seed(0)
    shape = json.loads(shape_json)
    shape.setdefault("rope_parameters", rope_of(shape))
    if theta := shape.pop("rope_theta", None):
        shape["rope_parameters"]["rope_theta"] = theta
    of_config, of_model = KINDS["num_experts" in shape, is_multimodal]
    if shape.pop("family", "") == "Next":
        of_config, of_model = Qwen3NextConfig, Qwen3NextForCausalLM
    if is_multimodal:
        config = of_config(text_config=shape, vision_config=VISION)
        config.tie_word_embeddings = shape["tie_word_embeddings"]
    else:
        config = of_config(**shape)
    model = of_model(config).eval()
    for name, parameter in model.named_parameters():
        if "linear_attn.norm" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)
        elif "norm" in name:
            nn.init.uniform_(parameter, -0.5, 0.5)
        elif "dt_bias" in name:
            nn.init.uniform_(parameter, -4, 1)
        elif "conv1d" in name:
            nn.init.normal_(parameter, 0, 0.5)
    folder = Path(tempfile.mkdtemp())
    checkpoints.made_folders.append(folder)
    model.save_pretrained(folder)
    shutil.copy(Config().model_folder / "tokenizer.json", folder)
    return folder, model


class Mtp(nn.Module):
    """The layer of multi-token prediction by its published description, with plain attention."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.base = [model]  # no submodule
        inner = model.model
        inner = getattr(inner, "language_model", inner)
        block = next(layer for layer in inner.layers if hasattr(layer, "self_attn"))
        self.layers = nn.ModuleList([copy.deepcopy(block)])
        norms = (copy.deepcopy(inner.norm) for _ in range(3))
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = norms
        size = inner.norm.weight.shape[0]
        self.fc = nn.Linear(2 * size, size, bias=False)

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """Return the logits of the token after the next one, for each token but the last."""
        (model,) = self.base
        inner = getattr(model.model, "language_model", model.model)
        ids = torch.tensor([token_ids])
        hidden = inner(ids).last_hidden_state[:, :-1]
        return self.block(hidden, ids[:, 1:])[1][0]

    @torch.inference_mode()
    def block(self, hidden: Tensor, next_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the last hidden states, and the logits. hidden: [1, num_tokens, hidden_size]."""
        (model,) = self.base
        inner = getattr(model.model, "language_model", model.model)
        embedded = self.pre_fc_norm_embedding(inner.embed_tokens(next_ids))
        x = self.fc(torch.cat([embedded, self.pre_fc_norm_hidden(hidden)], -1))
        number = x.shape[1]
        later = torch.full((number, number), -torch.inf).triu(1)
        positions = torch.arange(number)[None]
        angles = inner.rotary_emb(x, positions)
        (layer,) = self.layers
        x = layer(x, position_embeddings=angles, attention_mask=later[None, None])
        x = self.norm(x[0] if isinstance(x, tuple) else x)
        return x, model.lm_head(x)


@torch.inference_mode(False)
def add_mtp(folder: Path, model: PreTrainedModel, predicts: bool = False) -> Mtp:
    """Add a layer of multi-token prediction to a checkpoint of `save_hybrid`.

    Its weights are random. predicts: make the layer right about many tokens. The model then looks
    at its last token most, and the layer passes the embedding of the next token on.
    """
    torch.manual_seed(1)
    mtp = Mtp(model)
    for name, parameter in mtp.named_parameters():
        if "norm" in name:
            nn.init.uniform_(parameter, -0.5, 0.5)
        else:
            nn.init.normal_(parameter, 0, 0.1)
    if predicts:
        nn.init.zeros_(mtp.pre_fc_norm_embedding.weight)
        mtp.norm.load_state_dict(mtp.base[0].model.norm.state_dict())
        with torch.no_grad():
            mtp.fc.weight[:] = torch.eye(*mtp.fc.weight.shape)
            for name, parameter in mtp.layers.named_parameters():
                if "norm" not in name:
                    parameter *= 0.1
    path = folder / SINGLE_FILE
    tensors = load_file(path)
    tensors |= {f"mtp.{name}": tensor.clone() for name, tensor in mtp.state_dict().items()}
    if predicts:
        tensors["model.embed_tokens.weight"] *= 30
    save_file(tensors, path, {"format": "pt"})
    return mtp.eval()


def split_experts(folder: Path) -> None:
    """Store the matrices of each expert in tensors of their own, as published in fp8."""
    path = folder / SINGLE_FILE
    tensors = load_file(path)
    fused = {name: tensor for name, tensor in tensors.items() if is_fused(name)}
    parts = fused_parts({name: tensor.shape for name, tensor in fused.items()})
    single = {
        name: fused[part.tensor][part.expert, part.start : part.stop].clone()
        for name, part in parts.items()
    }
    kept = {name: tensor for name, tensor in tensors.items() if name not in fused}
    save_file(kept | single, path)


def rope_of(shape: dict[str, int]) -> dict[str, object]:
    """Return `rope_parameters` with sections for positions in images, which text does not use."""
    turns = shape["head_dim"] // 8
    return {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.25,
        "mrope_section": [turns - 2 * (turns // 3), turns // 3, turns // 3],
        "mrope_interleaved": True,
    }


class Steps:
    """One sequence, computed in steps with the state blocks 0 and 1 in turns."""

    def __init__(self, model: Model, max_tokens: int = 1024) -> None:
        self._model, self.length = model, 0
        self.states = allocate_states(model, 2)
        layers = [layer for layer in model.model.layers if hasattr(layer, "self_attn")]
        attention = layers[0].self_attn
        block = model.attention.block_size
        heads = attention.num_kv_heads, attention.q_norm.weight.shape[0]
        size = -(-max_tokens // block), block, *heads
        self._caches = [KVCache(torch.zeros(size), torch.zeros(size)) for _ in layers]
        self._read, self._written = -1, 0

    def prefill(self, token_ids: Sequence[int], prompt_end: int = 1 << 20) -> Tensor:
        """Compute a chunk. Return the logits after each token."""
        logits = self._run(token_ids, prompt_end, num_rows=1, num_decode=0)
        self.length += len(token_ids)
        return logits

    def decode(self, token_ids: Sequence[int], num_right: int) -> Tensor:
        """Compute a token and drafts, of which the first `num_right` are right."""
        logits = self._run(token_ids, 0, len(token_ids), len(token_ids))
        self.length += num_right
        return logits

    @torch.inference_mode()
    def _run(
        self, token_ids: Sequence[int], prompt_end: int, num_rows: int, num_decode: int
    ) -> Tensor:
        number, begin = len(token_ids), self.length
        counts = torch.full((num_rows,), number // num_rows)
        ends = begin + counts.cumsum(0)
        packed = pack_states(
            torch.full((num_rows,), self._read), torch.full((num_rows,), self._written)
        )
        prompt_ends = torch.full((num_rows,), prompt_end)
        cu_seqlens_q = torch.tensor([0, *counts.cumsum(0)]).int()
        step = self.states.begin(packed.int(), cu_seqlens_q, ends, prompt_ends)
        positions = torch.arange(begin, begin + number)
        batch = ForwardBatch(
            BatchShape(num_rows, number, num_decode, 0, 64, int(counts[0]), int(ends[-1])),
            input_ids=torch.tensor(token_ids),
            positions=positions,
            slot_mapping=positions,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=torch.tensor([0, *ends.cumsum(0)]).int(),
            context_lens=ends.int(),
            decode_lens=ends[:num_decode].int(),
            tiles=torch.empty(0),
            block_tables=torch.arange(len(self._caches[0].k)).int().expand(num_rows, -1),
            states=step,
        )
        hidden_states = self._model(batch, self._caches)
        self.states.end(step, torch.full((num_rows,), num_decode))
        self._read, self._written = self._written, 1 - self._written
        logits = self._model.head.join(self._model.compute_logits(hidden_states))
        assert logits is not None
        return logits
