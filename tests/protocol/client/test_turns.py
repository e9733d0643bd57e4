"""Many messages for one client: its other tasks have their turn."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from penstock.protocol.client import connection
from penstock.protocol.client.async_client import AsyncClient
from penstock.protocol.client.session import Session
from penstock.protocol.messages.client import GenerateRequest, Reply, Request
from tests.launch.fake_gateway import delta, gateway, reply


def test_other_tasks_have_their_turn_between_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages that come faster than they are taken would stop all else."""
    monkeypatch.setattr(connection, "TURN", 0.0)
    endpoint = f"ipc://{tmp_path}/clients"
    number = 500

    def flood(request: Request) -> list[Reply]:
        assert isinstance(request, GenerateRequest)
        return [*(delta(request, 0, 1) for _ in range(number)), reply(request)]

    received: Counter[int] = Counter()
    """turn of the loop → messages"""
    turn, receive = 0, Session.receive

    def count(self: Session, frames: list[bytes]) -> None:
        received[turn] += 1
        receive(self, frames)

    async def run() -> None:
        nonlocal turn
        async with AsyncClient(endpoint) as client:
            result = asyncio.ensure_future(client.stream("x").result())
            while not result.done():
                await asyncio.sleep(0)
                turn += 1

    monkeypatch.setattr(Session, "receive", count)
    with gateway(endpoint, flood):
        asyncio.run(run())
    assert sum(received.values()) == number + 1
    assert max(received.values()) <= 3  # one for each descriptor, and for what is left
