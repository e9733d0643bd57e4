"""The scheduler of draft tokens: drafts of `NgramLookup` fill the free rows of a plan.

A step verifies drafts while it decodes: each draft token is a row, which samples the next token.
"""

from penstock.protocol.config import Config
from penstock.protocol.messages.plan import STATE_WINDOW, RowAdded
from penstock.services.scheduler.blocks.block_manager import BlockManager
from penstock.services.scheduler.in_flight_plan import PlanBuilder
from penstock.services.scheduler.ngram_lookup import KNOWN, NgramLookup
from penstock.services.scheduler.sequence import Sequence


class DraftScheduler:
    """The maker and counter of drafts for all sequences."""

    def __init__(self, config: Config, blocks: BlockManager) -> None:
        self.num_draft_tokens = 0  # draft tokens sent to the workers
        self.num_accepted_tokens = 0  # draft tokens that were right
        self._max_tokens = config.num_speculative_tokens
        if blocks.states:  # the window of a state block also has the token before the drafts
            self._max_tokens = min(self._max_tokens, STATE_WINDOW - 1)
        self._blocks = blocks

    def counters(self) -> dict[str, float]:
        return {
            "draft_tokens_total": self.num_draft_tokens,
            "accepted_tokens_total": self.num_accepted_tokens,
        }

    def begin(self, sequence: Sequence, row: RowAdded) -> None:
        """Prepare an admitted sequence. A row with extras gets no drafts."""
        speculates = sequence.sampling.speculative and row.extras is None
        sequence.ngram_lookup = NgramLookup() if speculates else None

    def check(self, sequence: Sequence, lookup: NgramLookup) -> None:
        """Compare a new token with its draft. After a wrong draft, roll later drafts back."""
        is_right = lookup.check(sequence.token_ids)
        if is_right:
            self.num_accepted_tokens += 1
        elif is_right is False:
            self._blocks.roll_back(sequence, len(sequence.token_ids) - 1)

    def add_drafts(self, running: list[Sequence], builder: PlanBuilder, num_left: int) -> None:
        """Add drafts of decoding sequences, at most `num_left` rows."""
        for sequence in running:
            if sequence.ngram_lookup and sequence.num_planned_tokens > sequence.num_prefill_tokens:
                num_left -= self._add(sequence, sequence.ngram_lookup, builder, num_left)

    def _add(
        self, sequence: Sequence, lookup: NgramLookup, builder: PlanBuilder, num_left: int
    ) -> int:
        """Add drafts of a sequence. Return their number of rows.

        The plan already has a row for the sequence's next token, unless the last token is a draft.
        """
        token_ids, begin = sequence.token_ids, sequence.num_planned_tokens
        has_row = sequence.last_step == builder.plan.number
        if self._blocks.states and not has_row:
            return 0  # of two drafts in flight, the second could overwrite the last right state
        limits = num_left, self._max_tokens + (not has_row), sequence.max_length - 1 - begin
        number = max(0, min(limits))
        may_guess = number and (lookup.look_up(token_ids) if has_row else lookup.matched)
        number = self._make_room(sequence, builder, number if may_guess else 0)
        if not has_row and number < 2:
            return 0  # workers would decode from a single draft even if it is wrong
        guesses = lookup.guess(token_ids, begin, begin + number)
        first = [token_ids[-1] if lookup.is_paused else KNOWN] if has_row else []
        if lookup.is_paused or guesses:
            tokens = first + guesses
            builder.drafts.extend((sequence.slot, begin - len(first), len(tokens), *tokens))
        lookup.send([KNOWN] * len(first) + guesses)
        builder.plan.sampled.extend([sequence] * number)
        sequence.num_planned_tokens += number
        sequence.last_step = builder.plan.number
        self.num_draft_tokens += number
        return number

    def _make_room(self, sequence: Sequence, builder: PlanBuilder, num_tokens: int) -> int:
        """Append free blocks for more tokens. Return the number of tokens that fit."""
        end = sequence.num_planned_tokens + num_tokens
        while end > sequence.capacity and self._blocks.num_free_blocks:
            builder.append_block(sequence.slot, self._blocks.append(sequence))
        return num_tokens - max(0, end - sequence.capacity)
