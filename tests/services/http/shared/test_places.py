"""Places of HTTP requests: what is counted, whatever happens in whatever order."""

import tracemalloc
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.services.http.generation.schema import ChatRequest
from penstock.services.http.shared.body import decode_body
from penstock.services.http.shared.places import NUMBER_BYTES, Places, decoded_bytes

MAX_CONNECTIONS, MAX_REQUESTS, MAX_BYTES = 8, 5, 1000
MOST_REQUESTS, MOST_BYTES = 6, 1125
"""with the reserve"""


class Occupant:
    """A connection that remembers whether it was refused."""

    def __init__(self, host: str, number: int) -> None:
        self.host = host
        self.began = self.due = float(number)
        self.gave_way = False

    def abort(self) -> None:
        """Nothing."""

    def give_way(self) -> None:
        self.gave_way = True


moves = st.lists(
    st.tuples(
        st.sampled_from(["connect", "begin", "check", "grow", "arrived", "end", "leave"]),
        st.sampled_from("abc"),
        st.integers(0, 20),
        st.integers(1, 700),
    ),
    max_size=120,
)


def move(places: Places, name: str, one: Occupant, num_bytes: int) -> bool:
    """Do something on a connection; False if the connection is closed."""
    match name:
        case "begin":
            return places.begin(one, must_have=False)
        case "check":
            assert places.begin(one, must_have=True)
            places.rest(one)
        case "grow":
            return places.grow(one, num_bytes)
        case "arrived":
            places.arrived(one)
        case "end":
            places.rest(one)
    return name != "leave"


@settings(max_examples=300)
@given(moves)
def test_counts_and_limits(moves: list[tuple[str, str, int, int]]) -> None:
    places = Places(MAX_CONNECTIONS, MAX_REQUESTS, MAX_BYTES)
    known: list[Occupant] = []
    for number, (name, host, which, num_bytes) in enumerate(moves):
        closed = None
        if name == "connect":
            known.append(new := Occupant(host, number))
            closed = places.connect(new)
        elif known and not move(places, name, one := known[which % len(known)], num_bytes):
            closed = one
        if closed:
            places.leave(closed)
        known = [one for one in known if one is not closed and not one.gave_way]
        shares = places._shares
        counted = Counter({host: share.num_open for host, share in shares.items()})
        assert counted == Counter(one.host for one in places._open)
        arriving = {one for share in shares.values() for one in share.arriving}
        idle = {one for share in shares.values() for one in share.idle}
        assert len(idle) == places._num_idle
        assert places._total.num_open == len(places._open) <= MOST_REQUESTS
        assert places._total.num_bytes == sum(places._open.values()) <= MOST_BYTES
        assert arriving <= set(places._open) <= set(known)
        assert idle == set(known) - set(places._open)
        assert len(known) <= MAX_CONNECTIONS
    for one in known:
        places.leave(one)
    assert not (places._open or places._shares)


def test_parts_of_a_body_are_counted() -> None:
    assert decoded_bytes(b'{"a": [{}, {}]}') == 2 * 15 + 64 * 5 + NUMBER_BYTES


@pytest.mark.parametrize("number", [b"1", b"300", b"1e5", b"-1.5"])
def test_numbers_take_no_more_than_is_counted(number: bytes) -> None:
    body = (
        b'{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"x": [%b]}}'
        % b",".join([number] * 50000)
    )
    tracemalloc.start()
    decoded = decode_body(body, ChatRequest)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert decoded.chat_template_kwargs
    assert taken + len(body) <= decoded_bytes(body)
