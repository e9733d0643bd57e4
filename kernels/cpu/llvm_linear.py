"""Matrix products of rows with a weight as the checkpoint stores it, [out_features, in_features].

A tile of rows and columns is in registers. Vectors run along in_features; each result is the sum of
its lanes, added in one fixed order. A result thus has the same bits in every tile, so that a row's
bits do not depend on the number of rows or of threads.
"""

from collections.abc import Sequence

from penstock.kernels.cpu.compiler import Target
from penstock.kernels.cpu.emitter import Kernel
from penstock.kernels.cpu.integers import GROUP, IntegerPointer, weight_pointer
from penstock.kernels.cpu.llvm_elementwise import add_lanes, silu
from penstock.kernels.cpu.values import Pointer, Value

STORE, ADD, SWIGLU = range(3)
COLUMNS = 4
"""columns of a tile: four outputs, or in SwiGLU two of the gate and two of up"""
BLOCK_BYTES = 256 << 10
"""of input rows that are multiplied with all columns before the next rows"""
WIDENED_ROWS = 12
"""rows from which columns of fewer bits are widened in memory, once for all rows"""
Weight = Pointer | IntegerPointer


def dot_tile(
    k: Kernel,
    target: Target,
    xs: list[Pointer],
    ws: Sequence[Weight],
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

    plain = [w for w in ws if isinstance(w, Pointer)]
    if not plain:
        with k.range(0, size, GROUP) as at:
            groups = [w.group(at) for w in ws if isinstance(w, IntegerPointer)]
            prefetch(at)
            for first in range(0, GROUP, lanes):
                accumulate(at + first, [group.vector(first, lanes) for group in groups])
    else:
        with k.range(0, size - size % lanes, lanes) as at:
            prefetch(at)
            accumulate(at, [w.vector(at, lanes) for w in plain])
        if isinstance(size, Value):
            whole = size - size % lanes
            count = size - whole
            with k.when(whole < size):
                accumulate(whole, [w.vector(whole, lanes, count) for w in plain], count)
    return [add_lanes([total.value for total in row], lanes) for row in sums]


def emit_product(k: Kernel, target: Target, kind: str) -> None:
    """Multiply rows with columns `begin` to `end` of a weight of a kind.

    Arguments: mode (STORE, ADD to `out`, SWIGLU), x, weight, its scales, size (in_features),
    columns (all of the result), begin, end, num_rows, out, scratch (COLUMNS * size float32).
    `begin` divides by 4.
    """
    mode, x, codes, scales, size, columns, begin, end, num_rows, out, scratch = k.arguments
    weight = weight_pointer(kind, codes, scales)
    step = (mode.compare("==", SWIGLU)).choose(k.integer(COLUMNS // 2), COLUMNS)
    rows_of_block = k.integer(BLOCK_BYTES // 4) // size
    rows_of_block = rows_of_block - rows_of_block % target.rows + target.rows
    place = _Place(k, target, mode, x, size, columns, out)
    with k.range(0, num_rows, rows_of_block) as first:
        last = k.smaller(first + rows_of_block, num_rows)
        # a CPU foresees one stream of memory better than four
        is_alone = (num_rows.compare("==", 1)) * (mode.compare("!=", SWIGLU))
        if isinstance(weight, IntegerPointer):
            is_alone = num_rows < 0  # never: one sum at a time would take longer than memory
        rest = is_alone.choose(end - begin, (end - begin) % step)
        with k.range(begin, end - rest, step) as column:
            _columns(place, weight, scratch, column, first, last)
        with k.range(end - rest, end) as column, k.range(first, last) as row:
            place.tile([row], [weight + column * size], column)


def _columns(
    place: "_Place", weight: Weight, scratch: Pointer, column: Value, first: Value, last: Value
) -> None:
    k, size = place.k, place.size
    is_swiglu = place.mode.compare("==", SWIGLU)
    ws: list[Weight] = []
    for index in range(COLUMNS):
        own = column + index
        of_pair = column + index % 2 + (place.columns if index > 1 else 0)
        ws.append(weight + is_swiglu.choose(of_pair, own) * size)
    if weight.kind == "f32":
        place.rows(ws, column, first, last)
        return
    is_long = last - first >= WIDENED_ROWS
    with k.when(is_long):
        for index, w in enumerate(ws):
            _widen(place, w, scratch + size * index)
        place.rows([scratch + size * index for index in range(COLUMNS)], column, first, last)
    with k.when(is_long.compare("==", 0)):
        place.rows(ws, column, first, last, is_streamed=True)


def _widen(place: "_Place", source: Weight, to: Pointer) -> None:
    lanes = place.target.lanes
    if isinstance(source, IntegerPointer):
        with place.k.range(0, place.size, GROUP) as at:
            group = source.group(at)
            for first in range(0, GROUP, lanes):
                to[at + first] = group.vector(first, lanes)
        return
    whole = place.size - place.size % lanes
    with place.k.range(0, whole, lanes) as at:
        to[at] = source.vector(at, lanes)
    with place.k.range(whole, place.size) as at:
        to[at] = source.vector(at, 1).lane(0)


class _Place:
    """Rows of the input, and where their products go."""

    def __init__(
        self,
        k: Kernel,
        target: Target,
        mode: Value,
        x: Pointer,
        size: Value,
        columns: Value,
        out: Pointer,
    ) -> None:
        self.k, self.target, self.mode = k, target, mode
        self.x, self.size, self.columns, self.out = x, size, columns, out

    def rows(
        self,
        ws: Sequence[Weight],
        column: Value,
        first: Value,
        last: Value,
        is_streamed: bool = False,
    ) -> None:
        """Multiply rows `first` to `last` with a column of tiles.

        is_streamed: the ws are read from memory, for few rows.
        """

        def tile(row: Value, number: int) -> None:
            self.tile([row + index for index in range(number)], ws, column, is_streamed)

        self.k.tiles(first, last, self.target.rows, tile)

    def tile(
        self, rows: list[Value], ws: Sequence[Weight], column: Value, is_streamed: bool = False
    ) -> None:
        """Multiply rows with columns and store."""
        k = self.k
        xs = [self.x + row * self.size for row in rows]
        # the next columns; a CPU foresees neither four streams nor what comes after a page
        ahead = self.size * COLUMNS if is_streamed else None
        sums = dot_tile(k, self.target, xs, ws, self.size, ahead)
        places = [self.out + (row * self.columns + column) for row in rows]
        if len(ws) == COLUMNS:
            with k.when(self.mode.compare("==", SWIGLU)):
                for total, place in zip(sums, places, strict=True):
                    place[0] = silu(total.lanes([0, 1])) * total.lanes([2, 3])
        with k.when(self.mode.compare("==", STORE)):
            for total, place in zip(sums, places, strict=True):
                place[0] = total
        with k.when(self.mode.compare("==", ADD)):
            for total, place in zip(sums, places, strict=True):
                place[0] = place.vector(0, len(ws)) + total
