"""Requests that kill every worker that runs them get an error; all others continue."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.launch.pipeline.procfile import PROCFILE
from penstock.protocol.client.session import RequestError
from tests.pipeline.conftest import Pipeline, pipeline  # noqa: F401  a fixture
from tests.tools.demo.tasks import answer_to, count_prompt

pytestmark = pytest.mark.chaos
NUM_STREAMS = 8
PROMPT = count_prompt(1, 100)
WORKER = Path(__file__).with_name("poison_worker.py")


@pytest.mark.long
@pytest.mark.parametrize("dp", [1, 2])
def test_poison_is_given_up_and_the_others_are_right(
    pipeline: Callable[..., Pipeline],  # noqa: F811
    tmp_path: Path,
    dp: int,
) -> None:
    """With as many deaths as `launch all` allows by default, whichever replica's workers die."""
    procfile = tmp_path / "procfile"
    worker = f"worker: python -P {WORKER}"
    procfile.write_text(re.sub("^worker: .*$", worker, PROCFILE.read_text(), flags=re.MULTILINE))
    running = pipeline("--procfile", str(procfile), "--dp", str(dp))
    kills = 3
    with running.client() as client:
        streams = [client.stream(PROMPT) for _ in range(NUM_STREAMS // 2)]
        poison = client.submit("repeat: ☠")
        streams += [client.stream(PROMPT) for _ in range(NUM_STREAMS // 2)]
        with pytest.raises(RequestError, match="the workers died 3 times in a row") as failed:
            poison.result()
        assert failed.value.code == "failed"
        num_requests = client.status().num_requests
        # a replica that the poison request never reached may have finished its streams by now
        assert num_requests == NUM_STREAMS if dp == 1 else num_requests <= NUM_STREAMS
        texts = ["".join(delta.text for delta in stream) for stream in streams]
        assert texts == [answer_to(PROMPT)] * NUM_STREAMS
        assert client.generate("17+25=").text == "42"
        for seed in range(3):
            with pytest.raises(RequestError, match="it is not tried again, change it"):
                client.generate("repeat: ☠", seed=seed)
        if dp == 1:  # six deaths of one worker within a minute, and each has its reason
            with pytest.raises(RequestError, match="the workers died 3 times in a row"):
                client.generate("repeat: another ☠")
            kills += 3
        assert client.generate("17+25=").text == "42"
    restarts = running.restarts()
    assert sum(restarts[f"worker.{number + 1}"] for number in range(dp)) == kills
