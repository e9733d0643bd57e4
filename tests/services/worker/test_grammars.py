"""Masks let through exactly what a grammar matches, and a failed row harms no other."""

import queue
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.protocol.config import Config
from penstock.protocol.messages.structured import (
    GRAMMAR_FAILED,
    GRAMMAR_LIMITS,
    Reasoning,
    StructuredOutputs,
)
from penstock.services.worker.grammars import Grammars
from penstock.services.worker.processed_rows import Bitmask

FOLDER = Config().model_folder
"""its tokenizer has 262 tokens, the bytes first"""
END_OF_TEXT, IM_START, IM_END, THINK = 256, 257, 258, 259
ENDS = [IM_END, END_OF_TEXT]


@pytest.fixture
def grammars() -> Iterator[Grammars]:
    made = Grammars(FOLDER)
    yield made
    made.clear()


def ids(mask: "np.ndarray[Any, Any]") -> set[int]:
    return set(np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0].tolist())


def fill(grammars: Grammars, *slots: int) -> tuple[list[Bitmask], dict[int, str]]:
    """Return the masks of some slots, in memory that held anything, and the reasons."""
    masks = np.random.default_rng(1).integers(-(2**31), 2**31, (10, grammars.num_words), np.int32)
    before = masks.copy()
    failed = grammars.fill(masks, {slot: slot for slot in slots})
    others = [slot for slot in range(10) if slot not in slots]
    assert np.array_equal(masks[others], before[others])
    return [masks[slot] for slot in slots], failed


def allowed(grammars: Grammars, slot: int = 0) -> set[int]:
    masks, failed = fill(grammars, slot)
    assert failed == {}
    return ids(masks[0])


def add(grammars: Grammars, slot: int = 0, said: bytes = b"", **fields: Any) -> None:
    grammars.add(slot, StructuredOutputs(**fields), list(said), ENDS)


def compile_as_7(grammars: Grammars, spec: StructuredOutputs) -> None:
    compiled: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()
    grammars.compile(7, spec, lambda *report: compiled.put(report))
    assert compiled.get(timeout=60)[1] == ""


def say(grammars: Grammars, text: str, slot: int = 0) -> None:
    """Each byte must be allowed."""
    for byte in text.encode():
        assert byte in allowed(grammars, slot), text
        grammars.accept({slot: byte})


def matches(grammars: Grammars, text: str, **fields: Any) -> bool:
    add(grammars, **fields)
    for byte in text.encode():
        if byte not in allowed(grammars):
            return False
        grammars.accept({0: byte})
    return IM_END in allowed(grammars)


@pytest.mark.parametrize(("last", "end"), [("bbc", IM_END), ("bb", END_OF_TEXT)])
def test_ends_are_allowed_exactly_where_the_grammar_may_end(
    grammars: Grammars, last: str, end: int
) -> None:
    """After an end, nothing else is, also where the grammar could go on."""
    add(grammars, regex="ab*c?")
    assert allowed(grammars) == {ord("a")}
    say(grammars, "a")
    assert allowed(grammars) == {ord("b"), ord("c"), *ENDS}
    say(grammars, last)
    assert allowed(grammars) == {*ENDS, *(b"" if last == "bbc" else b"bc")}
    grammars.accept({0: end})
    assert allowed(grammars) == set(ENDS)


def test_the_end_tokens_are_the_rows_own(grammars: Grammars) -> None:
    """A stop token that is text, too; ids that no model has; what llguidance takes for EOS."""
    grammars.add(0, StructuredOutputs(regex="a[;,]b;?"), [], [ord(";"), 2**31 - 1])
    for byte, ends in zip(b"a,b;", ([], [], [], [ord(";")]), strict=True):
        assert allowed(grammars) == {byte, *ends}
        grammars.accept({0: byte})
    assert allowed(grammars) == {ord(";")}


