"""A folder of KV blocks on a disk that is full or read-only; see small_disk."""

import subprocess
import sys
from pathlib import Path

import pytest

NAMESPACE = ("unshare", "--map-root-user", "--mount")


def may_mount() -> bool:
    try:
        return subprocess.run([*NAMESPACE, "true"], check=False).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not may_mount(), reason="needs Linux and namespaces of users")
@pytest.mark.parametrize("name", ["full", "full_of_others", "read_only"])
def test_a_small_disk(name: str, tmp_path: Path) -> None:
    module = "tests.services.worker.memory.small_disk"
    subprocess.run([*NAMESPACE, sys.executable, "-m", module, name, tmp_path], check=True)
