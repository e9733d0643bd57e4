"""The ledger takes each token once, whatever is repeated, and counts it."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from penstock.protocol.messages.client import (
    JSON,
    MSGPACK,
    ChatMessage,
    Codec,
    ErrorReply,
    GenerateReply,
    GenerateRequest,
    TextDelta,
    TokenLogprobs,
)
from penstock.protocol.messages.packed import pack
from penstock.protocol.messages.status import (
    END_TO_END,
    FIRST_TOKEN,
    INTER_TOKEN,
    Histogram,
    Metrics,
    RequestTimes,
    token_bounds,
)
from penstock.services.gateway.ledger import Ledger
from penstock.services.gateway.request import GapError, Request, Share, estimated_tokens
from tests.services.gateway.conftest import accepted, delta

LENGTH = 40
Steps = list[tuple[int, int, bool]]
STEPS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.booleans()))


class Opened:
    """A ledger with one request, a stream."""

    def __init__(self, **fields: Any) -> None:
        self.ledger, self.totals = Ledger(), Share()
        self.request = accepted(stream=True, **fields)
        self.ledger.open(self.request, self.totals)

    def append(self, begin: int, end: int, **fields: Any) -> bool:
        return append(self.ledger, self.request, delta(begin, end, **fields))


def append(ledger: Ledger, request: Request, new: TextDelta) -> bool:
    """As `Requests` does."""
    num_bytes = request.num_bytes
    is_new = request.append(new)
    ledger.record_growth(request, num_bytes)
    return is_new


def logprobs(begin: int, end: int) -> list[TokenLogprobs | None]:
    """Return the logprobs of tokens `begin` to `end`, without alternatives."""
    return [
        TokenLogprobs(token_id=token_id, logprob=-1.0, token="", bytes=[], rank=1, top=[])
        for token_id in range(begin, end)
    ]


def undelivered(request: Request) -> TextDelta:
    return request.undelivered() or delta(0, 0)


# ---- tokens ------------------------------------------------------------------------------------


@given(STEPS)
def test_repeats_are_trimmed_and_what_is_untold_adds_up(steps: Steps) -> None:
    """Each step goes back by some tokens and then on by others; the client may have no room."""
    opened = Opened()
    request = opened.request
    known = 0
    seen: list[int] = []
    for back, length, has_room in [*steps, (9, LENGTH, True)]:
        begin = max(0, known - back)
        end = min(begin + length, LENGTH)
        assert opened.append(begin, end) == (end > known)
        known = max(known, end)
        assert request.token_ids == list(range(known))
        assert request.num_unread_bytes == 9 * (known - len(seen))
        assert opened.totals.num_bytes == 9 * known
        new = request.undelivered()
        assert (new is None) == (known == len(seen))
        if new is not None and has_room:
            assert (new.token_offset, new.char_offset) == (len(seen), len(seen))
            assert len(new.text) == len(new.token_ids)
            seen += new.token_ids
            request.mark_delivered()
    assert seen == list(range(LENGTH))
    assert request.reply("length").text == "x" * LENGTH
    request.rewind()
    again = undelivered(request)
    assert (again.token_offset, again.char_offset, again.text) == (0, 0, "x" * LENGTH)


def test_who_wants_no_stream_is_told_nothing_before_the_end() -> None:
    request = accepted()
    request.append(delta(0, 3))
    assert (request.undelivered(), request.num_unread_bytes) == (None, 0)
    request.answer = request.reply("stop")
    assert request.num_unread_bytes == 3 * 9


def test_a_gap_is_an_error() -> None:
    request = accepted()
    request.append(delta(0, 3))
    with pytest.raises(GapError, match="token 5; 3 are known"):
        request.append(delta(5, 6))


def test_deltas_of_an_older_attempt_are_dropped() -> None:
    ledger, request = Ledger(first_attempt=100), accepted()
    ledger.open(request, Share())
    ledger.begin_attempt(request)
    assert not request.append(delta(0, 3, attempt=100))
    assert request.append(delta(0, 3, attempt=101))
    submitted = request.submission().request
    assert (submitted.output_token_ids, submitted.attempt) == (pack([0, 1, 2]), 101)


@pytest.mark.parametrize(
    ("fields", "ends", "expected"),
    [
        ({}, {"finish_reason": "stop"}, None),
        ({"stop": ["z"]}, {"finish_reason": "stop", "stop_reason": "z"}, "z"),
        ({"stop_token_ids": [2]}, {"finish_reason": "stop"}, 2),
        ({"stop_token_ids": [1]}, {"finish_reason": "stop"}, None),
        ({"stop_token_ids": [2]}, {"finish_reason": "length"}, None),
    ],
)
def test_why_it_stopped(fields: dict[str, Any], ends: dict[str, Any], expected: object) -> None:
    request = accepted(**fields)
    request.append(delta(0, 3, **ends))
    assert request.reply(ends["finish_reason"]).stop_reason == expected


# ---- logprobs ----------------------------------------------------------------------------------


@given(STEPS)
def test_every_token_keeps_its_logprobs(steps: Steps) -> None:
    """Logprobs are sent once, like tokens.

    Tokens that the client brought have none; clients that requested none receive none.
    """
    brought = {"stream": True, "output_token_ids": [0, 1]}
    request, other = accepted(logprobs=0, **brought), accepted(**brought)
    known = 0
    heard: list[TokenLogprobs | None] = []
    for back, length, has_room in [*steps, (0, 2, False), (9, LENGTH, True)]:
        begin = max(0, known - back)
        end = min(begin + length, LENGTH)
        known = max(known, end)
        for each in (request, other):
            each.append(delta(begin, end, logprobs=logprobs(begin, end)))
        new = request.undelivered()
        if new and has_room:
            assert new.logprobs is not None
            assert len(new.logprobs) == len(new.token_ids)
            heard += new.logprobs
            request.mark_delivered()
    assert heard == request.reply("stop").logprobs == [None, None, *logprobs(2, LENGTH)]
    assert undelivered(other).logprobs is other.reply("stop").logprobs is None


def test_logprobs_that_nobody_knows() -> None:
    """After a restart of all other processes, the gateway's own tokens keep what is known."""
    opened = Opened(logprobs=0)
    request = opened.request
    opened.append(0, 2, logprobs=logprobs(0, 2))
    opened.ledger.begin_attempt(request)
    opened.append(0, 3, attempt=request.attempt, logprobs=[None, None, *logprobs(2, 3)])
    opened.append(3, 4, attempt=request.attempt)
    assert request.reply("stop").logprobs == [*logprobs(0, 3), None]


