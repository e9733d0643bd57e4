"""Plans are small."""

import msgspec
import pytest

from penstock.protocol.messages.packed import pack, unpack
from penstock.protocol.messages.pipeline import StepTokens, StreamOpened, TokenizedRequest
from penstock.protocol.messages.plan import BatchPlan, RowAdded, SampledTokens
from penstock.protocol.messages.sampling import SamplingParams


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


ROW = (0, pack([1, 2]), pack([0]), 0, {"temperature": 1.0}, 7)
WHOLE = [
    TokenizedRequest("r", 0, SamplingParams(), pack([1, 2])),
    StreamOpened(1, "r", 0, pack([1, 2]), pack([3])),
    StepTokens(1, stream_ids=pack([1]), token_ids=pack([2])),
    BatchPlan(1, 2, pack([3]), [], pack([4]), pack([5, 6])),
    RowAdded(*ROW),
    SampledTokens(1, 2, pack([3])),
]


@pytest.mark.parametrize("message", WHOLE, ids=lambda message: type(message).__name__)
def test_a_message_with_a_torn_list_does_not_decode(message: msgspec.Struct) -> None:
    """Each list of integers, one byte short."""
    fields = msgspec.to_builtins(message, builtin_types=(bytes,))
    keys = range(len(fields)) if isinstance(fields, list) else list(fields)
    torn = [key for key in keys if isinstance(fields[key], bytes) and fields[key]]
    assert torn
    for key in torn:
        copy = fields.copy()
        copy[key] = copy[key][:-1]
        with pytest.raises(msgspec.ValidationError, match="bytes"):
            msgspec.msgpack.decode(msgspec.msgpack.encode(copy), type=type(message))


def test_a_token_of_no_stream_does_not_decode() -> None:
    with pytest.raises(ValueError, match="different numbers"):
        StepTokens(1, stream_ids=pack([1]), token_ids=pack([2, 3]))
