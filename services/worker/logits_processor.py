"""Processing of logits for rows with `RowExtras`: penalties, bias, restrictions and logprobs.

A step samples every row, in a CUDA graph if possible. The logits processor then takes the logits of
the rows with extras, changes them, samples these rows again, and overwrites their tokens. It also
computes logprobs, including the prompt's. The host waits for the device only for rows with a
grammar, or with bad words of several tokens: their masks follow from the previous token. The GPU
computes the step meanwhile.

Rank 0 gets the logits of the rows. The other ranks take part in its collectives, and must therefore
know the rows too.
"""

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.sampling.candidates import candidates_suffice
from penstock.kernels.sampling.penalties import apply_bitmask, penalize
from penstock.kernels.sampling.sampling import sample
from penstock.kernels.step.types import Slots, StepBuffers
from penstock.models.qwen3 import Qwen3
from penstock.protocol.messages.plan import BatchPlan, RowAdded, RowExtras, unpack
from penstock.services.worker.cuda_graphs import Computed
from penstock.services.worker.grammars import Grammars
from penstock.services.worker.persistent_batch import Integers, Record, Rows
from penstock.services.worker.processed_row import Bitmask, ProcessedRow
from penstock.services.worker.step_output import (
    PendingLogprobs,
    PendingOutput,
    integers_to_device,
    pack_logprobs,
    to_device,
    to_host,
)

MAX_ROWS = 64
"""rows whose logits are processed at a time, which bounds the memory"""
MAX_PROMPT_TOKENS = 256
"""prompt tokens whose logits are processed at a time"""


