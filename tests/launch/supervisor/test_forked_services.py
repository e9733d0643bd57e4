"""Services whose processes are forked."""

import os

import pytest

from penstock.launch.supervisor.local import forked_services
from penstock.protocol.config import Config


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")
@pytest.mark.parametrize("http", [0, 1, 2])
def test_http_is_imported_only_where_it_is_served(http: int) -> None:
    services, worker = forked_services(Config(device="cpu", http=http))
    assert services == ["gateway", "tokenizer", "scheduler", "detokenizer"] + ["http"] * bool(http)
    assert worker == ["worker"]