def of_prompt(begin: int, end: int) -> dict[str, Any]:
    """Return the fields of a piece with the logprobs of the prompt tokens `begin` to `end`."""
    encoded = [Raw(MSGPACK.encode(known)) for known in logprobs(begin, end)]
    return {"prompt_logprobs": encoded, "prompt_offset": begin - 1}


def as_sent(reply: TextDelta | GenerateReply, codec: Codec) -> list[TokenLogprobs | None] | None:
    """Return the prompt logprobs that a client of this encoding reads."""
    return codec.decode_reply(codec.encode(reply)).prompt_logprobs


@pytest.mark.parametrize("codec", [JSON, MSGPACK])
def test_logprobs_of_the_prompt_come_in_pieces_and_go_at_once(codec: Codec) -> None:
    """With the first output, and again with the reply, in the client's encoding."""
    opened = Opened(prompt_logprobs=3)
    request = opened.request
    request.client = request.client._replace(codec=codec)
    expected = [None, *logprobs(1, 6)]
    for piece in of_prompt(1, 3), of_prompt(2, 4), of_prompt(1, 4):
        assert not opened.append(0, 0, **piece)
    with pytest.raises(GapError, match="prompt token 5"):
        opened.append(0, 0, **of_prompt(5, 6))
    assert request.reply("abort").prompt_logprobs is None
    assert opened.totals.num_waiting == 1  # for output
    assert opened.append(0, 2, **of_prompt(4, 6))
    assert as_sent(undelivered(request), codec) == expected
    unread = request.num_unread_bytes
    request.mark_delivered()
    assert opened.append(2, 4)
    assert undelivered(request).prompt_logprobs is None
    assert request.num_unread_bytes < unread - 2 * 3
    assert as_sent(request.reply("stop"), codec) == expected


