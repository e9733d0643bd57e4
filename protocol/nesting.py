"""The depth of untyped data, which is limited where it comes in."""

from collections.abc import Iterable
from typing import Any

from msgspec.structs import astuple

MAX_DEPTH = 64
"""levels of lists and maps in one field. What recurses over a request on its way (encoders, chat
templates, grammar compilers) has room for many times as many."""
_SCALARS = frozenset({str, int, float, bool, type(None), bytes})


def is_too_deep(value: object) -> bool:
    """Return True if `value`, as msgspec decodes it, has more than MAX_DEPTH levels."""
    level = [] if type(value) in _SCALARS else [value]
    for _ in range(MAX_DEPTH):
        if not level:
            return False
        level = [child for one in level for child in _children(one) if type(child) not in _SCALARS]
    return bool(level)


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, list):
        return value
    if isinstance(value, dict):
        return value.values()
    return astuple(value) if hasattr(value, "__struct_fields__") else ()
