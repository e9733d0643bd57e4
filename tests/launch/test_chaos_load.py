"""The load of `launch chaos` finds whatever is wrong with an answer."""

import asyncio
import itertools
import math
from collections.abc import Callable
from pathlib import Path

import httpx
import msgspec
import pytest

from penstock.launch.chaos.load import Content, Load, Received, Verdict, check, content_of
from penstock.launch.chaos.mix import HTTP_KINDS, MIX, HttpCall, Model, make_calls
from penstock.launch.chaos.processes import Changes, ChaosOptions
from penstock.launch.pipeline.errors import LaunchError
from penstock.protocol.client.async_client import AsyncClient
from penstock.protocol.messages.client import (
    ErrorReply,
    FinishReason,
    GenerateReply,
    GenerateRequest,
    Reply,
    Request,
    TokenLogprobs,
    Usage,
)
from tests.launch.fake_gateway import TEXT, Behaviour, delta, gateway, reply

DEMO = Model("", 264, is_demo=True, end_of_thought=261)


def generated(token_ids: list[int], text: str, reason: FinishReason = "stop") -> GenerateReply:
    usage = Usage(prompt_tokens=1, cached_tokens=0, output_tokens=len(token_ids))
    return GenerateReply(
        request_id="", text=text, token_ids=token_ids, finish_reason=reason, usage=usage
    )


def streamed(
    token_ids: list[int], text: str, *, told: GenerateReply | ErrorReply | None = None
) -> Received:
    """Return a stream, and the reply after it: if none is given, one that says the same."""
    received = Received(True, Content({"tokens": token_ids, "text": text}))
    received.finish(told or generated(token_ids, text))
    return received


RIGHT = content_of(generated([1, 2, 3, 4], "abcd"))
TOLD = generated([1, 2, 3, 4], "abcd")
LONGER = generated([1, 2, 3, 4], "abcd", "length")
TORN = {"is_torn": True, "is_different": True}
FAILED = ErrorReply(code="failed", message="no luck")


@pytest.mark.parametrize(
    ("received", "verdict"),
    [
        (streamed([1, 2, 3, 4], "abcd"), Verdict()),
        (Received(False, reply=RIGHT), Verdict()),
        (streamed([1, 2, 4], "abd"), Verdict(tokens_lost=1, is_different=True)),
        (streamed([1, 2, 2, 3, 4], "abbcd"), Verdict(tokens_doubled=1, is_different=True)),
        (streamed([1, 2, 3, 5], "abce"), Verdict(is_different=True)),
        (streamed([1, 2, 3, 4], "abce"), Verdict(is_different=True)),
        (streamed([1, 2, 3, 4], "abcd", told=LONGER), Verdict(is_different=True)),
        (streamed([1, 2, 4], "abd", told=TOLD), Verdict(tokens_lost=1, **TORN)),
        (streamed([1, 2, 3, 3, 4], "abccd", told=TOLD), Verdict(tokens_doubled=1, **TORN)),
        (Received(True, Content({"tokens": [1], "text": "a"})), Verdict(lost="no answer")),
        (streamed([1], "a", told=FAILED), Verdict(lost="failed: no luck")),
    ],
)
def test_check_finds_what_is_wrong(received: Received, verdict: Verdict) -> None:
    assert check(received, RIGHT) == verdict


@pytest.mark.parametrize("part", ["logprobs", "prompt_logprobs", "pooled", "text", "tokens"])
def test_check_compares_every_part(part: str) -> None:
    parts = {
        "tokens": [1],
        "text": "a",
        "logprobs": [0.5],
        "prompt_logprobs": [1.5],
        "pooled": b"x",
    }
    other = parts | {part: parts[part] * 2}  # type: ignore[operator]
    verdict = check(Received(False, reply=Content(other)), Content(parts))
    assert verdict == Verdict(is_different=True, tokens_doubled=int(part == "tokens"))


def test_check_finds_a_stream_without_some_logprobs() -> None:
    told = Content({"tokens": [1, 2], "text": "ab", "logprobs": [0.5, 0.25]}, ["stop", None])
    sent = Content({"tokens": [1, 2], "text": "ab", "logprobs": [0.5, None]})
    verdict = check(Received(True, sent, told), told)
    assert verdict == Verdict(is_torn=True, is_different=True)


