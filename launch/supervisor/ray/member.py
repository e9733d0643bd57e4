"""One process of the pipeline, on the node where Ray puts its actor, whose child it is."""

import asyncio
import os
import sys
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import msgspec
import ray

from penstock.launch.supervisor.child import end_of
from penstock.launch.supervisor.logs import MAX_LINE, Lines
from penstock.launch.supervisor.procfile import shell_line
from penstock.launch.supervisor.ray.folder import NodeFolder
from penstock.launch.supervisor.tasks import Tasks, traceback_lines
from penstock.launch.supervisor.vitals import Vitals
from penstock.protocol.config import CONFIG_FILE, CONFIG_VARIABLE, Config
from penstock.protocol.transport.discovery import KEYS_FOLDER, NODE_VARIABLE, Node
from penstock.protocol.transport.incarnation import INCARNATION_VARIABLE
from penstock.protocol.transport.process import PROCESS_VARIABLE, SUPERVISOR_VARIABLE

PUBLIC_KEYS = "keys"
GPU_VARIABLE = "PENSTOCK_GPU"
"""index of the GPU that Ray gives to a worker, among those that it sees"""
MAX_LINES = 10_000
"""lines kept for a supervisor that does not come for them"""
LOST = "its Ray actor"
"""how a process ends whose actor or node is gone: `Policy.reaped`"""
LAST_OUTPUT = 1.0
"""seconds that output has to come to its end after the process's: a child may hold the pipe"""


class Spec(NamedTuple):
    """What an actor must know of its process."""

    name: str
    command: str
    """the procfile's"""
    config: Config
    run: str
    """of this pipeline in the cluster"""
    fixed: dict[str, str]
    """as `Node.fixed`"""
    keys: dict[str, bytes]
    """of the processes: content by path"""
    public_keys: dict[str, bytes]
    """of `--keys`"""


class Started(NamedTuple):
    """Which process runs now."""

    pid: int
    node: str
    """name of its node"""


@ray.remote
class Member:
    """Runs one process at a time, of the incarnation that the supervisor has given it."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._id = uuid4().hex
        self._number = 0
        self._child: asyncio.subprocess.Process | None = None
        self._output: list[str] = []
        self._end: str | None = None
        self._changed = asyncio.Event()
        self._tasks = Tasks(self._fail)
        self._node_id = ray.get_runtime_context().get_node_id()
        nodes = ray.nodes()  # type: ignore[no-untyped-call]
        self._node = next(one["NodeName"] for one in nodes if one["NodeID"] == self._node_id)
        self._folder = NodeFolder(f"{self._node_id[:8]}-{spec.run}")

    @ray.method(max_task_retries=-1)
    async def id(self) -> str:
        """Return what tells this actor from the one that Ray puts in its place."""
        return self._id

    @ray.method(max_task_retries=-1)
    async def start(self, actor_id: str, number: int) -> Started | None:
        """Start the process of this number, if it has not been started; only the newest runs.

        Returns None if another actor was meant: the process that it has started may live on, cut
        off, and no two may have one number.
        """
        if actor_id != self._id:
            return None
        if number != self._number:
            await self._kill()
            self._number = number
            self._output, self._end = [], None
            self._child = await asyncio.create_subprocess_exec(
                *("sh", "-c", shell_line(self._spec.command)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=self._environment(),
            )
            self._vitals = Vitals(self._child.pid)
            self._tasks.start(self._follow(self._child))
        assert self._child  # noqa: S101
        return Started(self._child.pid, self._node)

    async def follow(self, number: int) -> tuple[list[str], str | None]:
        """New lines, or, when there are none any more, how it ended; waits for one of them."""
        if number != self._number:  # Ray has restarted this actor
            return [], LOST
        while not self._output and self._end is None:
            self._changed.clear()
            await self._changed.wait()
        lines, self._output = self._output, []
        return lines, None if lines else self._end

    async def works(self, pid: int, since: float) -> bool:
        """As `Watched.works`, of the process with this pid."""
        return bool(self._child and self._child.pid == pid and self._vitals.works(since))

    async def signal(self, pid: int, number: int) -> None:
        """Sends it a signal, if it is the one with this pid and lives."""
        if self._child and self._child.pid == pid and self._child.returncode is None:
            self._child.send_signal(number)

    async def stop(self, grace: float) -> None:
        """SIGTERM, and SIGKILL after so many seconds; returns when it has ended."""
        if self._child and self._child.returncode is None:
            self._child.terminate()
            try:
                await asyncio.wait_for(self._child.wait(), grace)
            except TimeoutError:
                await self._kill()

    async def ping(self) -> None:
        """Answers."""

    async def leave(self) -> None:
        """The last thing that is asked of it."""
        await self._kill()
        self._folder.leave()

    async def _kill(self) -> None:
        if self._child and self._child.returncode is None:
            self._child.kill()
            await self._child.wait()

    async def _follow(self, child: asyncio.subprocess.Process) -> None:
        reading = self._tasks.start(self._read(child))
        exit_code = await child.wait()
        await asyncio.wait([reading], timeout=LAST_OUTPUT)
        reading.cancel()
        if child is self._child:
            self._end = end_of(exit_code)
            self._changed.set()

    def _fail(self, error: BaseException) -> None:
        """Ends the process, which nobody follows any more, with a traceback as its last lines."""
        self._put(traceback_lines(error))
        if self._child and self._child.returncode is None:
            self._child.kill()
        self._end = repr(error)
        self._changed.set()

    async def _read(self, child: asyncio.subprocess.Process) -> None:
        assert child.stdout  # noqa: S101
        lines = Lines()
        while data := await child.stdout.read(MAX_LINE):
            self._put(lines.take(data))
        self._put(lines.take_rest())

    def _put(self, lines: list[str]) -> None:
        self._output = [*self._output, *lines][-MAX_LINES:]
        self._changed.set()

    def _environment(self) -> dict[str, str]:
        """Writes what the process needs, and says where it is."""
        spec, folder = self._spec, self._folder
        run_folder = Path(f"penstock-{os.getuid()}", spec.config.name)
        config, keys = spec.config, folder.path / run_folder / PUBLIC_KEYS
        if spec.public_keys:
            config = msgspec.structs.replace(config, keys=str(keys))
        host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        node = Node(self._node_id, self._node, host, spec.fixed)
        files = {CONFIG_FILE: msgspec.json.encode(config), "node.json": msgspec.json.encode(node)}
        files |= {f"{KEYS_FOLDER}/{path}": content for path, content in spec.keys.items()}
        files |= {f"{PUBLIC_KEYS}/{path}": content for path, content in spec.public_keys.items()}
        for path, content in files.items():
            folder.write(str(run_folder / path), content)
        path = os.environ.get("PATH", os.defpath)
        environment = os.environ | {
            "PATH": os.pathsep.join((str(Path(sys.executable).parent), path)),
            "XDG_RUNTIME_DIR": str(folder.path),
            CONFIG_VARIABLE: str(folder.path / run_folder / CONFIG_FILE),
            NODE_VARIABLE: str(folder.path / run_folder / "node.json"),
            PROCESS_VARIABLE: spec.name,
            SUPERVISOR_VARIABLE: str(os.getpid()),
            INCARNATION_VARIABLE: str(self._number),
            **_gpu(),
        }
        environment.pop("OMP_NUM_THREADS", None)  # Ray's, for what itself computes in an actor
        return environment


def _gpu() -> dict[str, str]:
    gpus = [str(gpu) for gpu in ray.get_gpu_ids()]
    if not gpus:
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return {GPU_VARIABLE: str(visible.split(",").index(gpus[0])) if visible else gpus[0]}
