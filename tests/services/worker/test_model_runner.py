"""Steps of the real model: the tokens of transformers, and the same bits in every order of work."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3ForCausalLM

from penstock.models import weights
from penstock.protocol.messages.plan import RowExtras
from penstock.protocol.messages.structured import StructuredOutputs
from penstock.services.worker.launched_step import BAD_LOGITS
from tests.models.checkpoints import save_checkpoint
from tests.services.worker.driver import NUM_DECODED, PROMPTS, Driver, make_runner, tables
from tests.services.worker.plans import plan, row


@pytest.fixture(scope="module")
def greedy(reference: Qwen3ForCausalLM) -> list[list[int]]:
    """Return the continuation of each of PROMPTS by transformers' model."""
    outputs = []
    for prompt in PROMPTS:
        token_ids = list(prompt)
        for _ in range(NUM_DECODED):
            with torch.inference_mode():
                logits = reference(torch.tensor([token_ids])).logits[0, -1]
            token_ids.append(int(logits.argmax()))
        outputs.append(token_ids[len(prompt) :])
    return outputs


@pytest.mark.parametrize(("block_size", "num_blocks"), [(16, 64), (256, 8), (1, 400)])
def test_prefill_and_decode(
    folder: Path, greedy: list[list[int]], block_size: int, num_blocks: int
) -> None:
    driver = Driver(make_runner(folder, block_size, num_blocks))
    lengths = [len(prompt) + NUM_DECODED for prompt in PROMPTS]
    block_tables = tables(block_size, num_blocks, lengths)
    added = [row(s, PROMPTS[s], block_tables[s]) for s in range(5)]
    chunks = [(s, len(PROMPTS[s])) for s in range(5)]
    driver.step(plan(added=added, chunks=chunks), *range(5))
    driver.decode(NUM_DECODED - 1, *range(5))
    assert list(driver.tokens.values()) == greedy


def test_chunked_prefill_beside_decode(folder: Path, greedy: list[list[int]]) -> None:
    driver = Driver(make_runner(folder))
    driver.step(plan(added=[row(1, PROMPTS[1], [0, 1])], chunks=[(1, 5)]), 1)
    added = [row(0, PROMPTS[0], [9, 3, 5, 6]), row(2, PROMPTS[2], range(20, 30))]
    driver.step(plan(added=added, chunks=[(0, 20), (2, 64)]), 1)
    driver.step(plan(chunks=[(2, 63), (0, 16)]), 1)
    driver.step(plan(chunks=[(0, 1)]), 0, 1)
    driver.step(plan(chunks=[(2, 13)]), 0, 1, 2)
    driver.decode(8, 0, 1, 2)
    assert [driver.tokens[slot] for slot in (0, 1, 2)] == [
        greedy[0][:10],
        greedy[1][:13],
        greedy[2][:9],
    ]


def test_a_slot_and_its_blocks_change_hands_in_one_plan(
    folder: Path, greedy: list[list[int]]
) -> None:
    driver = Driver(make_runner(folder))
    added = [row(0, PROMPTS[2], range(10)), row(1, PROMPTS[1], [10, 11])]
    driver.step(plan(added=added, chunks=[(0, 140), (1, 5)]), 0, 1)
    driver.decode(3, 0, 1)
    del driver.tokens[0]
    added = [row(0, PROMPTS[0], [4, 2, 0, 7])]
    driver.step(plan(removed=[0], added=added, chunks=[(0, 37)]), 0, 1)
    driver.decode(3, 0, 1)
    driver.step(plan(removed=[1]), 0)
    assert driver.tokens == {0: greedy[0][:5], 1: greedy[1][:8]}


def test_blocks_computed_before_are_shared(folder: Path, greedy: list[list[int]]) -> None:
    driver = Driver(make_runner(folder))
    driver.step(plan(added=[row(0, PROMPTS[0], [5, 9, 1])], chunks=[(0, 37)]), 0)
    added = [row(3, PROMPTS[0], [5, 9, 2, 3], 32)]
    driver.step(plan(removed=[0], added=added, chunks=[(3, 5)]), 3)
    driver.decode(15, 3)
    assert driver.tokens[3] == greedy[0][:16]


def test_blocks_are_appended_when_a_row_needs_them(folder: Path, greedy: list[list[int]]) -> None:
    driver = Driver(make_runner(folder))
    added = [row(0, PROMPTS[3], [8]), row(1, PROMPTS[4], [2])]
    driver.step(plan(added=added, chunks=[(0, 16), (1, 1)]), 0, 1)
    driver.step(plan(appended=[(0, 30)]), 0, 1)
    driver.decode(14, 0, 1)
    driver.step(plan(appended=[(1, 0)]), 0, 1)
    driver.step(plan(appended=[(0, 31)]), 0, 1)
    assert driver.tokens == {0: greedy[3][:18], 1: greedy[4][:18]}


