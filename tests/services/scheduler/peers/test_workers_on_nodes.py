"""Groups of workers on several machines, and the messages to them."""

from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.messages.worker import WorkerAssignment
from tests.services.scheduler.peers.site import Site


def seat(nodes: str, tp_size: int, own: str) -> tuple[str, list[WorkerAssignment]]:
    """Return the node of each rank, and its message, when workers of all `nodes` are heard.

    The workers are w0, w1, …; own: the scheduler's node.
    """
    site = Site(tp_size, len(nodes) - tp_size, own)
    for number, node in enumerate(nodes):
        site.start(f"w{number}", node=node)
    members = site.group.members
    seated = "".join(site.states[member].node for member in members)
    return seated, [site.assignments[member] for member in members]


@pytest.mark.parametrize(
    ("nodes", "tp_size", "own", "seated"),
    [
        ("abab", 2, "b", "bb"),
        ("abbcc", 2, "a", "bb"),  # rather with each other than with the scheduler
        ("babcbc", 4, "a", "abbb"),
        ("bcacba", 4, "a", "aabb"),
        ("aabbb", 4, "z", "bbba"),
        ("ba", 1, "a", "a"),
    ],
)
def test_ranks_of_a_node_are_neighbours(nodes: str, tp_size: int, own: str, seated: str) -> None:
    assert seat(nodes, tp_size, own)[0] == seated


@given(st.text("abc", min_size=4, max_size=12), st.sampled_from([1, 2, 4]), st.sampled_from("abcd"))
def test_groups_stay_on_a_node_that_can_hold_them(nodes: str, tp_size: int, own: str) -> None:
    seated, told = seat(nodes, tp_size, own)
    assert len(seated) == tp_size
    runs = [node for node, _ in groupby(seated)]
    assert len(runs) == len(set(runs))
    assert {one.spans_nodes for one in told} == {len(runs) > 1}
    if any(nodes.count(node) >= tp_size for node in nodes):
        assert len(runs) == 1
    if nodes.count(own) >= tp_size or (own in nodes and len(runs) > 1):
        assert seated[0] == own


def test_ranks_meet_where_rank_0_can_listen() -> None:
    _, told = seat("ab", 2, "b")
    assert [one.rendezvous for one in told] == ["tcp://w1"] * 2


def test_only_pids_of_the_own_node_are_waited_for() -> None:
    site = Site(2, 3, "a")
    one, _ = site.start("w1", "w2", node="a")
    [three] = site.start("w3", node="b")
    [four, five] = site.start("w4", "w5", node="c")
    site.kill(one)
    assert site.group.members == [four, five]
    assert [site.assignments[worker].pids_before for worker in (four, five)] == [[], []]
    site.kill(five)
    [six] = site.start("w6", node="c")
    assert site.group.members == [three, six]
    assert [site.assignments[worker].pids_before for worker in (three, six)] == [[], [4, 5]]