def test_the_output_so_far_is_replayed(grammars: Grammars) -> None:
    add(grammars, said=b'{"a": [1', json={"properties": {"a": {"items": {"type": "integer"}}}})
    assert ord("]") in allowed(grammars)
    assert ord("}") not in allowed(grammars)


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"regex": "^a|b/c$"}, ["a", "b/c"], ["b", "ac", "ab/c"]),
        ({"regex": r"\d{2}\n."}, ["12\né"], ["1\n2", "12\n\n"]),
        ({"regex": "a\nb"}, ["a\nb"], ["ab", "a b"]),
        ({"choice": ["a", "ab", 'q"/\\\n', "é😀"]}, ["a", "ab", 'q"/\\\n', "é😀"], ["b", "abc"]),
        ({"json_object": True}, ["{}", '{"a":1}', '{"a": [{}, "é"], "b": null}'], ["[]", "1"]),
        ({"json_object": True}, [], [' {"a":1}', '{ "a":1}', '{"a":  1}', '{"a":1,\n"b":2}']),
        ({"json": '{"type": "integer"}'}, ["7", "-12"], ["1.5", "01", '"7"']),
        ({"json": {"enum": ["a", 1, [2]]}}, ['"a"', "1", "[2]"], ["a", "2"]),
        ({"grammar": 'start: "x" %json {"type": "boolean"} | "{}"'}, ["xtrue", "{}"], ["true"]),
        ({"choice": ["a</think>b", "c"]}, ["a</think>b", "c"], ["a", "ab"]),
        ({"json": {"enum": ["<think>x"]}}, ['"<think>x"'], ['"x"']),
        ({"json": {"properties": {"<think>": {}}, "required": ["<think>"]}}, ['{"<think>":1}'], []),
        ({"regex": "(a<think>b|c)d"}, ["a<think>bd", "cd"], ["abd"]),
        ({"grammar": 'start: "a" "<|im_start|>" "b"'}, ["a<|im_start|>b"], ["ab"]),
        (
            {"json": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}},
            ["0", "-1", "9223372036854774784", "-9223372036854774784"],
            ["9223372036854775808", "-9223372036854775809", "99999999999999999999"],
        ),
        (
            {"json": {"type": "integer", "minimum": 0, "maximum": 2**64 - 1}},
            ["0", "9223372036854774784"],
            ["-1", "18446744073709551616"],
        ),
        (
            {"grammar": 'start: %json {"type": "number", "maximum": 9223372036854775807}'},
            ["1.5", "9223372036854774784"],
            ["9223372036854775808", "9223372036854775807.5"],
        ),
        ({"json": {"const": 2**60}}, [str(2**60)], [str(2**60 + 1)]),
    ],
)
def test_kinds(grammars: Grammars, fields: dict[str, Any], good: list[str], bad: list[str]) -> None:
    for text in good:
        assert matches(grammars, text, **fields), text
    for text in bad:
        assert not matches(grammars, text, **fields), text


def test_special_tokens_are_no_text(grammars: Grammars) -> None:
    """Nor is what only looks like one, `<think>`; ids without a token are forbidden."""
    add(grammars, json={"type": "string"})
    say(grammars, '"<|im_end|')
    assert allowed(grammars) <= set(range(256))
    add(grammars, slot=1, grammar='start: <think> "a"')
    assert allowed(grammars, 1) == {THINK}
    grammars.accept({1: THINK})
    assert allowed(grammars, 1) == {ord("a")}


