"""Heartbeats for the supervisor, with what a process reports in them."""

import contextlib
import logging
import os
from collections.abc import Callable
from typing import Any

import psutil
import zmq

from penstock.protocol.messages.supervisor import SupervisorHeartbeat
from penstock.protocol.transport.channel import Channel, traffic
from penstock.protocol.transport.process import SUPERVISOR_VARIABLE, Process

Counters = Callable[[], dict[str, float]]


class HeartbeatSender:
    """Sends heartbeats to the supervisor, if there is one. `send` is for one thread.

    A heartbeat has this process's counts of messages, and what `counters` returned at the latest
    `count`, by names of Prometheus metrics without `penstock_process_`.
    """

    def __init__(self, process: Process, counters: Counters = dict[str, float]) -> None:
        self._name = process.name
        self._counters = counters
        self._counted: dict[str, float] = {}
        self._counters_failed = False
        self.group, self.group_size = "", 1  # of a worker, as in `SupervisorHeartbeat`
        self._own = psutil.Process()
        self._rss_bytes = 0
        self._channel: Channel[Any] | None = None
        if SUPERVISOR_VARIABLE in os.environ:
            self._channel = process.context.connect(zmq.PUSH, process.endpoints.supervisor)

    def send(self, busy_seconds: float = 0.0) -> None:
        """Send a heartbeat; to be called every HEARTBEAT_INTERVAL."""
        if self._channel:
            counters = {
                "messages_sent_total": traffic.messages_sent,
                "messages_received_total": traffic.messages_received,
                "bad_frames_total": traffic.bad_frames,
                **self._counted,
            }
            times = os.times()
            with contextlib.suppress(OSError):  # no descriptor is free
                self._rss_bytes = self._own.memory_info().rss
            beat = SupervisorHeartbeat(self._name, os.getpid(), busy_seconds)
            beat.group, beat.group_size = self.group, self.group_size
            beat.counters = counters
            beat.cpu_seconds, beat.rss_bytes = times.user + times.system, self._rss_bytes
            self._channel.send(beat)

    def count(self) -> None:
        """Call `counters`, in the thread that owns them; an exception stops no heartbeat."""
        try:
            self._counted = self._counters()
        except Exception:
            self._counted = {}
            if not self._counters_failed:
                self._counters_failed = True
                logging.getLogger(self._name).exception("counters failed (reported once)")
