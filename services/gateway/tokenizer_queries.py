"""Questions that a tokenizer answers alone: the token ids of a prompt, the text of token ids."""

from itertools import count

from penstock.protocol.messages.client import DetokenizeRequest, ErrorReply, TokenizePromptRequest
from penstock.protocol.messages.tokenizer import TokenizerQuery, TokenizerReply
from penstock.services.gateway.connections import Client
from penstock.services.gateway.delivery import Outbox
from penstock.services.gateway.estimates import estimated_tokens
from penstock.services.gateway.tokenizers import Tokenizers

AskedTokenizer = TokenizePromptRequest | DetokenizeRequest


class OpenQuestion:
    """One question that is not answered, and whose it is."""

    def __init__(
        self, number: int, client: Client, question: AskedTokenizer, num_bytes: int
    ) -> None:
        self.key = number
        self.client = client
        self.num_bytes = num_bytes
        self.size = num_bytes
        self.share = client.share
        self.priority = 0
        self.num_tokens = num_question_tokens(question)
        self.request = question

    @property
    def is_open(self) -> bool:
        """Somebody waits for the answer."""
        return not self.client.connection.is_gone

    def submission(self) -> TokenizerQuery:
        """For a tokenizer."""
        return TokenizerQuery(self.key, self.request)


def num_question_tokens(question: AskedTokenizer) -> int:
    """About as many tokens of a prompt that a tokenizer is to find."""
    return estimated_tokens(question) if isinstance(question, TokenizePromptRequest) else 0


class Questions:
    """All open questions by number. No two have the same one, whichever gateway they are of: a
    tokenizer may answer its predecessor's to this one."""

    def __init__(self, first_number: int, outbox: Outbox, tokenizers: Tokenizers) -> None:
        self.num_bytes = 0
        """of their frames"""
        self.num_tokens = 0
        """of their prompts, as estimated"""
        self._numbers = count(first_number)
        self._open: dict[int, OpenQuestion] = {}
        self._outbox = outbox
        self._tokenizers = tokenizers

    def __len__(self) -> int:
        return len(self._open)

    def ask(self, client: Client, question: AskedTokenizer, num_bytes: int) -> None:
        """A client asks, with a frame of so many bytes."""
        one = OpenQuestion(next(self._numbers), client, question, num_bytes)
        self._open[one.key] = one
        self._count(one, 1)
        self._tokenizers.submit(one)

    def answer(self, message: TokenizerReply) -> None:
        """A tokenizer has answered, perhaps as the second one."""
        if one := self._forget(message.number):
            self._outbox.reply(one.client, message.reply)

    def fail(self, one: OpenQuestion, message: str) -> None:
        """Answers a question with an error."""
        if self._forget(one.key):
            self._outbox.reply(one.client, ErrorReply(code="failed", message=message))

    def on_heartbeat(self) -> None:
        """Gives up what nobody waits for."""
        for one in [one for one in self._open.values() if not one.is_open]:
            self._tokenizers.forget(one)
            self._forget(one.key)

    def _forget(self, number: int) -> OpenQuestion | None:
        one = self._open.pop(number, None)
        if one:
            self._count(one, -1)
        return one

    def _count(self, one: OpenQuestion, number: int) -> None:
        self.num_bytes += number * one.num_bytes
        self.num_tokens += number * one.num_tokens
        one.share.num_open += number
        one.share.num_waiting_tokens += number * one.num_tokens
        one.share.num_bytes += number * one.num_bytes
