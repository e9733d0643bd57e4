"""Metrics of the gateway, which sees every request, whatever the number of other processes.

The names are vLLM's where the meaning is the same.
"""

from msgspec import Struct

from penstock.protocol.messages.histogram import Histogram

# bounds of the tokens of a step: 1, 8, 16, 32, … 8,192
ITERATION_TOKENS = [1.0, *(float(1 << bits) for bits in range(3, 14))]


# Bounds of histograms in seconds, as vLLM's (vllm/v1/metrics/loggers.py, commit 005a810bc40f),
# with finer ones before the first of INTER_TOKEN, which is longer than a step of a small model.
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
    """Return 1, 2, 5, 10, 20, … up to `largest`."""
    exponents = range(len(str(largest)))
    return [float(m * 10**e) for e in exponents for m in (1, 2, 5) if m * 10**e <= largest]


class RequestTimes(Struct, kw_only=True):
    """Durations of the parts of one request, seconds."""

    queue: float  # from its arrival at the scheduler until a step first had it
    prefill: float  # from then to its first token, at the scheduler
    decode: float  # from its first token to its last, at the gateway
    first_token: float  # from its arrival at the gateway to its first token there


class Metrics(Struct, kw_only=True):
    """Since the start of this gateway."""

    request_success: dict[str, int] = {}  # finish reason → answered requests
    request_failed: dict[str, int] = {}  # code of the error → refused or failed requests
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_cache_hits: int = 0  # prompt tokens that were found in the prefix cache
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

    @classmethod
    def empty(cls, max_model_len: int) -> "Metrics":
        tokens = token_bounds(max_model_len)
        return cls(
            time_to_first_token_seconds=Histogram.of(FIRST_TOKEN),
            inter_token_latency_seconds=Histogram.of(INTER_TOKEN),
            e2e_request_latency_seconds=Histogram.of(END_TO_END),
            request_queue_time_seconds=Histogram.of(END_TO_END),
            request_prefill_time_seconds=Histogram.of(END_TO_END),
            request_decode_time_seconds=Histogram.of(END_TO_END),
            request_inference_time_seconds=Histogram.of(END_TO_END),
            request_time_per_output_token_seconds=Histogram.of(INTER_TOKEN),
            request_prompt_tokens=Histogram.of(tokens),
            request_generation_tokens=Histogram.of(tokens),
            request_params_max_tokens=Histogram.of(tokens),
            request_params_n=Histogram.of(NUM_ANSWERS),
        )

    def count_failure(self, code: str) -> None:
        """Count a request, of any kind, that was refused or has failed."""
        self.request_failed[code] = self.request_failed.get(code, 0) + 1
