"""What the gateway counts: it sees every request, so the sums are right however many processes
there are of any kind. Named as vLLM's metrics where they mean the same."""

from bisect import bisect_left

from msgspec import Struct

ITERATION_TOKENS = [1.0, *(float(1 << bits) for bits in range(3, 14))]
"""bounds of the tokens of a step: 1, 8, 16, 32, … 8,192"""


class Histogram(Struct, kw_only=True):
    """How often a value was at most each bound, as Prometheus counts it."""

    bounds: list[float]
    """ascending; seconds or tokens"""
    counts: list[int]
    """[len(bounds) + 1]: of values in each interval, not summed; the last is beyond all bounds"""
    sum: float = 0.0

    @classmethod
    def of(cls, bounds: list[float]) -> "Histogram":
        """One that has seen nothing."""
        return cls(bounds=bounds, counts=[0] * (len(bounds) + 1))

    def add(self, value: float) -> None:
        """Counts a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class RequestTimes(Struct, kw_only=True):
    """How long the parts of one request took, seconds."""

    queue: float
    """from its arrival at the scheduler until a step first had it"""
    prefill: float
    """from then to its first token, at the scheduler"""
    decode: float
    """from its first token to its last, at the gateway"""
    first_token: float
    """from its arrival at the gateway to its first token there"""

    @classmethod
    def of(
        cls,
        accepted_at: float,
        first_token_at: float,
        last_token_at: float,
        phase_seconds: tuple[float, float],
    ) -> "RequestTimes | None":
        """Makes them from moments of one clock; None where no token has come."""
        if not first_token_at:
            return None
        queue, prefill = phase_seconds
        decode = last_token_at - first_token_at
        return cls(
            queue=queue, prefill=prefill, decode=decode, first_token=first_token_at - accepted_at
        )


class Metrics(Struct, kw_only=True):
    """Since the start of this gateway."""

    request_success: dict[str, int] = {}
    """finish reason → answered requests"""
    request_failed: dict[str, int] = {}
    """code of the error → refused or failed requests"""
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_cache_queries: int = 0
    """prompt tokens that were looked for in the prefix cache"""
    prefix_cache_hits: int = 0
    """and those found there"""
    time_to_first_token_seconds: Histogram
    inter_token_latency_seconds: Histogram
    e2e_request_latency_seconds: Histogram
    request_queue_time_seconds: Histogram
    request_prefill_time_seconds: Histogram
    request_decode_time_seconds: Histogram
    request_inference_time_seconds: Histogram
    request_time_per_output_token_seconds: Histogram
    request_prompt_tokens: Histogram
    request_generation_tokens: Histogram
    request_params_max_tokens: Histogram
    request_params_n: Histogram
