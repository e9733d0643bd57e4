"""The shapes that `LLM` takes and gives, as in vLLM."""

import re
import time
from typing import Any

import msgspec
import pytest

from penstock.launch.offline.llm import _Progress
from penstock.launch.offline.outputs import RequestOutput, prompts_of
from penstock.protocol.messages.client import GenerateReply, TokenLogprobs, Usage
from penstock.protocol.messages.sampling import SamplingParams
from penstock.protocol.messages.status import RequestTimes
from penstock.services.http.generation.schema import ChatRequest


def reply(**fields: Any) -> GenerateReply:
    usage = Usage(prompt_tokens=3, cached_tokens=2, output_tokens=2)
    text = {"request_id": "0-0", "text": "ab", "token_ids": [1, 2]}
    return GenerateReply(**text, finish_reason="stop", usage=usage, **fields)


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("a", ["a"]),
        ([1, 2], [[1, 2]]),
        ((1, 2), [[1, 2]]),
        ({"prompt": "a"}, ["a"]),
        ({"prompt_token_ids": [1, 2]}, [[1, 2]]),
        ({"prompt": "a", "prompt_token_ids": [1, 2], "multi_modal_data": None}, [[1, 2]]),
        (["a", [1], {"prompt": "b"}, {"prompt_token_ids": (2,)}], ["a", [1], "b", [2]]),
        ([], []),
    ],
)
def test_prompts_of_every_shape(prompts: Any, expected: list[Any]) -> None:
    assert prompts_of(prompts) == expected


@pytest.mark.parametrize(
    ("prompts", "error", "message"),
    [
        ([{}], ValueError, "prompt: got a map of [], expected one of prompt and prompt_token_ids"),
        ({"prompt": "a", "multi_modal_data": {}}, ValueError, "['prompt', 'multi_modal_data']"),
        ([3.5], TypeError, "prompt: got float, expected text, token ids or a map"),
        ({"prompt_token_ids": ["a"]}, TypeError, "prompt: got list, expected"),
    ],
)
def test_prompts_that_can_not_be(prompts: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        prompts_of(prompts)


def test_an_output_has_what_vllm_has() -> None:
    output = RequestOutput(request_id="0", prompt="p", prompt_token_ids=[1])
    logprobs = [
        TokenLogprobs(token_id=one, logprob=-0.5 * one, token="", bytes=[], rank=1, top=[])
        for one in (1, 2)
    ]
    times = RequestTimes(queue=1.0, prefill=2.0, decode=3.0, first_token=4.0)
    before = time.monotonic()
    output.add(1, reply(stop_reason=7), n=2)
    assert not output.finished
    output.add(0, reply(stop_reason="!", times=times, logprobs=logprobs), n=2)
    assert output.finished
    assert [one.stop_reason for one in output.outputs] == ["!", 7]
    assert [one.cumulative_logprob for one in output.outputs] == [-1.5, None]
    assert output.outputs[0].finished()
    assert output.num_cached_tokens == 2
    metrics = output.metrics
    assert metrics is not None
    assert metrics.last_token_ts >= before
    assert metrics.last_token_ts - metrics.first_token_ts == pytest.approx(3.0)
    assert metrics.first_token_ts - metrics.scheduled_ts == pytest.approx(2.0)
    assert metrics.scheduled_ts - metrics.queued_ts == pytest.approx(1.0)
    assert time.time() - metrics.arrival_time >= 7.0
    assert (metrics.first_token_latency, metrics.num_generation_tokens) == (4.0, 2)


@pytest.mark.parametrize("kind", [SamplingParams, ChatRequest])
def test_as_many_answers_as_over_http(kind: type[SamplingParams] | type[ChatRequest]) -> None:
    messages = [{"role": "user", "content": "a"}]
    assert msgspec.convert({"messages": messages, "n": 128}, kind).n == 128
    with pytest.raises(msgspec.ValidationError, match="128"):
        msgspec.convert({"messages": messages, "n": 129}, kind)


@pytest.mark.parametrize("is_shown", [True, False])
def test_a_bar_has_the_number_of_answers_and_their_speed(
    capsys: pytest.CaptureFixture[str], is_shown: bool
) -> None:
    with _Progress(2, is_shown) as progress:
        for _ in range(2):
            progress.count(reply())
    shown = re.findall(
        r"2/2 .*prefill (\d\S*) tok/s, decode (\d\S*) tok/s", capsys.readouterr().err
    )
    assert [len(one) for one in shown] == [2] * is_shown
