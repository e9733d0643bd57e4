"""What the gateway counts of the requests that go through it. Pure: moments are handed in.

The bounds of the histograms are vLLM's (vllm/v1/metrics/loggers.py, commit 005a810bc40f), with
finer ones before the first of INTER_TOKEN, which is longer than a whole step of a small model.
"""

from penstock.protocol.messages.client import ErrorReply, GenerateReply
from penstock.protocol.messages.metrics import Histogram, Metrics, RequestTimes
from penstock.services.gateway.entry import Entry

# fmt: off
FIRST_TOKEN = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
]
INTER_TOKEN = [
    0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5,
    0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
]
END_TO_END = [
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0,
    240.0, 480.0, 960.0, 1920.0, 7680.0,
]
# fmt: on
NUM_ANSWERS = [1.0, 2.0, 5.0, 10.0, 20.0]


def token_bounds(largest: int) -> list[float]:
    """1, 2, 5, 10, 20, … up to `largest`."""
    exponents = range(len(str(largest)))
    return [float(m * 10**e) for e in exponents for m in (1, 2, 5) if m * 10**e <= largest]


class Statistics:
    """Keeps `metrics`."""

    def __init__(self, max_model_len: int) -> None:
        self.metrics = Metrics(
            request_success={},
            request_failed={},
            time_to_first_token_seconds=Histogram.of(FIRST_TOKEN),
            inter_token_latency_seconds=Histogram.of(INTER_TOKEN),
            e2e_request_latency_seconds=Histogram.of(END_TO_END),
            request_queue_time_seconds=Histogram.of(END_TO_END),
            request_prefill_time_seconds=Histogram.of(END_TO_END),
            request_decode_time_seconds=Histogram.of(END_TO_END),
            request_inference_time_seconds=Histogram.of(END_TO_END),
            request_time_per_output_token_seconds=Histogram.of(INTER_TOKEN),
            request_prompt_tokens=Histogram.of(token_bounds(max_model_len)),
            request_generation_tokens=Histogram.of(token_bounds(max_model_len)),
            request_params_max_tokens=Histogram.of(token_bounds(max_model_len)),
            request_params_n=Histogram.of(NUM_ANSWERS),
        )

    def got_tokens(self, entry: Entry, num_tokens: int, now: float) -> None:
        """New tokens of a request, which came at once: the time before counts for all of them."""
        metrics = self.metrics
        metrics.generation_tokens += num_tokens
        if entry.first_token_at:
            metrics.inter_token_latency_seconds.add(now - entry.last_token_at)
        else:
            entry.first_token_at = now
            metrics.time_to_first_token_seconds.add(now - entry.accepted_at)
            metrics.prompt_tokens += entry.num_prompt_tokens
            metrics.prefix_cache_queries += entry.num_prompt_tokens
            metrics.prefix_cache_hits += entry.num_cached_tokens
        entry.last_token_at = now

    def ended(self, entry: Entry, reply: GenerateReply | ErrorReply, now: float) -> None:
        """A request is answered; or its client is gone, which counts as `abort`."""
        if isinstance(reply, ErrorReply):
            self.failed(reply)
            return
        metrics, reason = self.metrics, reply.finish_reason
        metrics.request_success[reason] = metrics.request_success.get(reason, 0) + 1
        metrics.e2e_request_latency_seconds.add(now - entry.accepted_at)
        metrics.request_prompt_tokens.add(reply.usage.prompt_tokens)
        metrics.request_generation_tokens.add(reply.usage.output_tokens)
        if entry.sampling.max_tokens is not None:
            metrics.request_params_max_tokens.add(entry.sampling.max_tokens)
        if entry.request.num_answers:
            metrics.request_params_n.add(entry.request.num_answers)
        if reply.times:
            self._took(reply.times, reply.usage.output_tokens)

    def _took(self, times: RequestTimes, num_tokens: int) -> None:
        metrics = self.metrics
        metrics.request_decode_time_seconds.add(times.decode)
        if num_tokens > 1:
            metrics.request_time_per_output_token_seconds.add(times.decode / (num_tokens - 1))
        if times.prefill:  # else the scheduler's part is not known
            metrics.request_queue_time_seconds.add(times.queue)
            metrics.request_prefill_time_seconds.add(times.prefill)
            metrics.request_inference_time_seconds.add(times.prefill + times.decode)

    def failed(self, error: ErrorReply) -> None:
        """A request, of any kind, was refused or has failed."""
        failed = self.metrics.request_failed
        failed[error.code] = failed.get(error.code, 0) + 1
