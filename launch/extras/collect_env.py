"""`launch collect-env`: information about this machine for a problem report.

All information comes from files, metadata of packages and `nvidia-smi`, without importing torch.
"""

import contextlib
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import psutil

from penstock.launch.commands.gpus import TIMEOUT
from penstock.protocol.config import DISTRIBUTION

SHOWN_VARIABLES = re.compile(
    r"PENSTOCK_|CUDA|NCCL_|NVIDIA_|TORCH|PYTORCH_|TRITON_|OMP_|MKL_|OPENBLAS_|NUMBA_|HF_|HUGGING|"
    r"TRANSFORMERS_|RAY_|UV_|PIP_|PYTHON|LD_|LC_|LANG$|TMP|TEMP$|XDG_|SLURM_|VIRTUAL_ENV|"
    r"https?_proxy|no_proxy|all_proxy",
    re.IGNORECASE,
)
SECRET = re.compile("key|token|secret|passw|credential|auth|cookie", re.IGNORECASE)
# user info and query of URLs, such as those of proxies, package indexes and endpoints; user info
# may lack a preceding `//`; if user info or the query has both ? and @, everything is hidden
PRIVATE = re.compile(r"(?:(?<=//)|(?<!\S)(?!\w+://)(?=[^/]))(?:\S*\?\S*@\S*|\S+(?=@))|(?<=\?)\S+")
GPU_FIELDS = "index,name,memory.total,memory.used,compute_cap,driver_version,mig.mode.current"
CGROUP = Path("/sys/fs/cgroup")
SOURCE = Path(__file__).resolve().parents[2]
CPU_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "asimd", "sve")
Facts = Iterator[tuple[str, str]]


def add_arguments(command: ArgumentParser) -> None:
    """Add the arguments of `launch collect-env`."""
    command.set_defaults(run=_run)
    command.epilog = (
        "Values of variables whose names look like secrets are hidden, and so are user info and "
        "query of URLs."
    )


def _run(_: Namespace) -> int:
    sections = {
        "Versions": _versions(),
        "Machine": _machine(),
        "GPUs": _gpus(),
        "Environment": _variables(),
    }
    for title, facts in sections.items():
        print(f"\n{title}" if title != "Versions" else title)
        for name, value in facts:
            print(f"  {f'{name}:':<22} {value}".rstrip())
    return 0


def _versions() -> Facts:
    yield "python", f"{platform.python_version()} ({sys.executable})"
    yield "platform", f"{platform.platform()}, {' '.join(platform.libc_ver())}"
    yield "penstock", _version(DISTRIBUTION)
    if (SOURCE / ".git").exists():
        yield "commit", _output("git", "-C", str(SOURCE), "describe", "--always", "--dirty")
    required = [text for text in metadata.requires(DISTRIBUTION) or () if '"dev"' not in text]
    needed = [re.split(r"[^\w.-]", text)[0] for text in required]
    for name in sorted({"torch", "triton", *needed}, key=str.lower):
        yield name, _version(name)
    yield "CUDA of torch", _cuda_of_torch()
    yield "gcc", _output("gcc", "--version").splitlines()[0]
    yield "nvcc", _output("nvcc", "--version").splitlines()[-1]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _cuda_of_torch() -> str:
    spec = find_spec("torch")
    for folder in spec.submodule_search_locations or () if spec else ():
        with contextlib.suppress(OSError):
            text = (Path(folder) / "version.py").read_text()
            if found := re.search(r"^cuda\b[^=]*= *'([^']+)'", text, re.MULTILINE):
                return found[1]
    return "none"


def _output(*words: str) -> str:
    """Return the output of a program, or a line with the reason why there is none."""
    if shutil.which(words[0]) is None:
        return "not found"
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return done.stdout.strip() or done.stderr.strip() or f"exit code {done.returncode}"


def _machine() -> Facts:
    info = _read(Path("/proc/cpuinfo"))
    model = re.search(r"^model name\s*: (.*)$", info, re.MULTILINE)
    yield "CPU", model[1] if model else platform.processor() or platform.machine()
    flags = set(re.findall(r"\w+", "".join(re.findall(r"^(?:flags|Features)\s*:.*$", info, re.M))))
    yield "CPU instructions", " ".join(flag for flag in CPU_FLAGS if flag in flags)
    affinity = getattr(os, "sched_getaffinity", None)
    usable = len(affinity(0)) if affinity else os.cpu_count()
    yield "cores", f"{os.cpu_count()}, of which this process may use {usable}"
    memory = psutil.virtual_memory()
    yield "memory", f"{memory.total >> 20} MiB, {memory.available >> 20} MiB available"
    groups = _read(Path("/proc/self/cgroup"))
    yield "cgroup", groups.replace("\n", " ")
    own = CGROUP / groups.rpartition("0::/")[2]
    for name in ("cpu.max", "memory.max", "pids.max"):
        yield f"cgroup {name}", _read(own / name) or _read(CGROUP / name) or "not known"
    for path in ("/dev/shm", "/tmp"):  # noqa: S108
        with contextlib.suppress(OSError):
            yield f"free in {path}", f"{shutil.disk_usage(path).free >> 20} MiB"
    yield "open files", "{}, at most {}".format(*resource.getrlimit(resource.RLIMIT_NOFILE))


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text().strip()
    return ""


def _gpus() -> Facts:
    query = [f"--query-gpu={GPU_FIELDS}", "--format=csv"]
    lines = _output("nvidia-smi", *query).splitlines()
    yield "nvidia-smi", lines[0]
    for line in lines[1:]:
        yield "", line
    if lines[1:]:
        found = re.search(r"CUDA Version: ([\d.]+)", _output("nvidia-smi"))
        yield "CUDA of the driver", found[1] if found else "not known"
    if lines[2:]:
        for line in _output("nvidia-smi", "topo", "-m").splitlines():
            yield "", line


def _variables() -> Facts:
    for name, value in sorted(os.environ.items()):
        if SHOWN_VARIABLES.match(name):
            yield name, "(hidden)" if SECRET.search(name) else PRIVATE.sub("(hidden)", value)
