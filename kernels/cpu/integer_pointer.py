"""Access to matrices of `Integers` in code that is being emitted."""

from typing import Any, NamedTuple

from penstock.kernels.cpu.values import Pointer, Value
from penstock.kernels.quantize.integers import Integers


class IntegerKind(NamedTuple):
    """A kind of matrices of integers."""

    bits: int
    group_size: int = 64
    has_shift: bool = False


Kind = str | IntegerKind  # of a matrix: "f32", "bf16", "f16" or one of integers


def integer_kind(matrix: Integers) -> IntegerKind:
    """Return the kind of a matrix."""
    return IntegerKind(matrix.bits, matrix.group_size, matrix.has_shift)


class IntegerPointer:
    """A unit in a matrix of `Integers`."""

    def __init__(self, codes: Pointer, scales: Pointer, kind: IntegerKind) -> None:
        """Point to the unit that has these codes, in the group that has this scale."""
        self.kind = kind
        self.codes, self._scales = codes, scales
        self._stride = 2 if kind.has_shift else 1
        self.bits = kind.bits

    def __add__(self, columns: "Value | int") -> "IntegerPointer":
        """Return a later unit; columns: a multiple of UNIT, from the begin of a group."""
        codes = self.codes + columns // (8 // self.kind.bits)
        scales = self._scales + columns // self.kind.group_size * self._stride
        return IntegerPointer(codes, scales, self.kind)

    def scale(self, first: int, count: int) -> Value:
        """Return the scale of `count` columns, for 4 columns a lane if they have several."""
        return self._of_groups(first, count, 0)

    def shift(self, first: int, count: int) -> Value:
        """Return the shift, as `scale` does."""
        return self._of_groups(first, count, 1)

    def _of_groups(self, first: int, count: int, part: int) -> Value:
        size = self.kind.group_size
        begin = first // size * self._stride
        if count <= size:
            return self._scales[begin + part]
        both = self._scales.vector(begin, 2 * self._stride)
        return both.lanes([lane * 4 // size * self._stride + part for lane in range(count // 4)])

    def prefetch(self, columns: "Value | int") -> None:
        """Start to read the cache line of the codes after `columns`."""
        self.codes.prefetch(columns // (8 // self.kind.bits))


def weight_pointer(kind: Kind, codes: Pointer, scales: Pointer) -> Any:
    """Return the pointer to a matrix of a kind."""
    return codes if isinstance(kind, str) else IntegerPointer(codes, scales, kind)


def element(kind: Kind) -> str:
    """Return the elements in memory of a kind of matrix."""
    return kind if isinstance(kind, str) else "i8"


def name_of(kind: Kind) -> str:
    """Return a part of a function's name."""
    return kind if isinstance(kind, str) else "q" + "_".join(str(int(part)) for part in kind)
