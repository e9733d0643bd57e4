"""RoPE of a checkpoint: where its base and its scaling are written, and what is served.

`config.json` has `rope_theta` and `rope_scaling`, whose type stood under `type` once;
transformers 5 writes both into `rope_parameters`. Served are RoPE as it is and YaRN (Peng et al.
2023, https://arxiv.org/abs/2309.00071).
"""

import math
from typing import Any, NamedTuple

DEFAULT_BASE = 10_000.0
"""transformers' own"""
SERVED_TYPES = ("default", "yarn")


class Yarn(NamedTuple):
    """Frequencies and positions beyond those that the model was trained with."""

    factor: float
    """by which low frequencies are divided"""
    original_positions: int
    """of the training"""
    beta_fast: float
    """frequencies that turn more often in the original positions are kept"""
    beta_slow: float
    """frequencies that turn less often are divided by `factor`"""
    truncate: bool
    """the bounds of the frequencies between are whole numbers"""
    attention_factor: float
    """of cosines and sines"""


class Rope(NamedTuple):
    """Rotary position embedding."""

    base: float
    yarn: Yarn | None
    num_positions: int
    """longest context"""


def read_rope(
    theta: float | None,
    scaling: dict[str, Any] | None,
    parameters: dict[str, Any] | None,
    num_positions: int,
    original_positions: int | None,
) -> Rope:
    """Reads the fields `rope_theta`, `rope_scaling`, `rope_parameters`,
    `max_position_embeddings` and `original_max_position_embeddings` of `config.json`.

    `rope_scaling` wins over `rope_parameters`. Raises ValueError for what is not served.
    """
    parameters = _flat(parameters or {})
    fields = {**parameters, **(scaling or {})}
    kinds = {_type(some) for some in (scaling or {}, parameters)} - {"default"}
    if len(kinds) > 1:
        raise ValueError(f"rope_scaling and rope_parameters: got {sorted(kinds)}, expected one")
    kind = kinds.pop() if kinds else "default"
    if kind not in SERVED_TYPES:
        served = " or ".join(map(repr, SERVED_TYPES))
        raise ValueError(f"rope_type: got {kind!r}, expected {served}")
    if _number(fields, "partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            f"partial_rotary_factor: got {fields['partial_rotary_factor']}, expected 1"
        )
    base = _number(fields, "rope_theta", theta or DEFAULT_BASE)
    if kind == "default":
        return Rope(base, None, num_positions)
    yarn = _yarn(fields, num_positions, original_positions)
    return Rope(base, yarn, int(yarn.original_positions * yarn.factor))


def _flat(parameters: dict[str, Any]) -> dict[str, Any]:
    """transformers 5 may write them for each type of layer, of which one is served."""
    nested = parameters.get("full_attention")
    return nested if isinstance(nested, dict) else parameters


def _type(fields: dict[str, Any]) -> str:
    return str(fields.get("rope_type") or fields.get("type") or "default")


def _yarn(fields: dict[str, Any], num_positions: int, original_positions: int | None) -> Yarn:
    """Reads YaRN's fields as transformers does."""
    original = original_positions or int(
        _number(fields, "original_max_position_embeddings", num_positions)
    )
    factor = _number(fields, "factor", num_positions / original)
    if factor < 1:
        raise ValueError(f"rope_scaling's factor: got {factor}, expected 1 or more")
    m_scale, m_scale_all = (_number(fields, name, 0.0) for name in ("mscale", "mscale_all_dim"))
    both = m_scale and m_scale_all
    factors = (m_scale, m_scale_all) if both else (1.0, 0.0)
    wide, narrow = (0.1 * scale * math.log(factor) + 1.0 for scale in factors)
    return Yarn(
        factor=factor,
        original_positions=original,
        beta_fast=_number(fields, "beta_fast", 32.0),
        beta_slow=_number(fields, "beta_slow", 1.0),
        truncate=bool(fields.get("truncate", True)),
        attention_factor=_number(fields, "attention_factor", wide / narrow),
    )


def _number(fields: dict[str, Any], name: str, default: float) -> float:
    value = fields.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{name}: got {value!r}, expected a number from 0 on")
    return float(value) or default
