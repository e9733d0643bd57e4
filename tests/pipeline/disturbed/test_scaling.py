"""Detokenizers and tokenizers come and go in the middle of streams."""

import pytest

from penstock.protocol.client.client import Client
from tests.pipeline.conftest import Pipeline
from tests.pipeline.load import Load

pytestmark = pytest.mark.pipeline
NUM_STREAMS = 16


def test_streams_survive_scaling(disturbed: Pipeline) -> None:
    """From 1 to 4 and back to 1 while streams run; a lost or doubled token would show."""
    with Load(disturbed.endpoint, NUM_STREAMS):
        for kind, *numbers in (("detokenizer", 4, 2, 3, 1), ("tokenizer", 3, 1)):
            for number in numbers:
                scaled = disturbed.run("scale", kind, str(number))
                assert (scaled.returncode, scaled.stdout) == (0, f"{kind}: {number}\n")
                names = {f"{kind}.{index + 1}" for index in range(number)}
                assert {one for one in disturbed.processes() if one.startswith(f"{kind}.")} == names
    assert set(disturbed.status()["gateway"]["schedulers"][0]["detokenizers"]) == {"detokenizer.1"}


def test_one_text_for_any_number_of_detokenizers(disturbed: Pipeline) -> None:
    """Random bytes, so that characters break in every way."""

    def texts(client: Client) -> list[tuple[str, list[int]]]:
        streams = [
            client.submit("repeat: é水🙂", temperature=2, seed=seed, ignore_eos=True, max_tokens=24)
            for seed in range(12)
        ]
        return [(reply.text, reply.token_ids) for reply in (s.result() for s in streams)]

    with disturbed.client() as client:
        expected = texts(client)
        assert len({text for text, _ in expected}) > 1
        for number in ("2", "3", "4", "1"):
            disturbed.run("scale", "detokenizer", number)
            assert texts(client) == expected
