"""Ray actor that runs a process of the pipeline as its child, on the node chosen by Ray."""

import asyncio
import os
from collections import deque
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import msgspec
import ray

from penstock.launch.pipeline.errors import LaunchError
from penstock.launch.pipeline.hub import HubModel
from penstock.launch.pipeline.procfile import kind_of
from penstock.launch.pipeline.run_folder import environment
from penstock.launch.ray.nodes import NodeFolder
from penstock.launch.supervisor.child_process import ChildProcess, vitals
from penstock.launch.supervisor.output import Log
from penstock.protocol.config import CONFIG_FILE, CONFIG_VARIABLE, Config
from penstock.protocol.transport.discovery import KEYS_FOLDER, Node
from penstock.protocol.transport.process import (
    INCARNATION_VARIABLE,
    NODE_VARIABLE,
    PROCESS_VARIABLE,
    SUPERVISOR_VARIABLE,
)

PUBLIC_KEYS = "keys"
# index of the GPU that Ray assigns to a worker, among its visible GPUs
GPU_VARIABLE = "PENSTOCK_GPU"
MAX_LINES = 10_000  # maximum lines kept for a supervisor that does not fetch them
LOST = "its Ray actor"  # reason for the end of a process whose actor or node is lost


class Spec(NamedTuple):
    """Arguments of an actor."""

    name: str
    command: str  # command in the procfile
    config: Config
    # where the node downloads the model from; None: the folder exists on every node
    source: HubModel | None
    run: str  # name of this pipeline in the cluster
    fixed: dict[str, str]  # see `Node.fixed`
    keys: dict[str, bytes]  # keys of the processes: path → content
    public_keys: dict[str, bytes]  # files of `--curve-keys`


class Started(NamedTuple):
    """Running process."""

    pid: int
    node: str  # name of the process's node


@ray.remote
class ProcessActor:
    """Actor that runs one process at a time, with the supervisor's incarnation number."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._id = uuid4().hex
        self._number = 0
        self._child: ChildProcess | None = None
        self._log: Log | None = None
        self._output: deque[str] = deque(maxlen=MAX_LINES)
        self._changed = asyncio.Event()
        self._node_id = ray.get_runtime_context().get_node_id()
        nodes = ray.nodes()  # type: ignore[no-untyped-call]
        self._node = next(node["NodeName"] for node in nodes if node["NodeID"] == self._node_id)
        self._folder = NodeFolder(f"{self._node_id[:8]}-{spec.run}")

    @ray.method(max_task_retries=-1)
    async def id(self) -> str:
        """Return an identifier that changes when this actor is replaced."""
        return self._id

    @ray.method(max_task_retries=-1)
    async def start(self, actor_id: str, number: int) -> Started | str | None:
        """Start the process with this number, unless it has been started; only the newest one runs.

        Return None if the call was meant for another actor. That actor's process may still run,
        unreachable, and no two processes may have the same number. Return a sentence if the node
        can't download the model. Raises OSError.
        """
        if actor_id != self._id:
            return None
        try:
            config = await asyncio.to_thread(self._model_config)
        except LaunchError as error:
            return str(error)
        if number != self._number or self._child is None:
            await self._kill()
            self._number = number
            self._output.clear()
            self._log = self._log or Log(self._on_line)
            variables = self._environment(config)
            self._child = ChildProcess.start(self._spec.command, variables, self._log)
            self._child.end.add_done_callback(lambda _: self._changed.set())
        return Started(self._child.pid, self._node)

    async def follow(self, number: int) -> tuple[list[str], str | None]:
        """Wait for new lines and return them, or after all lines how the process ended."""
        if number != self._number or self._child is None:  # Ray has restarted this actor
            return [], LOST
        while not self._output and not self._child.end.done():
            self._changed.clear()
            await self._changed.wait()
        lines = list(self._output)
        self._output.clear()
        return lines, None if lines else self._child.end.result()

    async def vitals(self, pid: int) -> tuple[float, bool]:
        return vitals(pid)

    async def signal(self, pid: int, number: int) -> None:
        """Send a signal if the process with this pid is running."""
        if self._child and self._child.pid == pid:
            self._child.signal(number)

    async def stop(self, grace: float) -> None:
        if self._child:
            await self._child.stop(grace)

    async def ping(self) -> bool:
        return True

    async def leave(self) -> None:
        """End the process and leave the node's run folder; no method is called after this."""
        await self._kill()
        self._folder.leave()

    async def _kill(self) -> None:
        if self._child:
            self._child.kill()
            await asyncio.wait([self._child.end])

    def _on_line(self, line: str) -> None:
        self._output.append(line)
        self._changed.set()

    def _model_config(self) -> Config:
        """Return the configuration with the model's folder on this node. Raises LaunchError."""
        spec = self._spec
        if spec.source is None:
            return spec.config
        folder = spec.source.folder(weights=kind_of(spec.name) == "worker")
        return msgspec.structs.replace(spec.config, model=str(folder))

    def _environment(self, config: Config) -> dict[str, str]:
        """Write the files that the process needs, and return its environment."""
        spec, folder = self._spec, self._folder
        run_folder = Path(f"penstock-{os.getuid()}", spec.config.name)
        keys = folder.path / run_folder / PUBLIC_KEYS
        if spec.public_keys:
            config = msgspec.structs.replace(config, curve_keys=str(keys))
        host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        node = Node(self._node_id, self._node, host, spec.fixed)
        files = {CONFIG_FILE: msgspec.json.encode(config), "node.json": msgspec.json.encode(node)}
        files |= {f"{KEYS_FOLDER}/{path}": content for path, content in spec.keys.items()}
        files |= {f"{PUBLIC_KEYS}/{path}": content for path, content in spec.public_keys.items()}
        for path, content in files.items():
            folder.write(str(run_folder / path), content)
        variables = environment(config) | {
            "XDG_RUNTIME_DIR": str(folder.path),
            CONFIG_VARIABLE: str(folder.path / run_folder / CONFIG_FILE),
            NODE_VARIABLE: str(folder.path / run_folder / "node.json"),
            PROCESS_VARIABLE: spec.name,
            SUPERVISOR_VARIABLE: str(os.getpid()),
            INCARNATION_VARIABLE: str(self._number),
            **_gpu(),
        }
        variables.pop("OMP_NUM_THREADS", None)  # set by Ray for actors that compute
        return variables


def _gpu() -> dict[str, str]:
    gpus = [str(gpu) for gpu in ray.get_gpu_ids()]
    if not gpus:
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return {GPU_VARIABLE: str(visible.split(",").index(gpus[0])) if visible else gpus[0]}
