"""The demo model: its tasks, its tokenizer, and the answers of the shipped checkpoint."""

import functools
import random
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from tests.tools.demo import tokenizer
from tests.tools.demo.dialogues import Dialogue, chat, plain
from tests.tools.demo.evaluate import answer_margins
from tests.tools.demo.model_files import CHECKPOINT_FOLDER, HYBRID_FOLDER, load_model
from tests.tools.demo.tasks import (
    DEFAULT_SIZES,
    TASK_NAMES,
    Example,
    Sizes,
    TaskName,
    answer_to,
    count_prompt,
    is_held_out,
    is_right,
    make_example,
)

MIXED_TEXT = "penstock, 水压管 👩🏽‍🔬 Дом naïve\t\x00\x7f\u2028"


@functools.cache
def shipped(folder: Path) -> tuple[PreTrainedTokenizerFast, Qwen3ForCausalLM]:
    return PreTrainedTokenizerFast.from_pretrained(folder), load_model(folder)


@pytest.fixture
def shipped_tokenizer() -> PreTrainedTokenizerFast:
    return shipped(CHECKPOINT_FOLDER)[0]


@pytest.fixture
def shipped_model() -> Qwen3ForCausalLM:
    return shipped(CHECKPOINT_FOLDER)[1]


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("17+25=", "42"),
        ("999+1=", "1000"),
        ("count from 3 to 9", "3 4 5 6 7 8 9"),
        ("count from 0 to 0", "0"),
        ("reverse: penstock", "kcotsnep"),
        ("repeat: 你好 👋", "你好 👋"),
        ("repeat: 17+25=", "17+25="),
    ],
)
def test_answers(prompt: str, answer: str) -> None:
    assert answer_to(prompt) == answer
    assert is_right(prompt, answer)
    assert not is_right(prompt, answer + " ")


@pytest.mark.parametrize("prompt", ["", "hello", "1000+1=", "17+25", "count from 3 to"])
def test_other_prompts_have_no_answer(prompt: str) -> None:
    with pytest.raises(ValueError, match="not a prompt"):
        answer_to(prompt)


@pytest.mark.parametrize(("first", "last"), [(5, 4), (-1, 3), (0, 1000)])
def test_counts_beyond_the_model_are_refused(first: int, last: int) -> None:
    with pytest.raises(ValueError, match="counts upwards"):
        count_prompt(first, last)


@pytest.mark.parametrize("task", TASK_NAMES)
def test_examples_come_from_the_part_asked_for(task: TaskName) -> None:
    training = _examples(task, held_out=False)
    held_out = _examples(task, held_out=True)
    assert not any(is_held_out(example.prompt) for example in training)
    assert all(is_held_out(example.prompt) for example in held_out)
    assert training == _examples(task, held_out=False)


def test_the_parts_are_the_same_on_every_machine() -> None:
    held_out = [n for n in range(100, 200) if is_held_out(f"{n}+1=")]
    assert held_out == [112, 120, 131, 143, 163, 181, 185]
    assert not any(is_held_out(f"{a}+{b}=") for a in range(10) for b in range(10))


def test_examples_keep_to_their_sizes() -> None:
    rng = random.Random(3)
    for _ in range(300):
        counted = make_example(rng, "count", Sizes(300, 450)).answer.split()
        assert 300 <= len(counted) <= 450
        assert [int(number) for number in counted] == list(
            range(int(counted[0]), int(counted[-1]) + 1)
        )
        repeated = make_example(rng, "repeat", Sizes(1, 40)).answer
        assert 1 <= len(repeated.encode()) <= 40
        assert repeated == repeated.strip()
        assert 1 <= len(make_example(rng, "reverse").answer) <= DEFAULT_SIZES["reverse"].largest


def test_a_token_is_a_byte(shipped_tokenizer: PreTrainedTokenizerFast) -> None:
    ascii_text = "".join(map(chr, range(0x80)))
    # Surrogates, which UTF-8 does not have, lie between the two.
    other_text = "".join(map(chr, (*range(0x80, 0xD800, 7), *range(0xE000, 0x110000, 997))))
    for text in (MIXED_TEXT, ascii_text, other_text):
        token_ids = shipped_tokenizer.encode(text)
        assert token_ids == list(text.encode())
        assert shipped_tokenizer.decode(token_ids) == text


def test_the_shipped_tokenizer_is_the_built_one(
    shipped_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    tokenizer.save_tokenizer(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (CHECKPOINT_FOLDER / name).read_bytes()
    for token, token_id in tokenizer.ADDED_TOKEN_IDS.items():
        assert shipped_tokenizer.convert_tokens_to_ids(token) == token_id


@pytest.mark.parametrize("enable_thinking", [True, False])
def test_training_used_the_chat_template(
    shipped_tokenizer: PreTrainedTokenizerFast, enable_thinking: bool
) -> None:
    first, last = _example("sum", "17+25="), _example("repeat", "repeat: 你好 👋")
    prompt = shipped_tokenizer.apply_chat_template(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": first.prompt},
            {"role": "assistant", "content": f"<think>\nhm\n</think>\n\n{first.answer}"},
            {"role": "user", "content": last.prompt},
        ],
        add_generation_prompt=True,
        enable_thinking=enable_thinking,
        return_dict=False,
    )
    dialogue = chat([first, last], "Be brief.", enable_thinking)
    assert dialogue.token_ids == [*prompt, *last.answer.encode(), tokenizer.IM_END_ID]


def test_the_weights_are_small_enough() -> None:
    assert (CHECKPOINT_FOLDER / "model.safetensors").stat().st_size <= 10_000_000


@pytest.mark.parametrize(
    "prompt",
    [
        "17+25=",
        "count from 3 to 9",
        "count from 95 to 103",
        "reverse: penstock",
        "repeat: 水压管 is a 👩🏽‍🔬 penstock",
    ],
)
@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize("folder", [CHECKPOINT_FOLDER, HYBRID_FOLDER], ids=["dense", "hybrid"])
def test_the_models_answer(folder: Path, prompt: str, is_chat: bool) -> None:
    own_tokenizer, model = shipped(folder)
    text = prompt
    if is_chat:
        text = own_tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
    inputs = own_tokenizer(text, return_tensors="pt")
    completion = model.generate(**inputs, max_new_tokens=80)[0, inputs["input_ids"].shape[1] :]
    assert is_right(prompt, own_tokenizer.decode(completion, skip_special_tokens=True))
    assert completion[-1] == (tokenizer.IM_END_ID if is_chat else tokenizer.END_OF_TEXT_ID)


def test_the_model_is_sure_of_a_long_count(shipped_model: Qwen3ForCausalLM) -> None:
    example = _example("count", count_prompt(120, 540))
    for dialogue in (plain(example), chat([example])):
        assert len(dialogue.token_ids) > 1400
        assert _margin(shipped_model, dialogue) > 2


def test_a_wrong_answer_has_a_negative_margin(shipped_model: Qwen3ForCausalLM) -> None:
    assert _margin(shipped_model, plain(Example("sum", "17+25=", "43"))) < 0


def _margin(model: Qwen3ForCausalLM, dialogue: Dialogue) -> float:
    return answer_margins(model, [dialogue])[0]


def _example(task: TaskName, prompt: str) -> Example:
    return Example(task, prompt, answer_to(prompt))


def _examples(task: TaskName, *, held_out: bool) -> list[Example]:
    rng = random.Random(1)
    return [make_example(rng, task, held_out=held_out) for _ in range(100)]
