"""Machines for the tests of several; skipped where the host does not let us make them."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.machines import Cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Three machines that reach one another, without Ray."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if not Path("/dev/net/tun").exists():
        pytest.skip("there is no /dev/net/tun, which the network between the machines needs")
    if shutil.which("ip") is None:
        pytest.skip("there is no ip of iproute2")
    with Cluster() as machines:
        yield machines