@pytest.mark.parametrize(
    ("token_ids", "sent", "verdict"),
    [
        ([1, 2], [1, 2], Verdict()),
        ([1, 2], [1, 2, 3], Verdict()),
        ([1, 2, 3], [1, 2], Verdict()),  # a new gateway has heard of the request, and then of this
        ([1, 2, 2], [1, 2], Verdict(is_different=True)),
        ([1, 3], [1, 2], Verdict(is_torn=True, is_different=True)),
        ([1, 3], [1, 3], Verdict(is_different=True)),
    ],
)
def test_an_aborted_request_has_the_beginning(
    token_ids: list[int], sent: list[int], verdict: Verdict
) -> None:
    texts = ["".join(" abcd"[one] for one in ids) for ids in (token_ids, sent)]
    received = streamed(token_ids, texts[0], told=generated(sent, texts[1], "abort"))
    assert check(received, RIGHT) == verdict


def run_load(
    tmp_path: Path, behaviour: Behaviour, options: ChaosOptions, file: Path | None = None
) -> list[Verdict]:
    """Send some requests to a gateway that does what the test says; nothing is killed."""

    async def run() -> list[Verdict]:
        changes = Changes()
        async with AsyncClient(endpoint) as client, httpx.AsyncClient() as http:
            load = Load(client, http, make_calls(options, [DEMO], ["plain"]), options, changes)
            expected = await load.expected(file)
            load.start()
            await changes.until(lambda: len(load.done) >= options.num_requests)
            await load.end()
            return [check(one.received, expected[one.number]) for one in load.done]

    endpoint = f"ipc://{tmp_path}/clients"
    with gateway(endpoint, behaviour):
        return asyncio.run(run())


def behind_the_first(number: int, wrong: Callable[[GenerateRequest], list[Reply]]) -> Behaviour:
    """Return right answers at first, then others."""
    count = itertools.count()

    def behaviour(request: Request) -> list[Reply]:
        assert isinstance(request, GenerateRequest)
        return [reply(request)] if next(count) < number else wrong(request)

    return behaviour


@pytest.mark.parametrize(
    ("wrong", "verdict"),
    [
        (lambda it: [delta(it, 0, 3), reply(it)], Verdict()),
        (lambda it: [reply(it, TEXT[:-1])], Verdict(tokens_lost=1, is_different=True)),
        (lambda it: [reply(it, TEXT + "!")], Verdict(tokens_doubled=1, is_different=True)),
        (lambda it: [reply(it, "two one")], Verdict(is_different=True)),
        (lambda _: [ErrorReply(code="failed", message="bad")], Verdict(lost="failed: bad")),
    ],
)
def test_load_finds_wrong_answers(
    tmp_path: Path, wrong: Callable[[GenerateRequest], list[Reply]], verdict: Verdict
) -> None:
    options = ChaosOptions(num_requests=8, concurrency=2, distinct=4)
    verdicts = run_load(tmp_path, behind_the_first(4, wrong), options)
    assert len(verdicts) >= 8
    assert verdicts == [verdict] * len(verdicts)


def test_load_finds_a_stream_that_differs_from_its_reply(tmp_path: Path) -> None:
    def wrong(request: GenerateRequest) -> list[Reply]:
        other = delta(request, 0, 3)
        other.text = "eno"
        return [other, reply(request)]

    options = ChaosOptions(num_requests=2, concurrency=1, distinct=1)
    verdicts = run_load(tmp_path, behind_the_first(1, wrong), options)
    assert verdicts == [Verdict(**TORN)] * len(verdicts)


def test_load_counts_what_never_comes(tmp_path: Path) -> None:
    """The load continues with the others, and reports at the end what has no answer."""
    is_silent = itertools.chain([True], itertools.repeat(False))
    behaviour = behind_the_first(4, lambda one: [] if next(is_silent) else [reply(one)])
    options = ChaosOptions(num_requests=8, concurrency=2, distinct=4, recovery_timeout=0.5)
    verdicts = run_load(tmp_path, behaviour, options)
    assert [one.lost for one in verdicts if one != Verdict()] == ["no answer"]


def test_load_wants_right_answers_first(tmp_path: Path) -> None:
    error = ErrorReply(code="failed", message="bad")
    with pytest.raises(LaunchError, match="a plain request failed before any kill"):
        run_load(tmp_path, behind_the_first(0, lambda _: [error]), ChaosOptions(distinct=1))


