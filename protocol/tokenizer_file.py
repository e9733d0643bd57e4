"""Files of a checkpoint about its tokens, read without the tokenizers library.

The files contain the bytes of every token, the end-of-sequence tokens, the tags around reasoning,
the chat templates, and the model's defaults of sampling.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, TypeVar

from msgspec import Meta, Struct, defstruct
from msgspec.structs import asdict, fields

from penstock.protocol.checkpoint import ModelError, read_bytes, read_json, read_model_config
from penstock.protocol.messages.sampling import LOGITS_NUMBERS, NUMBERS, SamplingParams

# the fields that the pipeline uses; a number that is None in a request takes the model's default
_File = defstruct(
    "_File",
    [
        ("eos_token_id", int | list[int] | None, None),
        ("do_sample", bool | None, False),
        *(
            (field.name, field.type, None)
            for field in fields(SamplingParams)
            if field.name in NUMBERS and field.default is None
        ),
    ],
)


class GenerationConfig:
    """A model's end-of-sequence tokens, and its defaults for the numbers of `SamplingParams`."""

    def __init__(
        self,
        eos_token_id: int | list[int] | None = None,
        do_sample: bool | None = False,
        **numbers: float | None,
    ) -> None:
        """Take the fields of the file; without `do_sample` the model is greedy."""
        self.eos_token_id = eos_token_id
        given = {name: number for name, number in numbers.items() if number is not None}
        if do_sample:
            self._defaults = NUMBERS | {"temperature": 1.0} | given
        else:
            kept = given.keys() & LOGITS_NUMBERS.keys()
            self._defaults = NUMBERS | {name: given[name] for name in kept}

    def fill(self, sampling: SamplingParams) -> None:
        """Set the parameters that a request leaves out to the model's defaults."""
        for name, default in self._defaults.items():
            if getattr(sampling, name) is None:
                setattr(sampling, name, default)


def read_generation_config(folder: Path) -> GenerationConfig:
    """Read `generation_config.json`; a missing file means all defaults."""
    path = folder / "generation_config.json"
    return (
        GenerationConfig(**asdict(read_json(path, _File))) if path.exists() else GenerationConfig()
    )


log = logging.getLogger("checkpoint")
T = TypeVar("T")
DEFAULT, TOOL_USE = "default", "tool_use"  # names of chat templates
TEMPLATE_FILE = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"  # folder of files NAME.jinja


class AddedToken(Struct):
    """A token in addition to the model's vocabulary, such as `<|im_end|>`."""

    id: int
    content: str
    special: bool


class Bpe(Struct):
    """The model that makes tokens of bytes."""

    vocab: Annotated[dict[str, int], Meta(min_length=1)]


class _Token(Struct):
    content: str


class _Template(Struct):
    name: str
    template: str


class TokenizerConfig(Struct):
    """The fields of `tokenizer_config.json` that are read here."""

    eos_token: str | _Token | None = None
    chat_template: str | list[_Template] | None = None

    def templates(self) -> dict[str, str]:
        """Return the chat templates by name; a single template is named `default`."""
        if isinstance(self.chat_template, list):
            return {part.name: part.template for part in self.chat_template if part.template}
        return {DEFAULT: self.chat_template} if self.chat_template else {}


class Decoder(Struct):
    """A decoder of bytes, or several in a row."""

    type: str = ""
    decoders: list["Decoder"] = []


class TokenizerFile(Struct):
    """The parts of a `tokenizer.json` from which the bytes of every token follow."""

    decoder: Decoder
    model: Bpe
    added_tokens: list[AddedToken] = []


def read_tokenizer_file(folder: Path) -> TokenizerFile:
    """Read `tokenizer.json`. Raises ModelError if the tokenizer is not byte-level."""
    path = folder / "tokenizer.json"
    file = read_json(path, TokenizerFile)
    kinds = [part.type for part in file.decoder.decoders or [file.decoder]]
    if "ByteLevel" not in kinds:
        raise ModelError(f"{path}: decoder: got {kinds}, expected ByteLevel")
    number = len(file.model.vocab)
    for token in file.added_tokens:
        expected = file.model.vocab.get(token.content, number)
        if token.id != expected:  # the tokenizers library would assign the expected id
            found = f"added_tokens: got id {token.id} of {token.content!r}, expected {expected}"
            raise ModelError(f"{path}: {found}: ids follow those of the vocabulary")
        number += token.id == number
    return file


