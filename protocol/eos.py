"""Token ids that end a text: of the checkpoint and of its tokenizer."""

from pathlib import Path

from msgspec import Struct

from penstock.protocol.checkpoint import read_generation_config, read_json, read_model_config


class _AddedToken(Struct):
    content: str
    id: int | None = None


class _TokenizerConfig(Struct):
    eos_token: str | _AddedToken | None = None


class _AddedTokens(Struct):
    added_tokens: list[_AddedToken] = []


class _BytePairs(Struct):
    vocab: dict[str, int]


class _Vocabulary(Struct):
    model: _BytePairs


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
    """The id of `eos_token` in tokenizer_config.json; None where there is none."""
    path, vocabulary = folder / "tokenizer_config.json", folder / "tokenizer.json"
    token = read_json(path, _TokenizerConfig).eos_token if path.exists() else None
    content = token.content if isinstance(token, _AddedToken) else token
    if content is None or not vocabulary.exists():
        return None
    added = read_json(vocabulary, _AddedTokens).added_tokens
    ids = [one.id for one in added if one.content == content]
    return ids[0] if ids else read_json(vocabulary, _Vocabulary).model.vocab.get(content)
