"""Triton's interpreter, made faster: it makes the same types again for each operation.

What is replaced returns the same values and raises the same errors. Operations are of few numbers,
so this took most of the tests' time.
"""

import functools
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from triton._utils import validate_block_shape
from triton.language import core
from triton.runtime import interpreter

checked_numel = functools.cache(validate_block_shape)
scalar_type = functools.cache(interpreter._get_np_dtype)


def speed_up() -> None:
    """Replace slow functions of the interpreter in this process."""
    # once for each function, not for each call of it
    interpreter._patch_lang = functools.cache(interpreter._patch_lang)
    interpreter._LangPatchScope.restore = lambda _: None
    # overflows are computed, but without `debug` nobody looks at them
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
    interpreter._get_np_dtype = _numpy_type
    type(builder).create_masked_store = _store
    core.block_type.__init__ = _make_block_type
    core.block_type.name = property(lambda kind: f"<{kind.shape}, {kind.element_ty}>")
    core.tensor.__init__ = _make_tensor


def _store(_: object, pointers: Any, value: Any, mask: Any, *__: object) -> Any:
    """Store, also what was broadcast: Triton 3.7 refuses such arrays, which are read-only."""
    arrays = (np.require(handle.data, requirements="W") for handle in (pointers, value, mask))
    return interpreter._interpreter.store(*arrays)


def _numpy_type(kind: core.dtype) -> np.dtype[Any]:
    """Return a type's type in NumPy, in which pointers are integers."""
    scalar = kind.scalar
    return np.dtype(np.uint64) if scalar.is_ptr() else scalar_type(scalar)


def _make_block_type(self: core.block_type, element_ty: core.dtype, shape: Iterable[Any]) -> None:
    self.element_ty = element_ty
    self.shape = tuple(one.value if isinstance(one, core.constexpr) else one for one in shape)
    if not self.shape:
        raise TypeError("0d block_type is forbidden")
    self.numel = checked_numel(self.shape)


def _make_tensor(self: core.tensor, handle: Any, kind: core.dtype) -> None:
    self.handle, self.type, self.dtype = handle, kind, kind.scalar
    self.shape, self.numel = _constants(kind.shape if kind.is_block() else ())


@functools.cache
def _constants(shape: tuple[int, ...]) -> tuple[core.tuple, core.constexpr]:
    """Return a shape and the number of its elements as tensors have them."""
    return core.tuple([core.constexpr(one) for one in shape]), core.constexpr(math.prod(shape))
