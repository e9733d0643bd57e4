"""The number of processors that this process may use: its affinity and its cgroups' quotas."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


def threads_of_worker(num_workers: int) -> int:
    """Return the number of threads of each of the workers that share this machine.

    One processor is left to the other processes: waiting for a thread without a processor is slow.
    """
    return max(1, (num_processors() - 1) // num_workers)


def num_processors(root: Path = ROOT) -> int:
    """Return the number of processors that this process may use.

    `os.cpu_count` counts all processors of the machine, ignoring `taskset`, Slurm and
    `docker --cpus`.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    number = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, min([number, *(int(quota) for quota in _quotas(root))]))


def _quotas(root: Path) -> Iterator[float]:
    """Yield the limits of this process's cgroups and of their parents, in processors."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        # in a container the path may be the host's: only a parent of it is mounted
        for folder in (mount / path.lstrip("/"), *(mount / path.lstrip("/")).parents):
            if not folder.is_relative_to(mount):
                break
            with contextlib.suppress(OSError, ValueError):  # no limit: no such file, `max` or -1
                yield _quota(folder, controllers)


def _quota(folder: Path, controllers: str) -> float:
    """Return the limit of one cgroup. Raises OSError or ValueError if there is no limit."""
    if controllers:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        period = int((folder / "cpu.cfs_period_us").read_text())
    else:
        quota, period = map(int, (folder / "cpu.max").read_text().split())
    if quota <= 0 or period <= 0:
        raise ValueError(f"got quota {quota} and period {period}, expected positive numbers")
    return quota / period
