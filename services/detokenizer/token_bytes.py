"""The bytes of every token, from a checkpoint's `tokenizer.json`."""

from pathlib import Path

from msgspec import Struct
from msgspec.structs import asdict

from penstock.protocol.messages.client import Logprob, TokenLogprobs
from penstock.protocol.messages.packed import PackedLogprobs
from penstock.protocol.tokenizer_file import (
    ReasoningTokens,
    byte_characters,
    read_reasoning_tokens,
    read_tokenizer_file,
)


class TokenBytes(Struct, frozen=True):
    """The bytes of every token by id; ids that no token has are in neither."""

    text: dict[int, bytes]  # special tokens have none
    special: dict[int, bytes]  # the special tokens' names
    reasoning: ReasoningTokens

    def logprobs(
        self, packed: PackedLogprobs | None, text_offset: int | None = None
    ) -> TokenLogprobs | None:
        """Return the logprobs of one position as a client sees them."""
        if packed is None:
            return None
        ranks = [packed.rank, *range(1, len(packed.token_ids) // 4)]
        pairs = zip(packed.pairs(), ranks, strict=True)
        first, *top = [self._logprob(*pair, rank) for pair, rank in pairs]
        return TokenLogprobs(**asdict(first), top=top, text_offset=text_offset)

    def _logprob(self, token_id: int, logprob: float, rank: int) -> Logprob:
        data = self.text.get(token_id) or self.special.get(token_id, b"")
        text = data.decode(errors="replace")
        return Logprob(token_id=token_id, logprob=logprob, token=text, bytes=list(data), rank=rank)


def token_bytes(folder: Path) -> TokenBytes:
    """Return the bytes of a checkpoint's tokens.

    Raises ModelError if the tokenizer is not a byte-level one.
    """
    file = read_tokenizer_file(folder)
    alphabet = {character: byte for byte, character in enumerate(byte_characters())}
    text = {
        token_id: bytes(alphabet[character] for character in token)
        for token, token_id in file.model.vocab.items()
        if alphabet.keys() >= set(token)
    }
    special: dict[int, bytes] = {}
    for token in file.added_tokens:
        text[token.id] = b"" if token.special else token.content.encode()
        if token.special:
            special[token.id] = token.content.encode()
    return TokenBytes(text, special, read_reasoning_tokens(folder))
