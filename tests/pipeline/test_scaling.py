"""Detokenizers and tokenizers come and go in the middle of streams.

`PENSTOCK_STREAMS=64 PENSTOCK_COUNT=400` is the whole size; the default is for every day.
"""

import os
from collections.abc import Callable

import pytest

from penstock.protocol.client.client import Client, Stream
from tests.pipeline.conftest import Pipeline
from tests.tools.demo.tasks import answer_to, count_prompt

pytestmark = pytest.mark.pipeline
NUM_STREAMS = int(os.environ.get("PENSTOCK_STREAMS", "16"))
COUNT_TO = int(os.environ.get("PENSTOCK_COUNT", "60"))


@pytest.fixture(scope="module")
def served(pipeline: Callable[..., Pipeline]) -> Pipeline:
    return pipeline("--tp", "1")


def read_until(stream: Stream, num_tokens: int) -> str:
    """Return the text of a stream up to the first delta that reaches `num_tokens`."""
    text = ""
    for delta in stream:
        text += delta.text
        if delta.token_offset + len(delta.token_ids) >= num_tokens:
            break
    return text


@pytest.mark.timeout(1200)
def test_streams_survive_scaling(served: Pipeline) -> None:
    """From 1 to 4 and back to 1 while all streams run; a lost or doubled token would show."""
    prompt = count_prompt(1, COUNT_TO)
    with Client(served.endpoint) as client:
        streams = [client.stream(prompt) for _ in range(NUM_STREAMS)]
        begin = read_until(streams[0], 20)
        for number in ("4", "2", "3", "1"):
            assert served.run("scale", "detokenizer", number).returncode == 0
        assert served.run("scale", "tokenizer", "3").returncode == 0
        texts = ["".join(delta.text for delta in stream) for stream in streams]
        texts[0] = begin + texts[0]
        replies = [stream.result() for stream in streams]
    answer = answer_to(prompt)
    assert texts == [answer] * NUM_STREAMS
    assert [reply.text for reply in replies] == [answer] * NUM_STREAMS
    assert {len(reply.token_ids) for reply in replies} == {len(answer) + 2}
    names = set(served.status()["gateway"]["schedulers"][0]["detokenizers"])
    assert names == {"detokenizer.1"}
    assert {"tokenizer.1", "tokenizer.2", "tokenizer.3"} <= set(served.processes())


def test_one_text_for_any_number_of_detokenizers(served: Pipeline) -> None:
    """Random bytes, so that characters break in every way."""

    def texts(client: Client) -> list[tuple[str, list[int]]]:
        streams = [
            client.submit("repeat: é水🙂", temperature=2, seed=seed, ignore_eos=True, max_tokens=24)
            for seed in range(12)
        ]
        return [(reply.text, reply.token_ids) for reply in (s.result() for s in streams)]

    with served.client() as client:
        expected = texts(client)
        assert len({text for text, _ in expected}) > 1
        for number in ("2", "3", "4", "1"):
            served.run("scale", "detokenizer", number)
            assert texts(client) == expected
