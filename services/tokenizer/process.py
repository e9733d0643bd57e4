"""The tokenizer process: its event handlers and sockets."""

from time import monotonic
from typing import Any

import zmq

from penstock.protocol.checkpoint import read_model_config
from penstock.protocol.messages.packed import pack
from penstock.protocol.messages.pipeline import (
    Goodbye,
    Heartbeat,
    Refused,
    RequestFailed,
    TokenizeDone,
    TokenizedRequest,
    TokenizeRequest,
    TokenizerQuery,
    TokenizerReply,
    ToTokenizer,
)
from penstock.protocol.tracing import Tracer
from penstock.protocol.transport.channel import Channel
from penstock.protocol.transport.event_loop import EventLoop
from penstock.protocol.transport.heartbeat import HeartbeatThread
from penstock.protocol.transport.process import Process
from penstock.services.tokenizer.chat_template import PromptError, error_reply
from penstock.services.tokenizer.grammar_check import GrammarChecker, excess
from penstock.services.tokenizer.prompts import Tokenizer, encode_bad_words


class TokenizerProcess:
    """The sockets of the process, with `Tokenizer` and `GrammarChecker`."""

    def __init__(self, process: Process) -> None:
        self.name = process.name
        config = process.config
        max_model_len = read_model_config(config.model_folder).context(config.max_model_len)
        self.tokenizer = Tokenizer(config.model_folder, max_model_len, config.template_defaults)
        context, endpoints = process.context, process.endpoints
        self.gateway = context.connect(
            zmq.DEALER,
            endpoints.tokenizers,
            ToTokenizer,
            process.identity,
            on_reconnect=self.resubmit_all,
        )
        self.schedulers = [
            context.connect(zmq.PUSH, replica.requests, on_reconnect=self.resubmit_all)
            for replica in process.all_endpoints
        ]
        self.tracer = Tracer(config, process.name)
        self.heartbeats = HeartbeatThread(process, to_peers=self.on_heartbeat)
        self.loop = EventLoop(process.context, self.on_heartbeat, self.heartbeats)
        self.loop.add(self.gateway, self.on_requests)
        context.on_connected(self.gateway, self.on_heartbeat)
        self.grammars = GrammarChecker(config.model_folder, self.loop)

    def on_requests(self) -> None:
        for _, message in self.gateway.receive():
            match message:
                case TokenizeRequest():
                    self.handle(message)
                case TokenizerQuery():
                    self.gateway.send(self.answer(message))
                case Refused():
                    raise SystemExit(message.reason)

    def handle(self, message: TokenizeRequest) -> None:
        """Encode a request and check its grammar. Send the request to a scheduler, or refuse it."""
        begin = monotonic()
        request, scheduler = message.request, self.schedulers[message.replica]
        wanted, grammar = request.sampling.structured_outputs, ""
        try:
            with self.heartbeats.working:
                token_ids, request.reasoning = self.tokenizer.encode(message)
                request.prompt_token_ids = pack(token_ids)
                if words := request.sampling.bad_words:
                    request.bad_words = encode_bad_words(self.tokenizer.backend, words)
                if wanted is not None:
                    grammar = wanted.to_llguidance()
                    if reason := excess(grammar):
                        raise _not_compiled(reason)
        except Exception as error:  # noqa: BLE001
            self._refuse(request, error)
            return
        if wanted is None:
            self._pass_on(request, scheduler, begin)
            return

        def on_checked(reason: str) -> None:
            if reason:
                self._refuse(request, _not_compiled(reason))
            else:
                self._pass_on(request, scheduler, begin)

        self.grammars.check(grammar, request.client, on_checked)

    def answer(self, message: TokenizerQuery) -> TokenizerReply:
        try:
            with self.heartbeats.working:
                reply = self.tokenizer.answer(message.query)
            return TokenizerReply(message.number, reply)
        except Exception as error:  # noqa: BLE001
            return TokenizerReply(message.number, error_reply(error))

    def _pass_on(self, request: TokenizedRequest, scheduler: Channel[Any], begin: float) -> None:
        scheduler.send(request)
        num_tokens = len(request.prompt_token_ids) // 4
        self.gateway.send(TokenizeDone(request.request_id, request.attempt, num_tokens))
        if self.tracer.is_on:
            attributes = {"gen_ai.usage.input_tokens": num_tokens}
            self.tracer.span("tokenize", request.request_id, begin, attributes)

    def _refuse(self, request: TokenizedRequest, error: Exception) -> None:
        self.gateway.send(RequestFailed(request.request_id, request.attempt, error_reply(error)))

    def resubmit_all(self) -> None:
        """Make the gateway resubmit requests that may be lost."""
        self.gateway.send(Goodbye())
        self.on_heartbeat()

    def on_heartbeat(self) -> None:
        self.gateway.send(Heartbeat(self.name))


def _not_compiled(reason: str) -> PromptError:
    text = f"got one that can't be compiled ({reason}), expected a supported one"
    return PromptError("structured_outputs", f"structured_outputs: {text}")
