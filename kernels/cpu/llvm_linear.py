"""Matrix products of rows with a weight as the checkpoint stores it, [out_features, in_features].

A tile of rows and columns is in registers. Vectors run along in_features; each result is the sum of
its lanes, added in one fixed order. A result thus has the same bits in every tile, so that a row's
bits do not depend on the number of rows or of threads.

For more rows than a tile has, a part of four columns is widened once to float32 in the first-level
cache (packing as in GotoBLAS, doi:10.1145/1356052.1356053), and all rows are multiplied with it.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from penstock.kernels.cpu.compiler import Target
from penstock.kernels.cpu.emitter import Kernel, Variable
from penstock.kernels.cpu.integer_pointer import IntegerKind, IntegerPointer, Kind, weight_pointer
from penstock.kernels.cpu.llvm_elementwise import add_lanes, silu
from penstock.kernels.cpu.llvm_integer_dot import (
    LANES,
    MAX_ROWS,
    MAX_UNIT_WORDS,
    integer_dot_tile,
    unit_words,
)
from penstock.kernels.cpu.values import Pointer, Value
from penstock.kernels.quantize.integers import UNIT

STORE, ADD, SWIGLU = range(3)
COLUMNS = 4  # columns of a tile: four outputs, or in SwiGLU two of the gate and two of up
BLOCK_BYTES = 256 << 10  # of input rows that are multiplied with all columns before the next rows
UNROLLED = 4  # vectors of a turn of the loop along in_features
PACKED = 1024  # in_features of a packed part of columns
CACHE_LINE = 64
# bytes by which a single column is prefetched; a CPU foresees memory only to the end of a page
AHEAD = 8192
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
    add_products(k, target, xs, ws, size, sums, ahead)
    return [add_lanes([total.value for total in row], lanes) for row in sums]


def add_products(
    k: Kernel,
    target: Target,
    xs: list[Pointer],
    ws: Sequence[Pointer],
    size: "Value | int",
    sums: list[list[Variable]],
    ahead: Value | None = None,
    stride: int = 1,
) -> None:
    """Add the products of each x with each of the ws to the sums of lanes.

    size, ahead: as in `dot_tile`. stride: 1, or COLUMNS for ws whose vectors alternate in memory.
    """
    lanes = target.lanes

    def add(at: "Value | int", count: Value | None = None) -> None:
        values = [x.vector(at, lanes, count) for x in xs]
        # one column at a time: the sums leave few registers
        for number, w in enumerate(ws):
            column = w.vector(at * stride, lanes, count)
            for value, row in zip(values, sums, strict=True):
                row[number].value = value.fma(column, row[number].value)

    group = UNROLLED * lanes
    lines = range(0, group, CACHE_LINE * 8 // ws[0].bits)
    whole = size - size % group
    with k.range(0, whole, group) as at:
        if ahead is not None:
            for w, first in itertools.product(ws, lines):
                (w + at).prefetch(ahead + first)
        for first in range(0, group, lanes):
            add(at + first)
    if isinstance(size, int):
        for rest in range(size - size % group, size, lanes):
            add(rest)
        return
    with k.range(whole, size, lanes) as at:
        add(at, size - at)


def emit_product(k: Kernel, target: Target, kind: Kind, rounding: Kernel | None) -> None:
    """Multiply rows with columns `begin` to `end` of a weight of a kind.

    Arguments: mode (STORE, ADD to `out`, SWIGLU), x, weight, its scales, size (in_features),
    columns (all of the result), begin, end, num_rows, out, scratch (`scratch_words`). `begin`
    divides by 4. rounding: of a row for a weight of integers.
    """
    mode, x, codes, scales, size, columns, begin, end, num_rows, out, scratch = k.arguments
    weight = weight_pointer(kind, codes, scales)
    step = (mode.compare("==", SWIGLU)).choose(k.integer(COLUMNS // 2), COLUMNS)
    rows_of_block = k.integer(BLOCK_BYTES // 4) // size
    rows_of_tile = min(target.rows, MAX_ROWS) if rounding else target.rows
    rows_of_block = rows_of_block - rows_of_block % rows_of_tile + rows_of_tile
    with k.range(0, num_rows, rows_of_block) as first:
        last = k.smaller(first + rows_of_block, num_rows)
        rows = _Rows(x + first * size, size)
        if isinstance(kind, IntegerKind) and rounding:
            rows = _Rows(scratch, size // UNIT * unit_words(kind))
            with k.range(0, last - first) as row:
                k.call(rounding, x + (first + row) * size, size, rows.at(row))
        place = _Place(k, target, mode, rows, size, columns, out + first * columns, scratch)
        rest = (end - begin) % step
        if rounding or target.lanes > LANES:
            # a CPU foresees one stream of memory better than four; adding short vectors of float32
            # to one sum is slower than memory
            rest = num_rows.compare("==", 1).choose(end - begin, rest)
        with k.range(begin, end - rest, step) as column:
            _columns(place, weight, column, last - first, rows_of_tile)
        with k.range(end - rest, end) as column, k.range(0, last - first) as row:
            with k.when(mode.compare("!=", SWIGLU)):
                place.tile([row], [weight + column * size], column)
            with k.when(mode.compare("==", SWIGLU)):
                pair = [weight + column * size, weight + (column + columns) * size]
                place.tile([row], pair, column)


def scratch_words(target: Target, inputs: Sequence[int]) -> int:
    """Return the words of 4 bytes of a thread's scratch; inputs: in_features of all weights."""
    units = [(BLOCK_BYTES // 4 // size + target.rows) * -(-size // UNIT) for size in inputs]
    num_rows = BLOCK_BYTES // 4 // PACKED + target.rows
    packed = COLUMNS * (PACKED + num_rows * target.lanes)
    return max(packed, max(units) * MAX_UNIT_WORDS)


class _Rows(NamedTuple):
    """Rows of the input, float32 or rounded."""

    x: Pointer
    stride: Value

    def at(self, row: Value) -> Pointer:
        return self.x + row * self.stride


def _columns(
    place: "_Place", weight: Weight, column: Value, num_rows: Value, rows_of_tile: int
) -> None:
    """Multiply all rows with a column of tiles."""
    k, size = place.k, place.size
    is_swiglu = place.mode.compare("==", SWIGLU)
    ws: list[Any] = []
    for index in range(COLUMNS):
        own = column + index
        of_pair = column + index % 2 + (place.columns if index > 1 else 0)
        ws.append(weight + is_swiglu.choose(of_pair, own) * size)

    def tile(row: Value, number: int) -> None:
        place.tile([row + index for index in range(number)], ws, column)

    if isinstance(weight, IntegerPointer):
        k.tiles(0, num_rows, rows_of_tile, tile)
        return
    with k.when(num_rows < rows_of_tile + 1):
        k.tiles(0, num_rows, rows_of_tile, tile)
    with k.when(num_rows > rows_of_tile), k.range(0, size, PACKED) as begin:
        _pack(place, [w + begin for w in ws], k.smaller(size - begin, PACKED))

        def part(row: Value, number: int) -> None:
            place.part([row + index for index in range(number)], begin, column)

        k.tiles(0, num_rows, rows_of_tile, part)


def _pack(place: "_Place", ws: Sequence[Pointer], size: Value) -> None:
    """Widen `size` elements of the ws side by side, and prefetch the next columns."""
    k, lanes = place.k, place.target.lanes

    def pack(at: Value, count: Value | None = None) -> None:
        for number, w in enumerate(ws):
            place.packed[at * COLUMNS + number * lanes] = w.vector(at, lanes, count)

    line = CACHE_LINE * 8 // ws[0].bits
    whole = size - size % line
    with k.range(0, whole, line) as at:
        for w in ws:
            (w + at).prefetch(place.size * COLUMNS)
        for first in range(0, line, lanes):
            pack(at + first)
    with k.range(whole, size, lanes) as at:
        pack(at, size - at)


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
        scratch: Pointer,
    ) -> None:
        self.k, self.target, self.mode = k, target, mode
        self.rows, self.size, self.columns, self.out = rows, size, columns, out
        self.packed, self.sums = scratch, scratch + PACKED * COLUMNS

    def tile(self, rows: list[Value], ws: Sequence[Any], column: Value) -> None:
        """Multiply rows with columns and store."""
        ahead = self.size * COLUMNS  # the next columns
        if len(ws) < COLUMNS:
            ahead = self.k.integer(AHEAD * 8 // ws[0].bits)
        multiply = integer_dot_tile if isinstance(ws[0], IntegerPointer) else dot_tile
        xs = [self.rows.at(row) for row in rows]
        self._store(rows, column, multiply(self.k, self.target, xs, ws, self.size, ahead))

    def part(self, rows: list[Value], begin: Value, column: Value) -> None:
        """Multiply rows with the packed part of columns, and store the sums after the last one."""
        k, lanes = self.k, self.target.lanes
        sums = [[k.variable(k.zeros(lanes)) for _ in range(COLUMNS)] for _ in rows]
        before = [self.sums + row * (COLUMNS * lanes) for row in rows]
        places = [
            (total, (of_row, number * lanes))
            for of_row, own in zip(before, sums, strict=True)
            for number, total in enumerate(own)
        ]
        with k.when(begin > 0):
            for total, (of_row, at) in places:
                total.value = of_row.vector(at, lanes)
        xs = [self.rows.at(row) + begin for row in rows]
        ws = [self.packed + number * lanes for number in range(COLUMNS)]
        rest = self.size - begin
        add_products(k, self.target, xs, ws, k.smaller(rest, PACKED), sums, stride=COLUMNS)
        with k.when(rest > PACKED):
            for total, (of_row, at) in places:
                of_row[at] = total.value
        with k.when(rest < PACKED + 1):
            totals = [add_lanes([total.value for total in own], lanes) for own in sums]
            self._store(rows, column, totals)

    def _store(self, rows: list[Value], column: Value, sums: list[Value]) -> None:
        """Store the products of rows with columns."""
        k, size = self.k, sums[0].raw.type.count
        places = [self.out + (row * self.columns + column) for row in rows]
        if half := size // 2:
            with k.when(self.mode.compare("==", SWIGLU)):
                for total, place in zip(sums, places, strict=True):
                    gate, up = total.lanes(range(half)), total.lanes(range(half, 2 * half))
                    place[0] = silu(gate) * up
        with k.when(self.mode.compare("==", STORE)):
            for total, place in zip(sums, places, strict=True):
                place[0] = total
        with k.when(self.mode.compare("==", ADD)):
            for total, place in zip(sums, places, strict=True):
                place[0] = place.vector(0, size) + total
