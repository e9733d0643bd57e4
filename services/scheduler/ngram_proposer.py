"""Adds guesses to a step, as far as something is left for them; `Speculation` makes the guesses.

A step checks a guess as it decodes: each is a row of its own, which samples the token behind it.
"""

from penstock.protocol.config import Config
from penstock.protocol.messages.plan import RowAdded
from penstock.services.scheduler.block_manager import BlockManager
from penstock.services.scheduler.in_flight_plan import Changes, Step
from penstock.services.scheduler.sequence import Sequence
from penstock.services.scheduler.speculative import KNOWN, Speculation


class Drafter:
    """Makes the drafts of all sequences, and counts."""

    def __init__(self, config: Config, blocks: BlockManager) -> None:
        self.num_draft_tokens = 0
        """guessed, and sent to the workers"""
        self.num_accepted_tokens = 0
        """of these, found right"""
        self._is_on = config.speculative == "ngram"
        self._most = config.num_speculative_tokens
        self._blocks = blocks

    def counters(self) -> dict[str, float]:
        """For metrics."""
        return {
            "draft_tokens_total": self.num_draft_tokens,
            "accepted_tokens_total": self.num_accepted_tokens,
        }

    def begin(self, sequence: Sequence, row: RowAdded) -> None:
        """A sequence is admitted, as `row`; extras are made for one token a step."""
        speculates = self._is_on and sequence.sampling.speculative and row.extras is None
        sequence.speculation = Speculation() if speculates else None

    def check(self, sequence: Sequence, speculation: Speculation) -> None:
        """The sequence has a new token. If it differs from its guess, all behind it is void."""
        is_right = speculation.check(sequence.token_ids)
        if is_right:
            self.num_accepted_tokens += 1
        elif is_right is False:
            sequence.num_planned_tokens = len(sequence.token_ids) - 1

    def add(self, running: list[Sequence], step: Step, changes: Changes, num_left: int) -> None:
        """Drafts for those that decode; num_left: rows that the step may still get."""
        for sequence in running if self._is_on else ():
            if sequence.speculation and sequence.num_planned_tokens > sequence.num_prefill_tokens:
                num_left -= self._add(sequence, sequence.speculation, step, changes, num_left)

    def _add(
        self,
        sequence: Sequence,
        speculation: Speculation,
        step: Step,
        changes: Changes,
        num_left: int,
    ) -> int:
        """Returns how many rows it takes.

        The step has a row for the sequence's next token already, unless this token is a guess, too.
        """
        token_ids, begin = sequence.token_ids, sequence.num_planned_tokens
        has_row = sequence.last_step == step.number
        limits = num_left, self._most + (not has_row), sequence.max_length - 1 - begin
        number = max(0, min(limits))
        may_guess = number and (speculation.look_up(token_ids) if has_row else speculation.matched)
        number = self._make_room(sequence, changes, number if may_guess else 0)
        if not has_row and number < 2:
            return 0  # alone it would be decoded from there on, even if it were wrong
        guesses = speculation.guess(token_ids, begin, begin + number)
        first = [token_ids[-1] if speculation.rests else KNOWN] if has_row else []
        if speculation.rests or guesses:
            tokens = first + guesses
            changes.drafts.extend((sequence.slot, begin - len(first), len(tokens), *tokens))
        speculation.send([KNOWN] * len(first) + guesses)
        step.sampled.extend([sequence] * number)
        sequence.num_planned_tokens += number
        sequence.last_step = step.number
        self.num_draft_tokens += number
        return number

    def _make_room(self, sequence: Sequence, changes: Changes, num_tokens: int) -> int:
        """Takes free blocks for more tokens, as long as there are any; returns for how many."""
        blocks, size, table = self._blocks, self._blocks.block_size, sequence.block_table
        end = sequence.num_planned_tokens + num_tokens
        while end > len(table) * size and blocks.num_free_blocks:
            changes.append(sequence.slot, blocks.append(sequence))
        return num_tokens - max(0, end - len(table) * size)
