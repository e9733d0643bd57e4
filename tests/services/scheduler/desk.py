"""`Streams` with detokenizers that only record their messages."""

from penstock.protocol.messages.packed import PackedLogprobs, pack, unpack
from penstock.protocol.messages.pipeline import StepTokens, StreamOpened
from penstock.services.scheduler.in_flight_plan import PlanOutput
from penstock.services.scheduler.sequence import Sequence
from penstock.services.scheduler.streams import Streams
from tests.services.scheduler.builders import make_sequence


class Reader:
    """State of a detokenizer."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[PackedLogprobs | None]] = {}
        self.opened: list[StreamOpened] = []
        self.finished: dict[int, str] = {}
        self.num_read = 0

    def read(self, delta: StepTokens) -> None:
        self.num_read += 1
        assert delta.number == self.num_read
        for stream_id in delta.closed:
            del self.tokens[stream_id]
        for opened in delta.opened:
            self.opened.append(opened)
            self.tokens[opened.stream_id] = list(unpack(opened.output_token_ids))
            if opened.logprobs is not None:
                self.logprobs[opened.stream_id] = opened.logprobs
            if opened.finish_reason:
                self.finished[opened.stream_id] = opened.finish_reason
        stream_ids, token_ids = unpack(delta.stream_ids), unpack(delta.token_ids)
        for stream_id, token_id in zip(stream_ids, token_ids, strict=True):
            if stream_id in self.tokens:  # else it was closed in this very message
                self.tokens[stream_id].append(token_id)
        for index, packed in delta.logprobs:
            self.logprobs[stream_ids[index]].append(packed)
        self.finished |= dict(delta.finished)

    @property
    def pieces(self) -> list[tuple[int, list[int], list[int]]]:
        """(offset, tokens of the prompt, output) of each message that opened a stream."""
        return [
            (
                opened.prompt_offset,
                [token for known in opened.prompt_logprobs or () for token, _ in known.pairs()],
                list(unpack(opened.output_token_ids)),
            )
            for opened in self.opened
        ]


def packed(token_id: int) -> PackedLogprobs:
    return PackedLogprobs(pack([token_id]), bytes(4))


class Desk:
    """`Streams` and its readers; messages arrive when `deliver` is called."""

    def __init__(self, *readers: str) -> None:
        self.streams = Streams(epoch=7)
        self.readers: dict[bytes, Reader] = {}
        for name in readers:
            self.come(name)

    def come(self, name: str) -> Reader:
        self.streams.alive(name.encode(), name)
        return self.readers.setdefault(name.encode(), Reader())

    def open(self, num_sequences: int = 1, **sampling: object) -> list[Sequence]:
        """Return new requests, which the scheduler then admits."""
        sequences = [make_sequence(**sampling) for _ in range(num_sequences)]  # type: ignore
        for sequence in sequences:
            self.streams.open(sequence)
            sequence.num_prefill_tokens = sequence.num_prompt_tokens
        return sequences

    def compute(
        self, sequence: Sequence, begin: int, end: int, token_id: int | None = None
    ) -> None:
        """Compute a chunk of a prompt with logprobs, and the token after the whole prompt."""
        sequence.confirm_chunk(end)
        last = min(end, sequence.num_prompt_tokens - 1)
        chunk = [packed(token) for token in sequence.token_ids[begin + 1 : last + 1]]
        prompts = [sequence] if sequence.add_prompt_logprobs(chunk) else []
        if token_id is None:
            self.streams.put(PlanOutput([], [], [], [], {}, prompts))
        else:
            self.step([sequence], token_id, prompts)

    def step(
        self, sequences: list[Sequence], token_id: int, prompts: list[Sequence] | None = None
    ) -> None:
        """Each of them gets a token. prompts: those with new prompt logprobs."""
        for sequence in sequences:
            sequence.add_logprobs(packed(token_id))
            sequence.token_ids.append(token_id)
        told = {at: packed(token_id) for at, one in enumerate(sequences) if one.logprobs}
        ended = [sequence for sequence in sequences if sequence.finish_reason]
        tokens = [token_id] * len(sequences)
        self.streams.put(PlanOutput(sequences, tokens, ended, [], told, prompts or []))

    def end(self, sequence: Sequence) -> None:
        """End a sequence without a token."""
        self.streams.put(PlanOutput([], [], [sequence], [], {}, []))

    def deliver(self) -> None:
        for identity, delta in self.streams.take_messages():
            assert delta.epoch == 7
            self.readers[identity].read(delta)

    @property
    def loads(self) -> list[int]:
        return [len(reader.tokens) for reader in self.readers.values()]
