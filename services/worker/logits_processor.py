"""Rows with `RowExtras`: penalties, bias, restrictions, grammars and logprobs.

The step's CUDA graph changes the logits of most rows with extras, by the state of their slots
(`penstock.kernels.sampling.logits`). Other rows are *deferred*: the graph does not change their
logits, and `LogitsProcessor.sample` changes and samples these logits in a second graph. Deferred
rows are of two kinds. Rows with a grammar, or with bad words of several tokens, need a mask that
depends on the previous token. Rows with logprobs need their raw logits. The host waits for the
previous tokens and computes the masks while the GPU computes the step. The row of a draft has the
mask after the drafts before it, which are then undone: only sampled tokens remain.

Each rank changes its shard of the logits. Rank 0 gets and samples the logits of deferred rows.
"""

from collections.abc import Callable, Iterable, Mapping
from copy import copy
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.layouts.sampling import DEFERRED, PENALTIES, column
from penstock.kernels.layouts.step import COUNT, FIRST, SLOT, START, Slots
from penstock.kernels.sampling.logits import apply_bitmask, process_logits
from penstock.kernels.sampling.sampling import candidates_suffice, sample
from penstock.models.model import Model
from penstock.protocol.messages.packed import unpack
from penstock.protocol.messages.plan import BatchPlan, RowAdded
from penstock.protocol.messages.sampling import MAX_LABELS, Pooling
from penstock.services.worker.cuda_graphs import Computed
from penstock.services.worker.grammars import Grammars
from penstock.services.worker.launched_step import (
    PendingLogprobs,
    PendingNumbers,
    PendingOutput,
    PooledNumbers,
    integers_to_device,
    pack_logprobs,
    to_host,
)
from penstock.services.worker.persistent_batch import Integers, Rows, split_drafts
from penstock.services.worker.processed_rows import (
    Bitmask,
    LogitsChanges,
    ProcessedRow,
    TokenBits,
    TokenMasks,
    has_token,
)

MAX_ROWS = 64  # rows whose logits are copied at a time, to bound the memory


class AwaitedRow(NamedTuple):
    """Row of a step whose token the host must know before the slot's next token is sampled."""

    place: int  # among the sampled rows
    at: int  # in the step
    position: int  # of its input token
    input_id: int  # -1: not a draft


def pool(
    model: Model, poolings: Mapping[int, Pooling], rows: Rows, computed: Computed
) -> Iterable[PendingNumbers]:
    """Yield functions that wait for and return the results of pooling rows.

    All ranks must call this function; rank 0 gets results. Hidden states and logits are copied to
    the host, which computes each row separately, so that results have the same bits in every batch.
    poolings: index among the sampled rows → parameters.
    """
    embedded = {index: pooling for index, pooling in poolings.items() if not pooling.label_ids}
    if embedded and model.tp.rank == 0:
        table = rows.table[rows.sampled[list(embedded)]]
        ends = table[:, FIRST] + table[:, COUNT]
        (last,) = integers_to_device((ends - 1,), computed.tokens.device)
        states = to_host(computed.hidden_states[last].float())
        norm = model.model.norm
        yield partial(_embeddings, embedded, states, to_host(norm.weight.float()), norm.eps)
    labelled = [(index, pooling) for index, pooling in poolings.items() if pooling.label_ids]
    for begin in range(0, len(labelled), MAX_ROWS):
        some = dict(labelled[begin : begin + MAX_ROWS])
        yield from _logits_of_labels(model, some, rows, computed)


def _logits_of_labels(
    model: Model, poolings: Mapping[int, Pooling], rows: Rows, computed: Computed
) -> Iterable[PendingNumbers]:
    label_ids = np.zeros((len(poolings), MAX_LABELS), np.int64)
    for row, pooling in zip(label_ids, poolings.values(), strict=True):
        row[: len(pooling.label_ids)] = pooling.label_ids
    order, ids = integers_to_device(
        (rows.sampled[list(poolings)], label_ids.ravel()), computed.tokens.device
    )
    logits = model.head.join(computed.logits[order])
    if logits is not None:
        yield partial(_probabilities, poolings, to_host(logits.gather(1, ids.view(-1, MAX_LABELS))))


def _embeddings(
    poolings: Mapping[int, Pooling], states: Tensor, weight: Tensor, eps: float
) -> PooledNumbers:
    """Yield the first `dimensions` of each normed hidden state, scaled to length 1."""
    for (index, pooling), state in zip(poolings.items(), states.numpy(), strict=True):
        square: np.float64 = np.square(state, dtype=np.float64).mean()
        normed = state / np.sqrt(square + eps) * weight.numpy()
        kept = normed[: pooling.dimensions]
        yield index, _packed(kept / np.linalg.norm(kept))


