"""The http process: uvicorn on a port that other http processes share."""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn

from penstock.protocol.client.async_client import AsyncClient
from penstock.protocol.config import Config
from penstock.protocol.transport.channel import HEARTBEAT_INTERVAL
from penstock.protocol.transport.context import attend, host_and_port
from penstock.protocol.transport.heartbeat import HeartbeatThread
from penstock.protocol.transport.process import Process, tune_collector
from penstock.services.http.apis import OPERATIONS
from penstock.services.http.app import make_app
from penstock.services.http.shared.app_state import Models
from penstock.services.http.shared.connections import Limits, limited_protocol, limits_for

# seconds that running requests have after SIGTERM, up to --drain-timeout: SIGKILL comes after 5
MAX_GRACE = 4
# the same if the gateway does not run: a gateway that died is back by then, and a gateway that has
# drained answers no requests
RETURN = 1
BACKLOG = 2048  # connections that wait to be accepted
LAST_ANSWERS = 0.5  # seconds to send errors for unfinished requests
KEEP_ALIVE = 75  # seconds for which a connection may be idle: longer than clients keep it
_NO_ERRORS = ("Cancel %s running task", "Invalid UTF-8 sequence")


class HttpServer(uvicorn.Server):
    """uvicorn's server without its signal handlers, which would end the process by the signal."""

    def __init__(self, config: uvicorn.Config, client: AsyncClient) -> None:
        """Prepare the server. client: client of the pipeline."""
        super().__init__(config)
        self._client = client

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()

    def stop(self) -> None:
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Also serve waiting connections, because the kernel resets them with their listener.

        Wait for the error responses of requests that uvicorn cancels; the pipeline's client must
        still be open.
        """
        opened = (listener for listener in sockets or [] if listener.fileno() >= 0)
        listeners = [listener.dup() for listener in opened]  # listen until all are accepted
        for server in self.servers:
            server.close()
        waiting = [connection for listener in listeners for connection in accept_all(listener)]
        connect = asyncio.get_running_loop().connect_accepted_socket
        for connection in waiting:
            await connect(self._protocol, connection)
        if not self._client.is_connected:
            grace = self.config.timeout_graceful_shutdown or 0
            self.config.timeout_graceful_shutdown = min(grace, RETURN)
        await super().shutdown(sockets)
        if tasks := set(self.server_state.tasks):
            await asyncio.wait(tasks, timeout=LAST_ANSWERS)

    def _protocol(self) -> asyncio.Protocol:
        make: Any = self.config.http_protocol_class
        protocol: asyncio.Protocol = make(self.config, self.server_state, self.lifespan.state)
        return protocol


def accept_all(listener: socket.socket) -> Iterator[socket.socket]:
    """Yield the waiting connections of a non-blocking listener, then close the listener at once."""
    with listener, contextlib.suppress(OSError):  # no connection is left
        while True:
            yield listener.accept()[0]


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that shares its port: the kernel distributes the connections."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind((host, port))
    return listener


async def serve(process: Process) -> None:
    """Serve until SIGTERM or SIGINT. Raises ClientError for unreadable keys, and OSError."""
    config, loop = process.config, asyncio.get_running_loop()
    listener = listen(config.http_host, config.http_port)
    heartbeats = HeartbeatThread(process)

    def heartbeat() -> None:
        loop.call_later(HEARTBEAT_INTERVAL, heartbeat)
        heartbeats.beat()

    attend(process.context.handlers)
    where, most = process.endpoints.inner_clients, config.max_unread_bytes
    async with AsyncClient(where, context=process.context, max_unread_bytes=most) as client:
        models = Models(config, client)
        server = HttpServer(uvicorn_config(config, models), client)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, server.stop)
        listener.listen(BACKLOG)
        heartbeat()  # the first heartbeat shows that this process listens
        address = host_and_port(config.http_host, config.http_port)
        process.log.info("http://%s is open; requests wait until the model is ready", address)
        await run(server, models, listener)
    heartbeats.stop()


async def run(server: HttpServer, models: Models, listener: socket.socket) -> None:
    """Serve until the server stops."""
    start = asyncio.create_task(models.start())
    tune_collector()
    await server.serve([listener])
    start.cancel()


def uvicorn_config(config: Config, models: Models, limits: Limits | None = None) -> uvicorn.Config:
    """Return the configuration of a `HttpServer`."""
    logging.getLogger("uvicorn.error").addFilter(_is_error)
    limits = limits or limits_for(
        models.max_batch_bytes,
        models.max_answers,
        max_open_bytes=config.max_open_bytes,
        open_paths=frozenset(
            operation.path.encode() for operation in OPERATIONS if operation.is_open
        ),
    )
    return uvicorn.Config(
        make_app(models, OPERATIONS),
        http=limited_protocol(limits),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=int(min(config.drain_timeout, MAX_GRACE)),
    )


def _is_error(record: logging.LogRecord) -> bool:
    """Return False for messages about clients, and tasks that `HttpServer.shutdown` cancels."""
    return not str(record.msg).startswith(_NO_ERRORS)