class PenaltyTables:
    """Token counts of rows with penalties, by slot, allocated once.

    The counts stay on the device and grow with each drawn token, so that steps need not wait for
    the host.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        # a CPU allocates a page when a row first writes to it
        empty = partial(torch.empty, num_slots, device=device)
        self._counts = empty(vocab_size, dtype=torch.int32)
        self._in_prompt = empty(vocab_size, dtype=torch.bool)
        self._factors = empty(3, dtype=torch.float32)
        """repetition, frequency and presence penalty of each slot"""

    def add(self, slot: int, extras: RowExtras, prompt: Tensor, output: Tensor) -> None:
        """Add a row with these tokens, int64 on the device."""
        self._in_prompt[slot].zero_().index_fill_(0, prompt, 1)
        ones = torch.ones_like(output, dtype=torch.int32)
        self._counts[slot].zero_().index_add_(0, output, ones)
        self._factors[slot, 0] = extras.repetition_penalty
        self._factors[slot, 1] = extras.frequency_penalty
        self._factors[slot, 2] = extras.presence_penalty

    def apply(self, logits: Tensor, slots: Tensor) -> Tensor:
        """Return the penalized logits [num_rows, vocab_size] of the rows in `slots`."""
        repetition, frequency, presence = self._factors[slots].unbind(1)
        return penalize(
            logits,
            self._counts[slots],
            self._in_prompt[slots],
            repetition=repetition,
            frequency=frequency,
            presence=presence,
        )

    def count(self, slots: Tensor, token_ids: Tensor) -> None:
        """Count the new tokens, int64 [num_rows], of the rows in `slots`."""
        one = torch.ones_like(slots, dtype=torch.int32)
        self._counts.index_put_((slots, token_ids), one, accumulate=True)


class LogitsProcessor:
    """The rows with extras, by slot. Changed by plans."""

    def __init__(
        self,
        model: Qwen3,
        slots: Slots,
        buffers: StepBuffers,
        vocab_size: int,
        grammars: Grammars | None,
    ) -> None:
        """Allocate the tables; grammars: on rank 0, None on other ranks."""
        self.rows: dict[int, ProcessedRow] = {}
        self._model = model
        self._slots = slots
        self._buffers = buffers
        self._device = slots.last_token.device
        self._vocab_size = vocab_size
        num_slots = len(slots.seeds)
        self._has_extras = np.zeros(num_slots, np.bool_)
        """by slot"""
        self._penalties = PenaltyTables(0 if model.tp.rank else num_slots, vocab_size, self._device)
        self.grammars = grammars
        self._awaited: dict[int, int] = {}
        """slot of a row that needs its tokens → index among the tokens sampled last"""
        self._last_tokens: Callable[[], list[int]] = list
        """waits for the tokens sampled last"""

    def clear(self) -> None:
        for slot in list(self.rows):
            self._remove(slot)

    def apply(self, plan: BatchPlan) -> None:
        """Remove and add rows. Raises ValueError for an invalid plan."""
        if self.rows:
            for slot in unpack(plan.removed):
                if slot in self.rows:
                    self._remove(slot)
        for row in plan.added:
            parameters = row.temperature, row.top_k, row.top_p, row.min_p
            if row.extras or (self._model.tp.spans_nodes and not candidates_suffice(*parameters)):
                self._add(row)

    def follow(self, tokens: Callable[[], list[int]]) -> None:
        """Take the launched step's tokens, for which `tokens` waits, before the next step."""
        self._last_tokens = tokens

    def _add(self, added: RowAdded) -> None:
        slot = added.slot
        row = self.rows[slot] = ProcessedRow(added, self._vocab_size)
        self._has_extras[slot] = True
        if self._model.tp.rank:
            return
        extras = row.extras
        prompt, output = np.split(row.token_ids, [extras.num_prompt_tokens])
        if row.has_penalties:
            self._penalties.add(slot, extras, *self._to_device(prompt, output))
        if extras.structured_outputs and self.grammars:
            given = output.tolist(), extras.end_token_ids, extras.reasoning
            self.grammars.add(slot, extras.structured_outputs, *given)

    def _remove(self, slot: int) -> None:
        row = self.rows.pop(slot)
        self._has_extras[slot] = False
        self._awaited.pop(slot, None)
        if row.extras.structured_outputs and self.grammars:
            self.grammars.remove(slot)

    def run(self, rows: Rows, computed: Computed) -> PendingOutput:
        """Overwrite the tokens of rows with extras, in `computed` and in the persistent batch."""
        output = PendingOutput([], {}, [])
        has_extras = self._has_extras[rows.table[:, 0]]
        for row in rows.table[has_extras].tolist():
            self._prompt_logprobs(row, computed.hidden_states, output)
        self._accept()
        which = np.flatnonzero(has_extras[rows.sampled])
        for begin in range(0, len(which), MAX_ROWS):
            part = which[begin : begin + MAX_ROWS]
            (index,) = self._to_device(rows.sampled[part])
            logits = self._model.head.join(computed.logits[index])
            if logits is not None:
                computed.tokens[index] = self._sample(
                    part, rows, logits, computed.tokens[index], index, output
                )
        return output

    def _prompt_logprobs(
        self, row: list[int], hidden_states: Tensor, output: PendingOutput
    ) -> None:
        """Compute logprobs of the prompt tokens that a chunk predicts; row: as in the record."""
        slot, start, count, first = row[:4]
        token_ids, extras = self.rows[slot].token_ids, self.rows[slot].extras
        if extras.num_prompt_logprobs < 0:
            return
        end = min(start + count, extras.num_prompt_tokens - 1)
        for begin in range(start, end, MAX_PROMPT_TOKENS):
            stop = min(begin + MAX_PROMPT_TOKENS, end)
            some = slice(first + begin - start, first + stop - start)
            logits = self._model.head.join(self._model.compute_logits(hidden_states[some]))
            if logits is not None:
                next_ids = to_device(token_ids[begin + 1 : stop + 1], self._device)
                packed = pack_logprobs(logits, next_ids, extras.num_prompt_logprobs)
                output.prompt_logprobs.setdefault(slot, []).append(to_host(packed))

    def _accept(self) -> None:
        """Advance grammars and masks of bad words by the tokens drawn last."""
        if not self._awaited:
            return
        token_ids = self._last_tokens()
        for slot, index in self._awaited.items():
            row = self.rows[slot]
            if row.mask:
                row.mask.accept(token_ids[index])
            if row.extras.structured_outputs and self.grammars:
                self.grammars.accept(slot, token_ids[index])
        self._awaited.clear()

    def _sample(
        self,
        which: Integers,
        rows: Rows,
        logits: Tensor,
        drawn: Tensor,
        index: Tensor,
        output: PendingOutput,
    ) -> Tensor:
        """Sample up to MAX_ROWS rows from their logits, which are overwritten.

        which: indices among the sampled rows; index: among all rows; drawn: tokens drawn from the
        unprocessed logits.
        """
        table = rows.table[rows.sampled[which]]
        slots = table[:, 0].tolist()
        extras = [self.rows[slot] for slot in slots]
        penalized = [n for n, row in enumerate(extras) if row.has_penalties]
        with_logprobs = [n for n, row in enumerate(extras) if row.extras.num_logprobs >= 0]
        on_penalized, penalized_slots, on_logprobs = self._to_device(
            penalized, [slots[n] for n in penalized], with_logprobs
        )
        raw_logits = logits[on_logprobs]
        if penalized:
            logits[on_penalized] = self._penalties.apply(logits[on_penalized], penalized_slots)
        self._add_bias(logits, extras, table)
        self._restrict(logits, drawn, which, slots, output)
        next_positions = self._buffers.next_positions[index]
        tokens = sample(logits, self._buffers.slots[index], next_positions, self._slots.sampling())
        if penalized:
            self._penalties.count(penalized_slots, tokens[on_penalized])
        if with_logprobs:
            numbers = [extras[n].extras.num_logprobs for n in with_logprobs]
            known = tokens[on_logprobs].clamp(min=0)  # -1 of a failed row
            packed = to_host(pack_logprobs(raw_logits, known, max(numbers)))
            output.logprobs.append(PendingLogprobs(which[with_logprobs].tolist(), numbers, packed))
        return tokens

    def _add_bias(self, logits: Tensor, extras: list[ProcessedRow], table: Record) -> None:
        positions = (table[:, 1] + table[:, 2]).tolist()
        biases = [row.bias(position) for row, position in zip(extras, positions, strict=True)]
        token_ids, values = np.concatenate(biases, 1)
        if not values.size:
            return
        in_row = np.repeat(np.arange(len(extras)), [bias.shape[1] for bias in biases])
        (flat,) = self._to_device(in_row * self._vocab_size + token_ids.astype(np.int64))
        logits.view(-1).index_add_(0, flat, to_device(values.astype(np.float32), self._device))

    def _restrict(
        self,
        logits: Tensor,
        drawn: Tensor,
        which: Integers,
        slots: list[int],
        output: PendingOutput,
    ) -> None:
        """Keep what grammars and masks allow, or only a `<think>` that an optional row drew."""
        restricted = [n for n, slot in enumerate(slots) if self.rows[slot].is_restricted]
        if not restricted:
            return
        slots = [slots[n] for n in restricted]
        order = dict(zip(slots, which[restricted].tolist(), strict=True))
        self._awaited |= {slot: n for slot, n in order.items() if self.rows[slot].needs_tokens}
        bitmask, tags, failed = self._bitmask(slots)
        output.failed.extend((order[slot], reason) for slot, reason in failed.items())
        (index,) = self._to_device(restricted)
        logits[index] = apply_bitmask(logits[index], to_device(bitmask, self._device))
        if max(tags) >= 0:
            (tag,) = self._to_device(tags)
            only = torch.full_like(logits[index], -math.inf)
            only.scatter_(1, tag.clamp(min=0)[:, None], 0.0)
            logits[index] = torch.where((drawn[index] == tag)[:, None], only, logits[index])

    def _bitmask(self, slots: list[int]) -> tuple[Bitmask, list[int], dict[int, str]]:
        """Return the rows' allowed tokens, opening tags or -2, and reasons of failed rows."""
        bitmask = np.full((len(slots), (self._vocab_size + 31) // 32), -1, np.int32)
        tags = [-2] * len(slots)
        failed: dict[int, str] = {}
        extras = [self.rows[slot].extras for slot in slots]
        with_grammar = [n for n, one in enumerate(extras) if one.structured_outputs]
        if with_grammar and self.grammars:
            bitmask[with_grammar], failed = self.grammars.bitmask([slots[n] for n in with_grammar])
            for n in with_grammar:
                tags[n] = self.grammars.opening_tag(slots[n])
        for n, slot in enumerate(slots):
            if mask := self.rows[slot].mask:
                words = mask.bitmask()
                bitmask[n] &= words
                if tags[n] >= 0 and not words[tags[n] // 32] >> tags[n] % 32 & 1:
                    tags[n] = -2
        return bitmask, tags, failed

    def _to_device(self, *lists: Integers | list[int]) -> tuple[Tensor, ...]:
        return integers_to_device(lists, self._device)
