"""The HTTP server itself, in this process, before a gateway that says what the test wants."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.protocol.client.async_client import AsyncClient
from penstock.protocol.config import Config
from penstock.protocol.messages.client import (
    DetokenizeReply,
    DetokenizeRequest,
    GenerateRequest,
    Reply,
    Request,
    TokenizePromptRequest,
    TokenizeReply,
)
from penstock.services.http.process import HttpServer, listen, run, uvicorn_config
from penstock.services.http.shared.app_state import Models
from penstock.services.http.shared.connections import Limits
from tests.launch.fake_gateway import Behaviour, Gateway, echo, gateway

NUM_AT_START = 3
"""requests that a server sends when it starts: status, and two tags of its vocabulary"""


def behave(request: Request) -> list[Reply]:
    """Answers with the prompt; a prompt has a token a character."""
    match request:
        case TokenizePromptRequest(prompt=str(prompt)):
            return [TokenizeReply(token_ids=[ord(one) for one in prompt], max_model_len=4096)]
        case TokenizePromptRequest():
            return [TokenizeReply(token_ids=[1], max_model_len=4096)]
        case DetokenizeRequest():
            return [DetokenizeReply(text="?")]
    return echo(request)


def silent(request: Request) -> list[Reply]:
    """Generate nothing, and decode nothing: requests stay open."""
    return [] if isinstance(request, GenerateRequest | DetokenizeRequest) else behave(request)


class Served:
    """A server that runs in a thread."""

    def __init__(
        self, config: Config, endpoint: str, asked: Gateway, limits: Limits | None
    ) -> None:
        self.asked = asked
        self.listener = listen("127.0.0.1", 0)
        self.address: tuple[str, int] = self.listener.getsockname()
        self.url = f"http://127.0.0.1:{self.address[1]}"
        self._config = config
        self._limits = limits
        self._endpoint = endpoint
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self.listener.listen()
        self._began = threading.Event()
        self._thread.start()
        self._began.wait()

    async def _run(self) -> None:
        self.loop = asyncio.get_running_loop()
        most = self._config.max_unread_bytes
        async with AsyncClient(self._endpoint, max_unread_bytes=most) as client:
            state = Models(self._config, client)
            self.server = HttpServer(uvicorn_config(self._config, state, self._limits), client)
            self._began.set()
            await run(self.server, state, self.listener)

    @contextlib.contextmanager
    def standing_still(self) -> Iterator[None]:
        """Stop the server's event loop meanwhile: what is sent to it arrives at one moment."""
        stands, resume = threading.Event(), threading.Event()

        def stand() -> None:
            stands.set()
            resume.wait()

        self.loop.call_soon_threadsafe(stand)
        stands.wait()
        try:
            yield
        finally:
            resume.set()

    def stop(self) -> None:
        """As SIGTERM does; twice does no harm."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.server.stop)

    def join(self) -> None:
        """Wait until it has stopped."""
        self._thread.join()
        self.listener.close()

    def client(self, **fields: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, **fields)


Serve = Callable[..., Served]


class QuickAsyncio:
    """asyncio for uvicorn's server, which polls every 0.1 s whether it should stop, or has."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / 20)


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """`serve(**options)` starts a server, which is stopped after the test."""
    monkeypatch.setattr("uvicorn.server.asyncio", QuickAsyncio())
    with contextlib.ExitStack() as stack:

        def start(
            behaviour: Behaviour = behave, limits: Limits | None = None, **options: Any
        ) -> Served:
            endpoint = f"ipc://{tmp_path}/gateway"
            asked = stack.enter_context(gateway(endpoint, behaviour))
            one = Served(Config(endpoint=endpoint, **options), endpoint, asked, limits)
            stack.callback(one.join)
            stack.callback(one.stop)
            return one

        yield start
