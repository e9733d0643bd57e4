"""The streams of sequences: the detokenizer of each, and its next message."""

from collections.abc import Iterable, Iterator

from penstock.protocol.messages.client import FinishReason
from penstock.protocol.messages.packed import PackedLogprobs, pack
from penstock.protocol.messages.pipeline import StepTokens, StreamOpened
from penstock.protocol.transport.peers import Peers
from penstock.services.scheduler.peers.poison import DetokenizerTrials
from penstock.services.scheduler.planning.in_flight_plan import PlanOutput
from penstock.services.scheduler.sequences.sequence import Sequence

MAX_CHARACTER_TOKENS = 4  # a character has at most 4 bytes, and a token at least one


class Outbox:
    """The next message for one detokenizer, while it is built."""

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
        """Close a stream; one that this message would open is left out."""
        if self.opened.pop(stream_id, None) is None:
            self.closed.append(stream_id)

    def take_alone(self, epoch: int, sequences: list[Sequence]) -> StepTokens:
        """Return a message that opens only these streams and must be confirmed."""
        self._num_taken += 1
        return StepTokens(
            epoch, [_opened(one) for one in sequences], number=self._num_taken, confirm=True
        )

    def take(self, epoch: int, confirm: bool = False) -> StepTokens | None:
        """Return the message made since the last call; None if it is empty."""
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
    """The detokenizer of every sequence: the least loaded one. A stream is opened with a token."""

    def __init__(self, epoch: int) -> None:
        self.detokenizers: Peers[Sequence] = Peers()
        self._outboxes: dict[bytes, Outbox] = {}
        self._epoch = epoch
        self._num_streams = 0
        self._unassigned: dict[int, Sequence] = {}
        # streams that no detokenizer knows: their prompt is not computed yet
        self._unopened: set[int] = set()
        self._trials = DetokenizerTrials()
        # the next message of a trial, and its detokenizer
        self._trial: tuple[bytes, StepTokens] | None = None

    def open(self, sequence: Sequence) -> None:
        self._number(sequence)
        self._assign([sequence])

    def _number(self, sequence: Sequence) -> None:
        self._num_streams += 1
        sequence.stream_id = self._num_streams

    def close(self, sequence: Sequence) -> None:
        stream_id = sequence.stream_id
        self._unassigned.pop(stream_id, None)
        if self._trials.num_deaths:
            self._trials.close(sequence)
        if peer := self.detokenizers.get(sequence.detokenizer):
            del peer.work[stream_id]
            if stream_id not in self._unopened:
                self._outboxes[peer.identity].close(stream_id)
        self._unopened.discard(stream_id)

    def _assign(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            peer = self.detokenizers.least_loaded()
            if peer is None:
                sequence.detokenizer = None
                self._unassigned[sequence.stream_id] = sequence
            else:
                sequence.detokenizer = peer.identity
                peer.work[sequence.stream_id] = sequence
                self._unopened.add(sequence.stream_id)
                if sequence.has_begun or sequence.finish_reason:
                    self._open(sequence, self._outboxes[peer.identity])

    def _open(self, sequence: Sequence, outbox: Outbox) -> None:
        self._unopened.discard(sequence.stream_id)
        outbox.opened[sequence.stream_id] = _opened(sequence)

    def put(self, output: PlanOutput) -> None:
        """Add the tokens of a step to the next messages."""
        outboxes = self._outboxes
        for sequence, token_id in zip(output.sequences, output.token_ids, strict=True):
            outbox = outboxes.get(sequence.detokenizer)  # type: ignore[arg-type]
            if outbox is None:
                continue
            if sequence.stream_id in self._unopened:
                self._open(sequence, outbox)
            else:
                if sequence.logprobs and (packed := sequence.logprobs[-1]):
                    outbox.logprobs.append((len(outbox.stream_ids), packed))
                outbox.stream_ids.append(sequence.stream_id)
                outbox.token_ids.append(token_id)
        for sequence in output.finished:
            outbox = outboxes.get(sequence.detokenizer or b"")
            if outbox and sequence.stream_id in self._unopened:  # without a token
                self._open(sequence, outbox)
            elif outbox and sequence.finish_reason:
                outbox.finished.append((sequence.stream_id, sequence.finish_reason))

    def take_messages(self) -> Iterator[tuple[bytes, StepTokens]]:
        """Yield the next message of each detokenizer that has one."""
        if self._trials.waiting and not self._trials.at:
            self._begin_trial()
        if self._trial:
            yield self._trial
            self._trial = None  # if it was lost, the detokenizer died of another cause
        for identity, outbox in list(self._outboxes.items()):
            if identity != self._trials.at and (message := outbox.take(self._epoch)):
                yield identity, message

    def _begin_trial(self) -> None:
        """Have one detokenizer confirm all earlier messages, so that the next one is alone."""
        if peer := self.detokenizers.least_loaded():
            self._trials.at = peer.identity
            message = self._outboxes[peer.identity].take(self._epoch, confirm=True)
            assert message  # noqa: S101
            self._trial = peer.identity, message


def _opened(sequence: Sequence) -> StreamOpened:
    end, sampling = sequence.num_prompt_tokens, sequence.sampling
    stop = sampling.stop or []
    return StreamOpened(
        stream_id=sequence.stream_id,
        request_id=sequence.request_id,
        attempt=sequence.attempt,
        prompt_tail=pack(sequence.token_ids[max(0, end - MAX_CHARACTER_TOKENS) : end]),
        output_token_ids=pack(sequence.output_token_ids),
        stop=[stop] if isinstance(stop, str) else stop,
        stop_token_ids=sorted(sequence.stop_token_ids),
        eos_token_ids=sorted(sequence.end_token_ids),
        include_stop_str_in_output=sampling.include_stop_str_in_output,
        skip_special_tokens=sampling.skip_special_tokens,
        min_tokens=sampling.min_tokens,
        logprobs=None if sequence.logprobs is None else list(sequence.logprobs),  # a copy: it grows
        prompt_logprobs=None if sequence.needs_prompt_logprobs else sequence.prompt_logprobs,
        prompt_tokens=end,
        cached_tokens=sequence.num_cached_tokens,
        is_chat=sequence.is_chat,
        starts_reasoning=sequence.reasoning == "open",
        phase_seconds=sequence.phase_seconds(),
        finish_reason=sequence.finish_reason,
        pooled=sequence.pooled,
    )
