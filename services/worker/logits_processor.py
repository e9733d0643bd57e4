"""The second pass of a step: for the rows that ask for more than a token (`RowExtras`).

A step samples every row, in a CUDA graph where there is one. Behind it this pass takes the logits
of the rows that ask, changes them, samples these rows again, and overwrites their tokens; it tells
logprobs, those of prompts too. Nothing here waits for the device except for rows with a
grammar, or with bad words of several tokens: what these allow is known when the token before is on
the host. By then the GPU computes the step.

Rank 0 gets the logits of the rows that ask; the other ranks take part in its collectives, so that
they, too, must know which rows ask.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.sampling.candidates import candidates_suffice
from penstock.kernels.sampling.penalties import apply_bitmask
from penstock.kernels.step.types import Slots, StepBuffers
from penstock.models.qwen3 import Qwen3
from penstock.protocol.messages.plan import BatchPlan, RowAdded, unpack
from penstock.services.worker.cuda_graphs import Computed
from penstock.services.worker.extra_row import ExtraRow
from penstock.services.worker.grammars import Grammars
from penstock.services.worker.penalties import Penalties
from penstock.services.worker.persistent_batch import Integers, Record, Rows
from penstock.services.worker.sampler import draw
from penstock.services.worker.step_output import OnItsWay, pack_logprobs
from penstock.services.worker.token_masks import Bitmask
from penstock.services.worker.transfers import integers_to_device, to_device, to_host

MAX_ROWS = 64
"""whose logits are worked on at a time: it bounds the memory"""
MAX_PROMPT_TOKENS = 256
"""likewise, of a prompt"""


class SecondPass:
    """The rows that ask, by slot. Changed by plans."""

    def __init__(
        self,
        model: Qwen3,
        slots: Slots,
        buffers: StepBuffers,
        vocab_size: int,
        grammars: Grammars | None,
    ) -> None:
        """grammars: on rank 0; None on the others."""
        self.rows: dict[int, ExtraRow] = {}
        """of the persistent batch, by slot"""
        self._model = model
        self._slots = slots
        self._buffers = buffers
        self._device = device = slots.last_token.device
        self._vocab_size = vocab_size
        self._asks = np.zeros(len(slots.seeds), np.bool_)
        num_places = 0 if model.tp.rank else len(slots.seeds)
        self._penalties = Penalties(num_places, vocab_size, device)
        self._grammars = grammars
        self._awaited: dict[int, int] = {}
        """slot of a row that needs its tokens → which of the tokens sampled last is its own"""
        self._last_tokens: Callable[[], list[int]] = list
        """waits for the tokens sampled last"""

    def clear(self) -> None:
        """Remove every row."""
        for slot in list(self.rows):
            self._remove(slot)

    def apply(self, plan: BatchPlan) -> None:
        """Rows leave and enter. Raises ValueError for what can't be."""
        if self.rows:
            for slot in unpack(plan.removed):
                if slot in self.rows:
                    self._remove(slot)
        for row in plan.added:
            if row.extras or (self._model.tp.spans_nodes and not _sampler_is_enough(row)):
                self._add(row)

    def follows(self, tokens: Callable[[], list[int]]) -> None:
        """The step that `run` was part of is launched; `tokens` waits for its tokens."""
        self._last_tokens = tokens

    def _add(self, row: RowAdded) -> None:
        extra = self.rows[row.slot] = ExtraRow(row, self._vocab_size)
        self._asks[row.slot] = True
        if self._model.tp.rank:
            return
        extras = extra.extras
        prompt, output = np.split(extra.token_ids, [extras.num_prompt_tokens])
        if extra.has_penalties:
            extra.place = row.slot
            self._penalties.add(row.slot, extras, *self._to_device(prompt, output))
        if extras.structured_outputs and self._grammars:
            given = output.tolist(), extras.end_token_ids, extras.reasoning
            self._grammars.add(row.slot, extras.structured_outputs, *given)

    def _remove(self, slot: int) -> None:
        extra = self.rows.pop(slot)
        self._asks[slot] = False
        self._awaited.pop(slot, None)
        if extra.extras.structured_outputs and self._grammars:
            self._grammars.remove(slot)

    def run(self, rows: Rows, computed: Computed) -> OnItsWay:
        """Overwrite the tokens of the rows that ask, in `computed` and in the persistent batch."""
        way = OnItsWay([], {}, [])
        asking = self._asks[rows.table[:, 0]]
        for row in rows.table[asking].tolist():
            self._tell_prompt(row, computed.hidden_states, way)
        self._accept()
        which = np.flatnonzero(asking[rows.sampled])
        for begin in range(0, len(which), MAX_ROWS):
            part = which[begin : begin + MAX_ROWS]
            (index,) = self._to_device(rows.sampled[part])
            logits = self._model.head.join(computed.logits[index])
            if logits is not None:
                drawn = computed.tokens[index]
                computed.tokens[index] = self._sample(part, rows, logits, drawn, index, way)
        return way

    def _tell_prompt(self, row: list[int], hidden_states: Tensor, way: OnItsWay) -> None:
        """Logprobs of the prompt tokens that a chunk predicts; row: as in the record."""
        slot, start, count, first = row[:4]
        extra = self.rows[slot]
        if extra.extras.num_prompt_logprobs < 0:
            return
        end = min(start + count, extra.extras.num_prompt_tokens - 1)
        for begin in range(start, end, MAX_PROMPT_TOKENS):
            stop = min(begin + MAX_PROMPT_TOKENS, end)
            some = slice(first + begin - start, first + stop - start)
            logits = self._model.head.join(self._model.compute_logits(hidden_states[some]))
            if logits is not None:
                token_ids = to_device(extra.token_ids[begin + 1 : stop + 1], self._device)
                packed = pack_logprobs(logits, token_ids, extra.extras.num_prompt_logprobs)
                way.prompt_logprobs.setdefault(slot, []).append(to_host(packed))

    def _accept(self) -> None:
        """The matchers of grammars and the masks of bad words take the tokens drawn last."""
        if not self._awaited:
            return
        token_ids = self._last_tokens()
        for slot, index in self._awaited.items():
            row = self.rows[slot]
            if row.mask:
                row.mask.accept(token_ids[index])
            if row.extras.structured_outputs and self._grammars:
                self._grammars.accept(slot, token_ids[index])
        self._awaited.clear()

    def _sample(
        self,
        which: Integers,
        rows: Rows,
        logits: Tensor,
        drawn: Tensor,
        index: Tensor,
        way: OnItsWay,
    ) -> Tensor:
        """Draws for some of the sampled rows, at most MAX_ROWS; which: indices among these;
        index: among all rows; logits: theirs, which are overwritten; drawn: by these as they are.
        """
        table = rows.table[rows.sampled[which]]
        extras = [self.rows[slot] for slot in table[:, 0].tolist()]
        penalized = [n for n, row in enumerate(extras) if row.place >= 0]
        telling = [n for n, row in enumerate(extras) if row.extras.num_logprobs >= 0]
        on_penalized, places, on_telling = self._to_device(
            penalized, [extras[n].place for n in penalized], telling
        )
        plain_logits = logits[on_telling]
        if penalized:
            logits[on_penalized] = self._penalties.apply(logits[on_penalized], places)
        self._add_bias(logits, extras, table)
        self._restrict(logits, drawn, which, table, way)
        slots, positions = self._buffers.slots[index], self._buffers.next_positions[index]
        tokens = draw(logits, self._slots, slots, positions)
        if penalized:
            self._penalties.count(places, tokens[on_penalized])
        if telling:
            numbers = [extras[n].extras.num_logprobs for n in telling]
            drawn = tokens[on_telling].clamp(min=0)  # -1: there is none
            packed = pack_logprobs(plain_logits, drawn, max(numbers))
            way.logprobs.append((which[telling].tolist(), numbers, to_host(packed)))
        return tokens

    def _add_bias(self, logits: Tensor, extras: list[ExtraRow], table: Record) -> None:
        positions = (table[:, 1] + table[:, 2]).tolist()
        biases = [row.bias(position) for row, position in zip(extras, positions, strict=True)]
        token_ids, values = np.concatenate(biases, 1)
        if not values.size:
            return
        in_row = np.repeat(np.arange(len(extras)), [bias.shape[1] for bias in biases])
        (flat,) = self._to_device(in_row * self._vocab_size + token_ids.astype(np.int64))
        logits.view(-1).index_add_(0, flat, to_device(values.astype(np.float32), self._device))

    def _restrict(
        self, logits: Tensor, drawn: Tensor, which: Integers, table: Record, way: OnItsWay
    ) -> None:
        """Leaves what grammars and token masks allow, or `<think>` where a row may begin with it
        and drew it."""
        slots = table[:, 0].tolist()
        restricted = [n for n, slot in enumerate(slots) if self.rows[slot].is_restricted]
        if not restricted:
            return
        slots = [slots[n] for n in restricted]
        order = dict(zip(slots, which[restricted].tolist(), strict=True))
        self._awaited |= {slot: n for slot, n in order.items() if self.rows[slot].needs_tokens}
        bitmask, tags, failed = self._bitmask(slots)
        way.failed.extend((order[slot], reason) for slot, reason in failed.items())
        (index,) = self._to_device(restricted)
        logits[index] = apply_bitmask(logits[index], to_device(bitmask, self._device))
        if max(tags) >= 0:
            (tag,) = self._to_device(tags)
            only = torch.full_like(logits[index], -math.inf)
            only.scatter_(1, tag.clamp(min=0)[:, None], 0.0)
            logits[index] = torch.where((drawn[index] == tag)[:, None], only, logits[index])

    def _bitmask(self, slots: list[int]) -> tuple[Bitmask, list[int], dict[int, str]]:
        """Return what rows may draw, their opening tags or -2, and why rows can't go on; as in
        `Grammars`."""
        bitmask = np.full((len(slots), (self._vocab_size + 31) // 32), -1, np.int32)
        tags = [-2] * len(slots)
        failed: dict[int, str] = {}
        with_grammar = [
            n for n, slot in enumerate(slots) if self.rows[slot].extras.structured_outputs
        ]
        if with_grammar and self._grammars:
            bitmask[with_grammar], failed = self._grammars.bitmask([slots[n] for n in with_grammar])
            for n in with_grammar:
                tags[n] = self._grammars.opening_tag(slots[n])
        for n, slot in enumerate(slots):
            if mask := self.rows[slot].mask:
                words = mask.bitmask()
                bitmask[n] &= words
                if tags[n] >= 0 and not words[tags[n] // 32] >> tags[n] % 32 & 1:
                    tags[n] = -2
        return bitmask, tags, failed

    def _to_device(self, *lists: Integers | list[int]) -> tuple[Tensor, ...]:
        return integers_to_device(lists, self._device)


def _sampler_is_enough(row: RowAdded) -> bool:
    return candidates_suffice(row.temperature, row.top_k, row.top_p, row.min_p)