@pytest.mark.parametrize("before", [JSON, MSGPACK])
@pytest.mark.parametrize("after", [JSON, MSGPACK])
def test_a_client_that_returns_with_another_encoding_reads_all(before: Codec, after: Codec) -> None:
    request = accepted(stream=True, prompt_logprobs=3)
    request.client = request.client._replace(codec=before)
    request.append(delta(0, 0, **of_prompt(1, 3)))
    request.append(delta(0, 1, **of_prompt(3, 4)))
    answer = request.reply("stop")  # waits to be sent
    request.client = request.client._replace(codec=after)
    request.rewind()
    for reply in undelivered(request), answer:
        assert as_sent(reply, after) == [None, *logprobs(1, 4)]


def test_a_prompt_of_one_token_has_no_logprobs() -> None:
    request = accepted(stream=True, prompt_logprobs=3)
    request.append(delta(0, 1, prompt_logprobs=[]))
    assert undelivered(request).prompt_logprobs == request.reply("stop").prompt_logprobs == [None]


def test_logprobs_count_as_bytes() -> None:
    opened = Opened(logprobs=2, prompt_logprobs=1)
    request = opened.request
    opened.append(0, 0, **of_prompt(1, 4))
    assert opened.totals.num_bytes == 0
    opened.append(0, 3, logprobs=logprobs(0, 3), **of_prompt(4, 6))
    expected = 3 * (9 + 3 * 256) + 5 * 2 * 256
    assert opened.totals.num_bytes == request.num_unread_bytes == expected
    request.mark_delivered()
    assert request.num_unread_bytes == 0
    opened.ledger.answer(request, request.reply("stop"))
    assert request.num_unread_bytes == expected
    opened.ledger.remove(request)
    assert opened.totals.num_bytes == 0


# ---- open work ---------------------------------------------------------------------------------


def test_bytes_count_until_the_client_has_the_answer() -> None:
    opened = Opened(num_bytes=100)
    ledger, request, totals = opened.ledger, opened.request, opened.totals
    opened.append(0, 4)
    assert totals.num_bytes == 100 + 4 * 9
    ledger.answer(request, request.reply("stop"))
    assert (ledger.get("a"), ledger.find("a")) == (None, request)
    assert (ledger.num_open, len(ledger), totals.num_bytes) == (0, 1, 100 + 4 * 9)
    for _ in range(2):
        ledger.remove(request)
        assert totals.num_bytes == 0


def test_a_prompt_waits_until_a_token_has_come_of_it() -> None:
    """Then it waits in no later attempt."""
    ledger, totals = Ledger(), Share()
    first, second = accepted("a", prompt="x" * 40), accepted("b", prompt=[1, 2])

    def counts() -> tuple[int, int, int]:
        return totals.num_waiting, totals.num_waiting_tokens, totals.num_started

    ledger.open(first, totals)
    ledger.open(second, totals)
    assert counts() == (2, 12, 0)
    ledger.record_tokenized(first, 30, b"")
    assert counts() == (2, 32, 0)
    assert append(ledger, first, delta(0, 1))
    assert counts() == (1, 2, 1)
    ledger.begin_attempt(first)
    ledger.record_tokenized(first, 30, b"")
    assert counts() == (1, 2, 1)
    ledger.remove(second)
    assert counts() == (0, 0, 1)


@pytest.mark.parametrize(
    ("message", "num_tokens"),
    [
        (GenerateRequest(prompt=[7] * 9), 9),
        (GenerateRequest(prompt="é" * 20), 10),
        (GenerateRequest(prompt="a"), 1),
        (GenerateRequest(messages=[ChatMessage(role="user", content="x" * 8)] * 2), 4),
    ],
)
def test_estimates(message: GenerateRequest, num_tokens: int) -> None:
    assert estimated_tokens(message) == num_tokens


# ---- times and metrics, with moments that the test makes up ------------------------------------


def timed(accepted_at: float, **fields: Any) -> Request:
    request = accepted(**fields)
    request.accepted_at, request.num_prompt_tokens = accepted_at, 30
    request.num_cached_tokens = 16
    return request


