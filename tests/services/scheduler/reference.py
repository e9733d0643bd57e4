"""Reference for the scheduler: a worker and a model that are slow, plain and strict."""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf

import msgspec

from penstock.protocol.config import Config
from penstock.protocol.messages.client import FinishReason
from penstock.protocol.messages.packed import PackedLogprobs, pack, unpack
from penstock.protocol.messages.plan import BatchPlan, RowAdded, SampledTokens
from penstock.protocol.messages.sampling import SamplingParams
from penstock.protocol.messages.worker import CopyBlocks
from penstock.protocol.tokenizer_file import ReasoningTokens
from tests.services.scheduler.packed_plans import blocks, pairs, split
from tests.services.scheduler.reference_host import GARBAGE, Cells, ReferenceHost
from tests.services.scheduler.reference_states import ReferenceStates

EOS = 0
TAGS = ReasoningTokens(1, 2)
NUM_TOKEN_IDS = 4
POISON = 1_000_000
"""the token id that a worker dies of"""
LATE_POISON = POISON + 1
"""the token id that a worker dies of when a row with it decodes: it gets a token before"""
DEAD_END = 3
"""the token id that a row with a grammar fails at"""
VOID = -1
LOOP = -1


class WorkerDiedError(Exception):
    """As a kernel that reads where no memory is."""


