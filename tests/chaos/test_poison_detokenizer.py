"""Requests whose text kills every detokenizer get an error; all others are answered."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.launch.pipeline.procfile import PROCFILE
from penstock.protocol.client.session import RequestError
from tests.pipeline.conftest import Pipeline, pipeline  # noqa: F401  a fixture
from tests.pipeline.load import Load

pytestmark = [pytest.mark.chaos, pytest.mark.long]
NUM_STREAMS = 6
DETOKENIZER = Path(__file__).with_name("poison_detokenizer.py")


def test_poison_is_given_up_and_the_others_are_right(
    pipeline: Callable[..., Pipeline],  # noqa: F811
    tmp_path: Path,
) -> None:
    procfile = tmp_path / "procfile"
    line = f"detokenizer: python -P {DETOKENIZER}"
    text = re.sub("^detokenizer: .*$", line, PROCFILE.read_text(), flags=re.MULTILINE)
    procfile.write_text(text)
    running = pipeline("--procfile", str(procfile))
    with running.client() as client, Load(running.endpoint, NUM_STREAMS):
        for number in range(2):  # more deaths than end a pipeline
            poison = client.submit(f"repeat: {number}", request_id=f"poison-{number}")
            message = "2 detokenizers died while they made the text"
            with pytest.raises(RequestError, match=message):
                poison.result()
            assert client.generate("17+25=").text == "42"
            with pytest.raises(RequestError, match="it is not tried again"):
                client.generate(f"repeat: {number}")
    assert running.restarts()["detokenizer.1"] in (5, 6)
