"""Every process is killed and restarts with a clock that is an hour late: all is answered."""

import re
from pathlib import Path

import pytest

from penstock.launch.pipeline.procfile import PROCFILE
from tests.chaos.conftest import Start
from tests.pipeline.conftest import Pipeline
from tests.tools.demo.tasks import answer_to, count_prompt

pytestmark = pytest.mark.chaos
LAUNCHER = Path(__file__).with_name("late_clock.py")
PROMPT = count_prompt(1, 100)
OTHERS = ("worker", "tokenizer", "detokenizer")


@pytest.fixture(scope="module")
def served(
    pipeline: Start,
    tmp_path_factory: pytest.TempPathFactory,
) -> Pipeline:
    folder = tmp_path_factory.mktemp("started")
    late = rf"\1: python -P {LAUNCHER} {folder} "
    procfile = folder / "procfile"
    procfile.write_text(re.sub(r"(?m)^(\w+): python -P -m ", late, PROCFILE.read_text()))
    return pipeline("--procfile", str(procfile), "--max-deaths", "100")


@pytest.mark.parametrize(
    "victim",
    [
        "gateway.1",
        "scheduler.1",
        *(pytest.param(f"{name}.1", marks=pytest.mark.long) for name in OTHERS),
    ],
)
def test_a_clock_that_is_set_back_stops_nobody(served: Pipeline, victim: str) -> None:
    with served.client() as client:
        stream = iter(client.stream(PROMPT))
        text = next(stream).text
        served.kill(victim)
        late = client.submit("17+25=")
        assert text + "".join(delta.text for delta in stream) == answer_to(PROMPT)
        assert late.result().text == "42"
    with served.client() as client:
        assert client.status(wait=True).ready
