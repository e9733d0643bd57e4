"""The scheduler of draft tokens, which fill the free rows of a plan.

A step verifies drafts while it decodes: each draft token is a row, which samples the next token.
Each sequence has a proposer (`penstock.services.scheduler.proposer`).
"""

from penstock.protocol.config import Config
from penstock.protocol.messages.packed import unpack
from penstock.protocol.messages.plan import STATE_WINDOW
from penstock.services.scheduler.blocks.block_manager import BlockManager
from penstock.services.scheduler.draft_policy import DraftPolicy
from penstock.services.scheduler.in_flight_plan import InFlightPlan, PlanBuilder
from penstock.services.scheduler.ngram_lookup import NgramLookup
from penstock.services.scheduler.proposer import KNOWN, LayerProposer, Proposer
from penstock.services.scheduler.sequence import Sequence

# Tokens that the proposers of all sequences read for a plan, 1 µs each. A longer prompt is read
# over several plans, while it is computed.
TOKENS_READ_PER_PLAN = 1024


class DraftScheduler:
    """The maker and counter of drafts for all sequences."""

    def __init__(self, config: Config, blocks: BlockManager) -> None:
        self.num_draft_tokens = 0  # draft tokens sent to the workers
        self.num_accepted_tokens = 0  # draft tokens that were right
        self._max_tokens = config.num_speculative_tokens
        if blocks.states:  # the window of a state block also has the token before the drafts
            self._max_tokens = min(self._max_tokens, STATE_WINDOW - 1)
        self._blocks = blocks
        self._make = {"ngram": NgramLookup, "mtp": LayerProposer}.get(config.speculative_method)
        is_layer = self._make is LayerProposer
        self.policy = DraftPolicy(self._max_tokens) if is_layer else None
        # the last plan, if its steps had as many drafts as they made, and no prefill
        self._steady: InFlightPlan | None = None
        self._size_before, self._arrived_at = 0, 0.0

    def counters(self) -> dict[str, float]:
        return {
            "draft_tokens_total": self.num_draft_tokens,
            "accepted_tokens_total": self.num_accepted_tokens,
        }

    def begin(self, sequence: Sequence) -> None:
        """Prepare an admitted sequence."""
        may_have = self._make and sequence.may_have_drafts
        sequence.proposer = self._make(sequence.token_ids) if self._make and may_have else None

    def check(self, sequence: Sequence, proposer: Proposer) -> None:
        """Compare a new token with its draft. After a wrong draft, roll later drafts back."""
        is_right = proposer.check()
        if is_right:
            self.num_accepted_tokens += 1
        elif is_right is False:
            self._blocks.roll_back(sequence, len(sequence.token_ids) - 1)

    def add_drafts(self, running: list[Sequence], builder: PlanBuilder, num_left: int) -> None:
        """Add drafts of decoding sequences, at most `num_left` rows."""
        num_unread = TOKENS_READ_PER_PLAN
        for sequence in running:
            if not (proposer := sequence.proposer):
                continue
            num_unread -= proposer.read(num_unread)
            if sequence.num_planned_tokens > sequence.num_prefill_tokens:
                num_left -= self._add(sequence, proposer, builder, num_left)

    def _add(
        self, sequence: Sequence, proposer: Proposer, builder: PlanBuilder, num_left: int
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
        number = number and min(number, proposer.num_drafts(has_row))
        number = self._make_room(sequence, builder, number)
        if not has_row and number < 2:
            return 0  # workers would decode from a single draft even if it is wrong
        drafts = proposer.drafts(begin, begin + number)
        first = [token_ids[-1] if proposer.is_paused else KNOWN] if has_row else []
        if proposer.is_paused or drafts:
            tokens = first + drafts
            builder.drafts.extend((sequence.slot, begin - len(first), len(tokens), *tokens))
        proposer.send([KNOWN] * len(first) + drafts)
        builder.plan.sampled.extend([sequence] * number)
        sequence.num_planned_tokens += number
        sequence.last_step = builder.plan.number
        self.num_draft_tokens += number
        return number

    def ask(self, builder: PlanBuilder, num_free: int) -> None:
        """Ask the workers for drafts after a plan, for the sequences that will decode again.

        num_free: rows of the next plan that may have drafts.
        """
        if not self.policy or num_free <= 0:
            return
        sampled = dict.fromkeys(builder.plan.sampled)
        drafted = {
            sequence: sequence.proposer.acceptance
            for sequence in sampled
            if isinstance(sequence.proposer, LayerProposer)
            and sequence.num_planned_tokens + 1 < sequence.max_length
        }
        if not drafted:
            return
        number = self.policy.choose(len(sampled) - len(drafted), list(drafted.values()))
        for sequence in drafted:  # room for the layer's keys of all drafts but the last
            left = sequence.max_length - 1 - sequence.num_planned_tokens
            self._make_room(sequence, builder, min(number - 1, left))
        builder.plan = builder.plan._replace(num_drafts=number)

    def take(self, plan: InFlightPlan, drafts: bytes) -> None:
        """Give the drafts that the workers have made after a plan to its sequences."""
        numbers, size = unpack(drafts), plan.num_drafts
        if len(numbers) != size * len(plan.sampled):
            found = f"got {len(numbers)} drafts of step {plan.number}"
            raise ValueError(f"{found}, expected {size} for each of {len(plan.sampled)} tokens")
        for index, sequence in enumerate(plan.sampled if size else ()):
            if isinstance(sequence.proposer, LayerProposer):
                sequence.proposer.take(numbers[index * size : (index + 1) * size])
        is_steady = not plan.chunks and plan.sampled and size == self._size_before
        self._steady, self._size_before = plan if is_steady else None, size

    def on_tokens(self, now: float) -> None:
        """Record the arrival of a step's tokens at `now`, in seconds."""
        if self.policy and self._steady:
            number = len(set(self._steady.sampled))
            self.policy.measure(number, self._steady.num_drafts, now - self._arrived_at)
        self._arrived_at = now

    def _make_room(self, sequence: Sequence, builder: PlanBuilder, num_tokens: int) -> int:
        """Append free blocks for more tokens. Return the number of tokens that fit."""
        end = sequence.num_planned_tokens + num_tokens
        while end > sequence.capacity and self._blocks.num_free_blocks:
            builder.append_block(sequence.slot, self._blocks.append(sequence))
        return num_tokens - max(0, end - sequence.capacity)
