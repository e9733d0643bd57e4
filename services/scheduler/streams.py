"""The streams of tokens to detokenizers, and their failover to other detokenizers."""

from collections.abc import Iterable, Iterator

from penstock.protocol.messages.client import FinishReason
from penstock.protocol.messages.packed import PackedLogprobs, pack
from penstock.protocol.messages.pipeline import StepTokens, StreamOpened
from penstock.protocol.transport.peers import Peers
from penstock.services.scheduler.in_flight_plan import PlanOutput
from penstock.services.scheduler.poison import DetokenizerTrials
from penstock.services.scheduler.sequence import Sequence

MAX_CHARACTER_TOKENS = 4  # a character has at most 4 bytes, a token at least 1


class Outbox:
    """The builder of the next message for one detokenizer."""

    def __init__(self) -> None:
        self._num_taken = 0
        self._clear()

    def _clear(self) -> None:
        self.opened: dict[int, StreamOpened] = {}
        self.stream_ids: list[int] = []
        self.token_ids: list[int] = []
        self.finished: list[tuple[int, FinishReason]] = []
        self.closed: list[int] = []
        self.logprobs: list[tuple[int, PackedLogprobs]] = []

    def close(self, stream_id: int) -> None:
        """Close a stream. A stream that this message would open is not opened."""
        if not (opened := self.opened.pop(stream_id, None)) or opened.prompt_offset:
            self.closed.append(stream_id)

    def take_alone(self, epoch: int, sequences: list[Sequence]) -> StepTokens:
        """Return a message that opens only these streams and requests a confirmation."""
        self._num_taken += 1
        return StepTokens(
            epoch,
            [_opened(sequence) for sequence in sequences],
            number=self._num_taken,
            confirm=True,
        )

    def take(self, epoch: int, confirm: bool = False) -> StepTokens | None:
        """Return the message with everything since the last call; None if it would be empty."""
        has_content = self.opened or self.stream_ids or self.finished or self.closed
        if not (has_content or confirm):
            return None
        self._num_taken += 1
        message = StepTokens(
            epoch,
            list(self.opened.values()),
            pack(self.stream_ids),
            pack(self.token_ids),
            self.finished,
            self.closed,
            self.logprobs,
            self._num_taken,
            confirm,
        )
        self._clear()
        return message