def next_token(seed: int, token_ids: SequenceOf[int]) -> int:
    """Return the model: a pure function of the whole prefix; EOS one time in eight.

    With odd seeds eight tokens in a row follow from the two before each: these can be guessed.
    With LOOP, it repeats 1 2 3 for ever.
    """
    if seed == LOOP:
        return 1 + len(token_ids) % 3
    digest = hash((seed, *token_ids))
    if seed % 2:
        digest = hash((seed, len(token_ids) // 8, *token_ids[-2:]))
    return EOS if digest % 8 == 0 else 1 + digest // 8 % (NUM_TOKEN_IDS - 1)


def expected_output(
    prompt: SequenceOf[int],
    sampling: SamplingParams,
    limit: int,
    is_chat: bool = False,
    reasoning: str = "none",
) -> tuple[list[int], FinishReason]:
    """Return the expected output of a prompt where at most `limit` tokens fit."""
    goes_on = sampling.ignore_eos and not sampling.structured_outputs
    stops = set(sampling.stop_token_ids) | (set() if goes_on else {EOS})
    end = min(limit, len(prompt) + (sampling.max_tokens or limit))
    token_ids = list(prompt)
    while True:
        token_ids.append(next_token(sampling.seed or 0, token_ids))
        output = token_ids[len(prompt) :]
        thinks = is_chat and (reasoning == "open" or output[0] == TAGS.begin)
        in_reasoning = thinks and TAGS.end not in output
        if output[-1] in stops and not (in_reasoning and (output[-1] != EOS or goes_on)):
            return output, "stop"
        if len(token_ids) == end:
            return token_ids[len(prompt) :], "length"


def logprobs_at(token_ids: SequenceOf[int], position: int) -> PackedLogprobs:
    """Return the logprobs of one token, which hold its position as a second token."""
    return told_of(token_ids[position], position)


def told_of(token_id: int, position: int) -> PackedLogprobs:
    return PackedLogprobs(pack([token_id, position]), bytes(8))


def pooled_of(token_ids: SequenceOf[int]) -> bytes:
    """Return the numbers that a row with `pooling` has: they follow from its whole prompt."""
    return pack([len(token_ids), *token_ids])


class Row:
    """One row of the persistent batch."""

    def __init__(self, added: RowAdded, token_ids: SequenceOf[int]) -> None:
        """Make a row; token_ids: of its sequence, of which some may be skipped."""
        self.slot = added.slot
        assert 0 <= added.num_skipped <= added.num_computed_tokens * (added.extras is None)
        self.token_ids = [*token_ids[: added.num_skipped], *unpack(added.token_ids)]
        self.block_table = list(unpack(added.block_ids))
        self.num_given = len(self.token_ids)
        self.num_computed = self.num_found = added.num_computed_tokens
        self.seed = added.seed
        extras = added.extras
        self.tells_logprobs = extras is not None and extras.num_logprobs >= 0
        self.num_prompt_logprobs = 0
        """the prompt's tokens after the first, where they are requested"""
        if extras and extras.num_prompt_logprobs >= 0:
            assert not self.num_computed, "these logprobs come of computing the whole prompt"
            self.num_prompt_logprobs = extras.num_prompt_tokens - 1
        self.is_pooled = extras is not None and extras.pooling is not None
        self.num_drafted = 0
        """tokens of its draft, if the last plan that it is part of has one"""
        self.has_grammar = extras is not None and extras.structured_outputs is not None
        self.is_loading = added.num_computed_tokens > 0
        """blocks of it may be copied from the host, until it first computes"""
        self.is_hidden = False
        """others may compute its blocks again"""
        self.prefixes: list[int] = []
        """for each token, the number of the prefix that ends with it"""


class ReferenceWorker:
    """Runs encoded plans as `messages/plan.py` says, and asserts what a real worker relies on.

    A cell of the KV memory holds the number of the exact prefix that it was computed from, so a
    wrong block, a lost write or a false prefix hit is seen by the next step that reads it. What a
    step computes is written before it is read.

    `computes_once`: no block is computed whose prefix another row has computed. So it must be where
    nothing is evicted.
    """

    def __init__(
        self,
        config: Config,
        num_blocks: int,
        epoch: int,
        computes_once: bool,
        num_state_blocks: int = 0,
        num_pieces: int = 1,
        blocks_per_state: int = 0,
    ) -> None:
        self.config = config
        self.states = ReferenceStates(num_state_blocks)
        self.computes_once = computes_once
        self.known_blocks: set[int] = set()
        """full blocks of given tokens that were computed, by the number of the prefix"""
        self.epoch = epoch
        self.num_steps = 0
        self.rows: dict[int, Row] = {}
        self.memory: Cells = [None] * (num_blocks * config.block_size)
        self.host = ReferenceHost(self.memory, config.block_size, self.states, num_pieces)
        self.host.cells_per_state = blocks_per_state * config.block_size
        self._numbers: dict[tuple[int, int], int] = {}
        self._writes: list[tuple[set[int], set[int]]] = []
        """cells and known blocks that each plan has written"""

    def inherit(self, dead: "ReferenceWorker", num_confirmed: int, is_whole: bool = False) -> None:
        """Take the memory of a dead worker; plans after `num_confirmed` may have run in part.

        is_whole: they have run, and are unknown to the scheduler.
        """
        self.memory = self.host.memory = dead.memory
        self._numbers = dead._numbers
        self.known_blocks = dead.known_blocks
        for cells, known_blocks in dead._writes[num_confirmed:]:
            self.known_blocks -= known_blocks
            for cell in () if is_whole else cells:
                self.memory[cell] = GARBAGE
        self.states.inherit(dead.states, num_confirmed, is_whole)
        self.host.inherit(dead.host, num_confirmed, is_whole)

    def run(
        self, frame: bytes, copies: CopyBlocks | None, token_ids: Mapping[int, SequenceOf[int]]
    ) -> bytes:
        """One step, after copies: an encoded `BatchPlan` in, encoded `SampledTokens` out.

        token_ids: by slot, those of the scheduler's sequences.
        """
        plan = msgspec.msgpack.decode(frame, type=BatchPlan)
        assert (plan.epoch, plan.step) == (self.epoch, self.num_steps), "a plan is missing"
        self.num_steps += 1
        self._writes.append((set(), set()))
        self.host.run(copies)
        self.states.begin(plan)
        self._change_rows(plan, token_ids)
        self._read()
        tokens = SampledTokens(plan.epoch, plan.step, b"", [], self._prompt_logprobs(plan), [])
        work = self._work(plan)
        self._compute(work)
        size, (cells, _) = self.host.cells_per_state, self._writes[-1]
        self.states.end({cell // size for cell in cells} if size else set())
        sampled: list[int] = []
        drafts: list[int] = []
        for row in [row for row, _ in work if is_done(row)]:
            if row.is_pooled:
                tokens.pooled.append((len(sampled), pooled_of(row.token_ids)))
            new = self._sample(row)
            sampled += new
            drafts += self._drafts_after(row, new, plan.num_drafts) * len(new)
            if row.tells_logprobs:
                position = len(row.token_ids) - max(1, row.num_drafted - 1)
                for index in range(len(new)):
                    told = told_of(new[index], position + index)
                    tokens.logprobs.append((len(sampled) - len(new) + index, told))
            for index, token_id in enumerate(new, len(sampled) - len(new)):
                if token_id == VOID:
                    tokens.failed.append((index, "no way out"))
        tokens.token_ids, tokens.drafts = pack(sampled), pack(drafts)
        return msgspec.msgpack.encode(tokens)

    def _prompt_logprobs(self, plan: BatchPlan) -> list[tuple[int, list[PackedLogprobs]]]:
        """Return the prompt logprobs of chunks of rows that request them."""
        found = []
        for slot, num_tokens in pairs(plan.chunks):
            row = self.rows[slot]
            if row.num_prompt_logprobs:
                end = min(row.num_computed + num_tokens, row.num_prompt_logprobs)
                positions = range(row.num_computed + 1, end + 1)
                found.append((slot, [logprobs_at(row.token_ids, at) for at in positions]))
        return found

    def _change_rows(self, plan: BatchPlan, token_ids: Mapping[int, SequenceOf[int]]) -> None:
        for slot in unpack(plan.removed):
            del self.rows[slot]
        for added in plan.added:
            assert added.slot not in self.rows, f"slot {added.slot} is taken"
            assert 0 <= added.slot < self.config.max_num_seqs
            row = self.rows[added.slot] = Row(added, token_ids[added.slot])
            if POISON in row.token_ids:
                raise WorkerDiedError
            assert row.num_computed < row.num_given, "one token is always computed"
            for token_id in row.token_ids:
                self._number(row, token_id)
        for slot, block in blocks(plan.appended):
            self.rows[slot].block_table.append(block)

    def _number(self, row: Row, token_id: int) -> None:
        key = (row.prefixes[-1] if row.prefixes else 0, token_id)
        row.prefixes.append(self._numbers.setdefault(key, len(self._numbers) + 1))

    def _work(self, plan: BatchPlan) -> list[tuple[Row, int]]:
        """Rows that compute, and how many tokens each, in ascending order of slot."""
        chunks = dict(pairs(plan.chunks))
        for slot, num_tokens in chunks.items():
            row = self.rows[slot]
            assert 0 < num_tokens <= row.num_given - row.num_computed, "a chunk is prefill"
        drafted = {slot: self._draft(slot, *draft) for slot, draft in split(plan.drafts)}
        decoding = {
            slot: 1
            for slot, row in self.rows.items()
            if slot not in chunks and row.num_computed >= row.num_given and row.num_drafted < 2
        }
        if any(LATE_POISON in self.rows[slot].token_ids for slot in decoding):
            raise WorkerDiedError
        work = chunks | decoding | drafted
        num_rows = len(chunks) + sum((decoding | drafted).values())
        assert sum(work.values()) <= self.config.max_num_batched_tokens, "the step is too long"
        assert num_rows <= self.config.max_num_seqs, "the step has too many rows"
        return [(self.rows[slot], num_tokens) for slot, num_tokens in sorted(work.items())]

    def _draft(self, slot: int, position: int, token_ids: list[int]) -> int:
        """Forgets the row's tokens from there on and takes others; returns how many."""
        row = self.rows[slot]
        assert row.num_given <= position <= row.num_computed, "a token before was not computed"
        if token_ids[0] == -1:
            assert row.num_drafted < 2 and position == len(row.token_ids) - 1, "it has no token"
            token_ids = [row.token_ids[-1], *token_ids[1:]]
        del row.token_ids[position:], row.prefixes[position:]
        for token_id in token_ids:
            row.token_ids.append(token_id)
            self._number(row, token_id)
        row.num_computed, row.num_drafted = position, len(token_ids)
        return len(token_ids)

    def _compute(self, work: list[tuple[Row, int]]) -> None:
        written, _ = self._writes[-1]
        for row, num_tokens in work:
            assert not row.is_pooled or row.num_computed < row.num_given, "a pooled row decodes"
            cells = self._cells(row)
            for position in range(row.num_computed, row.num_computed + num_tokens):
                assert position < len(cells), "a token is written that has no block"
                assert cells[position] not in written, "two rows write to one block"
                written.add(cells[position])
                self.memory[cells[position]] = row.prefixes[position]
                self.host.spoil_state(cells[position])
                self._check_once(row, position)
            start = row.num_computed
            row.num_computed += num_tokens
            decodes = num_tokens == 1 or start >= row.num_given
            block = self.states.step(row.slot, start, row.prefixes[: row.num_computed], decodes)
            self.host.spoil_cells(block)
        self._read()

    def _check_once(self, row: Row, position: int) -> None:
        """At the end of a block; the last given token is computed in any case."""
        is_end = (position + 1) % self.config.block_size == 0
        if not is_end or position >= row.num_given or row.is_hidden:
            return
        prefix = row.prefixes[position]
        # a row that returns within a block continues it, whoever else has computed it meanwhile
        size = self.config.block_size
        begun = row.num_found % size and position // size == row.num_found // size
        is_due = position + 1 < row.num_given and not row.num_prompt_logprobs and not begun
        if self.computes_once and is_due:
            assert prefix not in self.known_blocks, "a block is computed again"
        self._writes[-1][1].update({prefix} - self.known_blocks)
        self.known_blocks.add(prefix)

    def hide_blocks(self) -> None:
        """Forget all known blocks, and those that the present rows add later.

        A block can't be found without the blocks before it, which are hidden.
        """
        self.known_blocks.clear()
        for row in self.rows.values():
            row.is_hidden = True

    def _read(self) -> None:
        """Every computed token of every row is where its block table says."""
        for row in self.rows.values():
            row.is_loading &= row.num_computed == row.num_found
            if row.is_loading or self.host.loading.intersection(row.block_table):
                assert row.num_computed == row.num_found, "it computes, and lacks KV"
                row.is_loading = True
                continue
            found = [self.memory[cell] for cell in self._cells(row)[: row.num_computed]]
            assert found == row.prefixes[: row.num_computed], "the KV is not that of this prefix"

    def _cells(self, row: Row) -> list[int]:
        size = self.config.block_size
        return [cell for b in row.block_table for cell in range(b * size, (b + 1) * size)]

    def _sample(self, row: Row) -> list[int]:
        if row.num_drafted > 1:
            ends = range(len(row.token_ids) - row.num_drafted + 1, len(row.token_ids) + 1)
            sampled = [next_token(row.seed, row.token_ids[:end]) for end in ends]
            if row.has_grammar and DEAD_END in sampled:
                first = sampled.index(DEAD_END)
                sampled[first:] = [VOID] * (len(sampled) - first)
            return sampled
        token_id = next_token(row.seed, row.token_ids)
        if row.has_grammar and (token_id == DEAD_END or row.token_ids[-1] == VOID):
            token_id = VOID
        row.token_ids.append(token_id)
        self._number(row, token_id)
        return [token_id]

    def _drafts_after(self, row: Row, sampled: list[int], number: int) -> list[int]:
        """Return drafts after the last right one of a row's tokens; two of three are right."""
        end = len(row.token_ids) - len(sampled)
        if row.num_drafted > 1:
            end += 1
        token_ids = row.token_ids[:end]
        for place, token_id in enumerate(sampled):
            token_ids.append(token_id)
            if row.token_ids[end + place : end + place + 1] != [token_id]:
                break
        for _ in range(number):
            token_id = next_token(row.seed, token_ids)
            is_right = hash((row.seed, *token_ids, "draft")) % 3
            token_ids.append(token_id if is_right else 1 + (token_id + 1) % 3)
        return token_ids[len(token_ids) - number :]


def is_done(row: Row) -> bool:
    """Nothing is left to compute before the next token."""
    return row.num_computed == len(row.token_ids)
