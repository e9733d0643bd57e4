"""Fixtures of several modules."""

import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from penstock.launch.commands.cli import main
from penstock.launch.pipeline.target import private_pipeline
from penstock.protocol.config import Config
from tests.launch.supervised import supervised

__all__ = ["supervised"]

SMALL = {"num_threads": 1, "kv_cache_gib": 0.1, "log_level": "warning"}
LIMITS = {"max_num_seqs": 8, "max_waiting_requests": 4}
CACHING = {"enable_prefix_caching": True, "block_size": 16}
"""to see that prompts differ"""


class Printed(NamedTuple):
    """Output of a command."""

    out: str
    err: str


Launch = Callable[..., Printed]


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Launch:
    """Return a function that runs a command line here, which must exit with this code."""

    def run(*words: str, code: int = 0) -> Printed:
        monkeypatch.setattr(sys, "argv", ["launch", *words])
        with pytest.raises(SystemExit) as end:
            main()
        printed = Printed(*capsys.readouterr())
        assert end.value.code == code, printed.err
        return printed

    return run


@pytest.fixture(scope="session")
def measured() -> Iterator[Config]:
    """Its options, its name and its endpoint."""
    with private_pipeline("bench-test", SMALL | LIMITS | CACHING) as config:
        yield config
