"""Functions of LLVM IR that Python emits; numbers and pointers are written as arithmetic.

`range` and `when` become loops and branches; Python's own loops unroll. Vectors have a fixed number
of lanes, and every fused multiply-add is explicit. The bits of a result thus do not depend on
LLVM's vectorization.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

INT64, INT32, INT16, INT8 = (ir.IntType(bits) for bits in (64, 32, 16, 8))
FLOAT = ir.FloatType()
POINTER = ir.PointerType()
HALF = ir.HalfType()
KINDS = {
    "f32": FLOAT,
    "bf16": INT16,
    "f16": INT16,
    "i8": INT8,
    "i32": INT32,
    "i64": INT64,
}
PREFETCH = "llvm.prefetch.p0"
BYTES = {"f32": 4, "bf16": 2, "f16": 2, "i8": 1, "i32": 4, "i64": 8}


class Value:
    """Integer, float32, truth value, or vector of these."""

    def __init__(self, builder: Any, raw: Any) -> None:
        self._builder = builder
        self.raw = raw

    @property
    def _element(self) -> Any:
        kind = self.raw.type
        return kind.element if isinstance(kind, ir.VectorType) else kind

    def lift(self, other: "Value | float | list[int]") -> Any:
        """Return `other` as a raw value of this value's type; a list has an element per lane."""
        kind = self.raw.type
        if isinstance(other, list):
            return ir.Constant(kind, other)
        if not isinstance(kind, ir.VectorType):
            return other.raw if isinstance(other, Value) else ir.Constant(kind, other)
        if not isinstance(other, Value):
            return ir.Constant(kind, [other] * kind.count)
        if isinstance(other.raw.type, ir.VectorType):
            return other.raw
        return splat(self._builder, other.raw, kind.count)

    def _binary(self, name: str, other: "Value | float", swapped: bool = False) -> "Value":
        left, right = self.raw, self.lift(other)
        if swapped:
            left, right = right, left
        name = f"f{name}" if self._element == FLOAT else name
        return Value(self._builder, getattr(self._builder, name)(left, right))

    def __add__(self, other: "Value | float") -> "Value":
        return self._binary("add", other)

    def __sub__(self, other: "Value | float") -> "Value":
        return self._binary("sub", other)

    def __rsub__(self, other: "Value | float") -> "Value":
        return self._binary("sub", other, swapped=True)

    def __mul__(self, other: "Value | float") -> "Value":
        return self._binary("mul", other)

    def __truediv__(self, other: "Value | float") -> "Value":
        return self._binary("div", other)

    def __rtruediv__(self, other: "Value | float") -> "Value":
        return self._binary("div", other, swapped=True)

    def __floordiv__(self, other: "Value | int") -> "Value":
        return Value(self._builder, self._builder.udiv(self.raw, self.lift(other)))

    def __mod__(self, other: "Value | int") -> "Value":
        return Value(self._builder, self._builder.urem(self.raw, self.lift(other)))

    def compare(self, operator: str, other: "Value | float") -> "Value":
        """Return the truth of `self operator other`; False for NaN."""
        name = "fcmp_ordered" if self._element == FLOAT else "icmp_signed"
        compare = getattr(self._builder, name)
        return Value(self._builder, compare(operator, self.raw, self.lift(other)))

    def __and__(self, other: "Value | int") -> "Value":
        return self._bitwise("and_", other)

    def __or__(self, other: "Value | int") -> "Value":
        return self._bitwise("or_", other)

    def __xor__(self, other: "Value | int") -> "Value":
        return self._bitwise("xor", other)

    def _bitwise(self, name: str, other: "Value | int") -> "Value":
        return Value(self._builder, getattr(self._builder, name)(self.raw, self.lift(other)))

    def __lt__(self, other: "Value | float") -> "Value":
        return self.compare("<", other)

    def __gt__(self, other: "Value | float") -> "Value":
        return self.compare(">", other)

    def __ge__(self, other: "Value | float") -> "Value":
        return self.compare(">=", other)

    def constant(self, number: float) -> "Value":
        """Return a number as a value of this type."""
        return Value(self._builder, self.lift(number))

    def choose(self, yes: "Value", no: "Value | float") -> "Value":
        """Return `yes` where this truth value is true, and `no` elsewhere."""
        return Value(self._builder, self._builder.select(self.raw, yes.raw, yes.lift(no)))

    def fma(self, factor: "Value", term: "Value") -> "Value":
        """Return self * factor + term, rounded once; self may be a scalar."""
        kind = term.raw.type
        left, right = term.lift(self), term.lift(factor)
        arguments = [left, right, term.raw]
        return Value(self._builder, intrinsic(self._builder, "fma", kind, arguments, kind))

    def lane(self, index: "int | Value") -> "Value":
        where = index.raw if isinstance(index, Value) else INT32(index)
        return Value(self._builder, self._builder.extract_element(self.raw, where))

    def lanes(self, indices: Sequence[int], other: "Value | None" = None) -> "Value":
        """Return a vector of elements of this vector, then of `other`."""
        mask = ir.Constant(ir.VectorType(INT32, len(indices)), list(indices))
        second = other.raw if other else ir.Constant(self.raw.type, ir.Undefined)
        return Value(self._builder, self._builder.shuffle_vector(self.raw, second, mask))

    def intrinsic(self, name: str, result: Any = None) -> "Value":
        """Return LLVM's intrinsic of this value; result: type of the result, if different."""
        kind = self.raw.type
        return Value(
            self._builder, intrinsic(self._builder, name, result or kind, [self.raw], kind)
        )

    def bits(self, element: Any, count: int = 0) -> "Value":
        """Reinterpret the bits as another element type; count: number of elements, if different."""
        kind = ir.VectorType(element, count) if count else self._like(element)
        return Value(self._builder, self._builder.bitcast(self.raw, kind))

    def call(self, name: str, *arguments: "Value") -> "Value":
        """Return the result of an intrinsic, given its full name; it has this value's type."""
        raw = [argument.raw for argument in arguments]
        function = self._builder.module.globals.get(name)
        if function is None:
            kind = ir.FunctionType(self.raw.type, [argument.type for argument in raw])
            function = ir.Function(self._builder.module, kind, name)
        return Value(self._builder, self._builder.call(function, raw))

    def to_float(self) -> "Value":
        return Value(self._builder, self._builder.sitofp(self.raw, self._like(FLOAT)))

    def to_unsigned_float(self) -> "Value":
        return Value(self._builder, self._builder.uitofp(self.raw, self._like(FLOAT)))

    def shift_left(self, bits: int) -> "Value":
        return Value(self._builder, self._builder.shl(self.raw, self.lift(bits)))

    def shift_right(self, bits: int | list[int]) -> "Value":
        """Shift the bits right, filling with zeros; a list has a shift per lane."""
        return Value(self._builder, self._builder.lshr(self.raw, self.lift(bits)))

    def truncate(self, element: Any = INT32) -> "Value":
        """Return the low bits as a smaller integer type."""
        return Value(self._builder, self._builder.trunc(self.raw, self._like(element)))

    def widened(self, element: Any) -> "Value":
        """Return signed integers as a larger type."""
        return Value(self._builder, self._builder.sext(self.raw, self._like(element)))

    def multiply_wide(self, factor: int) -> "tuple[Value, Value]":
        """Return the high and the low words of the unsigned products of int32."""
        wide = Value(self._builder, self._builder.zext(self.raw, self._like(INT64)))
        product = wide * factor
        return product.shift_right(32).truncate(), product.truncate()

    def splat(self, scalar: "Value") -> "Value":
        """Return a vector of this type with the scalar in every lane."""
        return Value(self._builder, splat(self._builder, scalar.raw, self.raw.type.count))

    def _like(self, element: Any) -> Any:
        """Return this type with another element type."""
        kind = self.raw.type
        return ir.VectorType(element, kind.count) if isinstance(kind, ir.VectorType) else element


