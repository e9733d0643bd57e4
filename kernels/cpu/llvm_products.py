"""Matrix products of rows with a weight as the checkpoint stores it, [out_features, in_features].

A tile of rows and columns is in registers. Vectors run along in_features; each result is the sum of
its lanes, added in one fixed order. A result thus has the same bits in every tile. A row's bits do
not depend on the number of rows or of threads.

With more rows than a tile has, a part of four columns is widened once to float32 in the first-level
cache (packing as in GotoBLAS, doi:10.1145/1356052.1356053). All rows are multiplied by this part.

Weights may be integers, for which activations are rounded to 8 bits. An activation has a scale for
each 32 columns. Products of four adjacent bytes add up to a lane of int32, in one instruction where
the CPU has it. The instructions of x86 multiply unsigned by signed bytes. The codes of weights
therefore have an offset, and sums start at a value that cancels it. Sums of integers are exact.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from penstock.kernels.cpu.compiler import Target
from penstock.kernels.cpu.llvm_elementwise import ROUND, add_lanes, silu
from penstock.kernels.cpu.values import FLOAT, INT8, INT16, INT32, Kernel, Pointer, Value, Variable
from penstock.kernels.packed.matrices import UNIT, Integers


class IntegerKind(NamedTuple):
    """Kind of a matrix of integers."""

    bits: int
    group_size: int = 64
    has_shift: bool = False


Kind = str | IntegerKind  # kind of a matrix: "f32", "bf16", "f16" or a kind of integers


def integer_kind(matrix: Integers) -> IntegerKind:
    """Return the kind of a matrix."""
    return IntegerKind(matrix.bits, matrix.group_size, matrix.has_shift)


class IntegerPointer:
    """Pointer to a unit of a matrix of `Integers`."""

    def __init__(self, codes: Pointer, scales: Pointer, kind: IntegerKind) -> None:
        """Point to the unit with these codes, in the group with this scale."""
        self.kind = kind
        self.codes, self._scales = codes, scales
        self._stride = 2 if kind.has_shift else 1
        self.bits = kind.bits

    def __add__(self, columns: "Value | int") -> "IntegerPointer":
        """Return a pointer to a later unit; columns: a multiple of UNIT, from a group's begin."""
        codes = self.codes + columns // (8 // self.kind.bits)
        scales = self._scales + columns // self.kind.group_size * self._stride
        return IntegerPointer(codes, scales, self.kind)

    def scale(self, first: int, count: int) -> Value:
        """Return the scale of `count` columns; several scales come as a lane per 4 columns."""
        return self._of_groups(first, count, 0)

    def shift(self, first: int, count: int) -> Value:
        """Return the shift in the same form as `scale`."""
        return self._of_groups(first, count, 1)

    def _of_groups(self, first: int, count: int, part: int) -> Value:
        size = self.kind.group_size
        begin = first // size * self._stride
        if count <= size:
            return self._scales[begin + part]
        both = self._scales.vector(begin, 2 * self._stride)
        return both.lanes([lane * 4 // size * self._stride + part for lane in range(count // 4)])

    def prefetch(self, columns: "Value | int") -> None:
        """Prefetch the cache line of the codes `columns` ahead."""
        self.codes.prefetch(columns // (8 // self.kind.bits))


def element(kind: Kind) -> str:
    """Return the element type in memory for a kind of matrix."""
    return kind if isinstance(kind, str) else "i8"


def name_of(kind: Kind) -> str:
    """Return the part of a function's name that stands for a kind."""
    return kind if isinstance(kind, str) else "q" + "_".join(str(int(part)) for part in kind)


BLOCK = 32  # columns that share a scale of an activation
LANES = BLOCK // 4  # sums per block
# 4-byte words of the codes of a unit of activations, and of each of three parts that follow. For
# each 4 codes, these parts hold the initial sum (int32), the scale and, with a shift, the sum of
# the codes times the scale
PART = UNIT // 4
SUMS, SCALES, SHIFTED = PART, 2 * PART, 3 * PART  # words of a unit before each part
MAX_UNIT_WORDS = 4 * PART
MAX_CODE = 127
MAX_ROWS = 4  # maximum rows of a tile; more would leave too few registers for codes and scales
UNROLLED = 4  # units per iteration of a loop with few sums


def unit_words(kind: IntegerKind) -> int:
    """Return the number of words of a unit of activations, for weights of this kind."""
    return MAX_UNIT_WORDS if kind.has_shift else 3 * PART


def code_offset(target: Target, bits: int) -> int:
    """Return the offset that codes of weights have in products."""
    if bits == 4:
        return 8
    return 128 if _has_vnni(target) else 0


def _has_vnni(target: Target) -> bool:
    """Return True if one instruction multiplies unsigned by signed bytes and adds four products."""
    return target.has("avxvnni" if target.lanes == LANES else "avx512vnni")


def emit_rounding(k: Kernel, target: Target, kind: IntegerKind) -> None:
    """Round rows to 8 bits, for products with weights of this kind.

    Arguments: x, number of elements (whole units), out. The scale of a block with NaN or infinity
    is NaN.
    """
    x, size, out = k.arguments
    lanes, bits = target.lanes, kind.bits
    offset = code_offset(target, bits)
    with k.range(0, size, BLOCK) as at:
        values = [x.vector(at + first, lanes) for first in range(0, BLOCK, lanes)]
        largest, wrong = k.zeros(lanes), k.zeros(lanes)
        for vector in values:
            absolute = vector.intrinsic("fabs")
            largest = (absolute > largest).choose(absolute, largest)
            wrong = vector.fma(vector.constant(0.0), wrong)
        most = largest.intrinsic("vector.reduce.fmax", FLOAT)
        factor = (most > 0.0).choose(MAX_CODE / most, 0.0)
        codes = out + at // UNIT * unit_words(kind) + at % UNIT // 4
        for index, vector in enumerate(values):
            shifted = vector.fma(vector.splat(factor), vector.constant(ROUND))
            codes[index * lanes // 4] = shifted.bits(INT32).truncate(INT8)
        words = codes.vector(0, LANES).bits(INT32)
        zeros, whole = words.constant(0), words.bits(INT8, BLOCK)
        sums = dot(target, bits, zeros, whole.constant(offset), whole)
        (codes + SUMS)[0] = zeros - sums
        scale = most * (1.0 / MAX_CODE) + add_lanes([wrong], lanes).lane(0)
        scales = k.zeros(LANES).splat(scale)
        (codes + SCALES)[0] = scales
        if kind.has_shift:
            # 4-bit codes are bytes with the same positive value, signed or unsigned
            ones = dot(target, 4, zeros, whole.constant(1), whole)
            (codes + SHIFTED)[0] = ones.to_float() * scales


def integer_dot_tile(
    k: Kernel,
    target: Target,
    xs: list[Pointer],
    ws: Sequence[IntegerPointer],
    size: Value,
    ahead: Value | None = None,
) -> list[Value]:
    """Compute `dot_tile`; xs: rows rounded by `emit_rounding`."""
    sums = [[k.variable(k.zeros(target.lanes)) for _ in ws] for _ in xs]
    unrolled = UNROLLED if len(xs) * len(ws) <= 2 else 1  # few sums take little time each
    whole, words = size - size % (unrolled * UNIT), unit_words(ws[0].kind)

    def accumulate(at: Value, number: int) -> None:
        units, rows = [w + at for w in ws], [x + at // UNIT * words for x in xs]
        for index in range(number):
            own = [unit + index * UNIT for unit in units]
            if ahead is not None:
                for unit in own:
                    unit.prefetch(ahead)
            _add_unit(k, target, own, [row + index * words for row in rows], sums)

    with k.range(0, whole, unrolled * UNIT) as at:
        accumulate(at, unrolled)
    if unrolled > 1:
        with k.range(whole, size, UNIT) as at:
            accumulate(at, 1)
    return [add_lanes([total.value for total in row], target.lanes) for row in sums]


def _add_unit(
    k: Kernel,
    target: Target,
    units: list[IntegerPointer],
    xs: list[Pointer],
    sums: list[list[Variable]],
) -> None:
    """Add the products of a unit of columns to the sums of each x with each weight."""
    kind, lanes = units[0].kind, target.lanes
    has_offset = code_offset(target, kind.bits) > 0
    vectors = range(0, PART, lanes)
    # vectors with the same scale of weights are added before they are multiplied by it
    spans = [vectors] if kind.group_size >= UNIT else [[lane] for lane in vectors]
    for span, (number, unit) in itertools.product(spans, enumerate(units)):
        k.forget()
        place = 4 * span[0], 4 * lanes
        columns = [_codes(unit, 4 * lane, 4 * lanes, target) for lane in span]
        scale = unit.scale(*place)
        for x, row in zip(xs, sums, strict=True):
            total, own = row[number], k.zeros(lanes)
            for lane, column in zip(span, columns, strict=True):
                codes = (x + lane).vector(0, lanes).bits(INT8, 4 * lanes)
                first = (x + SUMS).vector(lane, lanes) if has_offset else k.zeros(lanes)
                first = first.bits(INT32)
                products = dot(target, kind.bits, first, column, codes).to_float()
                scales = (x + SCALES).vector(lane, lanes)
                own = products * scales if lane == span[0] else products.fma(scales, own)
                if kind.has_shift:
                    ones = (x + SHIFTED).vector(lane, lanes)
                    total.value = unit.shift(*place).fma(ones, total.value)
            total.value = scale.fma(own, total.value)


def _codes(unit: IntegerPointer, first: int, count: int, target: Target) -> Value:
    """Return codes of a unit as bytes, including their offset."""
    if unit.kind.bits == 8:
        codes = unit.codes.vector(first, count)
        return codes ^ 128 if _has_vnni(target) else codes
    both = unit.codes.vector(0, UNIT // 2)
    if count == UNIT // 2:
        return (both.shift_right(4) if first else both) & 15
    twice = both.lanes([*range(count // 2)] * 2).bits(INT32, count // 4)
    shifts = [0] * (count // 8) + [4] * (count // 8)
    return (twice.shift_right(shifts) & 0x0F0F0F0F).bits(INT8, count)


def dot(target: Target, bits: int, sums: Value, weights: Value, codes: Value) -> Value:
    """Return the sums plus the products of four adjacent bytes each.

    weights: bytes from `_codes`. codes: int8.
    """
    lanes = sums.raw.type.count
    if _has_vnni(target):
        return sums.call(f"llvm.x86.avx512.vpdpbusd.{32 * lanes}", sums, weights, codes)
    if lanes > LANES:  # the instructions have fewer lanes
        halves = [
            dot(target, bits, *(_half(vector, index) for vector in (sums, weights, codes)))
            for index in range(2)
        ]
        return halves[0].lanes(range(lanes), halves[1])
    if target.has("avx2"):
        if bits == 8:  # larger products would saturate the instruction
            codes = codes.call("llvm.x86.avx2.psign.b", codes, weights)
            weights = (weights < 0).choose(0 - weights, weights)
        pairs = sums.bits(INT16, 2 * lanes)
        pairs = pairs.call("llvm.x86.avx2.pmadd.ub.sw", weights, codes)
        return sums + sums.call("llvm.x86.avx2.pmadd.wd", pairs, pairs.constant(1))
    if target.has("dotprod"):
        name = "llvm.aarch64.neon.sdot.v4i32.v16i8"
        parts = [[_half(vector, index) for vector in (sums, weights, codes)] for index in range(2)]
        low, high = (part[0].call(name, *part) for part in parts)
        return low.lanes(range(lanes), high)
    products = weights.widened(INT32) * codes.widened(INT32)
    for first in range(4):
        sums = sums + products.lanes(range(first, 4 * lanes, 4))
    return sums


def _half(vector: Value, index: int) -> Value:
    size = vector.raw.type.count // 2
    return vector.lanes(range(index * size, (index + 1) * size))


STORE, ADD, SWIGLU = range(3)
COLUMNS = 4  # columns of a tile: four outputs, or with SwiGLU two of gate and two of up
BLOCK_BYTES = 256 << 10  # bytes of input rows multiplied by all columns before the next rows
UNROLLED_VECTORS = 4  # vectors per iteration of the loop along in_features
PACKED = 1024  # in_features of a packed part of columns
CACHE_LINE = 64
# bytes by which a single column is prefetched; a CPU predicts reads only to the end of a page
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

    size: a multiple of the vector's lanes if it is a number. ahead: elements of the ws that are
    prefetched, as a distance.
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

    size, ahead: see `dot_tile`. stride: 1, or COLUMNS if the vectors of the ws alternate in memory.
    """
    lanes = target.lanes

    def add(at: "Value | int", count: Value | None = None) -> None:
        values = [x.vector(at, lanes, count) for x in xs]
        # one column at a time, since the sums leave few registers
        for number, w in enumerate(ws):
            column = w.vector(at * stride, lanes, count)
            for value, row in zip(values, sums, strict=True):
                row[number].value = value.fma(column, row[number].value)

    group = UNROLLED_VECTORS * lanes
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
    """Multiply rows by columns `begin` to `end` of a weight of this kind.

    Arguments: mode (STORE, ADD to `out`, SWIGLU), x, weight, its scales, size (in_features),
    columns (of the whole result), begin, end, num_rows, out, scratch (`scratch_words`). `begin` is
    a multiple of 4. rounding: rounds a row for a weight of integers.
    """
    mode, x, codes, scales, size, columns, begin, end, num_rows, out, scratch = k.arguments
    weight = codes if isinstance(kind, str) else IntegerPointer(codes, scales, kind)
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
            # a CPU predicts one stream of memory better than four; for float32, adding short
            # vectors to one sum is slower than memory
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
    """Return the 4-byte words of a thread's scratch memory; inputs: in_features of all weights."""
    units = [(BLOCK_BYTES // 4 // size + target.rows) * -(-size // UNIT) for size in inputs]
    num_rows = BLOCK_BYTES // 4 // PACKED + target.rows
    packed = COLUMNS * (PACKED + num_rows * target.lanes)
    return max(packed, max(units) * MAX_UNIT_WORDS)


class _Rows(NamedTuple):
    """Rows of the input, in float32 or rounded."""

    x: Pointer
    stride: Value

    def at(self, row: Value) -> Pointer:
        return self.x + row * self.stride


def _columns(
    place: "_Place", weight: Weight, column: Value, num_rows: Value, rows_of_tile: int
) -> None:
    """Multiply all rows by a tile's columns."""
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
    """Widen `size` elements of the ws into adjacent memory, and prefetch the next columns."""
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
    """Rows of the input, and the destination of their products."""

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
        """Multiply rows by columns and store the products."""
        ahead = self.size * COLUMNS  # the next columns
        if len(ws) < COLUMNS:
            ahead = self.k.integer(AHEAD * 8 // ws[0].bits)
        multiply = integer_dot_tile if isinstance(ws[0], IntegerPointer) else dot_tile
        xs = [self.rows.at(row) for row in rows]
        self._store(rows, column, multiply(self.k, self.target, xs, ws, self.size, ahead))

    def part(self, rows: list[Value], begin: Value, column: Value) -> None:
        """Multiply rows by the packed part of columns, and store the sums after the last part."""
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
        """Store the products of rows and columns."""
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
