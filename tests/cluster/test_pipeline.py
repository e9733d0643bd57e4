"""A pipeline on three machines, as a user starts it: `launch all --backend ray`."""

import asyncio
import contextlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from penstock import LLM, SamplingParams
from penstock.launch.chaos.load import Content, Received, Verdict, check, content_of
from penstock.launch.pipeline.keys import make_keys
from penstock.protocol.client.async_client import AsyncClient
from penstock.protocol.client.client import Client
from penstock.protocol.client.session import RequestError
from penstock.protocol.config import DEFAULT_CLIENT
from penstock.protocol.transport.context import secure_client
from penstock.protocol.transport.discovery import KEYS_FOLDER
from tests.cluster.machines import RAY_PORT, Cluster, Machine, ip, wait_for_ray
from tests.cluster.pipeline import PORT, START_TIMEOUT, STOP_TIMEOUT, Pipeline
from tests.cluster.test_wire import PYTHON, frames

pytestmark = [pytest.mark.pipeline, pytest.mark.long]
CPUS = (3, 4, 2)
"""one for the gateway and a replica's three on the second machine leave no machine three more, so
that the other replica's group spans two"""
TASKS = ["count from 3 to 40", "17+25=", "reverse: penstock", "repeat: abcabd", "so be it"]
COUNT = "count from 1 to 200"
NUM_STREAMS = 8
NUM_PROCESSES = 9
WORDS = "quixotic zephyrs juggling"
FRAMES = "frames.pcap"
CURVE, NULL = b"CURVE" + bytes(15), b"NULL" + bytes(16)
"""what a ZeroMQ greeting says of a connection's security"""
LEFT = """
import json, ray, sys
from ray._private import state
ray.init(sys.argv[1], log_to_driver=False, logging_level="error")
actors = [one["State"] for one in state.actors().values()]
groups = [one["state"] for one in ray.util.placement_group_table().values()]
nodes = [one["NodeID"] for one in ray.nodes()]
print(json.dumps({"actors": actors, "groups": groups, "nodes": nodes}))
"""


def sampling(number: int) -> SamplingParams:
    """Greedy for the first half of the tasks asked twice, with a seed for the second."""
    seed = None if number < len(TASKS) else number
    return SamplingParams(max_tokens=60, temperature=0.0 if seed is None else 1.2, seed=seed)


@pytest.fixture(scope="module")
def alone() -> list[Content]:
    """Return the answers of one machine: the tasks, greedy and with seeds, and the count."""
    params = [sampling(number) for number in range(2 * len(TASKS))]
    count = SamplingParams(max_tokens=1000, temperature=0.0)
    with LLM(device="cpu", num_threads=1, kv_cache_gib=0.1) as llm:
        outputs = llm.generate([*TASKS, *TASKS, COUNT], [*params, count], use_tqdm=False)
    answers = [output.outputs[0] for output in outputs]
    return [
        Content({"tokens": list(one.token_ids), "text": one.text}, [one.finish_reason, None])
        for one in answers
    ]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys") / "keys"
    make_keys(folder, None)
    return folder


@pytest.fixture(scope="module")
def served(cluster: Cluster, keys: Path) -> Iterator[Pipeline]:
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    head, *others = cluster.machines
    nodes = [head.start_ray(None, CPUS[0])]
    nodes += [one.start_ray(head, cpus) for one, cpus in zip(others, CPUS[1:], strict=True)]
    for node in nodes:
        wait_for_ray(node)
    cluster.wire.capture(cluster.folder / FRAMES)  # from its first connection on
    flags = ("--endpoint", f"tcp://{head.address}:{PORT}", "--curve-keys", str(keys))
    with Pipeline(cluster, *flags, "--tp", "2", "--dp", "2", "--routing", "load") as pipeline:
        yield pipeline


def test_a_group_across_two_machines_gives_the_tokens_of_one(
    served: Pipeline, keys: Path, alone: list[Content]
) -> None:
    nodes = served.nodes()
    assert nodes["worker.1"] == nodes["worker.2"] == nodes["scheduler.1"]
    assert nodes["worker.3"] != nodes["worker.4"]
    assert nodes["gateway.1"] == served.machine.address

    async def ask() -> tuple[list[Received], list[int]]:
        async with client(served, keys) as one:
            answers = (generate(one, number) for number in range(2 * len(TASKS)))
            received = await asyncio.gather(*answers)
            status = await one.status(fresh=True)
        return received, [scheduler.num_steps for scheduler in status.schedulers]

    received, num_steps = asyncio.run(ask())
    assert [check(*both) for both in zip(received, alone, strict=False)] == [Verdict()] * len(
        received
    )
    assert min(num_steps) > 0  # both groups took part


def test_streams_outlive_a_machine(
    cluster: Cluster, served: Pipeline, keys: Path, alone: list[Content]
) -> None:
    nodes = served.nodes()
    members = {nodes["worker.3"], nodes["worker.4"]} - {served.machine.address}
    index = next(i for i, one in enumerate(cluster.machines) if one.address in members)
    victim, start = cluster.machines[index], len(served.output)

    async def ask() -> list[Received]:
        async with client(served, keys) as one:
            begun = asyncio.Barrier(NUM_STREAMS + 1)
            streams = [asyncio.create_task(count(one, begun)) for _ in range(NUM_STREAMS)]
            await begun.wait()
            await asyncio.to_thread(victim.kill)
            node = victim.start_ray(served.machine, CPUS[index])
            await asyncio.to_thread(wait_for_ray, node)
            return await asyncio.gather(*streams)

    received = asyncio.run(ask())
    assert [check(one, alone[-1]) for one in received] == [Verdict()] * NUM_STREAMS
    served.wait_for(r"launch .*died with its Ray actor", START_TIMEOUT, start)
    served.wait_for(r"gateway\.1.* (resubmitting|migrating) [1-9]", START_TIMEOUT, start)
    served.wait_for(r"scheduler\.2@.* workers ready", START_TIMEOUT, start)


