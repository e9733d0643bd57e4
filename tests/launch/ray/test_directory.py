"""The directory, with real processes' networks."""

import asyncio
from pathlib import Path
from typing import Any

import zmq

from penstock.launch.pipeline.keys import make_keys
from penstock.launch.ray.nodes import DirectoryServer, FixedNetwork
from penstock.protocol.messages.pipeline import Goodbye
from penstock.protocol.transport.context import attend, leave
from penstock.protocol.transport.discovery import KEYS_CLIENT, KEYS_FOLDER, Cluster, Directory, Node


async def test_names_are_found_wherever_they_are_bound(tmp_path: Path) -> None:
    """The one that connects comes first, and on another node."""
    make_keys(tmp_path / KEYS_FOLDER, None)
    make_keys(tmp_path / KEYS_FOLDER, KEYS_CLIENT)
    changes: list[set[str]] = []

    def note(directory: Directory) -> None:
        changes.append(set(directory.addresses))

    fixed = FixedNetwork("127.0.0.1", tmp_path)
    server = DirectoryServer(fixed, note)
    assert set(fixed.fixed) == {"directory"}
    handlers = [*fixed.handlers, (server.channel, server.handle)]
    attend(handlers)
    networks = [
        Cluster(Node(node, node, "127.0.0.1", fixed.fixed), tmp_path) for node in ("a", "b")
    ]
    sender = networks[0].connect(zmq.PUSH, "cluster://results", wait=False, max_queue=1)
    for network in networks:
        attend(network.handlers)
    got: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    receiver = networks[1].bind(zmq.PULL, "cluster://results", Goodbye)

    def receive() -> None:
        for _, message in receiver.receive():
            got.set_result(message)

    attend([(receiver, receive)])
    while not sender.send(Goodbye()):
        await asyncio.sleep(0)
    assert await got == Goodbye()
    assert changes == [{"results"}]
    leave([*handlers, *networks[0].handlers, *networks[1].handlers, (receiver, receive)])
    for context in (*networks, fixed):
        context.destroy(linger=0)
