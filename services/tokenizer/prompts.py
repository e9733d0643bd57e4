"""Prompts and conversations to token ids."""

import os
from pathlib import Path

from tokenizers import Tokenizer as HuggingFaceTokenizer

from penstock.protocol.checkpoint import ModelError
from penstock.protocol.messages.client import (
    DetokenizeReply,
    DetokenizeRequest,
    PromptFields,
    TokenizePromptRequest,
    TokenizeReply,
)
from penstock.protocol.messages.pipeline import TokenizeRequest
from penstock.protocol.messages.structured import Reasoning
from penstock.services.tokenizer.chat_template import ChatTemplate
from penstock.services.tokenizer.errors import PromptError
from penstock.services.tokenizer.fast_encoder import load_fast_encoder

_THINK, _END_OF_THINKING = "<think>", "</think>"
_TURN, _END_OF_TURN = "<|im_start|>assistant\n", "<|im_end|>"


class Tokenizer:
    """A checkpoint's tokenizer and chat template."""

    def __init__(self, folder: Path, max_model_len: int) -> None:
        path = folder / "tokenizer.json"
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads for one text help nobody
        try:
            self.backend = HuggingFaceTokenizer.from_file(str(path))
        except Exception as error:  # it raises nothing more exact
            raise ModelError(f"{path} can't be read: {error}") from error
        self.backend.no_truncation()
        self.backend.no_padding()
        self._fast = load_fast_encoder(path, self.backend)
        self._chat_template = ChatTemplate(folder)
        self._max_model_len = max_model_len

    def encode(self, request: TokenizeRequest) -> tuple[list[int], Reasoning]:
        """Return the prompt's token ids, and how its answer begins. Raises PromptError."""
        token_ids, text = self._encode(request)
        field = "messages" if request.messages else "prompt"
        if not token_ids:
            raise PromptError(field, f"{field}: got no token, expected one or more")
        room = 1 if request.request.pooling is None else 0
        most = self._max_model_len - room
        if len(token_ids) > most:
            leaving = ", which leave room for an answer" if room else ""
            raise PromptError(
                field,
                f"{field}: got {len(token_ids)} tokens, expected up to {most}{leaving} in the "
                f"context of {self._max_model_len}",
                too_long=(len(token_ids), most),
            )
        if text is None and request.request.sampling.structured_outputs:
            text = self._decode(token_ids)
        return token_ids, _reasoning_after(text or "", self._chat_template.opens_reasoning)

    def answer(
        self, query: TokenizePromptRequest | DetokenizeRequest
    ) -> TokenizeReply | DetokenizeReply:
        """Answer a client. A prompt may be longer than the context here. Raises PromptError."""
        if isinstance(query, TokenizePromptRequest):
            token_ids, _ = self._encode(query)
            reply = TokenizeReply(token_ids=token_ids, max_model_len=self._max_model_len)
            if query.return_token_strs:
                reply.token_strs = [self.backend.id_to_token(token) or "" for token in token_ids]
            return reply
        return DetokenizeReply(text=self._decode(query.token_ids, query.skip_special_tokens))

    def _decode(self, token_ids: list[int], skips: bool = False) -> str:
        return str(self.backend.decode_batch([token_ids], skip_special_tokens=skips)[0])

    def _encode(self, request: PromptFields) -> tuple[list[int], str | None]:
        """Token ids, and the text as far as it is known and they end with it."""
        token_ids, text = self._all_tokens(request)
        most = request.truncate_prompt_tokens
        if most is None or len(token_ids) <= most:
            return token_ids, text
        if isinstance(request.prompt, str) and self._adds_tokens(request, most):
            self.backend.enable_truncation(most, direction=request.truncation_side)
            [encoding] = self.backend.encode_batch_fast([request.prompt])
            self.backend.no_truncation()
            return list(encoding.ids), None
        if request.truncation_side == "right":
            return token_ids[:most], None
        return token_ids[-most:], text

    def _adds_tokens(self, request: PromptFields, most: int) -> bool:
        """Return True if a text of `most` tokens has, and keeps, some that the tokenizer adds."""
        number = self.backend.num_special_tokens_to_add(False)
        return request.add_special_tokens is not False and 0 < number < most

    def _all_tokens(self, request: PromptFields) -> tuple[list[int], str | None]:
        if isinstance(request.prompt, list):
            return request.prompt, None
        text, adds_special = request.prompt, True
        if text is None:
            text, adds_special = self._chat_template.render(request), False
        if request.add_special_tokens is not None:
            adds_special = request.add_special_tokens
        if self._fast:
            return list(self._fast.encode(text, add_special_tokens=adds_special).ids), text
        # of the methods that encode, those of a batch let other threads run meanwhile
        [encoding] = self.backend.encode_batch_fast([text], add_special_tokens=adds_special)
        return list(encoding.ids), text


def _reasoning_after(prompt: str, opens_itself: bool) -> Reasoning:
    """Return where the answer to `prompt` begins.

    "open": the prompt ends with `<think>`, or the assistant's turn, which it has begun, ends within
    a thought. Other tags in a prompt do not matter: they may be a user's.
    "optional": the prompt ends where the turn begins, and the model `opens_itself`.
    """
    _, begun, turn = prompt.rpartition(_TURN)
    if not begun or _END_OF_TURN in turn:
        return "open" if prompt.rstrip().endswith(_THINK) else "none"
    if turn.rfind(_THINK) > turn.rfind(_END_OF_THINKING):
        return "open"
    return "optional" if opens_itself and not turn else "none"
