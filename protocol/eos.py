"""Token ids that end a text: of the checkpoint and of its tokenizer."""

from pathlib import Path

from msgspec import Struct

from penstock.protocol.checkpoint import read_generation_config, read_json, read_model_config


class _Token(Struct):
    content: str
    id: int = -1


class _TokenizerConfig(Struct):
    eos_token: str | _Token | None = None


class _Model(Struct):
    vocab: dict[str, int]


class _Tokenizer(Struct):
    model: _Model
    added_tokens: list[_Token] = []


def read_eos_token_ids(folder: Path) -> list[int]:
    """Reads every id that ends a text: those of `generation_config.json`, or, where it has none, of
    `config.json`; and the tokenizer's own."""
    ids = read_generation_config(folder).eos_token_id
    if ids is None:
        ids = read_model_config(folder).eos_token_id
    known = [ids] if isinstance(ids, int) else ids or []
    own = _tokenizer_eos(folder)
    return known if own is None or own in known else [*known, own]


def _tokenizer_eos(folder: Path) -> int | None:
    """Return the id of `eos_token` in tokenizer_config.json; None where there is none."""
    path, vocabulary = folder / "tokenizer_config.json", folder / "tokenizer.json"
    token = read_json(path, _TokenizerConfig).eos_token if path.exists() else None
    content = token.content if isinstance(token, _Token) else token
    if content is None or not vocabulary.exists():
        return None
    tokenizer = read_json(vocabulary, _Tokenizer)
    added = {one.content: one.id for one in tokenizer.added_tokens}
    return added.get(content, tokenizer.model.vocab.get(content))
