"""Requests that kill every process that works for them get an error; all others continue."""

from pathlib import Path

import pytest

from penstock.protocol.client.session import RequestError
from tests.chaos.conftest import Start
from tests.chaos.torn_scheduler import FILE_VARIABLE
from tests.pipeline.load import Load
from tests.tools.demo.tasks import answer_to, count_prompt

pytestmark = [pytest.mark.chaos, pytest.mark.long]
NUM_STREAMS = 8
PROMPT = count_prompt(1, 100)
REMEMBERED = "it is not tried again"


@pytest.mark.parametrize("dp", [1, 2])
def test_a_request_that_kills_workers_is_given_up(start_with: Start, dp: int) -> None:
    """With as many deaths as `launch all` allows by default, whichever replica's workers die."""
    running = start_with("worker", "poison_worker.py", "--dp", str(dp))
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
            with pytest.raises(RequestError, match=f"{REMEMBERED}, change it"):
                client.generate("repeat: ☠", seed=seed)
        if dp == 1:  # six deaths of one worker within a minute, and each has its reason
            with pytest.raises(RequestError, match="the workers died 3 times in a row"):
                client.generate("repeat: another ☠")
            kills += 3
        assert client.generate("17+25=").text == "42"
    restarts = running.restarts()
    assert sum(restarts[f"worker.{number + 1}"] for number in range(dp)) == kills


def test_a_request_that_kills_detokenizers_is_given_up(start_with: Start) -> None:
    running = start_with("detokenizer", "poison_detokenizer.py")
    with running.client() as client, Load(running.endpoint, NUM_STREAMS):
        for number in range(2):  # more deaths than end a pipeline
            poison = client.submit(f"repeat: {number}", request_id=f"poison-{number}")
            with pytest.raises(RequestError, match="2 detokenizers died while they made the text"):
                poison.result()
            assert client.generate("17+25=").text == "42"
            with pytest.raises(RequestError, match=REMEMBERED):
                client.generate(f"repeat: {number}")
    assert running.restarts()["detokenizer.1"] in (5, 6)


def test_a_request_that_kills_tokenizers_is_given_up_and_a_slow_one_is_not(
    start_with: Start,
) -> None:
    running = start_with("tokenizer", "poison_tokenizer.py", "--hang-timeout", "1")
    with running.client() as client:
        assert client.generate("🐌", max_tokens=1).usage.output_tokens == 1
        assert running.restarts()["tokenizer.1"] == 0
        with Load(running.endpoint, NUM_STREAMS // 2):
            for prompt in ("repeat: ☠", "☠", "another ☠"):  # more deaths than end a pipeline
                poison = client.submit(prompt)
                innocent = client.submit("17+25=")
                with pytest.raises(RequestError, match="2 tokenizers died while they worked"):
                    poison.result()
                assert innocent.result().text == "42"
                with pytest.raises(RequestError, match=REMEMBERED):
                    client.generate(prompt)
    assert 6 <= running.restarts()["tokenizer.1"] <= 9


def test_ranks_with_other_plans_do_not_run_on_together(start_with: Start, tmp_path: Path) -> None:
    """The scheduler dies when some ranks have a plan that others never get."""
    file = tmp_path / "torn"
    torn = ("scheduler", "torn_scheduler.py", "--tp", "2")
    served = start_with(*torn, assignment=f"{FILE_VARIABLE}={file}")
    with served.client() as client:
        streams = [client.stream(PROMPT) for _ in range(3)]
        begin = next(iter(streams[0])).text
        start = len(served.output)
        file.touch()
        served.wait_for(r"launch +\| .* scheduler.1 died", start)
        texts = ["".join(delta.text for delta in stream) for stream in streams]
        texts[0] = begin + texts[0]
        assert texts == [answer_to(PROMPT)] * 3
        assert client.generate("17+25=").text == "42"
