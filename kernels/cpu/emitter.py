"""Functions of LLVM IR that Python emits.

`range` and `when` become loops and branches; Python's own loops unroll. Vectors have a fixed number
of lanes and every fused multiply-add is explicit, so that the bits of a result do not depend on
what LLVM vectorizes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

from penstock.kernels.cpu.values import FLOAT, INT64, KINDS, POINTER, Pointer, Value


class Variable:
    """A value that loops and branches change."""

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
    """A function that is being emitted."""

    def __init__(
        self, module: ir.Module, name: str, arguments: str, *, public: bool = False
    ) -> None:
        """Begin a function; arguments: kinds of pointers, or "int", by spaces."""
        kinds = arguments.split()
        types = [INT64 if kind == "int" else POINTER for kind in kinds]
        self.function = ir.Function(module, ir.FunctionType(ir.VoidType(), types), name)
        if not public:
            self.function.linkage = "internal"
            # one copy of each: LLVM would inline them, and copy them for constant arguments
            self.function.attributes.add("noinline")
            self.function.attributes.add("optsize")
        self.builder = builder = ir.IRBuilder(self.function.append_basic_block())
        self.arguments: list[Any] = [
            Value(builder, raw) if kind == "int" else Pointer(builder, raw, kind)
            for raw, kind in zip(self.function.args, kinds, strict=True)
        ]

    def end(self) -> None:
        self.builder.ret_void()

    def call(self, kernel: "Kernel", *arguments: "Value | Pointer | int") -> None:
        raw = [INT64(one) if isinstance(one, int) else one.raw for one in arguments]
        self.builder.call(kernel.function, raw)

    def integer(self, value: int) -> Value:
        return Value(self.builder, INT64(value))

    def real(self, value: float) -> Value:
        return Value(self.builder, FLOAT(value))

    def zeros(self, size: int) -> Value:
        return Value(self.builder, ir.Constant(ir.VectorType(FLOAT, size), [0.0] * size))

    def iota(self, size: int) -> Value:
        """Return the vector 0, 1, 2..., of int64."""
        return Value(self.builder, ir.Constant(ir.VectorType(INT64, size), list(range(size))))

    def variable(self, initial: Value) -> Variable:
        return Variable(self.builder, initial)

    def array(self, size: int, kind: str = "f32") -> Pointer:
        """Return memory for numbers, which lasts until the function returns."""
        with self.builder.goto_entry_block():
            raw = self.builder.alloca(ir.ArrayType(KINDS[kind], size))
            raw.align = 64
        raw.type = POINTER  # of any element
        return Pointer(self.builder, raw, kind)

    def forget(self) -> None:
        """Make LLVM read memory again after this point: there are few registers for old values."""
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
        """Call tile(first, number) for tiles of `most`, then for the rest in powers of two."""
        rest = (end - begin) % most
        whole = end - rest
        with self.range(begin, whole, most) as first:
            tile(first, most)
        for number in (size for size in (4, 2, 1) if size < most):
            with self.when(rest % (2 * number) >= number):
                tile(whole + (rest - rest % (2 * number)), number)
