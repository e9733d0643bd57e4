"""A supervisor of processes of a line each, which tests end by a signal."""

import asyncio
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from signal import SIGHUP, SIGINT

import psutil
import pytest

from penstock.launch.pipeline.run_folder import claim
from penstock.launch.supervisor.supervisor import Supervisor
from penstock.protocol.config import Config, write_config

CONFIG = Config(name="x", endpoint="ipc://nowhere", tp=2)
Supervise = Callable[..., int]


@pytest.fixture
def supervise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Supervise:
    """Run these commands to their end, which leaves nothing; `act` runs after the first line."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    def run(
        act: Callable[[], None] = lambda: None, config: Config = CONFIG, **commands: str
    ) -> int:
        supervisor = Supervisor(config, commands, max_deaths=5)
        write = supervisor._write

        def write_and_act(text: str) -> None:
            nonlocal act
            write(text)
            act()
            act = lambda: None  # noqa: E731

        supervisor._write = write_and_act  # type: ignore[method-assign]
        before = psutil.Process().children()
        with claim(config):
            write_config(config)
            exit_code = asyncio.run(asyncio.wait_for(supervisor.run(), 60))
        assert psutil.Process().children() == before
        return exit_code

    return run


@pytest.fixture(autouse=True)
def _no_signal_is_ignored() -> Iterator[None]:
    """As under `nohup`, or in the background of a shell."""
    usual = {SIGHUP: signal.SIG_DFL, SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