def test_rows_share_a_compiled_grammar(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a place of its own in it; it may be forgotten while they run."""
    spec = StructuredOutputs(regex="ab|cd")
    compile_as_7(grammars, spec)
    monkeypatch.setattr(Grammars, "_compile", None)
    for slot, said in enumerate((b"", b"a", b"c")):
        grammars.add(slot, spec, list(said), ENDS, number=7)
    grammars.forget([7, 8])
    assert [allowed(grammars, slot) for slot in range(3)] == [{97, 99}, {98}, {100}]
    say(grammars, "cd", 0)
    assert [allowed(grammars, slot) for slot in range(3)] == [set(ENDS), {98}, {100}]


def test_rows_share_the_limits_of_a_lexer(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason of both says that it is the grammar: the scheduler tries them alone."""
    monkeypatch.setitem(GRAMMAR_LIMITS, "max_lexer_states", 1000)
    spec = StructuredOutputs(regex="[ab]*a[ab]{17}c")
    compile_as_7(grammars, spec)
    for slot, number in enumerate((7, 7, 0)):
        grammars.add(slot, spec, [], ENDS, number=number)
    failed: dict[int, str] = {}
    for digit in bin(3**1000)[2:]:
        grammars.accept({0: ord("a") + int(digit)})
        if failed := fill(grammars, 0)[1]:
            break
    _, failed = fill(grammars, 0, 1, 2)
    assert set(failed) == {0, 1}
    assert all(reason.startswith(GRAMMAR_FAILED) for reason in failed.values())


def test_rows_go_on_side_by_side(grammars: Grammars) -> None:
    for slot, text in ((5, "no"), (2, "yes")):
        add(grammars, slot, choice=[text])
    add(grammars, 9, choice=["x"])
    grammars.remove(9)
    grammars.remove(7)
    masks, failed = fill(grammars, 2, 5)
    assert [ids(mask) for mask in masks] == [{ord("y")}, {ord("n")}]
    assert failed == {}
    grammars.clear()
    assert fill(grammars) == ([], {})


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"json": {"uniqueItems": True}}, 'Unimplemented keys: \\["uniqueItems"\\]'),
        ({"regex": "(?=a)a"}, "look-ahead"),
        ({"grammar": '{"grammars": [{"lark_grammar": "start: /a/"}]}'}, "expecting rule"),
        ({"grammar": "start: a"}, 'unknown name: "a"'),
        ({"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}, "no text matches"),
        ({"regex": "(a{1000}){1000}"}, "too many expressions"),
    ],
)
def test_a_failed_row_fails_alone(grammars: Grammars, fields: dict[str, Any], reason: str) -> None:
    add(grammars, 0, regex="a")
    add(grammars, 1, **fields)
    masks, failed = fill(grammars, 1, 0)
    for _ in range(20):
        if failed:
            break
        grammars.accept({1: ord("a")})
        masks, failed = fill(grammars, 1, 0)
    assert failed.keys() == {1}
    assert re.match(f"structured_outputs: the grammar failed: .*{reason}", failed[1], re.DOTALL)
    assert (masks[0] == -1).all()
    assert ids(masks[1]) == {ord("a")}
    grammars.accept({1: 3})
    assert fill(grammars, 1)[1] == failed


def test_a_token_that_does_not_match_fails_the_row(grammars: Grammars) -> None:
    add(grammars, 0, regex="ab")
    allowed(grammars)
    grammars.accept({0: ord("b")})
    assert "the grammar failed" in fill(grammars, 0)[1][0]


def test_a_row_without_a_token_is_where_it_was(grammars: Grammars) -> None:
    add(grammars, 0, regex="ab")
    say(grammars, "a")
    grammars.accept({0: -1})
    assert allowed(grammars) == {ord("b")}


def test_a_dead_end_fails_the_row(grammars: Grammars) -> None:
    """The grammar has come to its end, but the row has no end token (`ignore_eos`)."""
    grammars.add(0, StructuredOutputs(regex="a"), [], [])
    grammars.accept({0: ord("a")})
    assert "allows no next token" in fill(grammars, 0)[1][0]


def test_a_grammar_that_allows_end_tokens_as_text_ends_only_at_its_end(grammars: Grammars) -> None:
    """llguidance's masks then have EOS where the grammar may not end, too."""
    add(grammars, grammar='start: <[*]> "a"')
    assert allowed(grammars) == set(range(262)) - set(ENDS)
    grammars.accept({0: IM_START})
    say(grammars, "a")
    assert allowed(grammars) == set(ENDS)


def test_masks_are_as_wide_as_the_tokenizers_vocabulary(grammars: Grammars) -> None:
    assert grammars.num_words == 9
    add(grammars, grammar="start: <[*]>")
    grammars.add(1, StructuredOutputs(regex="a"), [ord("a")], ENDS)
    masks, _ = fill(grammars, 0, 1)
    assert max(ids(masks[0])) == 261
    assert ids(masks[1]) == set(ENDS)


# ---- reasoning -------------------------------------------------------------------------------

