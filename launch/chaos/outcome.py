"""Observations of a run."""

import psutil
from msgspec import Struct

from penstock.launch.chaos.check import Expected
from penstock.launch.chaos.load import Flight
from penstock.launch.chaos.schedule import Event


class Recovery(Struct):
    """Effect of one event on the requests that ran."""

    event: Event
    num_running: int
    is_over: bool
    """the pipeline was whole again within the time-out"""
    silence: float
    """seconds, the longest in which a stream that ran got nothing"""


class Outcome(Struct):
    """All that was seen."""

    expected: list[Expected]
    flights: list[Flight]
    recoveries: list[Recovery]
    num_restarts: dict[str, int]
    """by name of the process; a worker's death ends the others of its group"""
    memory: tuple[dict[str, int], dict[str, int]]
    """resident bytes by kind of process, before and after the load"""
    is_answering: bool
    """the pipeline, after the load"""
    used_blocks: int
    """KV blocks in use after the load, less those before"""
    processes: list[psutil.Process]
    """every one there has been"""
    num_open: int
    """requests that are open in the gateway or the scheduler after the load"""
