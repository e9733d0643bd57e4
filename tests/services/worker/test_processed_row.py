"""Masks of `allowed_token_ids` and `bad_words`, against the definition; and rows that have one."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import Qwen3ForCausalLM

from penstock.kernels.layouts.sampling import make_parameters
from penstock.protocol.messages.plan import RowExtras
from penstock.protocol.messages.structured import StructuredOutputs
from penstock.services.worker.logits_processor import CONTRADICTION
from penstock.services.worker.processed_rows import (
    Bitmask,
    LogitsChanges,
    ProcessedRow,
    has_token,
)
from tests.services.worker.driver import (
    NUM_STEPS,
    PROMPT,
    Driver,
    Listener,
    extras,
    generate,
    make_runner,
)
from tests.services.worker.plans import plan, row
from tests.services.worker.test_logits_processor import PENALTIES, expected, penalize

VOCAB_SIZE = 70
TOKENS = st.sampled_from([0, 1, 2, 31, 32, 69])
"""few, so that words occur; at both ends of a mask's words"""


def tokens_of(mask: Bitmask, vocab_size: int = VOCAB_SIZE) -> set[int]:
    return {token for token in range(vocab_size) if int(mask[token // 32]) >> token % 32 & 1}


def processed(asked: RowExtras, output: Sequence[int] = ()) -> ProcessedRow:
    return ProcessedRow(row(0, output, [0], extras=asked), VOCAB_SIZE)


def left(asked: RowExtras, output: list[int]) -> set[int]:
    """Return the tokens that may follow, by the definition."""

    def is_bad(token: int) -> bool:
        text = [*output, token]
        return any(word and text[-len(word) :] == word for word in asked.bad_words)

    allowed = asked.allowed_token_ids or range(VOCAB_SIZE)
    return {token for token in allowed if not is_bad(token)}


@given(
    words=st.lists(st.lists(TOKENS, max_size=4), max_size=6),
    allowed=st.lists(TOKENS, max_size=5),
    output=st.lists(TOKENS, max_size=12),
    num_given=st.integers(0, 12),
)
def test_masks(
    words: list[list[int]], allowed: list[int], output: list[int], num_given: int
) -> None:
    """After each token, whether the row came with the token or drew it."""
    asked = RowExtras(0, allowed_token_ids=allowed, bad_words=words)
    one = processed(asked, output[:num_given])
    for end in range(min(num_given, len(output)), len(output) + 1):
        always = set(range(VOCAB_SIZE)) if one.mask is None else tokens_of(one.mask)
        assert always - set(one.bad_tokens()) == left(asked, output[:end])
        assert {token for token in range(VOCAB_SIZE) if one.allows(token)} == left(
            asked, output[:end]
        )
        if end < len(output):
            one.accept(output[end])
            one.accept(-1)  # a step without a token changes nothing
    assert one.needs_tokens == any(len(word) > 1 for word in words)


def test_words_with_tokens_that_the_model_does_not_have() -> None:
    words = [[70], [70, 2], [3, 99], [-1], [5]]
    one = processed(RowExtras(0, bad_words=words))
    assert one.mask is not None
    assert tokens_of(one.mask) == set(range(VOCAB_SIZE)) - {5}
    assert not one.needs_tokens


def test_a_row_that_restricts_nothing_has_no_mask() -> None:
    assert processed(RowExtras(0, logit_bias={3: 1.0})).mask is None


def test_drafts_are_counted_until_others_replace_them() -> None:
    """A draft of one token is that of a usual step, which counts it."""
    one = processed(RowExtras(0), [3, 4])
    assert one.count_draft(2, [7]) == []
    assert one.count_draft(2, [7, 8]) == [(7, 1), (8, 1)]
    assert one.count_draft(3, [9, 5]) == [(8, -1), (9, 1), (5, 1)]
    assert one.count_draft(5, [6]) == []
    assert one.count_draft(2, [7]) == [(5, -1), (9, -1), (7, -1)]
    many = list(range(64))
    assert one.count_draft(2, many) == [(token, 1) for token in many]
    assert one.count_draft(2, [7]) == [(token, -1) for token in reversed(many)]


def test_a_row_follows_the_last_known_token() -> None:
    one = processed(RowExtras(0), [3, 4])
    assert one.follows(1, -1) and one.follows(1, 5)  # a given token is right in any case
    assert not (one.follows(2, -1) or one.follows(0, -1))
    one.accept(5)
    assert one.follows(2, -1) and one.follows(2, 5)
    assert not (one.follows(2, 6) or one.follows(1, -1))
    one.accept(-1)
    assert one.follows(2, 5)


def test_counts_of_a_shard() -> None:
    """A token outside changes nothing; -1 is the last one of the slot."""
    changes = LogitsChanges(make_parameters(2, torch.device("cpu")), VOCAB_SIZE, 10, 40)
    counts = changes.state.occurrences.zero_()
    tokens = [(0, 11, 1), (0, -1, 1), (1, 39, -1), (1, 40, 1), (0, 9, 1), (1, -1, 1)]
    changes.count(tokens, torch.tensor([12, 11]))
    expected = torch.zeros_like(counts)
    expected[[0, 0, 1, 1], [1, 2, 29, 1]] = torch.tensor([2, 2, -2, 2], dtype=torch.int32)
    assert torch.equal(counts, expected)


def test_a_mask_has_no_token_after_its_end() -> None:
    assert not has_token(np.full(2, -1, np.int32), 64)


# ---- rows of the real model --------------------------------------------------------------------


def forbid(logits: Tensor, allowed: set[int]) -> Tensor:
    others = [token for token in range(264) if token not in allowed]
    logits[0, others] = -np.inf
    return logits


def test_rows(folder: Path, reference: Qwen3ForCausalLM, plain: dict[int, list[int]]) -> None:
    """With penalties, bias and min_tokens; rows next to them are as ever."""
    one, two, three = plain[3][:3]
    words = [[one, two], [three], [two, one, two]]
    allowed = sorted({*plain[3], *range(0, 264, 3)} - {10})
    end = plain[3][4]
    asked = extras(
        allowed_token_ids=allowed,
        bad_words=words,
        logit_bias={10: 100.0, two: 1.0},
        min_tokens=5,
        end_token_ids=[end],
    )

    def change(logits: Tensor, token_ids: list[int]) -> Tensor:
        logits = penalize(logits, token_ids)
        logits[0, 10] += 100.0
        logits[0, two] += 1.0
        output = token_ids[len(PROMPT) :]
        bad = {word[-1] for word in words if [*output, word[-1]][-len(word) :] == word}
        return forbid(logits, set(allowed) - bad - ({end} if len(output) < 5 else set()))

    tokens = generate(folder, asked, **PENALTIES).tokens
    assert tokens[3] == expected(reference, change)[0] != plain[3]
    assert (tokens[1], tokens[6]) == (plain[1], plain[6])


def test_a_row_with_bad_words_that_comes_again(folder: Path, plain: dict[int, list[int]]) -> None:
    """In the middle of a word, in another slot; and with plans in flight."""
    asked = extras(bad_words=[plain[3][:3], plain[3][4:6]])
    whole = generate(folder, asked).tokens[3]
    assert whole[:2] == plain[3][:2]
    assert whole[2] != plain[3][2]
    runner = make_runner(folder)
    added = [row(0, PROMPT + whole[:2], range(5), extras=asked)]
    steps = [runner.launch(plan(added=added, chunks=[(0, 20)]))]
    steps += [runner.launch(plan(chunks=[(0, 19)]))]
    steps += [runner.launch(plan()) for _ in range(NUM_STEPS - 3)]
    assert [token for step in steps for token in step.token_ids()] == whole[2:]


def test_the_prompt_is_no_output(folder: Path, plain: dict[int, list[int]]) -> None:
    """A word that begins in the prompt is none, as in vLLM."""
    asked = extras(bad_words=[[PROMPT[-1], plain[3][0]]])
    driver = Driver(make_runner(folder))
    driver.step(plan(added=[row(3, PROMPT, range(5), extras=asked)], chunks=[(3, 37)]), 3)
    assert driver.tokens[3] == plain[3][:1]


def test_with_a_grammar(folder: Path) -> None:
    """Only tokens that both allow; a row without any allowed token reports why it ends."""
    grammar = StructuredOutputs(regex="[a-c]{6}")
    bad_words = [list(b"ab"), list(b"bb"), list(b"c")]
    asked = extras(structured_outputs=grammar, bad_words=bad_words, end_token_ids=[258])
    listener = generate(folder, asked)
    text = bytes(listener.tokens[3][:6]).decode()
    assert set(text) <= {"a", "b"}
    assert "ab" not in text
    assert "bb" not in text
    assert listener.tokens[3][6] == 258
    asked = extras(structured_outputs=grammar, allowed_token_ids=[ord("d")])
    listener = Listener(folder)
    listener.step(plan(added=[row(3, PROMPT, range(5), extras=asked)], chunks=[(3, 37)]), 3)
    assert listener.tokens[3] == [-1]
    assert listener.outputs[0].failed == [(0, CONTRADICTION)]
    asked = extras(structured_outputs=StructuredOutputs(choice=["ab"]), bad_words=[list(b"ab")])
    listener = generate(folder, asked)
    assert listener.tokens[3][:2] == [ord("a"), -1]
    assert listener.outputs[1].failed == [(1, CONTRADICTION)]


def test_a_forbidden_tag_begins_no_thought(folder: Path, plain: dict[int, list[int]]) -> None:
    """Even where the model draws it, and the grammar would let it think."""
    opens, says = plain[3][:2]
    listener = Listener(folder)
    grammars = listener.runner.logits_processor.grammars
    assert grammars
    grammars._tags = opens, says
    grammar = StructuredOutputs(regex="[a-c]{6}")
    asked = extras(structured_outputs=grammar, bad_words=[[opens]], reasoning="optional")
    listener.step(plan(added=[row(3, PROMPT, range(5), extras=asked)], chunks=[(3, 37)]), 3)
    assert listener.tokens[3][0] in b"abc"


def test_skipped_tokens_count_by_their_number() -> None:
    """A row without extras has these parameters if the ranks are on several machines."""
    added = row(0, range(7, 10), [0], num_computed_tokens=2)
    added.num_skipped = 2
    deferred = ProcessedRow(added, VOCAB_SIZE, is_deferred=True)
    assert deferred.numbers()["num_given"] == 5
    assert deferred.follows(4, -1)
    assert not deferred.follows(2, -1)
