"""The start of the pipeline, as HTTP clients see it."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.protocol.config import Config
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