def test_no_frame_between_machines_tells_a_prompt_or_an_answer(
    cluster: Cluster, served: Pipeline, keys: Path
) -> None:
    with cluster.machines[-1].entered():
        outside = Client(served.endpoint, keys=keys, timeout=START_TIMEOUT)
    with outside as one:
        assert WORDS in one.generate(f"repeat: {WORDS}", temperature=0.0).text
    cluster.wire.capture(None)
    captured = b"\n".join(frames(cluster.folder / FRAMES))
    assert NULL not in captured
    assert captured.count(CURVE) > 2 * NUM_PROCESSES  # each one's heartbeats, and more
    for word in WORDS.split():
        assert word.encode() not in captured


def test_a_stranger_gets_nothing(
    cluster: Cluster, served: Pipeline, keys: Path, tmp_path: Path
) -> None:
    """Not even one who knows the servers' public keys."""
    strange = tmp_path / "strange"
    make_keys(strange, None)
    shutil.copy(keys / "server.key", strange / "server.key")
    machine = cluster.machines[-1]
    with machine.entered():
        stranger = Client(served.endpoint, keys=strange, timeout=START_TIMEOUT)
    with stranger, pytest.raises(RequestError, match="the gateway refuses this client"):
        stranger.generate("17+25=")
    shutil.copy(served.run_folder / KEYS_FOLDER / "server.key", strange / "server.key")
    addresses = [f"tcp://{one.address}:{port}" for one in cluster.machines for port in ports(one)]
    assert len(addresses) > 2 * NUM_PROCESSES
    with machine.entered(), zmq.Context() as context:
        for address in addresses:
            assert not is_let_in(context, address, strange)


def is_let_in(context: "zmq.Context[Any]", address: str, keys: Path) -> bool:
    """Return whether ZeroMQ's handshake succeeds there."""
    with context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.HANDSHAKE_IVL, 1000)
        secure_client(socket, keys, DEFAULT_CLIENT)
        end = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        with socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | end) as events:
            socket.connect(address)
            socket.send(b"")
            event: dict[str, Any] = recv_monitor_message(events)  # type: ignore[assignment]
            socket.disable_monitor()
            return event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED or bool(socket.poll(0))


def ports(machine: Machine) -> set[int]:
    """Return the addresses at which processes of Penstock listen there."""
    listed = ip("netns", "exec", machine.name, "ss", "-Hltnp")
    ours = machine.ours()
    return {
        int(line.split()[3].rpartition(":")[2])
        for line in listed.splitlines()
        if any(int(pid) in ours for pid in re.findall(r"pid=(\d+)", line))
    }


def test_nothing_is_left_when_it_has_stopped(cluster: Cluster, served: Pipeline) -> None:
    assert served.run("stop") == ""
    assert served.process.wait(STOP_TIMEOUT) == 0
    for machine in cluster.machines:
        assert machine.ours() == {}
    left = served.machine.run(
        *PYTHON, LEFT, f"{served.machine.address}:{RAY_PORT}", stdout=subprocess.PIPE
    )
    found = json.loads(left.communicate(timeout=START_TIMEOUT)[0])
    assert set(found["actors"]) == {"DEAD"}
    assert set(found["groups"]) == {"REMOVED"}
    folders = Path(tempfile.gettempdir(), f"penstock-{os.getuid()}", ".ray").iterdir()
    assert [one for one in folders if one.name[:8] in {id_[:8] for id_ in found["nodes"]}] == []
    assert not served.run_folder.exists()


@contextlib.asynccontextmanager
async def client(pipeline: Pipeline, keys: Path) -> AsyncIterator[AsyncClient]:
    """On the first machine."""
    one = AsyncClient(pipeline.endpoint, keys=keys)
    with pipeline.machine.entered():
        await one.__aenter__()
    try:
        yield one
    finally:
        await one.__aexit__()


async def generate(one: AsyncClient, number: int) -> Received:
    """Return the answer to a task."""
    params = sampling(number)
    prompt = TASKS[number % len(TASKS)]
    fields = {"max_tokens": params.max_tokens, "temperature": params.temperature}
    reply = await one.generate(prompt, seed=params.seed, **fields)
    return Received(is_stream=False, reply=content_of(reply))


async def count(one: AsyncClient, begun: asyncio.Barrier) -> Received:
    """Return a stream; waits once, when it has begun."""
    received = Received(is_stream=True)
    stream = one.stream(COUNT, max_tokens=1000, temperature=0.0)
    async for delta in stream:
        if not received.streamed.num_tokens:
            await begun.wait()
        received.streamed.extend("tokens", delta.token_ids)
        received.streamed.extend("text", delta.text)
    received.reply = content_of(await stream.result())
    return received
