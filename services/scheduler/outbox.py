"""The next message for a detokenizer, while it is built."""

from penstock.protocol.messages.client import FinishReason
from penstock.protocol.messages.detokenizer import StepTokens, StreamOpened
from penstock.protocol.messages.logprobs import PackedLogprobs
from penstock.protocol.messages.packed import pack
from penstock.services.scheduler.sequence import Sequence

MAX_CHARACTER_TOKENS = 4
"""a character has at most 4 bytes, and a token at least one"""


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
            epoch, [opened_stream(one) for one in sequences], number=self._num_taken, confirm=True
        )

    def take(self, epoch: int, confirm: bool = False) -> StepTokens | None:
        """Return the message made since the last call; None if it is empty."""
        has_content = self.opened or self.stream_ids or self.finished or self.closed
        if not (has_content or confirm):
            return None
        self._num_taken += 1
        delta = StepTokens(
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
        return delta


def opened_stream(sequence: Sequence) -> StreamOpened:
    """Return all that a detokenizer needs to continue a sequence."""
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
        include_stop_str_in_output=sampling.include_stop_str_in_output,
        skip_special_tokens=sampling.skip_special_tokens,
        min_tokens=sampling.min_tokens,
        logprobs=None if sequence.logprobs is None else list(sequence.logprobs),  # a copy: it grows
        prompt_logprobs=None if sequence.needs_prompt_logprobs else sequence.prompt_logprobs,
        prompt_tokens=end,
        cached_tokens=sequence.num_cached_tokens,
        starts_reasoning=sequence.reasoning == "open",
        phase_seconds=sequence.phase_seconds(),
        finish_reason=sequence.finish_reason,
        pooled=sequence.pooled,
    )
