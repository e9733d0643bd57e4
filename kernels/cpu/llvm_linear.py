"""Matrix products of rows with a weight as the checkpoint stores it, [out_features, in_features].

A tile of rows and columns is in registers. Vectors run along in_features; each result is the sum of
its lanes, added in one fixed order. A result thus has the same bits in every tile, so that a row's
bits do not depend on the number of rows or of threads.

Two adjacent bfloat16 are read as an int32: a shift leaves the even element as float32, a mask the
odd one. Rows are therefore stored in the same order before: even columns, then odd ones.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from penstock.kernels.cpu.compiler import Target
from penstock.kernels.cpu.emitter import Kernel
from penstock.kernels.cpu.integer_pointer import IntegerKind, IntegerPointer, Kind, weight_pointer
from penstock.kernels.cpu.llvm_elementwise import add_lanes, silu
from penstock.kernels.cpu.llvm_integer_dot import (
    MAX_ROWS,
    MAX_UNIT_WORDS,
    integer_dot_tile,
    unit_words,
)
from penstock.kernels.cpu.values import Pointer, Value
from penstock.kernels.quantize.integers import UNIT

STORE, ADD, SWIGLU = range(3)
COLUMNS = 4
"""columns of a tile: four outputs, or in SwiGLU two of the gate and two of up"""
BLOCK_BYTES = 256 << 10
"""of input rows that are multiplied with all columns before the next rows"""
AHEAD = 8192
"""bytes by which a single column is prefetched; a CPU foresees memory only to the end of a page"""
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
    are prefetched meanwhile. xs of bfloat16 ws: from `emit_deinterleaving`.
    """
    lanes = target.lanes
    sums = [[k.variable(k.zeros(lanes)) for _ in ws] for _ in xs]
    is_split = ws[0].kind == "bf16"
    width = 2 * lanes if is_split else lanes

    def add(at: Value, columns: Sequence[Value], count: Value | None = None) -> None:
        for x, row in zip(xs, sums, strict=True):
            values = x.vector(at, lanes, count)
            for column, total in zip(columns, row, strict=True):
                total.value = values.fma(column, total.value)

    def accumulate(at: Value, count: Value | None = None) -> None:
        if not is_split:
            add(at, [w.vector(at, lanes, count) for w in ws], count)
            return
        evens, odds = zip(*(w.halves(at, lanes, count) for w in ws), strict=True)
        add(at, evens)
        add(at + lanes, odds)

    whole = size - size % width
    with k.range(0, whole, width) as at:
        if ahead is not None:
            for w in ws:
                (w + at).prefetch(ahead)
        accumulate(at)
    if isinstance(whole, Value):
        with k.when(whole < size):
            accumulate(whole, size - whole)
    return [add_lanes([total.value for total in row], lanes) for row in sums]


def emit_deinterleaving(k: Kernel, target: Target) -> None:
    """Write groups of columns of a row as `Pointer.halves` widens them: even ones, then odd ones.

    Arguments: x, size, out. Columns of the last group after `size` are 0.
    """
    x, size, out = k.arguments
    lanes = target.lanes
    with k.range(0, size, 2 * lanes) as at:
        low = x.vector(at, lanes, size - at)
        high = x.vector(at + lanes, lanes, size - (at + lanes))
        for part in range(2):
            out[at + part * lanes] = low.lanes(range(part, 2 * lanes, 2), high)


def emit_product(k: Kernel, target: Target, kind: Kind, preparation: Kernel | None) -> None:
    """Multiply rows with columns `begin` to `end` of a weight of a kind.

    Arguments: mode (STORE, ADD to `out`, SWIGLU), x, weight, its scales, size (in_features),
    columns (all of the result), begin, end, num_rows, out, scratch (`scratch_words`). `begin`
    divides by 4. preparation: of a row for a weight of this kind.
    """
    mode, x, codes, scales, size, columns, begin, end, num_rows, out, scratch = k.arguments
    weight = weight_pointer(kind, codes, scales)
    step = (mode.compare("==", SWIGLU)).choose(k.integer(COLUMNS // 2), COLUMNS)
    rows_of_block = k.integer(BLOCK_BYTES // 4) // size
    rows_of_tile = _rows_of_tile(target, kind)
    rows_of_block = rows_of_block - rows_of_block % rows_of_tile + rows_of_tile
    with k.range(0, num_rows, rows_of_block) as first:
        last = k.smaller(first + rows_of_block, num_rows)
        rows = _Rows(x + first * size, size)
        if preparation:
            rows = _Rows(scratch, _prepared_words(target, kind, size))
            with k.range(0, last - first) as row:
                k.call(preparation, x + (first + row) * size, size, rows.at(row))
        place = _Place(k, target, mode, rows, size, columns, out + first * columns)
        # a CPU foresees one stream of memory better than four
        rest = num_rows.compare("==", 1).choose(end - begin, (end - begin) % step)
        with k.range(begin, end - rest, step) as column:
            _columns(place, weight, column, last - first, rows_of_tile)
        with k.range(end - rest, end) as column, k.range(0, last - first) as row:
            with k.when(mode.compare("!=", SWIGLU)):
                place.tile([row], [weight + column * size], column)
            with k.when(mode.compare("==", SWIGLU)):
                pair = [weight + column * size, weight + (column + columns) * size]
                place.tile([row], pair, column)


def _rows_of_tile(target: Target, kind: Kind) -> int:
    """Return the rows of a tile whose sums fit the registers."""
    return min(target.rows, MAX_ROWS) if isinstance(kind, IntegerKind) else target.rows


def _prepared_words(target: Target, kind: Kind, size: Value) -> Value:
    """Return the words of 4 bytes of a prepared row of `size` columns."""
    if isinstance(kind, IntegerKind):
        return size // UNIT * unit_words(kind)
    group = 2 * target.lanes
    return (size + (group - 1)) // group * group


def scratch_words(target: Target, inputs: Sequence[int]) -> int:
    """Return the words of 4 bytes of a thread's scratch; inputs: in_features of all weights."""
    units = [(BLOCK_BYTES // 4 // size + target.rows) * -(-size // UNIT) for size in inputs]
    return max(units) * MAX_UNIT_WORDS


class _Rows(NamedTuple):
    """Rows of the input, float32 or prepared."""

    x: Pointer
    stride: Value

    def at(self, row: Value) -> Pointer:
        return self.x + row * self.stride


def _columns(
    place: "_Place", weight: Weight, column: Value, num_rows: Value, rows_of_tile: int
) -> None:
    """Multiply all rows with a column of tiles."""
    size = place.size
    is_swiglu = place.mode.compare("==", SWIGLU)
    ws: list[Any] = []
    for index in range(COLUMNS):
        own = column + index
        of_pair = column + index % 2 + (place.columns if index > 1 else 0)
        ws.append(weight + is_swiglu.choose(of_pair, own) * size)

    def tile(row: Value, number: int) -> None:
        place.tile([row + index for index in range(number)], ws, column)

    place.k.tiles(0, num_rows, rows_of_tile, tile)


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

    def tile(self, rows: list[Value], ws: Sequence[Any], column: Value) -> None:
        """Multiply rows with columns and store."""
        k = self.k
        ahead = self.size * COLUMNS  # the next columns
        if len(ws) < COLUMNS:
            ahead = k.integer(AHEAD * 8 // ws[0].bits)
        multiply = integer_dot_tile if isinstance(ws[0], IntegerPointer) else dot_tile
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