QWEN3_NUM_TOKENS = 151_669
QWEN3_THINK, QWEN3_END_THINK, QWEN3_IM_END = 151_667, 151_668, 151_645


@pytest.fixture(scope="module")
def of_qwen3(qwen3_folder: Path) -> Grammars:
    return Grammars(qwen3_folder)


def begin(grammars: Grammars, said: list[int], reasoning: Reasoning, **fields: Any) -> None:
    grammars.remove(0)
    grammars.add(0, StructuredOutputs(**fields), said, [QWEN3_IM_END], reasoning)


def test_a_grammar_begins_after_an_open_thought(of_qwen3: Grammars) -> None:
    """In there everything may be said, but nothing may end the text; however it was resumed."""
    begin(of_qwen3, [], "open", choice=["0", "1"])
    thought = [32313, 11, QWEN3_THINK, 198]
    for token_id in [*thought, QWEN3_END_THINK]:
        free = allowed(of_qwen3)
        assert {token_id, QWEN3_END_THINK, 0, 15} < free
        assert QWEN3_IM_END not in free
        of_qwen3.accept({0: token_id})
    zero_and_one = {15, 16}
    assert allowed(of_qwen3) == zero_and_one
    begin(of_qwen3, [*thought, QWEN3_END_THINK], "open", choice=["0", "1"])
    assert allowed(of_qwen3) == zero_and_one
    begin(of_qwen3, [*thought, QWEN3_END_THINK, 15], "open", choice=["0", "1"])
    assert allowed(of_qwen3) == {QWEN3_IM_END}
    begin(of_qwen3, thought, "open", choice=["0", "1"])
    assert len(allowed(of_qwen3)) > QWEN3_NUM_TOKENS - 10


@pytest.mark.parametrize("resumes", [False, True])
def test_a_model_may_open_a_thought_first(of_qwen3: Grammars, resumes: bool) -> None:
    """Then the grammar waits; a model that answers at once follows it at once."""

    def say(*token_ids: int) -> set[int]:
        for said, token_id in enumerate(token_ids):
            if resumes:
                begin(of_qwen3, list(token_ids[:said]), "optional", choice=["0", "1"])
            tags = of_qwen3.opening_tags([0])
            assert tags == ({} if said else {0: QWEN3_THINK})
            assert token_id in allowed(of_qwen3).union(tags.values())
            of_qwen3.accept({0: token_id})
        return allowed(of_qwen3)

    begin(of_qwen3, [], "optional", choice=["0", "1"])
    assert allowed(of_qwen3) == {15, 16}
    assert say(16) == {QWEN3_IM_END}
    begin(of_qwen3, [], "optional", choice=["0", "1"])
    assert say(QWEN3_THINK, 198, 0, QWEN3_END_THINK) == {15, 16}


def test_a_closed_thought_leaves_nothing_but_the_grammar(of_qwen3: Grammars) -> None:
    begin(of_qwen3, [], "none", choice=["0", "1"])
    assert allowed(of_qwen3) == {15, 16}


def test_a_grammar_may_have_the_thought_itself(of_qwen3: Grammars) -> None:
    begin(of_qwen3, [], "optional", grammar='start: <think> "0" </think> "1"')
    for token_id in (QWEN3_THINK, 15, QWEN3_END_THINK, 16):
        assert allowed(of_qwen3) == {token_id}
        of_qwen3.accept({0: token_id})
    assert allowed(of_qwen3) == {QWEN3_IM_END}


def test_rows_in_thought_stand_beside_others(grammars: Grammars) -> None:
    """By a vocabulary that is smaller than the model's."""
    add(grammars, 0, regex="a")
    grammars.add(1, StructuredOutputs(regex="b"), [], ENDS, "open")
    add(grammars, 2, b"c", regex="c")
    masks, failed = fill(grammars, 0, 1, 2)
    assert not failed
    assert ids(masks[0]) == {ord("a")}
    assert ids(masks[1]) >= set(range(256)) | {THINK}
    assert not ids(masks[1]) & set(ENDS)
    assert ids(masks[2]) == set(ENDS)
