"""Peers that register by heartbeats."""

from penstock.protocol.transport.channel import MAX_MISSED_HEARTBEATS
from penstock.protocol.transport.peers import Peers


def test_a_peer_is_silent_after_missed_heartbeats_and_not_after_a_time() -> None:
    """Whoever was stopped itself counts one heartbeat for the whole of that time."""
    peers: Peers[object, object] = Peers()
    assert peers.alive(b"a", "a")
    assert peers.alive(b"b", "b")
    for _ in range(MAX_MISSED_HEARTBEATS):
        assert peers.silent() == []
    assert not peers.alive(b"b", "b")
    assert peers.silent() == [b"a"]
    peers.lost(b"a")
    assert [peers.silent() for _ in range(MAX_MISSED_HEARTBEATS)] == [[]] * (
        MAX_MISSED_HEARTBEATS - 1
    ) + [[b"b"]]
