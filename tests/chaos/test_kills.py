"""One process after the other is killed or stopped, in the middle of streams: all streams continue.

`test_chaos.py` does the same at random, and several at once; here it can be read.
"""

import signal
from collections.abc import Iterator

import pytest

from penstock.protocol.messages.client import TextDelta
from tests.chaos.conftest import Start
from tests.pipeline.conftest import Pipeline
from tests.tools.demo.tasks import answer_to, count_prompt

pytestmark = pytest.mark.chaos
NUM_STREAMS = 6
PROMPT = count_prompt(1, 100)
KILLED = ("detokenizer.1", "tokenizer.1", "scheduler.1", "worker.1", "gateway.1")
"""`tests/pipeline/disturbed/test_launch.py` kills each of them, too, with one rank"""
STOPPED = ("scheduler.1", "worker.1", "gateway.1")  # each takes the hang time-out


@pytest.fixture(scope="module")
def served(pipeline: Start) -> Pipeline:
    return pipeline("--tp", "2", "--max-deaths", "100", "--hang-timeout", "3")


def read(deltas: Iterator[TextDelta], num_chars: int) -> str:
    """Return at least `num_chars` characters of a stream."""
    text = ""
    while len(text) < num_chars:
        text += next(deltas).text
    return text


@pytest.mark.parametrize(
    ("victim", "how"),
    [
        ("worker.2", signal.SIGKILL),
        *(pytest.param(name, signal.SIGKILL, marks=pytest.mark.long) for name in KILLED),
        *((name, signal.SIGSTOP) for name in STOPPED),
    ],
)
def test_streams_survive(served: Pipeline, victim: str, how: signal.Signals) -> None:
    with served.client() as client:
        streams = [client.stream(PROMPT) for _ in range(NUM_STREAMS)]
        first = iter(streams[0])
        begin = read(first, 40)
        served.kill(victim, how)
        client.status()  # is answered; on a slow machine the streams may have ended meanwhile
        late = client.submit("17+25=")
        texts = ["".join(delta.text for delta in stream) for stream in streams[1:]]
        texts.append(begin + "".join(delta.text for delta in first))
        assert texts == [answer_to(PROMPT)] * NUM_STREAMS
        assert [stream.result().text for stream in streams] == texts
        assert late.result().text == "42"