def counted(histogram: Histogram) -> dict[float, int]:
    """Bound → how many values are in the interval that ends there."""
    ends = [*histogram.bounds, float("inf")]
    return {end: n for end, n in zip(ends, histogram.counts, strict=True) if n}


def test_times_of_the_first_attempt_that_has_them() -> None:
    request = accepted()
    assert request.reply("abort").times is None
    request.accepted_at, request.first_token_at, request.last_token_at = 10.0, 12.0, 15.0
    request.append(delta(0, 1))
    request.append(delta(0, 2, phase_seconds=(0.5, 1.0)))
    request.append(delta(0, 3, phase_seconds=(7.0, 7.0)))
    expected = RequestTimes(queue=0.5, prefill=1.0, decode=3.0, first_token=2.0)
    assert request.reply("length").times == expected


def test_metrics_of_a_request_from_its_acceptance_to_its_answer() -> None:
    metrics, request = Metrics.empty(4096), timed(100.0, max_tokens=5)
    request.phase_seconds = (0.02, 0.9)
    for num_tokens, now in ((1, 100.2), (3, 100.26), (1, 100.5)):
        request.token_ids += [7] * num_tokens
        request.record_tokens(metrics, num_tokens, now)
    request.record_end(metrics, request.reply("length"), 100.6)
    assert (metrics.prompt_tokens, metrics.generation_tokens) == (30, 5)
    assert metrics.prefix_cache_hits == 16
    assert (metrics.request_success, metrics.request_failed) == ({"length": 1}, {})
    histograms: dict[str, dict[float, int]] = {
        "time_to_first_token_seconds": {0.25: 1},
        "inter_token_latency_seconds": {0.075: 1, 0.3: 1},
        "e2e_request_latency_seconds": {0.8: 1},
        "request_prompt_tokens": {50.0: 1},
        "request_generation_tokens": {5.0: 1},
        "request_queue_time_seconds": {0.3: 1},
        "request_prefill_time_seconds": {1.0: 1},
        "request_params_max_tokens": {5.0: 1},
        "request_params_n": {1.0: 1},
    }
    assert {name: counted(getattr(metrics, name)) for name in histograms} == histograms
    sums = {
        "time_to_first_token_seconds": 0.2,
        "inter_token_latency_seconds": 0.3,
        "request_decode_time_seconds": 0.3,
        "request_inference_time_seconds": 1.2,
        "request_time_per_output_token_seconds": 0.3 / 4,
    }
    assert {name: getattr(metrics, name).sum for name in sums} == pytest.approx(sums)


def test_n_is_counted_once_though_each_answer_is_a_request() -> None:
    metrics = Metrics.empty(4096)
    for num_answers in (3, 0, 0, 1):
        request = timed(1.0, num_answers=num_answers)
        request.record_end(metrics, request.reply("abort"), 2.0)
    assert metrics.request_params_n.sum == 4.0
    assert counted(metrics.request_params_n) == {1.0: 1, 5.0: 1}
    assert counted(metrics.request_decode_time_seconds) == {}
    assert counted(metrics.request_params_max_tokens) == {}


def test_errors_are_in_no_histogram() -> None:
    metrics = Metrics.empty(4096)
    for code in ("failed", "overloaded", "failed"):
        error = ErrorReply(code=code, message="")  # type: ignore[arg-type]
        timed(1.0).record_end(metrics, error, 2.0)
    assert metrics.request_failed == {"failed": 2, "overloaded": 1}
    assert counted(metrics.e2e_request_latency_seconds) == {}


def test_bounds_of_histograms() -> None:
    """They ascend; a value at a bound is within it."""
    histogram = Histogram.of([1.0, 2.0])
    for value in (0.5, 1.0, 1.5, 2.0, 2.5):
        histogram.add(value)
    assert (histogram.counts, histogram.sum) == ([2, 2, 1], 7.5)
    assert token_bounds(4096) == [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000]
    assert token_bounds(100)[-2:] == [50, 100]
    for bounds in (FIRST_TOKEN, INTER_TOKEN, END_TO_END):
        assert bounds == sorted(set(bounds))