class Streams:
    """The streams of all sequences, each assigned to the least loaded detokenizer.

    A stream is opened with the first token; with prompt logprobs, by each chunk of the prompt, with
    the chunk's logprobs. A sequence can move to another detokenizer at any time: its text depends
    only on its tokens, and the gateway drops repeated output. The module `poison` has the rules of
    trials.
    """

    def __init__(self, epoch: int) -> None:
        # remembered of a silent detokenizer: whether it had a trial, and its streams
        self.detokenizers: Peers[Sequence, tuple[bool, dict[int, Sequence]]] = Peers()
        self._outboxes: dict[bytes, Outbox] = {}
        self._epoch = epoch
        self._num_streams = 0
        self._unassigned: dict[int, Sequence] = {}
        # streams that are not opened with output at a detokenizer: they have no token yet
        self._unopened: set[int] = set()
        self._trials = DetokenizerTrials()
        # (detokenizer, next message) of a trial
        self._trial: tuple[bytes, StepTokens] | None = None

    def open(self, sequence: Sequence) -> None:
        self._number(sequence)
        self._assign([sequence])

    def reopen(self, sequence: Sequence) -> None:
        self.close(sequence)
        self.open(sequence)

    def _number(self, sequence: Sequence) -> None:
        self._num_streams += 1
        sequence.stream_id = self._num_streams

    def close(self, sequence: Sequence) -> None:
        stream_id = sequence.stream_id
        self._unassigned.pop(stream_id, None)
        if self._trials.suspects:
            self._trials.close(sequence)
        if peer := self.detokenizers.get(sequence.detokenizer):
            del peer.work[stream_id]
            if self._was_sent(sequence):
                self._outboxes[peer.identity].close(stream_id)
        self._unopened.discard(stream_id)

    def _assign(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            peer = self.detokenizers.least_loaded()
            if peer is None:
                sequence.detokenizer = None
                self._unassigned[sequence.stream_id] = sequence
            else:
                sequence.detokenizer, sequence.num_sent = peer.identity, 0
                peer.work[sequence.stream_id] = sequence
                self._unopened.add(sequence.stream_id)
                if sequence.has_begun or sequence.finish_reason:
                    self._open(sequence, self._outboxes[peer.identity])

    def _open(self, sequence: Sequence, outbox: Outbox) -> None:
        num_sent = self._mark_sent(sequence, outbox) if sequence.prompt_logprobs else 0
        opened = outbox.opened[sequence.stream_id] = _opened(sequence, num_sent)
        if opened.output_token_ids or opened.finish_reason:
            self._unopened.discard(sequence.stream_id)

    def _was_sent(self, sequence: Sequence) -> bool:
        """Return whether the detokenizer was sent a part of the stream."""
        return sequence.stream_id not in self._unopened or sequence.num_sent > 0

    def _mark_sent(self, sequence: Sequence, outbox: Outbox) -> int:
        """Count all known prompt logprobs as sent. Return how many earlier messages contain."""
        waiting = outbox.opened.get(sequence.stream_id)
        num_sent = waiting.prompt_offset if waiting else sequence.num_sent
        sequence.num_sent = len(sequence.prompt_logprobs or ())
        return num_sent

    def put(self, output: PlanOutput) -> None:
        """Add the tokens of a step to the next messages for detokenizers."""
        outboxes, logprobs = self._outboxes, output.logprobs
        tokens = zip(output.sequences, output.token_ids, strict=True)
        for index, (sequence, token_id) in enumerate(tokens):
            outbox = outboxes.get(sequence.detokenizer)  # type: ignore[arg-type]
            if outbox is None:
                continue
            if sequence.stream_id in self._unopened:
                self._open(sequence, outbox)
            else:
                if index in logprobs:
                    outbox.logprobs.append((len(outbox.stream_ids), logprobs[index]))
                outbox.stream_ids.append(sequence.stream_id)
                outbox.token_ids.append(token_id)
        for sequence in dict.fromkeys((*output.prompts, *output.finished)):
            outbox = outboxes.get(sequence.detokenizer or b"")
            if outbox and sequence.stream_id in self._unopened:  # without a token
                self._open(sequence, outbox)
            elif outbox and sequence.finish_reason:
                outbox.finished.append((sequence.stream_id, sequence.finish_reason))

    def take_messages(self) -> Iterator[tuple[bytes, StepTokens]]:
        """Yield (detokenizer, next message) for each detokenizer with new content."""
        if self._trials.waiting and not self._trials.at:
            self._begin_trial()
        if self._trial:
            yield self._trial
            self._trial = None  # still set if the send fails: then the trial is not the cause
        for identity, outbox in list(self._outboxes.items()):
            if identity != self._trials.at and (message := outbox.take(self._epoch)):
                yield identity, message

    # ---- detokenizers come and go --------------------------------------------------------------

    def alive(self, identity: bytes, name: str) -> bool:
        """Record a heartbeat. Return whether it is the first, which registers a detokenizer."""
        if not self.detokenizers.alive(identity, name):
            return False
        self._outboxes[identity] = Outbox()
        orphans, self._unassigned = self._unassigned, {}
        self._assign(orphans.values())
        self._rebalance()
        return True

    def _rebalance(self) -> None:
        """Move sequences away from detokenizers that have more than their share."""
        share = -(-sum(len(peer.work) for peer in self.detokenizers) // len(self.detokenizers))
        for peer in self.detokenizers:
            if peer.identity == self._trials.at:
                continue
            surplus = list(peer.work.values())[share:]
            for sequence in surplus:
                self.close(sequence)
            self._assign(surplus)

    def lose_silent(self) -> list[bytes]:
        """Move the sequences of silent detokenizers, at each heartbeat. Return the detokenizers."""
        trials, silent = self._trials, self.detokenizers.silent()
        for identity in silent:
            is_trial = identity == trials.at and bool(trials.batch) and not self._trial
            peer = self.detokenizers.get(identity)
            had = peer.work.values() if peer else []
            opened = {
                sequence.stream_id: sequence
                for sequence in (trials.batch if is_trial else had)
                if self._was_sent(sequence)
            }
            self.lost(identity)
            self.detokenizers.remember(identity, (is_trial, opened))
        return silent

    def lost(
        self, identity: bytes, has_died: bool = False
    ) -> tuple[list[Sequence], list[Sequence]]:
        """Move the sequences of a lost detokenizer to others, with all their tokens.

        If the detokenizer `has_died`, suspects are tried first. Return (suspects, poison requests);
        the latter are among the suspects and get no detokenizer.
        """
        if identity in self.detokenizers.remembered:
            return self._blame(identity)
        self._outboxes.pop(identity, None)
        lost = self.detokenizers.lost(identity)
        trials = self._trials
        is_tried = identity == trials.at
        suspects = [sequence for sequence in lost if has_died and self._was_sent(sequence)]
        given_up: list[Sequence] = []
        if is_tried and has_died and trials.batch and not self._trial:
            suspects, given_up = trials.batch, trials.failed()
        else:
            if is_tried:  # the detokenizer has not received the trial
                for sequence in trials.batch:
                    sequence.detokenizer = None  # it may return under the same identity
                trials.add(trials.batch)
                trials.at, trials.batch = b"", []
            trials.add(suspects)
        if is_tried:
            self._trial = None
        for sequence in suspects:
            sequence.detokenizer = None
        gone = trials.waiting.keys() | set(given_up)
        self._assign(sequence for sequence in lost if sequence not in gone)
        return suspects, given_up

    def _blame(self, identity: bytes) -> tuple[list[Sequence], list[Sequence]]:
        """Queue a dead, formerly silent detokenizer's streams for trials. Return as `lost` does."""
        is_trial, opened = self.detokenizers.remembered.pop(identity)
        suspects = [
            sequence for stream_id, sequence in opened.items() if self._is_open(sequence, stream_id)
        ]
        if is_trial:
            return suspects, self._trials.blame(suspects)
        for sequence in suspects:
            if sequence not in self._trials.suspects:
                self.close(sequence)
                sequence.detokenizer = None
                self._number(sequence)  # the close of the old stream may arrive after the trial
                self._trials.add([sequence])
        return suspects, []

    def _is_open(self, sequence: Sequence, stream_id: int) -> bool:
        peer = self.detokenizers.get(sequence.detokenizer)
        has_peer = peer is not None and stream_id in peer.work
        is_open = has_peer or stream_id in self._unassigned or sequence in self._trials.suspects
        return is_open and sequence.stream_id == stream_id

    # ---- trials --------------------------------------------------------------------------------

    def _begin_trial(self) -> None:
        """Ask a detokenizer to confirm all earlier messages, so that the trial runs alone."""
        if peer := self.detokenizers.least_loaded():
            self._trials.at = peer.identity
            message = self._outboxes[peer.identity].take(self._epoch, confirm=True)
            assert message  # noqa: S101
            self._trial = peer.identity, message

    def confirmed(self, identity: bytes) -> None:
        """Handle a confirmation: a trial can begin, or has passed."""
        trials, outbox = self._trials, self._outboxes.get(identity)
        if identity != trials.at or outbox is None:
            return
        if trials.batch or not trials.waiting:
            trials.passed()
            return
        batch = trials.next_batch()
        peer = self.detokenizers.get(identity)
        for sequence in batch:
            sequence.detokenizer = identity
            peer.work[sequence.stream_id] = sequence  # type: ignore[union-attr]
            sequence.num_sent = len(sequence.prompt_logprobs or ())
            has_output = sequence.output_token_ids and not sequence.needs_prompt_logprobs
            if not (has_output or sequence.finish_reason):
                self._unopened.add(sequence.stream_id)
        self._trial = identity, outbox.take_alone(self._epoch, batch)


def _opened(sequence: Sequence, num_sent: int = 0) -> StreamOpened:
    """Return the message that opens a stream, with prompt logprobs after the first `num_sent`.

    The output comes with the last of them.
    """
    end, sampling = sequence.num_prompt_tokens, sequence.sampling
    stop = sampling.stop or []
    output, known = sequence.output_token_ids, sequence.prompt_logprobs
    if sequence.needs_prompt_logprobs:  # they never come if an earlier attempt has ended
        output, known = (output, None) if sequence.finish_reason else ([], known)
    return StreamOpened(
        stream_id=sequence.stream_id,
        request_id=sequence.request_id,
        attempt=sequence.attempt,
        prompt_tail=pack(sequence.token_ids[max(0, end - MAX_CHARACTER_TOKENS) : end]),
        output_token_ids=pack(output),
        stop=[stop] if isinstance(stop, str) else stop,
        stop_token_ids=sorted(sequence.stop_token_ids),
        eos_token_ids=sorted(sequence.end_token_ids),
        include_stop_str_in_output=sampling.include_stop_str_in_output,
        skip_special_tokens=sampling.skip_special_tokens,
        min_tokens=sampling.min_tokens,
        logprobs=None if sequence.logprobs is None else sequence.logprobs[: len(output)],
        prompt_logprobs=None if known is None else known[num_sent:],
        prompt_offset=num_sent,
        prompt_tokens=end,
        cached_tokens=sequence.num_cached_tokens,
        is_chat=sequence.is_chat,
        starts_reasoning=sequence.reasoning == "open",
        phase_seconds=sequence.phase_seconds(),
        finish_reason=sequence.finish_reason,
        pooled=sequence.pooled,
    )
