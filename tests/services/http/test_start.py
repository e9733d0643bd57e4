"""The start of the pipeline, as HTTP clients and the log see it."""

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.protocol.config import Config
from penstock.services.http import process
from penstock.services.http.shared import app_state
from penstock.services.http.shared.app_state import AppState, Singletons
from penstock.services.http.shared.errors import ApiError


def test_a_start_may_take_as_long_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Retry-After` is what the start has taken so far, up to a minute."""
    clock = iter((100.0, 120.5, 1000.0))
    monkeypatch.setattr(
        app_state, "time", SimpleNamespace(time=lambda: 0, monotonic=clock.__next__)
    )
    monkeypatch.setattr(app_state, "START_TIMEOUT", 0.0)
    client: Any = SimpleNamespace(of_model=lambda _: None)

    async def refused(state: AppState) -> ApiError:
        with pytest.raises(ApiError, match="the pipeline is starting") as error:
            await state.check_start()
        return error.value

    state = AppState(Config(), client, Singletons())
    assert asyncio.run(refused(state)).headers == {"Retry-After": "21"}
    assert asyncio.run(refused(state)).headers == {"Retry-After": "60"}


def test_the_address_is_logged_once_it_serves(caplog: pytest.LogCaptureFixture) -> None:
    """A line before that would look like the end of the start."""
    caplog.set_level(logging.INFO, "http")

    async def check() -> None:
        ready = asyncio.Event()
        models: Any = SimpleNamespace(start=ready.wait, config=Config(http_host="::1"))
        start = asyncio.create_task(process._start(models))
        await asyncio.sleep(0)
        assert not caplog.messages
        ready.set()
        await start

    asyncio.run(check())
    assert caplog.messages == ["serving http://[::1]:8000"]
