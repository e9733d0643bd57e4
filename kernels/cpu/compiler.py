"""Compilation of LLVM IR for the current CPU, with a cache of machine code on disk."""

import contextlib
import ctypes
import fcntl
import functools
import gc
import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import llvmlite
import llvmlite.binding as llvm

log = logging.getLogger(__name__)
DIGEST_BYTES = 32


class Target(NamedTuple):
    """CPU, and the sizes of a tile that fits its registers."""

    name: str
    features: str
    lanes: int  # float32 elements of a vector
    rows: int  # rows of a tile

    def has(self, feature: str) -> bool:
        """Return True if the CPU has a feature, given LLVM's name."""
        return f"+{feature}" in self.features.split(",")

    @property
    def widens_half(self) -> bool:
        """True if instructions convert float16 to float32, as on every 64-bit ARM CPU."""
        return self.has("f16c") or self.has("neon")


class Library:
    """Compiled functions, which exist as long as this object."""

    def __init__(self, code: bytes, machine: Any) -> None:
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        self._engine.finalize_object()

    def function(self, name: str, num_arguments: int) -> Callable[..., None]:
        """Return a function with int64 arguments; it runs without the GIL."""
        address = self._engine.get_function_address(name)
        if not address:
            raise OSError(f"compiled code lacks the function {name}")
        return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * num_arguments)(address)


@functools.cache
def host() -> Target:
    """Return this machine's CPU."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = llvm.get_host_cpu_features()
    return target(llvm.get_host_cpu_name(), features.flatten(), bool(features.get("avx512f")))


def target(name: str, features: str, has_wide_registers: bool) -> Target:
    """Return a CPU with 32 registers of 16 float32 elements, or with 16 registers of 8."""
    if has_wide_registers:
        return Target(name, f"{features},-prefer-256-bit", 16, 6)
    return Target(name, features, 8, 3)


def load(build: Callable[[Target], str], key: str, cpu: Target | None = None) -> Library:
    """Return the library of the IR that `build` returns, compiled at the first use of `key`."""
    cpu = cpu or host()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=cpu.name, features=cpu.features, opt=2, jit=True
    )
    folder = cache_folder()
    full = repr((key, cpu, _sources(), llvmlite.__version__, machine.triple))
    path = folder / hashlib.sha256(full.encode()).hexdigest() if folder else None
    code = _read(path) if path else None
    if code is None:
        with _alone(folder):  # ranks start together and need the same code
            code = _read(path) if path else None
            if code is None:
                code = _compile(build, cpu, machine)
                if path:
                    _write(path, code)
    return Library(code, machine)


def _compile(build: Callable[[Target], str], cpu: Target, machine: Any) -> bytes:
    with _without_garbage_collection():
        source = build(cpu)
    return compile_object(source, machine)


@contextmanager
def _alone(folder: Path | None) -> Iterator[None]:
    """Prevent other processes that use this folder from compiling at the same time."""
    with contextlib.ExitStack() as stack:
        if folder:
            try:
                descriptor = os.open(folder, os.O_RDONLY)
                stack.callback(os.close, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            except OSError as error:  # the file system has no locks
                log.warning("%s: could not lock the cache of kernels: %s", folder, error)
        yield


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Emit code twice as fast: garbage collection would visit torch's many objects."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def compile_object(source: str, machine: Any) -> bytes:
    """Return the object file of LLVM IR."""
    module = llvm.parse_assembly(source)
    module.verify()
    # vectors are already in the source; other passes would mainly add compile time
    passes = llvm.create_new_module_pass_manager()
    passes.add_sroa_pass()
    passes.add_instruction_combine_pass()
    passes.add_simplify_cfg_pass()
    options = llvm.create_pipeline_tuning_options()
    passes.run(module, llvm.create_pass_builder(machine, options))
    return machine.emit_object(module)  # type: ignore[no-any-return]


def cache_folder() -> Path | None:
    """Return the user's folder for machine code, or None if it can't be trusted."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(root) / "penstock" / "kernels"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except (OSError, RuntimeError):
        return None
    is_own = status.st_uid == os.geteuid() and not status.st_mode & 0o022
    return folder if is_own else None


@functools.cache
def _sources() -> str:
    """Return a digest of the code that emits kernels, and of the layouts that it emits."""
    kernels = Path(__file__).parents[1]
    folders = (kernels / name for name in ("cpu", "layouts", "packed", "recurrent"))
    paths = [path for folder in folders for path in sorted(folder.glob("*.py"))]
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()


def _read(path: Path) -> bytes | None:
    """Return cached machine code, or None if it is missing or damaged."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    digest, code = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
    return code if hashlib.sha256(code).digest() == digest else None


def _write(path: Path, code: bytes) -> None:
    """Write machine code; other processes see a whole file or no file."""
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(hashlib.sha256(code).digest() + code)
        Path(file.name).replace(path)
    except OSError as error:
        log.warning("%s: could not cache compiled kernels: %s", path.parent, error)