class Pointer:
    """Place in an array of a kind; 16-bit elements are read as float32, "i32" as int64."""

    def __init__(self, builder: Any, raw: Any, kind: str) -> None:
        self._builder = builder
        self.raw = raw
        self.kind = kind

    def __add__(self, index: "Value | int") -> "Pointer":
        where = index.raw if isinstance(index, Value) else INT64(index)
        moved = self._builder.gep(self.raw, [where], source_etype=KINDS[self.kind])
        return Pointer(self._builder, moved, self.kind)

    @property
    def bits(self) -> int:
        """Return the bits of an element."""
        return 8 * BYTES[self.kind]

    def __getitem__(self, index: "Value | int") -> Value:
        raw = self._builder.load((self + index).raw, typ=KINDS[self.kind], align=BYTES[self.kind])
        if self.kind == "i32":
            raw = self._builder.sext(raw, INT64)
        return Value(self._builder, raw)

    def __setitem__(self, index: "Value | int", value: Value) -> None:
        raw = value.raw
        if self.kind == "i32":
            raw = self._builder.trunc(raw, INT32)
        self._builder.store(raw, (self + index).raw, align=BYTES[self.kind])

    def vector(self, index: "Value | int", size: int, count: "Value | None" = None) -> Value:
        """Return a vector of `size` lanes; lanes from `count` on are 0 and not read."""
        at, element = self + index, KINDS[self.kind]
        kind = ir.VectorType(element, size)
        if count is None:
            raw = self._builder.load(at.raw, typ=kind, align=BYTES[self.kind])
        else:
            iota = Value(self._builder, ir.Constant(ir.VectorType(INT64, size), list(range(size))))
            arguments = [at.raw, (iota < count).raw, ir.Constant(kind, [0] * size)]
            raw = intrinsic(self._builder, "masked.load", kind, arguments, kind, ".p0")
        if self.kind == "f16":
            half = self._builder.bitcast(raw, ir.VectorType(HALF, size))
            return Value(self._builder, self._builder.fpext(half, ir.VectorType(FLOAT, size)))
        if self.kind != "bf16":
            return Value(self._builder, raw)
        wide = Value(self._builder, self._builder.zext(raw, ir.VectorType(INT32, size)))
        return wide.shift_left(16).bits(FLOAT)

    def prefetch(self, index: "Value | int" = 0) -> None:
        """Prefetch the cache line of an element, which may lie outside of the array.

        The line is fetched into the second level: the first level has too few buffers for reads
        from memory.
        """
        function = self._builder.module.globals.get(PREFETCH)
        if function is None:
            kinds = [POINTER, INT32, INT32, INT32]
            kind = ir.FunctionType(ir.VoidType(), kinds)
            function = ir.Function(self._builder.module, kind, PREFETCH)
        is_write, second_level, is_data = INT32(0), INT32(2), INT32(1)
        self._builder.call(function, [(self + index).raw, is_write, second_level, is_data])

    def pointer(self, index: "Value | int", kind: str) -> "Pointer":
        """Return the pointer stored here as an int64."""
        return Pointer(self._builder, self._builder.inttoptr(self[index].raw, POINTER), kind)


