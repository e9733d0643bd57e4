"""Fixtures of several modules."""

import os
from collections.abc import Iterator

import pytest

from penstock.launch.pipeline.ephemeral_pipeline import private_pipeline
from penstock.launch.pipeline.run_folder import running_config
from penstock.protocol.config import Config
from tests.launch.supervised import supervised

__all__ = ["supervised"]

SMALL = ("--num-threads", "1", "--kv-cache-gib", "0.1", "--log-level", "warning")
LIMITS = ("--max-num-seqs", "8", "--max-waiting-requests", "4")
CACHING = ("--enable-prefix-caching", "--block-size", "16")
"""to see that prompts differ"""


@pytest.fixture(scope="session")
def measured() -> Iterator[Config]:
    """Its options, its name and its endpoint."""
    name = f"bench-test-{os.getpid()}"
    with private_pipeline(name, *SMALL, *LIMITS, *CACHING):
        yield running_config(name)