def byte_characters() -> list[str]:
    """Return the character by which byte-level BPE shows each byte (GPT-2, encoder.py)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    moved = {byte: 256 + i for i, byte in enumerate(others)}
    return [chr(moved.get(byte, byte)) for byte in range(256)]


def read_eos_token_ids(folder: Path) -> list[int]:
    """Return the ids of all end-of-sequence tokens.

    `generation_config.json` has the ids, or else `config.json`; the tokenizer's own id is added.
    Ids that the vocabulary lacks are left out. Logs a warning for these ids, and if no id is left.
    """
    model = read_model_config(folder)
    ids = read_generation_config(folder).eos_token_id
    if ids is None:
        ids = model.eos_token_id
    own = _tokenizer_eos(folder)
    given = [*([ids] if isinstance(ids, int) else ids or []), *([] if own is None else [own])]
    largest = model.vocab_size - 1
    known = [token_id for token_id in dict.fromkeys(given) if 0 <= token_id <= largest]
    for token_id in set(given) - set(known):
        log.warning("%s: eos_token_id: got %d, expected 0 to %d", folder, token_id, largest)
    if not known:
        reason = "answers end at max_tokens or a stop string only"
        log.warning("%s: no eos_token_id in the vocabulary: %s", folder, reason)
    return known


def read_chat_templates(folder: Path) -> dict[str, str]:
    """Return the Jinja sources by name, from the places of transformers. Raises ModelError."""
    file = folder / TEMPLATE_FILE
    files = {DEFAULT: file} if file.exists() else {}
    files |= {path.stem: path for path in (folder / MORE_TEMPLATES).glob("*.jinja")}
    if texts := {name: text for name, path in files.items() if (text := _read_text(path))}:
        return texts
    for path in folder / "chat_template.json", folder / "tokenizer_config.json":
        if path.exists() and (templates := read_json(path, TokenizerConfig).templates()):
            return templates
    return {}


def choose_template(templates: Mapping[str, T], *, has_tools: bool) -> T | None:
    """Return the template that transformers would use: `tool_use` with tools, or `default`."""
    return templates.get(TOOL_USE if has_tools and TOOL_USE in templates else DEFAULT)


def _read_text(path: Path) -> str:
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} is not text in UTF-8: {error}") from error


def _tokenizer_eos(folder: Path) -> int | None:
    """Return the id of `eos_token` in `tokenizer_config.json`, or None without this token."""
    path = folder / "tokenizer_config.json"
    token = read_json(path, TokenizerConfig).eos_token if path.exists() else None
    content = token.content if isinstance(token, _Token) else token
    if content is None or not (folder / "tokenizer.json").exists():
        return None
    tokenizer = read_tokenizer_file(folder)
    added = {token.content: token.id for token in tokenizer.added_tokens}
    return added.get(content, tokenizer.model.vocab.get(content))


THINK, END_THINK = "<think>", "</think>"


class ReasoningTokens(Struct, frozen=True):
    """Ids of the tags around reasoning, -1 if the vocabulary lacks them, and of white space."""

    begin: int = -1
    end: int = -1
    blank: frozenset[int] = frozenset()


NO_TAGS = ReasoningTokens()


class ReasoningTracker:
    """Tracker of reasoning in a chat's output. Its state follows from the tokens alone."""

    def __init__(self, tokens: ReasoningTokens, is_open: bool) -> None:
        """Start before the first token. is_open: whether the prompt ends within reasoning."""
        self._tokens = tokens
        self._may_begin = True
        self.is_open = is_open and tokens.end >= 0  # the last token belongs to reasoning
        self._is_between = False
        # the last token is white space between `</think>` and the answer
        self.is_blank = False

    @property
    def is_over(self) -> bool:
        """True if all further tokens belong to the answer."""
        return not (self.is_open or self._may_begin)

    def feed(self, token_id: int) -> None:
        """Take the next token. Only white space may come before `<think>`."""
        tokens = self._tokens
        if self._may_begin and token_id not in tokens.blank:
            self._may_begin = False
            self.is_open = self.is_open or token_id == tokens.begin
        if self.is_open and token_id == tokens.end:
            self.is_open, self._is_between = False, True
        elif self._is_between:
            self._is_between = self.is_blank = token_id in tokens.blank


def read_reasoning_tokens(folder: Path) -> ReasoningTokens:
    """Read the tokens from a checkpoint. Raises ModelError if its tokenizer is not byte-level."""
    if not (folder / "tokenizer.json").exists():
        return NO_TAGS
    file = read_tokenizer_file(folder)
    ids = file.model.vocab | {token.content: token.id for token in file.added_tokens}
    if THINK not in ids or END_THINK not in ids:
        return NO_TAGS
    characters = byte_characters()
    spaces = {characters[byte] for byte in b" \t\n\r\v\f"}
    blank = frozenset(id_ for token, id_ in file.model.vocab.items() if spaces.issuperset(token))
    return ReasoningTokens(ids[THINK], ids[END_THINK], blank)