def splat(builder: Any, scalar: Any, size: int) -> Any:
    """Return a vector that has the scalar in every lane."""
    empty = ir.Constant(ir.VectorType(scalar.type, size), ir.Undefined)
    first = builder.insert_element(empty, scalar, INT32(0))
    return builder.shuffle_vector(first, empty, ir.Constant(ir.VectorType(INT32, size), [0] * size))


def intrinsic(
    builder: Any, name: str, result: Any, arguments: list[Any], kind: Any, suffix: str = ""
) -> Any:
    """Call LLVM's intrinsic `name` with values of type `kind`."""
    element, count = (kind.element, f"v{kind.count}") if is_vector(kind) else (kind, "")
    short = "f32" if element == FLOAT else f"i{element.width}"
    full = f"llvm.{name}.{count}{short}{suffix}"
    function = builder.module.globals.get(full)
    if function is None:
        types = [argument.type for argument in arguments]
        function = ir.Function(builder.module, ir.FunctionType(result, types), full)
    return builder.call(function, arguments)


def is_vector(kind: Any) -> bool:
    """Return True for a vector type."""
    return isinstance(kind, ir.VectorType)


class Variable:
    """Value that loops and branches change."""

    def __init__(self, builder: Any, initial: Value) -> None:
        self._builder = builder
        self._kind = initial.raw.type
        with builder.goto_entry_block():
            self._place = builder.alloca(self._kind)
        self.value = initial

    @property
    def value(self) -> Value:
        return Value(self._builder, self._builder.load(self._place, typ=self._kind))

    @value.setter
    def value(self, value: Value) -> None:
        self._builder.store(value.raw, self._place)


