"""Matrix products of rows with a weight as the checkpoint stores it, [out_features, in_features].

A tile of rows and columns is in registers. Vectors run along in_features; each result is the sum of
its lanes, added in one fixed order. A result thus has the same bits in every tile, so that a row's
bits do not depend on the number of rows or of threads.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from penstock.kernels.cpu.compiler import Target
from penstock.kernels.cpu.emitter import Kernel
from penstock.kernels.cpu.integer_pointer import IntegerPointer, Kind, weight_pointer
from penstock.kernels.cpu.llvm_elementwise import add_lanes, silu
from penstock.kernels.cpu.llvm_integer_dot import MAX_UNIT_WORDS, integer_dot_tile, unit_words
from penstock.kernels.cpu.values import Pointer, Value
from penstock.kernels.quantize.integers import UNIT

STORE, ADD, SWIGLU = range(3)
COLUMNS = 4
"""columns of a tile: four outputs, or in SwiGLU two of the gate and two of up"""
BLOCK_BYTES = 256 << 10
"""of input rows that are multiplied with all columns before the next rows"""
AHEAD = 8192
"""columns of integers that are prefetched of a single stream; a CPU foresees longer rows itself"""
Weight = Pointer | IntegerPointer


def dot_tile(
    k: Kernel,
    target: Target,
    xs: list[Pointer],
    ws: Sequence[Pointer],
    size: "Value | int",
    ahead: Value | None = None,
) -> list[Value]:
    """Return for each x the vector of its products with the ws, over `size` elements.

    size: a number is a multiple of the vector's lanes. ahead: distance of elements of the ws that
    are prefetched meanwhile.
    """
    lanes = target.lanes
    sums = [[k.variable(k.zeros(lanes)) for _ in ws] for _ in xs]

    def accumulate(at: Value, columns: list[Value], count: Value | None = None) -> None:
        for x, row in zip(xs, sums, strict=True):
            values = x.vector(at, lanes, count)
            for column, total in zip(columns, row, strict=True):
                total.value = values.fma(column, total.value)

    def prefetch(at: Value) -> None:
        if ahead is not None:
            for w in ws:
                (w + at).prefetch(ahead)

    with k.range(0, size - size % lanes, lanes) as at:
        prefetch(at)
        accumulate(at, [w.vector(at, lanes) for w in ws])
    if isinstance(size, Value):
        whole = size - size % lanes
        count = size - whole
        with k.when(whole < size):
            accumulate(whole, [w.vector(whole, lanes, count) for w in ws], count)
    return [add_lanes([total.value for total in row], lanes) for row in sums]


def emit_product(k: Kernel, target: Target, kind: Kind, rounding: Kernel | None) -> None:
    """Multiply rows with columns `begin` to `end` of a weight of a kind.

    Arguments: mode (STORE, ADD to `out`, SWIGLU), x, weight, its scales, size (in_features),
    columns (all of the result), begin, end, num_rows, out, scratch (`scratch_words`). `begin`
    divides by 4. rounding: of the rows, for a weight of integers.
    """
    mode, x, codes, scales, size, columns, begin, end, num_rows, out, scratch = k.arguments
    weight = weight_pointer(kind, codes, scales)
    step = (mode.compare("==", SWIGLU)).choose(k.integer(COLUMNS // 2), COLUMNS)
    rows_of_block = k.integer(BLOCK_BYTES // 4) // size
    rows_of_block = rows_of_block - rows_of_block % target.rows + target.rows
    with k.range(0, num_rows, rows_of_block) as first:
        last = k.smaller(first + rows_of_block, num_rows)
        rows = _Rows(x + first * size, size)
        if rounding:
            k.call(rounding, rows.x, (last - first) * size, scratch)
            rows = _Rows(scratch, size // UNIT * unit_words(weight.kind))
        place = _Place(k, target, mode, rows, size, columns, out + first * columns)
        # a CPU foresees one stream of memory better than four
        rest = num_rows.compare("==", 1).choose(end - begin, (end - begin) % step)
        with k.range(begin, end - rest, step) as column:
            _columns(place, weight, column, last - first)
        with k.range(end - rest, end) as column, k.range(0, last - first) as row:
            with k.when(mode.compare("!=", SWIGLU)):
                place.tile([row], [weight + column * size], column)
            with k.when(mode.compare("==", SWIGLU)):
                pair = [weight + column * size, weight + (column + columns) * size]
                place.tile([row], pair, column)


def scratch_words(target: Target, inputs: Sequence[int]) -> int:
    """Return the words of 4 bytes of a thread's scratch; inputs: in_features of all weights."""
    return (BLOCK_BYTES // 4 + target.rows * max(inputs)) // UNIT * MAX_UNIT_WORDS


class _Rows(NamedTuple):
    """Rows of the input, float32 or rounded."""

    x: Pointer
    stride: Value

    def at(self, row: Value) -> Pointer:
        return self.x + row * self.stride


def _columns(place: "_Place", weight: Weight, column: Value, num_rows: Value) -> None:
    size = place.size
    is_swiglu = place.mode.compare("==", SWIGLU)
    ws: list[Any] = []
    for index in range(COLUMNS):
        own = column + index
        of_pair = column + index % 2 + (place.columns if index > 1 else 0)
        ws.append(weight + is_swiglu.choose(of_pair, own) * size)
    place.multiply(ws, column, num_rows)


class _Place:
    """Rows of the input, and where their products go."""

    def __init__(
        self,
        k: Kernel,
        target: Target,
        mode: Value,
        rows: _Rows,
        size: Value,
        columns: Value,
        out: Pointer,
    ) -> None:
        self.k, self.target, self.mode = k, target, mode
        self.rows, self.size, self.columns, self.out = rows, size, columns, out

    def multiply(self, ws: Sequence[Weight], column: Value, num_rows: Value) -> None:
        """Multiply all rows with a column of tiles."""

        def tile(row: Value, number: int) -> None:
            self.tile([row + index for index in range(number)], ws, column)

        self.k.tiles(0, num_rows, self.target.rows, tile)

    def tile(self, rows: list[Value], ws: Sequence[Any], column: Value) -> None:
        """Multiply rows with columns and store."""
        k = self.k
        # the next columns; a CPU foresees neither four streams nor what comes after a page
        ahead = self.size * COLUMNS if len(ws) == COLUMNS else None
        is_integer = isinstance(ws[0], IntegerPointer)
        if len(ws) < COLUMNS and is_integer:
            ahead = k.integer(AHEAD)
        multiply = integer_dot_tile if is_integer else dot_tile
        sums = multiply(k, self.target, [self.rows.at(row) for row in rows], ws, self.size, ahead)
        places = [self.out + (row * self.columns + column) for row in rows]
        if half := len(ws) // 2:
            with k.when(self.mode.compare("==", SWIGLU)):
                for total, place in zip(sums, places, strict=True):
                    gate, up = total.lanes(range(half)), total.lanes(range(half, 2 * half))
                    place[0] = silu(gate) * up
        with k.when(self.mode.compare("==", STORE)):
            for total, place in zip(sums, places, strict=True):
                place[0] = total
        with k.when(self.mode.compare("==", ADD)):
            for total, place in zip(sums, places, strict=True):
                place[0] = place.vector(0, len(ws)) + total
