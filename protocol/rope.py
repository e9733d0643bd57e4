"""RoPE of a checkpoint: where its base and its scaling are written, and what is served.

`config.json` has `rope_theta` and `rope_scaling`, whose type stood under `type` once;
transformers 5 writes both into `rope_parameters`. Served are RoPE as it is and YaRN (Peng et al.
2023, https://arxiv.org/abs/2309.00071).
"""

import math
from typing import Any, NamedTuple

DEFAULT_BASE = 10_000.0  # transformers' own
SERVED_TYPES = ("default", "yarn")
# YaRN divides by the logarithm; more would make frequencies that float32 does not have
MIN_BASE, MAX_BASE = 2.0, 1e30
MAX_POSITIONS = 1 << 24
Fields = dict[str, tuple[str, Any]]  # name → path in `config.json`, and value


class Yarn(NamedTuple):
    """Frequencies and positions beyond those that the model was trained with."""

    factor: float  # by which low frequencies are divided
    original_positions: int  # of the training
    beta_fast: float  # frequencies that turn more often in the original positions are kept
    beta_slow: float  # frequencies that turn less often are divided by `factor`
    truncate: bool  # the bounds of the frequencies between are whole numbers
    attention_factor: float  # of cosines and sines


class Rope(NamedTuple):
    """Rotary position embedding."""

    base: float
    yarn: Yarn | None
    num_positions: int  # longest context


def read_rope(
    theta: float | None,
    scaling: dict[str, Any] | None,
    parameters: dict[str, Any] | None,
    num_positions: int,
    original_positions: int | None,
) -> Rope:
    """Read the fields of `config.json` about RoPE. Raises ValueError for an unsupported kind.

    `rope_scaling` wins over `rope_parameters`.
    """
    given = {"rope_parameters": _flat(parameters or {}), "rope_scaling": scaling or {}}
    fields = {
        name: (f"{parent}.{name}", value)
        for parent, values in given.items()
        for name, value in values.items()
    }
    kinds = dict(_type(parent, values) for parent, values in given.items())
    kinds.pop("default", None)
    if len(kinds) > 1:
        raise ValueError(f"{' and '.join(kinds.values())}: got {sorted(kinds)}, expected one")
    kind, path = kinds.popitem() if kinds else ("default", "")
    if kind not in SERVED_TYPES:
        raise ValueError(f"{path}: got {kind!r}, expected {' or '.join(map(repr, SERVED_TYPES))}")
    if (part := _number(fields, "partial_rotary_factor", 1.0)) != 1.0:
        raise ValueError(f"{fields['partial_rotary_factor'][0]}: got {part}, expected 1")
    fields.setdefault("rope_theta", ("rope_theta", theta))
    base = _within(fields, "rope_theta", DEFAULT_BASE, MIN_BASE, MAX_BASE)
    if kind == "default":
        return Rope(base, None, num_positions)
    fields.setdefault("factor", (f"{path.partition('.')[0]}.factor", None))
    yarn = _yarn(fields, num_positions, original_positions)
    return Rope(base, yarn, int(yarn.original_positions * yarn.factor))


def _flat(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of `full_attention`: transformers 5 may have some for each layer type.

    Only that type is served.
    """
    nested = parameters.get("full_attention")
    return nested if isinstance(nested, dict) else parameters


def _type(parent: str, fields: dict[str, Any]) -> tuple[str, str]:
    """Return the type of RoPE, and the path of the field that has it."""
    name = "rope_type" if fields.get("rope_type") else "type"
    return str(fields.get(name) or "default"), f"{parent}.{name}"


def _yarn(fields: Fields, num_positions: int, original_positions: int | None) -> Yarn:
    """Read YaRN's fields as transformers does."""
    name = "original_max_position_embeddings"
    if original_positions is not None:
        fields[name] = name, original_positions
    original = int(_within(fields, name, num_positions, 1, MAX_POSITIONS))
    path, given = fields["factor"]
    if given is None and original != num_positions:
        fields["factor"] = path, num_positions / original
    elif given is None:
        raise ValueError(f"{path}: got null, expected 1 or more")
    factor = _within(fields, "factor", 0.0, 1, MAX_POSITIONS / original)
    m_scale, m_scale_all = (_number(fields, name, 0.0) for name in ("mscale", "mscale_all_dim"))
    both = m_scale and m_scale_all
    factors = (m_scale, m_scale_all) if both else (1.0, 0.0)
    wide, narrow = (0.1 * scale * math.log(factor) + 1.0 for scale in factors)
    return Yarn(
        factor=factor,
        original_positions=original,
        beta_fast=_number(fields, "beta_fast", 32.0),
        beta_slow=_number(fields, "beta_slow", 1.0),
        truncate=bool(fields.get("truncate", ("", True))[1]),
        attention_factor=_number(fields, "attention_factor", wide / narrow),
    )


def _within(fields: Fields, name: str, default: float, least: float, most: float) -> float:
    """Return a number. Raises ValueError for one beyond the limits, which 0 is, too."""
    path, value = fields.get(name, (name, None))
    expected = f"{least:g} to {most:g}"
    number = _number(fields, name, default, f"a number of {expected}")
    if value == 0 or not least <= number <= most:
        raise ValueError(f"{path}: got {value}, expected {expected}")
    return number


def _number(
    fields: Fields, name: str, default: float, expected: str = "a number of at least 0"
) -> float:
    path, value = fields.get(name, (name, None))
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{path}: got {value!r}, expected {expected}")
    return float(value) or default
