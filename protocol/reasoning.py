"""A chat's reasoning, which begins at the token `<think>` and ends at `</think>`.

A tag that is spelled in other tokens is text.
"""

from pathlib import Path

from msgspec import Struct

from penstock.protocol.tokenizer_file import byte_characters, read_tokenizer_file

THINK, END_THINK = "<think>", "</think>"


class ReasoningTokens(Struct, frozen=True):
    """Ids of the tags around reasoning, -1 if the vocabulary lacks them, and of white space."""

    begin: int = -1
    end: int = -1
    blank: frozenset[int] = frozenset()


NO_TAGS = ReasoningTokens()


class ReasoningTracker:
    """State of a chat's output, which follows from its tokens alone."""

    def __init__(self, tokens: ReasoningTokens, is_open: bool) -> None:
        """is_open: the prompt ends within reasoning."""
        self._tokens = tokens
        self._may_begin = True
        self.is_open = is_open and tokens.end >= 0  # the last token belongs to reasoning
        self._is_between = False
        # the last token is white space after `</think>`, of which the answer has none yet
        self.is_blank = False

    @property
    def is_over(self) -> bool:
        """True if all further tokens are the answer's."""
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
    """Read them from a checkpoint. Raises ModelError if its tokenizer is not a byte-level one."""
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
