"""Addresses and behaviours of the gateways that the tests play."""

from pathlib import Path

import pytest

from penstock.launch.pipeline.keys import make_keys
from penstock.protocol.messages.client import GenerateRequest, Reply, Request
from tests.launch.fake_gateway import TEXT, Behaviour, delta, reply

TIMEOUT = 60


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/clients"


@pytest.fixture
def addresses(tmp_path: Path) -> list[str]:
    return [f"ipc://{tmp_path}/{name}" for name in "abc"]


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys", None)
    return tmp_path / "keys"


def streams(*ends: int) -> Behaviour:
    """Return a gateway that sends TEXT up to each end. It answers if that is all of the text."""

    def behave(request: Request) -> list[Reply]:
        if not isinstance(request, GenerateRequest):
            return []
        pieces = [delta(request, begin, end) for begin, end in zip((0, *ends), ends, strict=False)]
        return [*pieces, reply(request)] if ends[-1:] == (len(TEXT),) else [*pieces]

    return behave


HALF, WHOLE = streams(3), streams(5, len(TEXT))
EACH_CHARACTER = streams(*range(1, len(TEXT) + 1))
