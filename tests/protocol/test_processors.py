"""The number of processors that this process may use."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.protocol import processors
from penstock.protocol.config import OPTIONS, Config
from penstock.protocol.processors import num_processors, threads_of_worker

V2, V1 = "0::/a/b\n", "4:memory:/x\n3:cpu,cpuacct:/a/b\n0::/\n"


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        (V2, {"a/b/cpu.max": "300000 100000\n"}, 3),
        (V2, {"a/b/cpu.max": "max 100000\n"}, 8),
        (V2, {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "250000 100000\n"}, 2),  # of a parent
        (V2, {"cpu.max": "50000 100000\n"}, 1),  # the path is the host's; less than a processor
        (V2, {"a/b/cpu.max": "1600000 100000\n"}, 8),  # more than the affinity
        (V1, {"cpu/a/b/cpu.cfs_quota_us": "400000", "cpu/a/b/cpu.cfs_period_us": "100000"}, 4),
        (V1, {"cpu/a/b/cpu.cfs_quota_us": "-1", "cpu/a/b/cpu.cfs_period_us": "100000"}, 8),
        (V1, {"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "50000"}, 2),
        ("", {}, 8),
    ],
)
def test_quota_of_cgroups(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cgroup: str,
    files: dict[str, str],
    expected: int,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    written = {"proc/self/cgroup": cgroup}
    written |= {f"sys/fs/cgroup/{path}": text for path, text in files.items()}
    for path, text in written.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert num_processors(tmp_path) == expected


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_affinity_of_the_process() -> None:
    """The affinity is inherited, as `taskset` uses it."""
    code = (
        "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]);"
        "from penstock.protocol.processors import num_processors; print(num_processors())"
    )
    command = [sys.executable, "-P", "-c", code]
    assert subprocess.check_output(command, text=True) == "1\n"


def test_threads_of_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers share what is left by the other processes, and each has one."""
    monkeypatch.setattr(processors, "num_processors", lambda: 9)
    assert [threads_of_worker(number) for number in (1, 2, 3, 16)] == [8, 4, 2, 1]
    models = (Config(served_model_name="a"), Config(served_model_name="b", tp=3))
    options = {field: getattr(Config(), field) for field in OPTIONS}
    numbers = [model.num_threads for model in Config(**options, models=models).by_model()]
    assert numbers == [2, 2]
