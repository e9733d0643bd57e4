"""Fixtures of several modules."""

from collections.abc import Iterator

import pytest

from penstock.launch.pipeline.target import private_pipeline
from penstock.protocol.config import Config
from tests.launch.supervised import supervised

__all__ = ["supervised"]

SMALL = {"num_threads": 1, "kv_cache_gib": 0.1, "log_level": "warning"}
LIMITS = {"max_num_seqs": 8, "max_waiting_requests": 4}
CACHING = {"enable_prefix_caching": True, "block_size": 16}
"""to see that prompts differ"""


@pytest.fixture(scope="session")
def measured() -> Iterator[Config]:
    """Its options, its name and its endpoint."""
    with private_pipeline("bench-test", SMALL | LIMITS | CACHING) as config:
        yield config
