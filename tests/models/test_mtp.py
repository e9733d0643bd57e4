"""Multi-token prediction: its logits, its drafts, and tokens that do not depend on them."""

from pathlib import Path
from random import Random

import pytest
import torch

from penstock.models.architecture import Ranks, describe
from penstock.protocol.checkpoint import ModelError, read_model_config
from penstock.protocol.messages.plan import SampledTokens
from penstock.protocol.messages.sampling import SamplingParams
from penstock.protocol.messages.structured import StructuredOutputs
from penstock.services.scheduler.proposer import LayerProposer
from tests.engine import Engine
from tests.models.checkpoints import change_config
from tests.models.forward import load_model, mtp_logits, random_prompts
from tests.models.hybrid import Mtp, add_mtp, save_hybrid, shape_of
from tests.models.toy.test_state import LateSteps, engine_of, lose_workers
from tests.search import diagonal, in_long

NUM_OUT = 24
SITUATIONS: dict[str, dict[str, object]] = {
    "plain": {"enable_prefix_caching": False},
    "prefix cache": {},
    "chunks": {"max_num_seqs": 6, "max_num_batched_tokens": 70},
    "preemption": {"num_blocks": 16, "max_num_seqs": 8},
    "one plan": {"num_plans_in_flight": 1},
}


@pytest.mark.parametrize("is_multimodal", [False, True])
@pytest.mark.parametrize("size", ["4B", "27B", "35B-A3B", "Next-80B-A3B"])
def test_logits_of_the_published_description(
    tmp_path: Path, size: str, is_multimodal: bool
) -> None:
    if is_multimodal and size == "Next-80B-A3B":
        pytest.skip("text only")
    mtp = add_mtp(tmp_path, save_hybrid(tmp_path, is_multimodal, **shape_of(size)))
    prompts = random_prompts(264, 2, 65, 130)
    logits = mtp_logits(load_model(tmp_path, speculative_method="mtp"), prompts)
    assert logits is not None
    expected = torch.cat([mtp.logits(prompt) for prompt in prompts])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_weights_and_memory(tmp_path: Path) -> None:
    """The layer is read, and has keys and values, only with the option."""
    model = save_hybrid(tmp_path)
    with_layer = read_model_config(tmp_path, speculative_method="mtp")
    with pytest.raises(ModelError, match=r"got mtp, expected none or ngram: .* lacks the layer"):
        load_model(tmp_path, speculative_method="mtp")
    add_mtp(tmp_path, model)
    assert load_model(tmp_path).mtp is None
    sizes = [
        describe(config).token_bytes(Ranks(), 4)
        for config in (read_model_config(tmp_path), with_layer)
    ]
    assert sizes[1] == 2 * sizes[0]
    change_config(tmp_path, mtp_use_dedicated_embeddings=True)
    with pytest.raises(ModelError, match="mtp_use_dedicated_embeddings"):
        describe(read_model_config(tmp_path, speculative_method="mtp"))


def drafts_by_description(mtp: Mtp, token_ids: list[int], number: int) -> list[int]:
    """Return the likeliest tokens after the tokens, by applying the layer again and again."""
    (model,) = mtp.base
    ids = torch.tensor([token_ids])
    with torch.inference_mode():
        hidden = model.model(ids[:, :-1]).last_hidden_state
        drafts: list[int] = []
        for _ in range(number):
            next_ids = torch.tensor([[*token_ids[1:], *drafts]])
            outs, logits = mtp.block(hidden, next_ids)
            drafts.append(int(logits[0, -1].argmax()))
            hidden = torch.cat([hidden, outs[:, -1:]], 1)
    return drafts


