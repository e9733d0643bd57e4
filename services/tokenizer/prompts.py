"""Encoding of prompts, conversations and bad words as token ids.

fastokens encodes a hundred times as fast as `tokenizers`, and is used if its ids are the same.
"""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
from penstock.services.tokenizer.chat_template import NO_DEFAULTS, ChatTemplate, PromptError

try:
    import fastokens
except ImportError:  # no package for this platform
    fastokens = None

log = logging.getLogger("tokenizer")
# texts that both encoders must encode equally at the start, as well as each added token
PROBES = (
    "Hello world, it's 12345 o'clock…\n\n  and  tabs\tare\r\nhere ",
    "I'LL we'Re IT'ſ x''s\u00a0\u3000\u200b\u0085\n \n\t \r\r\n\x0b end   ",
    "e\u0301 A\u030a \u212b \u1e9b\u0323 \u0958 \ufb1d \u1100\u1161\u11a8 q\u0307\u0323 ﬁ ² ½ ٣",
    "Grüße 日本語 한국어 Ελλάδα МОСКВА العربية עברית हिन्दी ไทย \U0001d7d8\U000e0001\uffff\0\x7f",
    "🙂👩\u200d🚀🏳\ufe0f\u200d🌈🇩🇪👍🏽!!!???...---===###\\\\ <|im_start <think> </think>>",
    "def f(x):\n\treturn {'a': x**2, \"b\": [1.5e-3]}  # ∑ ﷽ https://a.b/c?d=e&f\n" * 20,
    "a" * 1000 + " " * 1000 + "\n" * 1000 + "é" * 1000 + "0" * 1000,
)


def load_fast_encoder(path: Path, tokenizer: HuggingFaceTokenizer) -> Any:
    """Return a fastokens.Tokenizer of `path`, or None if `tokenizer` must encode.

    Log a warning if fastokens can't load the file, or encodes any probe differently.
    """
    if fastokens is None:
        return None
    try:
        fast = fastokens.Tokenizer.from_file(str(path))
        added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
        between = [f"{name}{name}x {name} e\u0301{name[:-1]}\n{name}" for name in added]
        for text in (*PROBES, *between, "".join(added), " ".join(added)):
            for adds_special in (False, True):
                expected = tokenizer.encode(text, add_special_tokens=adds_special).ids
                if list(fast.encode(text, add_special_tokens=adds_special).ids) != expected:
                    raise ValueError(f"other ids for {text[:40]!r}")
    except Exception as error:  # noqa: BLE001  fastokens raises no narrower type
        log.warning("%s: fastokens can't encode (%s); tokenizers does, more slowly", path, error)
        return None
    return fast


def encode_bad_words(tokenizer: HuggingFaceTokenizer, words: list[str]) -> list[list[int]]:
    """Return the token sequences of bad words. Raises PromptError.

    As in vLLM, a word is encoded twice: at the start of a text, and after a space. The second
    sequence is left out if it ends with the first sequence, which then forbids both.
    """
    stripped = [word.lstrip(" ") or word for word in words]
    texts = [text for word in stripped for text in (word, f" {word}")]
    encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    sequences = []
    for number, word in enumerate(words):
        plain, spaced = (list(text.ids) for text in encoded[2 * number : 2 * number + 2])
        if not plain:
            raise PromptError(
                "bad_words",
                f"bad_words[{number}]: got {word!r}, expected a string that has a token",
            )
        sequences.append(plain)
        if spaced[-len(plain) :] != plain:
            sequences.append(spaced)
    return sequences


_THINK, _END_OF_THINKING = "<think>", "</think>"
_TURN, _END_OF_TURN = "<|im_start|>assistant\n", "<|im_end|>"


class Tokenizer:
    """A checkpoint's tokenizer and chat template."""

    def __init__(
        self, folder: Path, max_model_len: int, template_defaults: Mapping[str, Any] = NO_DEFAULTS
    ) -> None:
        """Read the files. template_defaults: as `defaults` of ChatTemplate. Raises ModelError."""
        path = folder / "tokenizer.json"
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a single text gains nothing from threads
        try:
            self.backend = HuggingFaceTokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises no narrower type
            raise ModelError(f"{path} can't be read: {error}") from error
        self.backend.no_truncation()
        self.backend.no_padding()
        self._fast = load_fast_encoder(path, self.backend)
        self._chat_template = ChatTemplate(folder, template_defaults)
        self._max_model_len = max_model_len

    def encode(self, request: TokenizeRequest) -> tuple[list[int], Reasoning]:
        """Return the prompt's token ids and the state of reasoning. Raises PromptError."""
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
        """Answer a query, whose prompt may exceed the context length. Raises PromptError."""
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
        """Return token ids, and the text if it is known and the token ids end with it."""
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
        """Return whether the tokenizer adds special tokens that `most` tokens have room for."""
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
        # the batch methods release the GIL, unlike the methods for a single text
        [encoding] = self.backend.encode_batch_fast([text], add_special_tokens=adds_special)
        return list(encoding.ids), text


def _reasoning_after(prompt: str, opens_itself: bool) -> Reasoning:
    """Return the state of reasoning at the end of `prompt`.

    "open": the prompt ends with `<think>`, or ends within reasoning of the assistant's open turn.
    Other tags in a prompt do not count, because a user may have written them.
    "optional": the assistant's turn is open and empty, and the model generates `<think>` itself.
    "none": all other prompts.
    """
    _, begun, turn = prompt.rpartition(_TURN)
    if not begun or _END_OF_TURN in turn:
        return "open" if prompt.rstrip().endswith(_THINK) else "none"
    if turn.rfind(_THINK) > turn.rfind(_END_OF_THINKING):
        return "open"
    return "optional" if opens_itself and not turn else "none"