@pytest.mark.parametrize("attention", ["auto", "torch"])
def test_a_step_tells_its_seconds_and_that_it_gets_on(folder: Path, attention: str) -> None:
    """With compiled layers and with those in torch; prompt logprobs come after the layers.

    On a CPU they are made at once: else the step's tokens would wait for the next step.
    """
    runner = make_runner(folder, attention=attention)
    prompt = PROMPTS[0]
    asked = RowExtras(len(prompt), num_prompt_logprobs=0)
    added = row(0, prompt, tables(16, 64, [len(prompt) + 9])[0], extras=asked)
    seen = [runner.progress]
    step = runner.launch(plan(added=[added], chunks=[(0, len(prompt))]))
    seen.append(runner.progress)
    assert step.done()
    launched = step.seconds
    assert 0 < launched == step.output().seconds
    seconds = runner.launch(plan()).output().seconds
    seen.append(runner.progress)
    assert seconds > 0
    assert seen == sorted(set(seen))


def test_attention_pads_chunks_on_gpus_only(folder: Path) -> None:
    runner = make_runner(folder)
    assert runner.tile_sizes == []
    runner._device = torch.device("cuda")
    assert runner.tile_sizes == [64, 128]


def test_a_plan_without_rows_gives_no_tokens(folder: Path) -> None:
    runner = make_runner(folder)
    assert runner.launch(plan()).token_ids() == []
    step = runner.launch(plan(added=[row(0, [1, 2, 3], [0])], chunks=[(0, 2)]))
    assert step.token_ids() == []
    assert step.done()


def test_clear_makes_room_for_the_next_epoch(folder: Path, greedy: list[list[int]]) -> None:
    driver = Driver(make_runner(folder))
    driver.step(plan(added=[row(0, PROMPTS[2], range(10))], chunks=[(0, 100)]))
    driver.runner.clear()
    driver.step(plan(added=[row(0, PROMPTS[1], [4, 5])], chunks=[(0, 5)]), 0)
    driver.decode(4, 0)
    assert driver.tokens[0] == greedy[1][:5]


def test_refuses_a_token_that_the_model_does_not_have(folder: Path) -> None:
    runner = make_runner(folder)
    with pytest.raises(ValueError, match="token id of slot 0: got 264, expected 0 to 263"):
        runner.launch(plan(added=[row(0, [264], [0])], chunks=[(0, 1)]))


def test_seeded_tokens_depend_on_nothing_but_the_sequence(folder: Path) -> None:
    """Other slot, other rows, other chunks, and recomputed in the middle."""
    sampling: Any = {"temperature": 1.5, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "seed": -7}
    alone = Driver(make_runner(folder))
    alone.step(plan(added=[row(0, PROMPTS[0], range(5), **sampling)], chunks=[(0, 37)]), 0)
    alone.decode(19, 0)
    other = Driver(make_runner(folder))
    added = [row(1, PROMPTS[2], range(20, 30), temperature=1.0)]
    added += [row(5, PROMPTS[0], [9, 7, 5, 3, 1], **sampling)]
    other.step(plan(added=added, chunks=[(1, 140), (5, 30)]), 1)
    other.step(plan(chunks=[(5, 7)]), 1, 5)
    other.decode(9, 1, 5)
    added = [row(2, PROMPTS[0] + other.tokens[5], [30, 31, 32, 33, 34], **sampling)]
    other.step(plan(removed=[5], added=added, chunks=[(2, 47)]), 1, 2)
    other.decode(9, 1, 2)
    assert other.tokens[5] + other.tokens[2] == alone.tokens[0]
    assert len(set(alone.tokens[0])) > 5


BROKEN = 263
"""a token whose embedding is NaN"""


@pytest.fixture(scope="module")
def broken_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("broken")
    model = save_checkpoint(folder)
    weights = model.state_dict()
    weights["model.embed_tokens.weight"][BROKEN] = torch.nan
    model.save_pretrained(folder, state_dict=weights)
    return folder


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "extras",
    [
        None,
        RowExtras(4, num_logprobs=2, num_prompt_logprobs=1),
        RowExtras(4, structured_outputs=StructuredOutputs(regex="[a-z]*"), end_token_ids=[258]),
    ],
)
def test_a_row_whose_logits_are_nan_fails_alone(
    broken_folder: Path,
    extras: RowExtras | None,
    temperature: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The row next to it gets the tokens that it gets alone; the next steps don't mind.

    Such weights are refused when they are loaded; here they stand for a product that overflows.
    """
    monkeypatch.setattr(weights, "_check_numbers", lambda *_: None)
    alone = Driver(make_runner(broken_folder))
    beside = row(2, PROMPTS[1], [7], temperature=temperature)
    alone.step(plan(added=[beside], chunks=[(2, 5)]), 2)
    alone.decode(4, 2)
    runner = make_runner(broken_folder)
    numbers: Any = {"temperature": temperature}
    if extras and extras.num_logprobs == 2:
        numbers["repetition_penalty"] = 1.5
    bad = row(1, [1, 2, BROKEN, 3], [3], extras=extras, **numbers)
    step = plan(added=[bad, beside], chunks=[(1, 4), (2, 5)])
    for number in range(5):
        launched = runner.launch(step)
        assert launched.token_ids() == [-1, alone.tokens[2][number]]
        assert launched.output().failed == [(0, BAD_LOGITS)]
        step = plan()
