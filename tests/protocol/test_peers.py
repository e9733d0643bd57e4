"""Peers that register by heartbeats."""

from penstock.protocol.peers import Peers
from penstock.protocol.sockets import LIVENESS


def test_a_peer_is_silent_after_missed_heartbeats_and_not_after_a_time() -> None:
    """Whoever was stopped itself counts one heartbeat for the whole of that time."""
    peers: Peers[object] = Peers()
    assert peers.alive(b"a", "a")
    assert peers.alive(b"b", "b")
    for _ in range(LIVENESS):
        assert peers.silent() == []
    assert not peers.alive(b"b", "b")
    assert peers.silent() == [b"a"]
    peers.lost(b"a")
    assert [peers.silent() for _ in range(LIVENESS)] == [[]] * (LIVENESS - 1) + [[b"b"]]
