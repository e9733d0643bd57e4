"""Rows with a grammar next to rows without, by the real model."""

import re
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from penstock.protocol.config import Config
from penstock.protocol.messages.plan import RowAdded
from penstock.protocol.messages.structured import StructuredOutputs
from tests.services.worker.driver import NUM_STEPS, PROMPT, Listener, extras
from tests.services.worker.plans import plan, row

DEMO = Config().model_folder


class Chats(Listener):
    """The demo model: rows that answer, with and without a grammar."""

    def __init__(self) -> None:
        super().__init__(DEMO)
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(DEMO)

    @property
    def failed(self) -> list[tuple[int, str]]:
        return [failure for output in self.outputs for failure in output.failed]

    def row(self, slot: int, prompt: str, regex: str | None, output: str = "") -> RowAdded:
        given = self.tokenizer.encode(prompt)
        asked = None
        if regex:
            grammar = StructuredOutputs(regex=regex)
            end = [self.tokenizer.eos_token_id]
            asked = extras(given, structured_outputs=grammar, end_token_ids=end)
        given = given + self.tokenizer.encode(output)
        return row(slot, given, range(8 * slot, 8 * slot + 8), extras=asked)

    def add(self, *added: RowAdded, removed: Sequence[int] = ()) -> None:
        chunks = [(one.slot, len(one.token_ids) // 4) for one in added]
        for slot in removed:
            self.tokens.pop(slot)
        running = {*self.tokens, *(one.slot for one in added)}
        self.step(plan(removed=removed, added=added, chunks=chunks), *running)

    def text(self, slot: int) -> str:
        """Up to the first EOS."""
        text: str = self.tokenizer.decode(self.tokens[slot])
        return text.partition(self.tokenizer.eos_token)[0]


def test_grammars() -> None:
    """Next to rows without; a row takes another's slot in the plan that removes it."""
    chats = Chats()
    chats.add(chats.row(0, "count from 3 to 9", None), chats.row(1, "17+25=", "[a-f]{5}"))
    chats.decode(3, 0, 1)
    chats.add(chats.row(2, "17+25=", "4[0-9]|[A-Z]{4}"))
    chats.decode(4, 0, 1, 2)
    assert re.fullmatch("[a-f]{5}", chats.text(1))
    assert chats.text(2) == "42"
    chats.add(chats.row(1, "17+25=", "xyz{3}abc", output="xyzz"), removed=[1])
    chats.decode(10, 0, 1, 2)
    assert chats.text(1) == "zabc"
    assert chats.tokens[0] == alone("count from 3 to 9", 20)
    assert not chats.failed


def alone(prompt: str, num_tokens: int) -> list[int]:
    chats = Chats()
    chats.add(chats.row(0, prompt, None))
    chats.decode(num_tokens - 1, 0)
    return chats.tokens[0]


def test_a_row_whose_grammar_fails_says_so() -> None:
    chats = Chats()
    chats.add(chats.row(0, "17+25=", None), chats.row(4, "17+25=", "ab", output="x"))
    chats.decode(2, 0, 4)
    assert [index for index, _ in chats.failed] == [1, 1, 1]
    assert "grammar" in chats.failed[0][1]
    assert chats.tokens[0] == alone("17+25=", 3)


def test_a_grammar_waits_for_the_thought_that_the_model_begins(
    folder: Path, plain: dict[int, list[int]]
) -> None:
    """And for no other: `<think>` is drawn from all tokens, or not at all."""
    opens, says, closes = plain[3][:3]
    grammar = StructuredOutputs(regex="[a-z]*")
    for tags, thought in (((opens, closes), plain[3][:3]), ((closes, says), [])):
        listener = Listener(folder)
        grammars = listener.runner.logits_processor.grammars
        assert grammars
        grammars._tags = tags
        asked = extras(structured_outputs=grammar, end_token_ids=[258], reasoning="optional")
        added = [row(3, PROMPT, range(5), extras=asked)]
        listener.step(plan(added=added, chunks=[(3, 37)]), 3)
        listener.decode(NUM_STEPS - 1, 3)
        tokens = listener.tokens[3]
        assert tokens[: len(thought)] == thought
        answer = tokens[len(thought) :]
        end = answer.index(258) if 258 in answer else len(answer)
        assert re.fullmatch(b"[a-z]*", bytes(answer[:end]))
        assert not any(output.failed for output in listener.outputs)
