"""A scheduler that dies when some ranks have a plan that others never get."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.launch.pipeline.procfile import PROCFILE
from tests.chaos.torn_scheduler import FILE_VARIABLE
from tests.pipeline.conftest import Pipeline, pipeline  # noqa: F401  a fixture
from tests.tools.demo.tasks import answer_to, count_prompt

pytestmark = [pytest.mark.chaos, pytest.mark.long]
SCHEDULER = Path(__file__).with_name("torn_scheduler.py")
PROMPT = count_prompt(1, 100)


def test_ranks_with_other_plans_do_not_run_on_together(
    pipeline: Callable[..., Pipeline],  # noqa: F811
    tmp_path: Path,
) -> None:
    procfile, file = tmp_path / "procfile", tmp_path / "torn"
    line = f"scheduler: {FILE_VARIABLE}={file} python -P {SCHEDULER}"
    procfile.write_text(re.sub("^scheduler: .*$", line, PROCFILE.read_text(), flags=re.MULTILINE))
    served = pipeline("--procfile", str(procfile), "--tp", "2")
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
