"""Services whose processes are forked."""

import os
from pathlib import Path

import pytest

from penstock.launch.supervisor import local
from penstock.launch.supervisor.local import forked_services
from penstock.protocol.config import Config


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")
@pytest.mark.parametrize(
    ("device", "has_gpu", "wanted", "forked"),
    [
        ("auto", False, "", True),
        ("auto", True, "", False),
        ("cpu", True, "", True),
        ("cuda", True, "0", False),
        ("cuda", True, "1", True),
    ],
)
def test_workers_that_may_use_a_gpu_are_forked_on_request(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    device: str,
    has_gpu: bool,
    wanted: str,
    forked: bool,
) -> None:
    monkeypatch.setattr(local, "GPU_FILE", tmp_path if has_gpu else tmp_path / "none")
    monkeypatch.setenv("PENSTOCK_FORK_GPU_WORKERS", wanted)
    services = forked_services(Config(device=device))
    assert (["worker"] in services) == forked
    assert services[0] == ["gateway", "tokenizer", "scheduler", "detokenizer", "http"]


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")
@pytest.mark.parametrize("http", [0, 1, 2])
def test_http_is_imported_only_where_it_is_served(http: int) -> None:
    assert ("http" in forked_services(Config(device="cpu", http=http))[0]) == bool(http)
