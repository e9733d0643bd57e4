"""Requests that kill every tokenizer get an error; slow ones and all others are answered."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.launch.pipeline.procfile import PROCFILE
from penstock.protocol.client.session import RequestError
from tests.pipeline.conftest import Pipeline, pipeline  # noqa: F401  a fixture
from tests.pipeline.load import Load

pytestmark = [pytest.mark.chaos, pytest.mark.long]
NUM_STREAMS = 4
TOKENIZER = Path(__file__).with_name("poison_tokenizer.py")


def test_poison_is_given_up_and_slow_prompts_are_not(
    pipeline: Callable[..., Pipeline],  # noqa: F811
    tmp_path: Path,
) -> None:
    procfile = tmp_path / "procfile"
    line = f"tokenizer: python -P {TOKENIZER}"
    procfile.write_text(re.sub("^tokenizer: .*$", line, PROCFILE.read_text(), flags=re.MULTILINE))
    running = pipeline("--procfile", str(procfile), "--hang-timeout", "1")
    with running.client() as client:
        assert client.generate("🐌", max_tokens=1).usage.output_tokens == 1
        assert running.restarts()["tokenizer.1"] == 0
        with Load(running.endpoint, NUM_STREAMS):
            for prompt in ("repeat: ☠", "☠", "another ☠"):  # more deaths than end a pipeline
                poison = client.submit(prompt)
                innocent = client.submit("17+25=")
                with pytest.raises(RequestError, match="2 tokenizers died while they worked"):
                    poison.result()
                assert innocent.result().text == "42"
                with pytest.raises(RequestError, match="it is not tried again"):
                    client.generate(prompt)
    assert 6 <= running.restarts()["tokenizer.1"] <= 9
