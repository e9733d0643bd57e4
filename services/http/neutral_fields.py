"""Fields of OpenAI's, vLLM's and SGLang's requests that have one meaning here, or none.

Clients often send every field of their own API with its default. A value that changes nothing is
accepted; any other value is refused by the name of its field, never ignored. The fields are in
`neutral_fields.json`.
"""

from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from penstock.services.http.errors import ApiError


class _NeutralFields(Struct, forbid_unknown_fields=True):
    renamed: dict[str, str]
    """SGLang's name → ours"""
    ignored: set[str]
    """Accounting, caches, back ends and parts of models that do not exist here: no value counts."""
    neutral: dict[str, list[Any]]
    """field → values that change nothing; null is always one of them"""


FIELDS = msgspec.json.decode(Path(__file__).with_suffix(".json").read_bytes(), type=_NeutralFields)


def without_neutral(given: dict[str, Any], known: tuple[str, ...]) -> dict[str, Any]:
    """Return the fields that are `known`, by our names, and those that no table has.

    Raises ApiError for a field that would change the answer and is not supported.
    """
    kept = {}
    for name, value in given.items():
        name = FIELDS.renamed.get(name, name)
        accepted = FIELDS.neutral.get(name)
        if name in known or (name not in FIELDS.ignored and accepted is None):
            kept[name] = value
        elif accepted is not None and value not in accepted:
            raise ApiError(400, _refusal(name, value, accepted), name)
    return kept


def _refusal(name: str, value: object, accepted: list[object]) -> str:
    shown = repr(value)
    expected = " or ".join(repr(one) for one in accepted if one not in ({}, [], "")) or "null"
    return (
        f"{name}: got {shown[:60]}{'…' * (len(shown) > 60)}, expected {expected}: it is not "
        "supported; leave it out"
    )
