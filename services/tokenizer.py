"""The tokenizer: prompts and conversations to token ids."""

from pathlib import Path

import zmq
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from penstock.protocol.checkpoint import read_model_config
from penstock.protocol.client import ErrorReply
from penstock.protocol.messages import (
    Goodbye,
    Heartbeat,
    Refused,
    RequestFailed,
    Tokenized,
    TokenizedRequest,
    TokenizeRequest,
    ToTokenizer,
)
from penstock.protocol.plan import pack
from penstock.protocol.process import Loop, Process, PulseSender
from penstock.protocol.sockets import connect


class PromptError(ValueError):
    """A prompt that can't be served: which field, and why."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class Tokenizer:
    """A checkpoint's tokenizer and chat template (`transformers`, without torch)."""

    def __init__(self, folder: Path, max_model_len: int) -> None:
        self._tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        self._max_model_len = max_model_len

    def encode(self, request: TokenizeRequest) -> list[int]:
        """The prompt's token ids. Raises PromptError."""
        token_ids = self._encode(request)
        field = "messages" if request.messages else "prompt"
        if not token_ids:
            raise PromptError(field, f"{field} has no token")
        if len(token_ids) >= self._max_model_len:
            raise PromptError(
                field,
                f"{field} has {len(token_ids)} tokens; at most {self._max_model_len - 1} leave "
                f"room for an answer in the context of {self._max_model_len}",
            )
        return token_ids

    def _encode(self, request: TokenizeRequest) -> list[int]:
        if isinstance(request.prompt, list):
            return request.prompt
        if request.prompt is not None:
            return list(self._tokenizer.encode(request.prompt))
        messages = [{"role": m.role, "content": m.content} for m in request.messages or []]
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except (TemplateError, ValueError) as error:
            raise PromptError("messages", f"the chat template refused messages: {error}") from error
        return list(self._tokenizer.encode(text, add_special_tokens=False))


class TokenizerProcess:
    """Sockets around `Tokenizer`."""

    def __init__(self, process: Process) -> None:
        self.name = process.name
        config = process.config
        model = read_model_config(config.model_folder)
        max_model_len = config.max_model_len or model.max_position_embeddings
        self.tokenizer = Tokenizer(config.model_folder, max_model_len)
        context, at = process.context, process.endpoints
        self.gateway = connect(context, zmq.DEALER, at.tokenizers, ToTokenizer, process.identity)
        self.scheduler = connect(context, zmq.PUSH, at.requests)
        self.loop = Loop(self.on_heartbeat, PulseSender(process))
        self.loop.add(self.gateway, self.on_requests)
        self.loop.add_connection(self.gateway, self.on_heartbeat)

    def on_requests(self) -> None:
        """Passes each request on to the scheduler, or says why not."""
        for _, message in self.gateway.receive():
            if isinstance(message, Refused):
                raise SystemExit(message.reason)
            self.gateway.send(self.handle(message))

    def handle(self, request: TokenizeRequest) -> Tokenized | RequestFailed:
        """Encodes and passes on one request."""
        try:
            token_ids = self.tokenizer.encode(request)
        except PromptError as error:
            reply = ErrorReply(code="invalid", message=str(error), field=error.field)
            return RequestFailed(request.request_id, request.attempt, reply)
        self.scheduler.send(
            TokenizedRequest(
                request.request_id,
                request.attempt,
                request.sampling,
                pack(token_ids),
                pack(request.output_token_ids),
            )
        )
        return Tokenized(request.request_id, request.attempt, len(token_ids))

    def on_heartbeat(self) -> None:
        """Registers this process with the gateway, and keeps it registered."""
        self.gateway.send(Heartbeat(self.name))


def main() -> None:
    """Runs until SIGTERM; then another tokenizer takes what is unanswered."""
    process = Process("tokenizer")
    tokenizer = TokenizerProcess(process)
    tokenizer.loop.run()
    tokenizer.gateway.send(Goodbye())
    process.context.destroy()


if __name__ == "__main__":
    main()