def with_logprobs(logprob: float) -> Behaviour:
    def behaviour(request: Request) -> list[Reply]:
        assert isinstance(request, GenerateRequest)
        first, whole = delta(request, 0, 1), reply(request)
        likely = {"token_id": 7, "logprob": logprob, "rank": 1, "token": "a", "bytes": [97]}
        first.logprobs = [msgspec.convert({**likely, "top": [likely]}, TokenLogprobs)]
        whole.logprobs = [*first.logprobs, *[None] * (len(TEXT) - 1)]
        return [first, whole]

    return behaviour


def test_answers_of_another_pipeline_are_read_from_a_file(tmp_path: Path) -> None:
    options = ChaosOptions(num_requests=4, concurrency=2, distinct=2)
    file, logprob = tmp_path / "answers", -0.1
    first = run_load(tmp_path, with_logprobs(logprob), options, file)
    same = run_load(tmp_path, with_logprobs(logprob), options, file)
    assert {*map(repr, first + same)} == {repr(Verdict())}
    other = run_load(tmp_path, with_logprobs(math.nextafter(logprob, 0)), options, file)
    assert len(other) >= 4
    assert {*map(repr, other)} == {repr(Verdict(is_different=True))}


def test_undisturbed_answers_are_compared_with_the_file(tmp_path: Path) -> None:
    options = ChaosOptions(num_requests=4, concurrency=1, distinct=2)
    file, count = tmp_path / "answers", itertools.count()

    def wrong_at_first(request: Request) -> list[Reply]:
        assert isinstance(request, GenerateRequest)
        return [reply(request, TEXT if next(count) else "two one")]

    run_load(tmp_path, behind_the_first(0, lambda it: [reply(it)]), options, file)
    verdicts = run_load(tmp_path, wrong_at_first, options, file)
    assert verdicts[0] == Verdict(is_different=True)
    assert verdicts[1:] == [Verdict()] * (len(verdicts) - 1)


def test_a_file_has_answers_to_the_same_requests(tmp_path: Path) -> None:
    file = tmp_path / "answers"
    right = behind_the_first(0, lambda it: [reply(it)])
    run_load(tmp_path, right, ChaosOptions(distinct=2, num_requests=2), file)
    with pytest.raises(
        LaunchError, match=r"--answers: got .*answers with other requests, expected"
    ):
        run_load(tmp_path, right, ChaosOptions(distinct=3, num_requests=2), file)
    file.write_bytes(b"no answers")
    with pytest.raises(LaunchError, match=r"--answers: got .*: .*, expected answers to the"):
        run_load(tmp_path, right, ChaosOptions(distinct=2, num_requests=2), file)


def test_requests_follow_from_the_seed() -> None:
    other = Model("other", 1000)
    first, same, differing = (
        make_calls(ChaosOptions(seed=seed), [other], ["plain"]) for seed in (1, 1, 2)
    )
    assert first == same != differing
    for calls in (first, make_calls(ChaosOptions(), [DEMO], ["plain"])):
        requests = [call.request for call in calls if isinstance(call.request, GenerateRequest)]
        assert len(requests) == ChaosOptions().distinct
        assert {request.stream for request in requests} == {True, False}
        assert {request.temperature for request in requests if request.seed is None} == {0}
        assert {request.temperature for request in requests if request.seed is not None} == {1}
        if calls is first:
            assert all(request.ignore_eos for request in requests)
            assert all(max(map(int, request.prompt or "0")) < 1000 for request in requests)


def test_a_mix_has_every_kind_that_a_model_serves() -> None:
    embedding = Model("embedding", 264, is_embedding=True)
    without_reasoning = Model("plain", 264)
    calls = make_calls(ChaosOptions(distinct=100), [DEMO, embedding, without_reasoning], MIX)
    by_model: dict[str, set[str]] = {}
    for call in calls:
        request = call.request
        name = request.body["model"] if isinstance(request, HttpCall) else request.model
        by_model.setdefault(name or "", set()).add(call.kind)
        assert isinstance(request, HttpCall) == (call.kind in HTTP_KINDS)
    assert by_model == {
        "": MIX.keys() - {"embeddings"},
        "embedding": {"embeddings"},
        "plain": MIX.keys() - {"embeddings", "reasoning"},
    }
