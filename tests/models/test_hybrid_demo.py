"""The hybrid demo model: training's forward pass, MTP drafts, and the shipped checkpoint."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache, Qwen3_5ForCausalLM
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm

from tests.models import forward
from tests.tools.demo import tokenizer
from tests.tools.demo.batches import collate
from tests.tools.demo.dialogues import Dialogue, chat, plain
from tests.tools.demo.evaluate import MAX_DRAFTS, accepted_drafts, answer_margins
from tests.tools.demo.hybrid import CHUNK, Hybrid, Pass, states_before
from tests.tools.demo.model_files import (
    HYBRID_CONFIG,
    HYBRID_FOLDER,
    load_hybrid,
    load_model,
    logits_of,
    save_checkpoint,
)
from tests.tools.demo.tasks import Example, answer_to, count_prompt
from tests.tools.demo.train import backward

TOLERANCE = {"atol": 1e-4, "rtol": 0.0}
LENGTHS = 1, 63, 64, 65, 300


@pytest.fixture(scope="module")
def random_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint of the demo's shape with random weights, all of which show in the logits."""
    torch.manual_seed(0)
    model = Hybrid(HYBRID_CONFIG | {"initializer_range": 0.06})
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.uniform_(parameter, *((0.5, 1.5) if "linear_attn" in name else (-0.5, 0.5)))
        elif "dt_bias" in name:
            nn.init.uniform_(parameter, -4, 1)
    folder = tmp_path_factory.mktemp("hybrid")
    save_checkpoint(model, folder)
    return folder


@pytest.fixture(scope="module")
def shipped() -> Hybrid:
    return load_hybrid(HYBRID_FOLDER)


@torch.inference_mode()
def test_training_has_the_logits_of_transformers_and_penstock(random_folder: Path) -> None:
    trained, reference = load_hybrid(random_folder), load_model(random_folder)
    prompts = forward.random_prompts(tokenizer.VOCAB_SIZE, *LENGTHS)
    inputs = [torch.tensor([prompt]) for prompt in prompts]
    logits = torch.cat([logits_of(trained, token_ids)[0] for token_ids in inputs])
    expected = torch.cat([reference(token_ids).logits[0] for token_ids in inputs])
    torch.testing.assert_close(logits, expected, **TOLERANCE)
    served = forward.prefill_logits(forward.load_model(random_folder), prompts)
    assert served is not None
    torch.testing.assert_close(logits, served, **TOLERANCE)


@torch.inference_mode()
def test_rows_of_a_batch_do_not_mix(random_folder: Path) -> None:
    model = load_hybrid(random_folder)
    rows = torch.randint(tokenizer.VOCAB_SIZE, (3, 5 * CHUNK))
    expected = torch.cat([logits_of(model, row.unsqueeze(0)) for row in rows])
    torch.testing.assert_close(logits_of(model, rows), expected, **TOLERANCE)


def test_gradients_are_those_of_transformers(random_folder: Path) -> None:
    trained, reference = load_hybrid(random_folder), load_model(random_folder)
    (token_ids,) = forward.random_prompts(tokenizer.VOCAB_SIZE, 2 * CHUNK + 1)
    inputs, targets = torch.tensor([token_ids[:-1]]), torch.tensor(token_ids[1:])
    for logits in (logits_of(trained, inputs)[0], reference(inputs).logits[0]):
        functional.cross_entropy(logits, targets).backward()
    expected = dict(reference.named_parameters())
    for name, parameter in trained.model.named_parameters():
        gradient = expected[f"model.{name}"].grad
        assert gradient is not None
        error = (parameter.grad - gradient).norm() / gradient.norm()
        assert error < 1e-3, name


def test_training_reaches_all_parameters(random_folder: Path) -> None:
    model = load_hybrid(random_folder)
    batch = collate([plain(_example("count from 3 to 19"))], 2 * CHUNK).to(model.device)
    losses = backward(model, batch)
    assert losses.shape == (1 + MAX_DRAFTS,)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.norm() > 0, name


def test_gradients_of_chunks_are_those_of_a_loop() -> None:
    torch.manual_seed(0)
    maps = (torch.randn(2 * 5, 3, 4, 4 + 6) / 4).requires_grad_()
    state, states = torch.zeros(2, 3, 4, 6), []
    for chunk in maps.unflatten(0, (2, 5)).unbind(1):
        states.append(state)
        state = chunk[..., :4] @ state + chunk[..., 4:]
    expected = torch.stack(states, 1).flatten(0, 1)
    found = states_before(maps, 2)
    torch.testing.assert_close(found, expected)
    weights = torch.randn_like(found)
    gradients = (torch.autograd.grad((x * weights).sum(), maps)[0] for x in (found, expected))
    torch.testing.assert_close(*gradients)


