"""Clients of a pipeline: `Client` blocks, `AsyncClient` is for asyncio.

    with Client("tcp://127.0.0.1:5555") as client:
        print(client.generate(messages=[{"role": "user", "content": "Hello"}]).text)
        for delta in client.stream("Once upon a time", max_tokens=50):
            print(delta.text, end="")
        streams = [client.submit(prompt) for prompt in prompts]
        texts = [stream.result().text for stream in streams]

A request survives the failure of any process of the pipeline, including the gateway. When the
connection is restored, the client resubmits unanswered requests. `ClientError` is the root of the
client's errors.

`Client("tcp://gpu1:5555,tcp://gpu2:5555")` continues at the next address when an address is
lost or unreachable.

If the gateway has keys, `keys` is the folder with `server.key` and `NAME.key_secret`, and `client`
is the NAME: `Client("tcp://gpu1:5555", keys="alice-keys", client="alice")`.
"""

import math
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import zmq

from penstock.protocol.client.connection import DEFAULT_ENDPOINT, Connection, Kind, expect
from penstock.protocol.client.scoring import result_of
from penstock.protocol.client.session import NoAnswer, PendingRequest, ask_n
from penstock.protocol.config import DEFAULT_CLIENT
from penstock.protocol.messages.client import (
    AbortReply,
    AbortRequest,
    DetokenizeReply,
    DetokenizeRequest,
    GenerateReply,
    GenerateRequest,
    Request,
    StatusRequest,
    TextDelta,
    TokenizePromptRequest,
    TokenizeReply,
)
from penstock.protocol.messages.sampling import Pooling
from penstock.protocol.messages.status import StatusReply


class Stream:
    """One request of a `Client`: iterate for its text as it arrives, or wait for its `result()`."""

    def __init__(self, client: "Client", pending: PendingRequest) -> None:
        self.request_id = pending.request_id
        self._client = client
        self._answer = pending

    def __iter__(self) -> Iterator[TextDelta]:
        while True:
            while delta := self._answer.take_delta():
                yield delta
            if self._answer.final:
                self._answer.result()
                return
            self._client.wait()

    def result(self) -> GenerateReply:
        """Wait for the whole answer. Raises RequestError."""
        return self._client.wait_for(self._answer, GenerateReply)

    def abort(self) -> None:
        """End the request early; `result()` has the output until then."""
        self._client.abort(self.request_id)


class Client:
    """A blocking client, for one thread at a time, and not for use after a fork.

    A call raises NoAnswer after `timeout` seconds without a reply or a change of the connection.
    """

    def __init__(
        self,
        endpoint: str = DEFAULT_ENDPOINT,
        *,
        timeout: float | None = None,
        keys: str | Path | None = None,
        client: str = DEFAULT_CLIENT,
    ) -> None:
        """Connect. Raises ClientError for unreadable keys and an invalid address."""
        self._connection = Connection(endpoint, keys, client)
        # called before a reference cycle of the connection is collected, in which libzmq would wait
        # for its sockets
        self._end = weakref.finalize(self, self._connection.end)
        self._end.atexit = False
        self._timeout = math.inf if timeout is None else timeout
        self._poller = zmq.Poller()
        self._poller.register(self._connection.socket, zmq.POLLIN)
        self._poller.register(self._connection.monitor, zmq.POLLIN)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; unanswered requests are aborted."""
        self._end()

    def submit(self, prompt: str | list[int] | None = None, **fields: Any) -> Stream:
        """Send a request and return at once. `fields`: as in GenerateRequest.

        Before the client is connected, the request leaves when something waits for an answer.
        """
        return Stream(self, self._connection.ask(GenerateRequest(prompt=prompt, **fields)))

    def stream(self, prompt: str | list[int] | None = None, **fields: Any) -> Stream:
        """Send a request whose text arrives piece by piece."""
        return self.submit(prompt, stream=True, **fields)

    def generate(self, prompt: str | list[int] | None = None, **fields: Any) -> GenerateReply:
        """Return the whole answer. Raises RequestError."""
        return self.submit(prompt, **fields).result()

    def submit_n(self, prompt: str | list[int] | None = None, **fields: Any) -> list[Stream]:
        """Send a request for each of the `n` answers to a prompt. Raises RequestError.

        Answers end and fail independently. `abort` of the given `request_id` ends all answers.
        """
        answers = ask_n(GenerateRequest(prompt=prompt, **fields), self.ask)
        return [Stream(self, pending) for pending in answers]

    def generate_n(
        self, prompt: str | list[int] | None = None, **fields: Any
    ) -> list[GenerateReply]:
        """Return `n` whole answers to a prompt. Raises RequestError if one fails.

        An exception aborts all answers.
        """
        streams = self.submit_n(prompt, **fields)
        try:
            return [stream.result() for stream in streams]
        except BaseException:
            for stream in streams:
                self.ask(AbortRequest(request_id=stream.request_id))
            raise

    def embed(
        self, prompt: str | list[int], *, dimensions: int | None = None, **fields: Any
    ) -> list[float]:
        """Return the embedding of a text or of token ids. Raises RequestError."""
        return result_of(self.generate(prompt, pooling=Pooling(dimensions=dimensions), **fields))

    def abort(self, request_id: str) -> bool:
        """End a request early. Return False if no such request is running."""
        answers = self._connection.ask_abort(request_id)
        replies = [self.wait_for(pending, AbortReply) for pending in answers]
        return any(reply.found for reply in replies)

    def tokenize(self, prompt: str | None = None, **fields: Any) -> TokenizeReply:
        """Return the token ids of a prompt. `fields`: as in TokenizePromptRequest."""
        return self._ask(TokenizePromptRequest(prompt=prompt, **fields), TokenizeReply)

    def detokenize(self, token_ids: list[int], **fields: Any) -> str:
        """Return the text of token ids, with special tokens. `fields`: as in DetokenizeRequest."""
        return self._ask(DetokenizeRequest(token_ids=token_ids, **fields), DetokenizeReply).text

    def status(self, wait: bool = False, fresh: bool = False, metrics: bool = False) -> StatusReply:
        """Return the pipeline's status; `wait`, `fresh`, `metrics`: as in `StatusRequest`."""
        return self._ask(StatusRequest(wait=wait, fresh=fresh, metrics=metrics), StatusReply)

    def ask(self, question: Request) -> PendingRequest:
        """Send a question without waiting."""
        return self._connection.ask(question)

    def wait_for(self, pending: PendingRequest, kind: type[Kind]) -> Kind:
        """Wait for the reply to one question. Raises RequestError."""
        while not pending.final:
            self.wait()
        return expect(pending, kind)

    def take_until(self, moment: float) -> None:
        """Handle messages until `moment` of `time.perf_counter()`, or up to 1 ms later."""
        while (seconds := moment - time.perf_counter()) > 0:
            with self._connection.used():
                self._poller.poll(math.ceil(seconds * 1000))
                self._connection.take()

    def wait(self) -> None:
        """Wait for replies or a change of the connection, and handle them. Raises NoAnswer."""
        deadline = time.monotonic() + self._timeout
        with self._connection.used():
            while (seconds := deadline - time.monotonic()) > 0:
                self._poller.poll(None if seconds == math.inf else math.ceil(seconds * 1000))
                if self._connection.take():
                    return
        raise NoAnswer("the pipeline does not answer")

    def _ask(self, question: Request, kind: type[Kind]) -> Kind:
        return self.wait_for(self.ask(question), kind)
