"""Plans are small."""

import msgspec
import pytest

from penstock.protocol.plan import BatchPlan, pack, unpack


def test_lists_of_integers_survive() -> None:
    numbers = [0, 1, -1, 2**31 - 1, -(2**31)]
    assert list(unpack(pack(numbers))) == numbers
    assert pack([1, 256]) == b"\x01\x00\x00\x00\x00\x01\x00\x00"


@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_a_torn_list_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match="multiple"):
        unpack(bytes(length))


def test_a_steady_plan_is_under_100_bytes() -> None:
    assert len(msgspec.msgpack.encode(BatchPlan(epoch=2**62, step=2**31))) < 100
