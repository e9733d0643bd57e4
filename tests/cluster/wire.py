"""The network between machines that are network namespaces of one host: `wire.py NAMESPACE …`.

A program of its own. It makes a TAP device for each namespace, moves it there as `eth0` and
forwards frames between them as a switch does. Each machine's link can be cut, delayed and lossy.
It obeys lines of JSON on its standard input, one answer a line, and ends with that input:

    {"link": 0, "is_cut": true, "delay_ms": 50, "loss": 0.05}   any of the three, for one machine
    {"capture": "/path/file.pcap"}                              or null, which closes the file
    {"counts": true}                                            each link's frames and bytes

A frame passes two links, its sender's and its receiver's: their delays add up.
"""

import fcntl
import heapq
import io
import json
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

TUNSETIFF = 0x400454CA
IFF_TAP, IFF_NO_PI = 0x0002, 0x1000
MTU = 1500
MAX_FRAME = MTU + 18
"""with Ethernet's header and a VLAN tag"""
MAX_BATCH = 64
"""frames of one machine before the next machine's turn"""
PCAP_HEADER = struct.pack("=IHHiIII", 0xA1B2C3D4, 2, 4, 0, 0, MAX_FRAME, 1)
"""the classic format, times in microseconds, link type Ethernet"""
STDIN, STDOUT = 0, 1


@dataclass(slots=True)
class Link:
    """A machine's cable: what it does to frames, and how many it has carried."""

    tap: int
    is_cut: bool = False
    delay_ms: float = 0.0
    """each way"""
    loss: float = 0.0
    """share of the frames dropped, each way"""
    sent: int = 0
    received: int = 0
    dropped: int = 0
    received_bytes: int = 0

    def drops(self, randoms: random.Random) -> bool:
        """Return whether the next frame is lost here."""
        is_lost = self.is_cut or (self.loss > 0 and randoms.random() < self.loss)
        self.dropped += is_lost
        return is_lost

    def counts(self) -> dict[str, int]:
        """Frames from and to the machine, those that its link dropped, and bytes to it."""
        names = ("sent", "received", "dropped", "received_bytes")
        return {name: getattr(self, name) for name in names}


class Switch:
    """Forwards frames by the destination's MAC address."""

    def __init__(self, taps: Iterable[int], seed: int) -> None:
        self._links = [Link(tap) for tap in taps]
        self._by_mac = {mac_address(i): link for i, link in enumerate(self._links)}
        self._by_tap = {link.tap: link for link in self._links}
        self._randoms = random.Random(seed)
        self._delayed: list[tuple[float, int, Link, Link, bytes]] = []
        """a heap by due time; the number keeps frames of one time in order"""
        self._number = 0
        self._capture: io.BufferedWriter | None = None
        self._epoll = select.epoll()
        for fd in (STDIN, *self._by_tap):
            self._epoll.register(fd, select.EPOLLIN)

    def run(self) -> None:
        """Forward until standard input ends; what was sent before a command passes first."""
        commands = b""
        while True:
            ready = [fd for fd, _ in self._epoll.poll(self._until_due())]
            for tap in ready:
                if tap != STDIN:
                    self._take(self._by_tap[tap])
            self._deliver_due()
            if STDIN in ready:
                data = os.read(STDIN, 65536)
                if not data:
                    return
                *lines, commands = (commands + data).split(b"\n")
                for line in lines:
                    answer = self.obey(json.loads(line))
                    os.write(STDOUT, json.dumps(answer).encode() + b"\n")

    def obey(self, command: dict[str, Any]) -> dict[str, Any]:
        """Carries out one command: its answer."""
        if "link" in command:
            link = self._links[command.pop("link")]
            for name in command:
                if name not in ("is_cut", "delay_ms", "loss"):
                    raise ValueError(f"a link has no {name!r}; it has is_cut, delay_ms and loss")
            for name, value in command.items():
                setattr(link, name, value)
        elif "capture" in command:
            self._switch_capture(command["capture"])
        elif "counts" in command:
            return {"counts": [link.counts() for link in self._links]}
        return {}

    def _switch_capture(self, path: str | None) -> None:
        if self._capture is not None:
            self._capture.close()
            self._capture = None
        if path is not None:
            self._capture = io.BufferedWriter(io.FileIO(path, "wb"))
            self._capture.write(PCAP_HEADER)

    def _until_due(self) -> float | None:
        return max(0.0, self._delayed[0][0] - time.monotonic()) if self._delayed else None

    def _take(self, source: Link) -> None:
        now = time.monotonic()
        for _ in range(MAX_BATCH):
            try:
                frame = os.read(source.tap, MAX_FRAME)
            except BlockingIOError:
                return
            source.sent += 1
            if source.drops(self._randoms):
                continue
            for target in self._targets(frame, source):
                if target.drops(self._randoms):
                    continue
                delay = (source.delay_ms + target.delay_ms) / 1000
                if delay:
                    self._number += 1
                    item = (now + delay, self._number, source, target, frame)
                    heapq.heappush(self._delayed, item)
                else:
                    self._deliver(target, frame)

    def _targets(self, frame: bytes, source: Link) -> Iterable[Link]:
        if frame[0] & 1:  # to a group: all
            return [link for link in self._links if link is not source]
        target = self._by_mac.get(frame[:6])
        return () if target is None else (target,)

    def _deliver_due(self) -> None:
        now = time.monotonic()
        while self._delayed and self._delayed[0][0] <= now:
            _, _, source, target, frame = heapq.heappop(self._delayed)
            if source.is_cut or target.is_cut:
                target.dropped += 1
            else:
                self._deliver(target, frame)

    def _deliver(self, target: Link, frame: bytes) -> None:
        os.write(target.tap, frame)
        target.received += 1
        target.received_bytes += len(frame)
        if self._capture is not None:
            seconds, nanoseconds = divmod(time.time_ns(), 1_000_000_000)
            length = len(frame)
            header = struct.pack("=IIII", seconds, nanoseconds // 1000, length, length)
            self._capture.write(header + frame)


def mac_address(index: int) -> bytes:
    """Return the address of the machine of this index, locally administered."""
    return bytes((2, 0, 0, 0, 0, index + 1))


def attach(index: int, namespace: str) -> int:
    """Make the TAP device of a namespace, its `eth0`, up: the descriptor, non-blocking."""
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    # the kernel puts a number for %d, and the name into the structure
    request = struct.pack("16sH14x", b"wire%d", IFF_TAP | IFF_NO_PI)
    name = fcntl.ioctl(tap, TUNSETIFF, request)[:16].rstrip(b"\0").decode()
    mac, mtu = mac_address(index).hex(":"), str(MTU)
    ip("link", "set", name, "netns", namespace, "name", "eth0", "address", mac, "mtu", mtu)
    ip("-n", namespace, "link", "set", "eth0", "addrgenmode", "none")  # no IPv6
    ip("-n", namespace, "link", "set", "eth0", "up")
    return tap


def ip(*arguments: str) -> None:
    """Run `ip` of iproute2."""
    subprocess.run(["ip", *arguments], check=True)


def main(seed: str, *namespaces: str) -> None:
    """Says `{}` when the network is up."""
    taps = [attach(index, namespace) for index, namespace in enumerate(namespaces)]
    switch = Switch(taps, int(seed))
    os.write(STDOUT, b"{}\n")
    switch.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
