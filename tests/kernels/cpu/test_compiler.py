"""The cache of machine code: used when it can be trusted, replaced when it is damaged."""

import ctypes
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from llvmlite import ir

from penstock.kernels.cpu import compiler
from penstock.kernels.cpu.values import Kernel, emitted


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "penstock" / "kernels"


def build(_: compiler.Target) -> str:
    module = ir.Module("test")

    def double(k: Kernel) -> None:
        (number,) = k.arguments
        number[0] = number[0] * 2

    emitted(module, "double", "i64", double, public=True)
    return str(module)


def refuse(_: compiler.Target) -> str:
    raise AssertionError("compiled once more")


def doubled(library: compiler.Library, number: int) -> int:
    place = ctypes.c_int64(number)
    library.function("double", 1)(ctypes.addressof(place))
    return place.value


def test_code_is_compiled_once(folder: Path) -> None:
    assert doubled(compiler.load(build, "double"), 21) == 42
    assert doubled(compiler.load(refuse, "double"), 4) == 8
    (path,) = folder.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("damage", [b"", b"\0" * 4096, None])
def test_damaged_code_is_compiled_again(folder: Path, damage: bytes | None) -> None:
    compiler.load(build, "double")
    (path,) = folder.iterdir()
    path.write_bytes(path.read_bytes()[:-1] if damage is None else damage)
    assert doubled(compiler.load(build, "double"), 3) == 6
    assert doubled(compiler.load(refuse, "double"), 3) == 6


def test_another_cpu_has_other_code(folder: Path) -> None:
    host = compiler.host()
    compiler.load(build, "double")
    with pytest.raises(AssertionError, match="compiled once more"):
        compiler.load(refuse, "double", host._replace(features=f"{host.features},-avx512f"))
    assert len(list(folder.iterdir())) == 1


def test_a_folder_that_others_write_is_not_trusted(folder: Path) -> None:
    compiler.load(build, "double")
    folder.chmod(0o777)
    assert compiler.cache_folder() is None
    with pytest.raises(AssertionError, match="compiled once more"):
        compiler.load(refuse, "double")


def test_without_a_folder_code_is_compiled_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert doubled(compiler.load(build, "double"), 5) == 10


def test_processes_may_compile_at_once(folder: Path) -> None:
    command = (
        "from tests.kernels.cpu.test_compiler import *;print(doubled(compiler.load(build, 'x'), 4))"
    )
    root = Path(__file__).parents[3]
    processes = [
        subprocess.Popen([sys.executable, "-c", command], cwd=root, stdout=subprocess.PIPE)
        for _ in range(3)
    ]
    assert [process.communicate()[0].strip() for process in processes] == [b"8"] * 3
    assert len(list(folder.iterdir())) == 1


@pytest.mark.usefixtures("folder")
def test_one_compiles_while_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    builds, found_nothing = threading.Event(), threading.Event()
    read = compiler._read

    def note(path: Path) -> bytes | None:
        code = read(path)
        if builds.is_set():
            found_nothing.set()
        return code

    def build_late(target: compiler.Target) -> str:
        builds.set()
        assert found_nothing.wait(60)
        return build(target)

    monkeypatch.setattr(compiler, "_read", note)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(compiler.load, build_late, "double")
        assert builds.wait(60)
        second = threads.submit(compiler.load, refuse, "double")
        assert [doubled(one.result(), 6) for one in (first, second)] == [12, 12]


def test_a_missing_function_is_an_error(folder: Path) -> None:
    assert folder.name == "kernels"
    with pytest.raises(OSError, match="lacks the function triple"):
        compiler.load(build, "double").function("triple", 1)
