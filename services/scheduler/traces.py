"""What the scheduler tells of a request's way: how long it waited, was prefilled, and decoded."""

from time import monotonic

from penstock.protocol.tracing import Tracer
from penstock.services.scheduler.in_flight_plan import Step, StepOutput
from penstock.services.scheduler.sequence import Sequence


class Traces:
    """The spans `queue`, `prefill` and `decode` of each sequence, where tracing is on.

    A sequence that is preempted, or whose workers die, stays in the span it is in.
    """

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._spans: dict[Sequence, tuple[str, float]] = {}
        """the span that each is in, and since when"""

    def arrived(self, sequence: Sequence) -> None:
        """It is new."""
        if self._tracer.is_on:
            self._spans[sequence] = "queue", monotonic()

    def planned(self, step: Step) -> None:
        """A plan is sent."""
        if self._tracer.is_on:
            for sequence in step.sequences:
                self._go_on(sequence, "queue", "prefill")

    def came(self, output: StepOutput) -> None:
        """A step brought tokens."""
        if self._tracer.is_on:
            for sequence in output.sequences:
                self._go_on(sequence, "prefill", "decode")
            for sequence in output.finished:
                self.left(sequence)

    def left(self, sequence: Sequence) -> None:
        """It has ended; perhaps it had before."""
        if span := self._spans.pop(sequence, None):
            name, begin = span
            attributes = {"gen_ai.usage.output_tokens": len(sequence.output_token_ids)}
            self._tracer.span(name, sequence.request_id, begin, attributes)

    def _go_on(self, sequence: Sequence, from_: str, to: str) -> None:
        if self._spans.get(sequence, ("",))[0] == from_:
            self.left(sequence)
            self._spans[sequence] = to, monotonic()
