"""Token ids that end a text: of the checkpoint and of its tokenizer."""

import logging
from pathlib import Path

from msgspec import Struct

from penstock.protocol.checkpoint import read_json, read_model_config
from penstock.protocol.generation_config import read_generation_config

log = logging.getLogger("checkpoint")


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
    """Read every id that ends a text.

    They are in `generation_config.json` or, where that has none, in `config.json`; the tokenizer's
    own is added. Ids that the vocabulary lacks are left out. Warns of them, and if there is no id.
    """
    model = read_model_config(folder)
    ids = read_generation_config(folder).eos_token_id
    if ids is None:
        ids = model.eos_token_id
    own = _tokenizer_eos(folder)
    given = [*([ids] if isinstance(ids, int) else ids or []), *([] if own is None else [own])]
    known = [one for one in dict.fromkeys(given) if 0 <= one < model.vocab_size]
    for one in set(given) - set(known):
        log.warning("%s: eos_token_id: got %d, expected 0 to %d", folder, one, model.vocab_size - 1)
    if not known:
        reason = "answers end at max_tokens or a stop string only"
        log.warning("%s: no eos_token_id in the vocabulary: %s", folder, reason)
    return known


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
