"""What the text of an answer must match."""

from typing import Annotated, Any

from msgspec import Meta, Struct

MAX_GRAMMAR_BYTES = 1 << 16
"""of a schema, a regex, the choices or a grammar; longer ones are refused"""


class StructuredOutputs(Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Exactly one of these; named as in vLLM."""

    json: Any | None = None
    """a JSON schema: a map, or its text"""
    json_object: bool = False
    """any JSON object"""
    regex: Annotated[str, Meta(min_length=1)] | None = None
    """matches the whole text"""
    choice: Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1)] | None = None
    """one of these texts"""
    grammar: Annotated[str, Meta(min_length=1)] | None = None
    """a Lark grammar in llguidance's dialect, which has `%json {…}` too"""
