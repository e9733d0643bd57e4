"""Structured outputs: constraints on the text of an answer."""

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from penstock.protocol.json_schema import within_limit

# how an answer begins: at once; with `<think>` if the model likes; within it, as the prompt has
# opened it. A grammar is for what follows `</think>`
Reasoning = Literal["none", "optional", "open"]
# beginning of the reason why a row ends whose matcher has ended with an error
GRAMMAR_FAILED = "structured_outputs: the grammar failed"
# of a schema, a regex, the choices or a grammar, as JSON; longer ones are refused
MAX_GRAMMAR_BYTES = 1 << 16
# llguidance's LLParserLimits, for whoever compiles one. With them the costliest mask that was found
# takes 0.1 s; they don't bound the time that compiling takes
GRAMMAR_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
# llguidance's options for JSON: a space after `,` and `:` or none, as the model likes it, and no
# other whitespace, of which a small model may write until its tokens are used up. A schema can't
# change them: `lenient` would let keywords pass that are not enforced
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


class StructuredOutputs(Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Exactly one of these; named as in vLLM."""

    json: Any | None = None  # a JSON schema: a map, or its text
    json_object: bool = False  # any JSON object
    # matches the whole text; syntax of Rust's `regex`
    regex: Annotated[str, Meta(min_length=1)] | None = None
    # one of these texts
    choice: Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1)] | None = None
    # a Lark grammar in llguidance's dialect, which has `%json {…}` too
    grammar: Annotated[str, Meta(min_length=1)] | None = None

    def __post_init__(self) -> None:
        fields = self.__struct_fields__
        given = [name for name in fields if getattr(self, name) is not None]
        if not self.json_object:
            given.remove("json_object")
        if len(given) != 1:
            raise ValueError(
                f"got {' and '.join(given) or 'none'}, expected one of {', '.join(fields)}"
            )
        size = len(msgspec.json.encode(getattr(self, given[0])))
        if size > MAX_GRAMMAR_BYTES:
            raise ValueError(f"{given[0]}: got {size} bytes, expected up to {MAX_GRAMMAR_BYTES}")
        if self.json is not None:
            self.schema()

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema as a map. Raises ValueError if `json` is not one."""
        schema = {"type": "object"} if self.json_object else self.json
        if isinstance(schema, str):
            try:
                schema = msgspec.json.decode(schema)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                got = f"json: got {repr(schema)[:64]}, expected a JSON schema, a map or its text"
                raise ValueError(f"{got}; the text is not JSON: {error}") from error
        if not isinstance(schema, dict):
            raise ValueError(f"json: got {repr(schema)[:64]}, expected a JSON schema, a map")
        return schema

    def to_llguidance(self) -> str:
        """Return the grammar in llguidance's own format."""
        if self.json is not None or self.json_object:
            schema = self.schema() | {"x-guidance": JSON_STYLE}
            lark = f"start: %json {msgspec.json.encode(schema).decode()}"
        else:
            lark = self._lark()
        lark = within_limit(lark)
        if _has_token_name(lark):
            lark = f"{NO_FORCING}\n{lark}"
        return msgspec.json.encode({"grammars": [{"lark_grammar": lark}]}).decode()

    def _lark(self) -> str:
        if self.grammar is not None:
            return self.grammar
        if self.regex is not None:
            return f"start: /{re.sub(_UNSAFE, _escape, self.regex)}/"
        texts = (msgspec.json.encode(text).decode() for text in self.choice or [])
        return f"start: CHOICE\nCHOICE: {' | '.join(texts)}"


# names of Qwen's special tokens
_NAME = re.compile(r"<\|\w+\|>|</?(?:think|tool_call|tool_response)>")
# a string or a regex in Lark, or a string in JSON. The last quote or slash may be missing: then the
# search does not begin again within the text, which would take time that grows with its square
_TEXT = re.compile(r'"((?:[^"\\\n]|\\.)*+)"?|/((?:[^/\\\n]|\\.)++)/?')
# an ASCII character by its number
_CODE = re.compile(r"\\(?:u00|x)([0-7][0-9a-fA-F])")
# Text that must follow is allowed in any tokens. Otherwise it is forced in the tokenizer's own:
# then a special token's name would be that token instead of text
NO_FORCING = '%llguidance {"no_forcing": true}'
# what would end a regex in Lark; escaped characters are found first, and left as they are
_UNSAFE = re.compile(r"\\?\n|\\.|/")


def _escape(found: re.Match[str]) -> str:
    return {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}.get(found[0], found[0])


def _has_token_name(lark: str) -> bool:
    """Return whether texts in a grammar may add up to the name of a special token."""
    text = "".join(one[1] or one[2] or "" for one in _TEXT.finditer(lark))
    text = _CODE.sub(lambda found: chr(int(found[1], 16)), text)
    return bool(_NAME.search(re.sub(r"[\\()\[\]]", "", text)))