class DraftsOfTransformers:
    """The MTP layer made of transformers' parts, one draft after the other, with a KV cache."""

    def __init__(self, folder: Path) -> None:
        self.model: Qwen3_5ForCausalLM = load_model(folder)
        config = self.model.config
        tensors = load_file(folder / "model.safetensors")
        weights = {name: tensor.float() for name, tensor in tensors.items() if "mtp." in name}
        self.norms = {}
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            self.norms[name] = Qwen3_5RMSNorm(config.hidden_size, config.rms_norm_eps)
            self.norms[name].weight.data = weights.pop(f"mtp.{name}.weight")
        self.fc = weights.pop("mtp.fc.weight")
        self.layer = Qwen3_5DecoderLayer(config, config.layer_types.index("full_attention"))
        self.layer.load_state_dict(
            {name.removeprefix("mtp.layers.0."): tensor for name, tensor in weights.items()}
        )

    def logits(self, token_ids: Sequence[int], num_known: int) -> Tensor:
        """Return the logits of the drafts after `num_known` tokens and a sampled one.

        The tokens that follow are the drafts themselves.
        """
        known = torch.tensor([token_ids[:num_known]])
        hidden = self.model.model(known, use_cache=False).last_hidden_state
        cache, logits = DynamicCache(), []
        positions = torch.arange(num_known).unsqueeze(0)
        following = torch.tensor([token_ids[1 : num_known + 1]])
        for draft in token_ids[num_known + 1 :]:
            hidden = self._step(following, hidden, positions, cache)[:, -1:]
            logits.append(self.model.lm_head(hidden)[0, 0])
            positions, following = positions[:, -1:] + 1, torch.tensor([[draft]])
        return torch.stack(logits)

    def _step(
        self, following: Tensor, hidden: Tensor, positions: Tensor, cache: DynamicCache
    ) -> Tensor:
        decoder = self.model.model
        embedding = self.norms["pre_fc_norm_embedding"](decoder.embed_tokens(following))
        joined = torch.cat([embedding, self.norms["pre_fc_norm_hidden"](hidden)], -1)
        x = functional.linear(joined, self.fc)
        rope = decoder.rotary_emb(x, positions.unsqueeze(0))
        return self.norms["norm"](self.layer(x, rope, past_key_values=cache))


@pytest.mark.parametrize("num_known", [1, 40, 70])
@torch.inference_mode()
def test_passes_are_drafts_in_turn(random_folder: Path, num_known: int) -> None:
    model = load_hybrid(random_folder)
    (token_ids,) = forward.random_prompts(tokenizer.VOCAB_SIZE, num_known + 4)
    expected = DraftsOfTransformers(random_folder).logits(token_ids, num_known)
    row = torch.tensor([token_ids])
    padded = functional.pad(row, (0, -row.shape[1] % CHUNK))
    hidden, passes = model.hidden(padded), list[Pass]()
    for _ in range(3):
        passes.append(model.mtp_pass(padded, hidden, passes))
    places = range(num_known - 1, num_known + 2)
    found = [model.logits(made.hidden)[place] for made, place in zip(passes, places, strict=True)]
    torch.testing.assert_close(torch.stack(found), expected, **TOLERANCE)


def test_configuration_and_names_are_those_of_published_checkpoints() -> None:
    config = json.loads((HYBRID_FOLDER / "config.json").read_bytes())
    assert config == HYBRID_CONFIG
    weights = load_file(HYBRID_FOLDER / "model.safetensors")
    assert {name.partition(".")[0] for name in weights} == {"model", "mtp"}
    assert set(weights) == set(Hybrid(HYBRID_CONFIG).state_dict())
    assert set(weights) >= {
        "mtp.fc.weight",
        "mtp.pre_fc_norm_hidden.weight",
        "mtp.pre_fc_norm_embedding.weight",
        "mtp.norm.weight",
        "mtp.layers.0.self_attn.q_proj.weight",
        "mtp.layers.0.mlp.gate_proj.weight",
    }


def test_the_tokenizer_is_that_of_the_other_demo(tmp_path: Path) -> None:
    tokenizer.save_tokenizer(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (HYBRID_FOLDER / name).read_bytes() == (tmp_path / name).read_bytes()


def test_the_weights_are_small_enough() -> None:
    assert (HYBRID_FOLDER / "model.safetensors").stat().st_size <= 10_100_000


def test_the_model_is_sure_of_a_long_count(shipped: Hybrid) -> None:
    example = _example(count_prompt(120, 540))
    for dialogue in (plain(example), chat([example])):
        assert len(dialogue.token_ids) > 1400
        assert answer_margins(shipped, [dialogue])[0] > 1


def test_drafts_are_accepted(shipped: Hybrid) -> None:
    prompts = (count_prompt(120, 180), "repeat: 水压管 is a penstock, naïve", "reverse: penstock")
    dialogues: list[Dialogue] = [plain(_example(prompt)) for prompt in prompts]
    accepted, places = accepted_drafts(shipped, dialogues)
    assert places.tolist() == [sum(_num_places(d, k) for d in dialogues) for k in range(MAX_DRAFTS)]
    shares = accepted / places
    assert shares[0] > 0.8
    assert shares[2] > 0.5


def _num_places(dialogue: Dialogue, number: int) -> int:
    """Return the tokens of an answer that are followed by more than `number` others."""
    return max(0, sum(label >= 0 for label in dialogue.labels) - 1 - number)


def _example(prompt: str) -> Example:
    return Example("count", prompt, answer_to(prompt))