def _probabilities(poolings: Mapping[int, Pooling], logits: Tensor) -> PooledNumbers:
    """Yield the softmax over the logits of each row's labels."""
    for (index, pooling), row in zip(poolings.items(), logits.numpy(), strict=True):
        kept = row[: len(pooling.label_ids)].astype(np.float64)
        shares = np.exp(kept - kept.max())
        yield index, _packed(shares / shares.sum())


def _packed(numbers: NDArray[np.floating]) -> bytes | None:
    """Return numbers as float32, or None if any is not finite."""
    return numbers.astype("<f4").tobytes() if np.isfinite(numbers).all() else None


MAX_PROMPT_TOKENS = 256  # prompt tokens whose logits are processed at a time
CONTRADICTION = (
    "structured_outputs: allowed_token_ids or bad_words forbid every token that the grammar allows"
)
# columns of `LogitsProcessor._traits`
IS_DEFERRED, IS_AWAITED, HAS_LOGPROBS, HAS_PROMPT_LOGPROBS, IS_POOLED = range(5)


class LogitsProcessor:
    """The rows with extras, by slot. Only plans change the rows."""

    def __init__(
        self, model: Model, slots: Slots, vocab_size: int, grammars: Grammars | None
    ) -> None:
        """Allocate the state of all slots. Only rank 0 has `grammars`."""
        self.rows: dict[int, ProcessedRow] = {}
        self.grammars = grammars
        self._model = model
        self._slots = slots
        self._device = slots.last_token.device
        self._vocab_size = vocab_size
        num_slots = len(slots.parameters)
        self._changes = LogitsChanges(
            slots.parameters, vocab_size, model.head.start, model.head.stop
        )
        self.state = self._changes.state
        self._masks = TokenMasks(num_slots, vocab_size, self._device) if grammars else None
        # traits of the row at each slot; False without a row
        self._traits: NDArray[np.bool_] = np.zeros((num_slots, 5), np.bool_)
        # slot that needs its tokens → its rows in the last step of any such slot
        self._awaited: dict[int, list[AwaitedRow]] = {}
        self._with_words: set[int] = set()  # slots of rows with bad words of several tokens
        self._last_tokens: Callable[[], list[int]] = list  # waits for the last sampled tokens

    def clear(self) -> None:
        self._remove(list(self.rows))

    def apply(self, plan: BatchPlan) -> dict[int, ProcessedRow]:
        """Remove and add rows. Return the new rows by slot.

        The caller writes their numbers to the slot table. Raises ValueError for an invalid plan.
        """
        if self.rows:
            self._remove([slot for slot in unpack(plan.removed) if slot in self.rows])
        added = {}
        for row in plan.added:
            is_deferred = self._model.tp.spans_nodes and not candidates_suffice(row.sampling)
            if row.extras or is_deferred:
                added[row.slot] = self._add(row, is_deferred)
        self._changes.add(added)
        return added

    def count_drafts(self, drafts: bytes) -> None:
        """Count drafts of rows with penalties before a step, instead of wrong drafts before."""
        counts = [
            (slot, *count)
            for slot, position, token_ids in split_drafts(drafts)
            if slot in self.rows and self.rows[slot].flags & PENALTIES
            for count in self.rows[slot].count_draft(position, token_ids.tolist())
        ]
        if counts and self._model.head.stop > self._model.head.start:
            self._changes.count(counts, self._slots.last_token)

    def follow(self, tokens: Callable[[], list[int]]) -> None:
        """Set `tokens`, which waits for and returns the tokens of the last launched step."""
        self._last_tokens = tokens

    def _add(self, added: RowAdded, is_deferred: bool) -> ProcessedRow:
        slot = added.slot
        row = self.rows[slot] = ProcessedRow(added, self._vocab_size, is_deferred)
        extras = row.extras
        is_deferred = row.flags & DEFERRED > 0
        with_logprobs = extras.num_logprobs >= 0, extras.num_prompt_logprobs >= 0
        is_pooled = extras.pooling is not None
        self._traits[slot] = is_deferred, row.needs_tokens, *with_logprobs, is_pooled
        if row.has_bad_words:
            self._with_words.add(slot)
        grammar = extras.structured_outputs
        if grammar and self.grammars:
            output = row.token_ids[extras.num_prompt_tokens :].tolist()
            begins = extras.end_token_ids, extras.reasoning, extras.grammar
            self.grammars.add(slot, grammar, output, *begins)
        return row

    def _remove(self, slots: list[int]) -> None:
        for slot in slots:
            row = self.rows.pop(slot)
            self._awaited.pop(slot, None)
            self._with_words.discard(slot)
            if row.extras.structured_outputs and self.grammars:
                self.grammars.remove(slot)
        self._traits[slots] = False

    def handles(self, rows: Rows) -> bool:
        """Return whether `run` must be called after a step with these rows."""
        return bool(self._awaited) or bool(self._traits[rows.table[:, SLOT]].any())

    def run(self, rows: Rows, computed: Computed) -> PendingOutput:
        """Overwrite the tokens of deferred rows, in `computed` and in the persistent batch."""
        output = PendingOutput([], {}, [], [])
        slots = rows.table[:, SLOT]
        for row in rows.table[self._traits[slots, HAS_PROMPT_LOGPROBS]].tolist():
            self._prompt_logprobs(row, computed.hidden_states, output)
        self._accept()
        slots = slots[rows.sampled]
        is_deferred, is_awaited, has_logprobs, _, is_pooled = self._traits[slots].T
        if is_deferred.any():
            self._await(rows, np.flatnonzero(is_awaited))
            output.failed.extend(self._restrict(rows.sampled[is_deferred]))
            if computed.sample_deferred and not (is_deferred & has_logprobs).any():
                computed.sample_deferred()
            else:
                self._sample_copies(rows.sampled[is_deferred], slots[is_deferred], computed)
        which = np.flatnonzero(has_logprobs)
        for begin in range(0, len(which), MAX_ROWS):
            some = which[begin : begin + MAX_ROWS]
            numbers = [self.rows[slot].extras.num_logprobs for slot in slots[some].tolist()]
            packed = self._logprobs(rows.sampled[some], max(numbers), computed)
            if packed is not None:
                output.logprobs.append(PendingLogprobs(some.tolist(), numbers, packed))
        if is_pooled.any():
            at = zip(np.flatnonzero(is_pooled).tolist(), slots[is_pooled].tolist(), strict=True)
            poolings = {index: self.rows[slot].extras.pooling or Pooling() for index, slot in at}
            output.pooled.extend(pool(self._model, poolings, rows, computed))
        return output

    def _await(self, rows: Rows, which: Integers) -> None:
        """Keep the rows with these indices among the sampled rows, by slot."""
        order = rows.sampled[which]
        table = rows.table[order]
        positions = table[:, START] + table[:, COUNT] - 1
        parts = table[:, SLOT], which, order, positions, rows.inputs(order)
        for slot, *row in zip(*(part.tolist() for part in parts), strict=True):
            self._awaited.setdefault(slot, []).append(AwaitedRow(*row))

    def sample(
        self,
        logits: Tensor,
        tokens: Tensor,
        slots: Tensor,
        positions: Tensor,
        newest: Tensor,
        order: Tensor | None = None,
    ) -> None:
        """Overwrite the logits and tokens of deferred rows. Do not change other rows.

        logits: this rank's shard. tokens: tokens that were drawn from all tokens; rank 0 overwrites
        them with the result. slots, positions, newest: as for `process_logits`. order: indices of
        the rows in the step; None: the step's first rows.
        """
        # slot -1 reads the last slot's flags, but stays -1 in any case
        flags = column(self.state.parameters, "flags")[slots]
        slots = slots.masked_fill(flags < DEFERRED, -1)
        process_logits(logits, slots, positions, newest, self.state, deferred=True)
        joined = self._model.head.join(logits)
        if joined is not None and self._masks:
            order = torch.arange(len(slots), device=slots.device) if order is None else order
            slots.masked_fill_(tokens == self._masks.tags[order], -1)
            apply_bitmask(joined, self._masks.bitmask, order.masked_fill(slots < 0, -1))
            sample(joined, slots, positions, self._slots.sampling(), tokens)

    def _sample_copies(self, order: Integers, slots: Integers, computed: Computed) -> None:
        """Sample rows from copies of their logits, because peers may still read the logits."""
        end = 0
        while end < len(order):
            begin, end = end, min(end + MAX_ROWS, len(order))
            while end < len(order) and slots[end] == slots[end - 1]:
                end += 1  # rows of a draft stay together
            (some,) = integers_to_device((order[begin:end],), self._device)
            tokens = computed.tokens[some]
            slots_of, positions, newest = (part[some] for part in computed.rows)
            self.sample(computed.logits[some], tokens, slots_of, positions, newest, some)
            computed.tokens[some] = tokens

    def _logprobs(self, order: Integers, number: int, computed: Computed) -> Tensor | None:
        """Return packed logprobs of rows from their raw logits; None on all ranks but rank 0."""
        (some,) = integers_to_device((order,), self._device)
        raw = self._model.head.join(computed.logits[some])
        if raw is None:
            return None
        tokens = computed.tokens[some].clamp(min=0)  # the token -1 of a failed row
        return to_host(pack_logprobs(raw, tokens, number))

    def _prompt_logprobs(
        self, row: list[int], hidden_states: Tensor, output: PendingOutput
    ) -> None:
        """Compute logprobs of the prompt tokens that a chunk (a row of the record) predicts."""
        slot, start, count, first, *_ = row
        token_ids, extras = self.rows[slot].token_ids, self.rows[slot].extras
        end = min(start + count, extras.num_prompt_tokens - 1)
        for begin in range(start, end, MAX_PROMPT_TOKENS):
            stop = min(begin + MAX_PROMPT_TOKENS, end)
            some = slice(first + begin - start, first + stop - start)
            logits = self._model.head.join(self._model.compute_logits(hidden_states[some]))
            if logits is not None:
                (next_ids,) = integers_to_device([token_ids[begin + 1 : stop + 1]], self._device)
                packed = pack_logprobs(logits, next_ids, extras.num_prompt_logprobs)
                output.prompt_logprobs.setdefault(slot, []).append(to_host(packed))

    def _accept(self) -> None:
        """Advance grammars and bad words by the last sampled tokens that follow no wrong draft."""
        awaited, self._awaited = self._awaited, {}
        if not awaited or not self.grammars:
            return
        token_ids = self._last_tokens()
        for slot, rows in awaited.items():
            for row in rows:
                if self.rows[slot].follows(row.position, row.input_id):
                    self._advance(self.grammars, slot, token_ids[row.place])

    def _advance(self, grammars: Grammars, slot: int, token_id: int) -> None:
        self.rows[slot].accept(token_id)
        grammars.accept({slot: token_id})

    def _restrict(self, order: Integers) -> list[tuple[int, str]]:
        """Write the masks of deferred rows. Return (index, reason) of failed rows.

        order: indices of the deferred rows in the step.
        """
        if not self._masks or not self.grammars:
            return []
        self._last_tokens()  # wait until the last step has read its masks
        masks = self._masks.on_host(self.grammars.num_words)
        masks[order] = -1
        known = {  # without slots whose rows all follow a wrong draft
            slot: rows
            for slot, rows in self._awaited.items()
            if self.rows[slot].follows(rows[0].position, rows[0].input_id)
        }
        drafted = [slot for slot, rows in known.items() if len(rows) > 1]
        before = {slot: copy(self.rows[slot]) for slot in drafted}
        progress = self.grammars.progress(drafted)
        tags: dict[int, int] = {}
        failed = self._fill_drafts(self.grammars, masks, list(known.items()), tags)
        self.rows.update(before)
        self.grammars.roll_back(progress)
        some = slice(int(order.min()), int(order.max()) + 1)
        with_grammar = [slot for slot in known if self.grammars.has(slot)]
        self._masks.copy(some, [row.at for slot in with_grammar for row in known[slot]], tags)
        return failed

    def _fill_drafts(
        self,
        grammars: Grammars,
        masks: Bitmask,
        left: list[tuple[int, list[AwaitedRow]]],
        tags: dict[int, int],
    ) -> list[tuple[int, str]]:
        """Write the masks and tags of (slot, rows), each row after the drafts before it.

        A draft that its mask forbids is wrong: the rows after it are void, and have no mask. Return
        (index, reason) of failed rows.
        """
        failed: list[tuple[int, str]] = []
        while left:
            slots = {rows[0].at: slot for slot, rows in left}
            reasons = self._fill(grammars, masks, slots, tags)
            following = []
            for slot, (row, *later) in left:
                if row.at in reasons:
                    failed += [(each.place, reasons[row.at]) for each in (row, *later)]
                elif later:
                    draft = later[0].input_id
                    may_open = tags.get(row.at) == draft
                    if may_open or not grammars.has(slot) or has_token(masks[row.at], draft):
                        self._advance(grammars, slot, draft)
                        following.append((slot, later))
            left = following
        return failed

    def _fill(
        self, grammars: Grammars, masks: Bitmask, slots: dict[int, int], tags: dict[int, int]
    ) -> dict[int, str]:
        """Write the masks and tags of rows, index → slot. Return index → reason of failed rows."""
        with_grammar = {at: slot for at, slot in slots.items() if grammars.has(slot)}
        failed = grammars.fill(masks, with_grammar)
        for at, slot in slots.items():
            if slot in self._with_words:
                bad = self.rows[slot].bad_tokens()
                TokenBits(token for token in bad if token < 32 * masks.shape[1]).forbid(masks, [at])
        opening = grammars.opening_tags(list(with_grammar.values()))
        for at, slot in with_grammar.items():
            own = self.rows[slot].mask
            mask = masks[at] if own is None else masks[at, : len(own)] & own[: masks.shape[1]]
            if (own is not None or slot in self._with_words) and not mask.any():
                failed.setdefault(at, CONTRADICTION)
            if slot in opening and self.rows[slot].allows(opening[slot]):
                tags[at] = opening[slot]
        return failed
