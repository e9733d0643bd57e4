"""Compiles launches of the kernels for a GPU that need not be there.

Run as a program, without Triton's interpreter: `compile_launches.py ARCHITECTURES PARTS [COMPILED]`
writes one line of JSON for each launch. One of PARTS launches is compiled, another one for each
architecture; the others are listed. With COMPILED, only one launch of each kernel of `SAMPLE` is
compiled, and only for this architecture. Each architecture has a process of its own, forked after
the slow imports, because the kernels read the GPU's properties when they are imported. As many run
at once as there are cores.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

GPUS = {
    80: "sm_80,shared=163,sms=108",
    86: "sm_86,shared=99,sms=84",
    89: "sm_89,shared=99,sms=128",
    90: "sm_90,shared=227,sms=132",
    100: "sm_100,shared=227,sms=148",
    120: "sm_120,shared=99,sms=170",
}
SAMPLE = {"_block_product", "packed_gemm_kernel"}
"""kernels with large tiles that `make test` compiles, in a second each"""
CUOBJDUMP = Path(triton.__file__).with_name("backends") / "nvidia/bin/cuobjdump"


class Launch(NamedTuple):
    source: Any
    options: dict[str, Any]


class Launches:
    """Launches of all kernels, each once, in place of the kernels themselves."""

    def __init__(self, arch: int) -> None:
        self.target = GPUTarget("cuda", arch, 32)
        self._backend = make_backend(self.target)
        self._binders: dict[JITFunction[Any], Any] = {}
        self.found: dict[Any, Launch] = {}
        self.case = ""

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        run = JITFunction.run
        JITFunction.run = lambda kernel, *args, **options: self._add(kernel, args, options)
        try:
            yield
        finally:
            JITFunction.run = run

    def _add(self, kernel: JITFunction[Any], args: Any, options: dict[str, Any]) -> None:
        del options["grid"], options["warmup"]
        if kernel not in self._binders:
            binder = create_function_from_signature(kernel.signature, kernel.params, self._backend)
            self._binders[kernel] = binder
        bound, special, rest = self._binders[kernel](*args, **options)
        packed = kernel._pack_args(self._backend, options, bound, special, rest)
        parsed, signature, constants, attributes = packed
        key = kernel.fn.__name__, str((signature, constants, attributes, parsed))
        if key not in self.found:
            source = triton.compiler.ASTSource(kernel, signature, constants, attributes)
            self.found[key] = Launch(source, {"case": self.case, **parsed.__dict__})


def describe(launch: Launch, arch: int) -> dict[str, Any]:
    """Return the launch's kernel, case, constants and options."""
    source, options = launch.source, launch.options
    names, constants = source.fn.arg_names, source.constants.items()
    return {
        "constants": {names[at[0]]: value for at, value in constants if isinstance(value, int)},
        "arch": arch,
        "kernel": source.fn.fn.__name__,
        **{name: options[name] for name in ("case", "num_warps", "num_stages")},
    }


def compiled(launch: Launch, target: GPUTarget) -> dict[str, Any]:
    """Return shared memory, registers and the stack's bytes, or the compiler's error."""
    options = {name: value for name, value in launch.options.items() if name != "case"}
    try:
        kernel = triton.compile(launch.source, target=target, options=options)
    except Exception as error:  # noqa: BLE001  reported
        return {"error": repr(error)[:1000]}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        command = [CUOBJDUMP, "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = dict(word.split(":") for word in text.split() if word.count(":") == 1)
    return {
        "shared": kernel.metadata.shared,
        "registers": int(usage["REG"]),
        "stack": int(usage["STACK"]),
    }


def sample(launches: Launches) -> set[int]:
    """Return the ids of one launch of each kernel of `SAMPLE`, the last one in its case."""
    last = {
        launch.source.fn.fn.__name__: id(launch)
        for launch in launches.found.values()
        if launch.options["case"] != "float16"
    }
    return {last[name] for name in SAMPLE & last.keys()}


def main() -> None:
    from tests.kernels.launch_cases import record

    architectures, parts, *only = sys.argv[1].split(","), int(sys.argv[2]), *map(int, sys.argv[3:])
    statuses = []
    for number, arch in enumerate(architectures):
        if number >= len(os.sched_getaffinity(0)):
            statuses.append(os.wait()[1])
        if not os.fork():
            _compile(int(arch), parts, only, record)
            sys.exit(0)
    statuses += [os.wait()[1] for _ in range(len(architectures) - len(statuses))]
    sys.exit(any(statuses))


def _compile(arch: int, parts: int, only: list[int], record: Callable[[Launches], None]) -> None:
    """Write the reports of one architecture, each in one piece: others write at the same time."""
    os.environ["PENSTOCK_SIMULATED_GPU"] = GPUS[arch]
    launches = Launches(arch)
    with torch.device("meta"), launches.recorded():
        record(launches)
    found = list(launches.found.values())
    chosen = {id(launch) for launch in found[list(GPUS).index(arch) % parts :: parts]}
    if only:
        chosen = sample(launches) if arch in only else set()
    for launch in found:
        report = describe(launch, arch)
        if id(launch) in chosen:
            report |= compiled(launch, launches.target)
        os.write(sys.stdout.fileno(), json.dumps(report).encode() + b"\n")


if __name__ == "__main__":
    main()