class Kernel:
    """Function that is being emitted."""

    def __init__(
        self, module: ir.Module, name: str, arguments: str, *, public: bool = False
    ) -> None:
        """Begin a function; arguments: kinds of pointers, or "int", separated by spaces."""
        kinds = arguments.split()
        types = [INT64 if kind == "int" else POINTER for kind in kinds]
        self.function = ir.Function(module, ir.FunctionType(ir.VoidType(), types), name)
        if not public:
            self.function.linkage = "internal"
            # emit one copy of each function: LLVM would inline them, and copy them for constant
            # arguments
            self.function.attributes.add("noinline")
            self.function.attributes.add("optsize")
        self.builder = builder = ir.IRBuilder(self.function.append_basic_block())
        self.arguments: list[Any] = [
            Value(builder, raw) if kind == "int" else Pointer(builder, raw, kind)
            for raw, kind in zip(self.function.args, kinds, strict=True)
        ]

    def call(self, kernel: "Kernel", *arguments: "Value | Pointer | int") -> None:
        raw = [
            INT64(argument) if isinstance(argument, int) else argument.raw for argument in arguments
        ]
        self.builder.call(kernel.function, raw)

    def integer(self, value: int) -> Value:
        return Value(self.builder, INT64(value))

    def real(self, value: float) -> Value:
        return Value(self.builder, FLOAT(value))

    def zeros(self, size: int) -> Value:
        return Value(self.builder, ir.Constant(ir.VectorType(FLOAT, size), [0.0] * size))

    def iota(self, size: int) -> Value:
        """Return the vector 0, 1, 2... of int64."""
        return Value(self.builder, ir.Constant(ir.VectorType(INT64, size), list(range(size))))

    def variable(self, initial: Value) -> Variable:
        return Variable(self.builder, initial)

    def array(self, size: int, kind: str = "f32") -> Pointer:
        """Return memory for numbers, which is valid until the function returns."""
        with self.builder.goto_entry_block():
            raw = self.builder.alloca(ir.ArrayType(KINDS[kind], size))
            raw.align = 64
        raw.type = POINTER  # pointer to any element type
        return Pointer(self.builder, raw, kind)

    def forget(self) -> None:
        """Make LLVM read memory again after this point: registers for old values are scarce."""
        nothing = ir.FunctionType(ir.VoidType(), [])
        self.builder.asm(nothing, "", "~{memory}", [], side_effect=True)

    def smaller(self, left: Value, right: "Value | int") -> Value:
        right = Value(self.builder, left.lift(right))
        return (left < right).choose(left, right)

    @contextmanager
    def range(
        self, begin: "Value | int", end: "Value | int", step: "Value | int" = 1
    ) -> Iterator[Value]:
        b = self.builder
        first, last, by = (INT64(n) if isinstance(n, int) else n.raw for n in (begin, end, step))
        before = b.block
        head, body, done = (b.append_basic_block() for _ in range(3))
        b.branch(head)
        b.position_at_end(head)
        index = b.phi(INT64)
        index.add_incoming(first, before)
        b.cbranch(b.icmp_signed("<", index, last), body, done)
        b.position_at_end(body)
        yield Value(b, index)
        index.add_incoming(b.add(index, by), b.block)
        b.branch(head)
        b.position_at_end(done)

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        with self.builder.if_then(condition.raw):
            yield

    def tiles(
        self, begin: "Value | int", end: Value, most: int, tile: Callable[[Value, int], None]
    ) -> None:
        """Call tile(first, number) for tiles of `most`, then for smaller powers of two."""
        rest = (end - begin) % most
        whole = end - rest
        with self.range(begin, whole, most) as first:
            tile(first, most)
        for number in (size for size in (4, 2, 1) if size < most):
            with self.when(rest % (2 * number) >= number):
                tile(whole + (rest - rest % (2 * number)), number)


def emitted(
    module: ir.Module,
    name: str,
    arguments: str,
    body: Callable[..., None],
    *own: Any,
    public: bool = False,
) -> Kernel:
    """Return the function that `body(kernel, *own)` emits; arguments, public: as in `Kernel`."""
    kernel = Kernel(module, name, arguments, public=public)
    body(kernel, *own)
    kernel.builder.ret_void()
    return kernel


class Record:
    """Named int64 values in memory, which are sizes and addresses."""

    def __init__(self, place: Pointer, names: Sequence[str]) -> None:
        self._place, self._names = place, names

    def __getitem__(self, name: str) -> Value:
        return self._place[self._names.index(name)]

    def at(self, name: str, kind: str = "f32") -> Pointer:
        """Return an address as a pointer to elements of this kind."""
        return self._place.pointer(self._names.index(name), kind)