@pytest.mark.parametrize("block_size", [4, 64])
def test_drafts_are_those_of_the_description(tmp_path: Path, block_size: int) -> None:
    """Also after drafts that were right or wrong, across blocks, and of prompts in chunks."""
    mtp = add_mtp(tmp_path, save_hybrid(tmp_path))
    options = {"max_num_batched_tokens": 70, "max_num_seqs": 6, "block_size": block_size}
    engine = engine_of(
        tmp_path, speculative_method="mtp", num_speculative_tokens=4, num_blocks=400, **options
    )
    prompts = random_prompts(264, 5, 63, 150)
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    sequences = [engine.add(f"{n}", prompt, params) for n, prompt in enumerate(prompts)]
    update, num_checked = engine.scheduler.update, 0

    def checked(tokens: SampledTokens) -> object:
        nonlocal num_checked
        plan, output = engine.scheduler.in_flight[0], update(tokens)
        for sequence in dict.fromkeys(plan.sampled):
            proposer = sequence.proposer
            if plan.num_drafts and isinstance(proposer, LayerProposer):
                # the others are after the end of the sequence
                number = min(4, sequence.max_length - 1 - len(sequence.token_ids))
                drafts = proposer.drafts(0, max(number, 0))
                assert drafts == drafts_by_description(mtp, sequence.token_ids, number)
                num_checked += 1
        return output

    engine.scheduler.update = checked  # type: ignore[method-assign, assignment]
    engine.run()
    assert all(len(sequence.output_token_ids) == 9 for sequence in sequences)
    assert num_checked > 18


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose layer is right about many tokens, and wrong about many."""
    folder = tmp_path_factory.mktemp("model")
    add_mtp(folder, save_hybrid(folder), predicts=True)
    return folder


@pytest.fixture(scope="module")
def requests() -> list[tuple[list[int], SamplingParams]]:
    """Prompts with common beginnings, and one request of each kind of sampling."""
    random = Random(1)
    first, second = ([random.randrange(1, 264) for _ in range(150)] for _ in range(2))
    prompts = [first[:n] for n in (1, 63, 64, 65, 129, 150)] + [second, first[:64] + second[:30]]
    params: list[dict[str, object]] = [
        {},
        {"temperature": 0.5, "seed": 3},
        {"temperature": 0.3, "top_k": 5},
        {"repetition_penalty": 1.5, "presence_penalty": 0.3},
        {"logprobs": 3, "temperature": 0.4, "seed": 7},
        {"structured_outputs": StructuredOutputs(regex="[ab]{8,20}"), "ignore_eos": False},
        {"max_tokens": 2},
        {"speculative": False},
    ]
    defaults = {"temperature": 0.0, "max_tokens": NUM_OUT, "ignore_eos": True}
    return [
        (prompt, SamplingParams(**defaults | given))  # type: ignore[arg-type]
        for prompt, given in zip(prompts, params, strict=True)
    ]


Outputs = list[tuple[list[int], object]]


def outputs(
    engine: Engine, requests: list[tuple[list[int], SamplingParams]], **run: object
) -> Outputs:
    """Return the tokens and logprobs of each request."""
    sequences = [engine.add(f"{n}", *request) for n, request in enumerate(requests)]
    engine.run(**run)  # type: ignore[arg-type]
    return [(sequence.output_token_ids, sequence.logprobs) for sequence in sequences]


@pytest.fixture(scope="module")
def expected(folder: Path, requests: list[tuple[list[int], SamplingParams]]) -> Outputs:
    """Return the outputs of plain decoding, one request after the other."""
    engine = engine_of(folder, enable_prefix_caching=False)
    found = []
    for number, request in enumerate(requests):
        sequence = engine.add(f"{number}", *request)
        engine.run()
        found.append((sequence.output_token_ids, sequence.logprobs))
    return found


@pytest.mark.parametrize(("name", "number"), diagonal(SITUATIONS, [1, 2, 3, 4]))
def test_the_tokens_of_plain_decoding(
    folder: Path,
    requests: list[tuple[list[int], SamplingParams]],
    expected: Outputs,
    name: str,
    number: int,
) -> None:
    options = {"speculative_method": "mtp", "num_speculative_tokens": number} | SITUATIONS[name]
    engine = engine_of(folder, **options)
    for _ in range(2):  # the second time with a full prefix cache
        assert outputs(engine, requests) == expected
    drafts = engine.scheduler.draft_scheduler
    assert 0 < drafts.num_accepted_tokens < drafts.num_draft_tokens
    if name == "preemption":
        assert engine.scheduler.num_preemptions


def test_right_drafts_save_steps(folder: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    steps = []
    for method in ("none", "mtp"):
        engine = engine_of(folder, speculative_method=method, num_speculative_tokens=3)
        outputs(engine, [([1, 2, 3], params)])
        steps.append(engine.scheduler.num_steps)
    assert steps[1] < 0.75 * steps[0]


@pytest.mark.parametrize("seed", [0, 1, in_long(2), in_long(3)])
def test_workers_that_die_in_mid_step_and_keep_their_memory(
    folder: Path,
    requests: list[tuple[list[int], SamplingParams]],
    expected: Outputs,
    seed: int,
) -> None:
    options = {"max_num_seqs": 6, "max_num_batched_tokens": 90, "num_plans_in_flight": 4}
    engine = engine_of(folder, speculative_method="mtp", num_speculative_tokens=3, **options)
    steps, random, num_deaths = LateSteps(engine), Random(seed), 0

    def disturb() -> None:
        nonlocal num_deaths
        if random.random() < 0.5 and engine.scheduler.in_flight:
            num_deaths += 1
            steps.die(random)
            lose_workers(engine)

    assert outputs(engine, requests, between_steps=disturb) == expected
    assert num_deaths > 2
    assert engine.scheduler.draft_scheduler.num_accepted_tokens
