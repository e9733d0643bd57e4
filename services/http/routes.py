"""What can be asked: one table, for starlette and for `/openapi.json`."""

import asyncio
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import Any

from msgspec import Struct
from starlette.responses import Response
from starlette.types import Receive

from penstock.protocol.messages.status import StatusReply
from penstock.services.http.app_state import Service
from penstock.services.http.caller import caller
from penstock.services.http.chat import chat
from penstock.services.http.completions import complete
from penstock.services.http.errors import ApiError
from penstock.services.http.health import LOOK_TIMEOUT, Watch
from penstock.services.http.metrics import render
from penstock.services.http.replies import (
    ChatReply,
    CompletionReply,
    DetokenizeResult,
    Health,
    Model,
    ModelList,
    TokenizeResult,
    Version,
    json_response,
)
from penstock.services.http.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeBody,
    TokenizeBody,
)
from penstock.services.http.to_generate_request import chat_messages, template_tools

PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
Run = Callable[[Any, Receive], Awaitable[Response]]


class Operation(Struct, frozen=True):
    """One route."""

    method: str
    path: str
    run: Run
    """gets the decoded body, or without one the parameters of the path"""
    summary: str
    body: type | None = None
    reply: type | None = None
    media_types: tuple[str, ...] = ()
    """other than JSON"""
    is_open: bool = False
    """to those without the key, too"""


class Routes:
    """Answers all but the page."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._watch = Watch(service.client, service.config.step_timeout)

    def table(self) -> list[Operation]:
        """Every route."""
        return [
            Operation(
                "POST",
                "/v1/chat/completions",
                self.chat,
                "Answers a conversation.",
                ChatRequest,
                ChatReply,
                ("text/event-stream",),
            ),
            Operation(
                "POST",
                "/v1/completions",
                self.complete,
                "Writes on from prompts.",
                CompletionRequest,
                CompletionReply,
                ("text/event-stream",),
            ),
            Operation("GET", "/v1/models", self.models, "The model.", None, ModelList),
            Operation("GET", "/v1/models/{model}", self.model, "One model.", None, Model),
            Operation(
                "POST", "/tokenize", self.tokenize, "To token ids.", TokenizeBody, TokenizeResult
            ),
            Operation(
                "POST", "/detokenize", self.detokenize, "To text.", DetokenizeBody, DetokenizeResult
            ),
            Operation("GET", "/status", self.status, "The pipeline now.", None, StatusReply),
            Operation(
                "GET", "/metrics", self.metrics, "For Prometheus.", media_types=("text/plain",)
            ),
            Operation("GET", "/health", self.health, "Does it work?", reply=Health, is_open=True),
            *(
                Operation(method, "/ping", self.health, "As /health.", reply=Health, is_open=True)
                for method in ("GET", "POST")
            ),
            Operation(
                "GET", "/ready", self.ready, "Is every stage there?", reply=Health, is_open=True
            ),
            Operation("GET", "/version", self.version, "Of Penstock.", reply=Version, is_open=True),
        ]

    async def chat(self, body: ChatRequest, receive: Receive) -> Response:
        """As OpenAI's."""
        await self._service.check(body.model)
        return await chat(self._service, body, receive)

    async def complete(self, body: CompletionRequest, receive: Receive) -> Response:
        """As OpenAI's."""
        await self._service.check(body.model)
        return await complete(self._service, body, receive)

    async def models(self, *_: object) -> Response:
        """The one model."""
        return json_response(ModelList(object="list", data=[self._model()]))

    async def model(self, path: dict[str, str], _: Receive) -> Response:
        """By its name."""
        if path["model"] != self._service.model:
            sentence = f"model is {path['model']!r}; {self._service.model!r} is served"
            raise ApiError(404, sentence, "model", "model_not_found")
        return json_response(self._model())

    async def tokenize(self, body: TokenizeBody, _: Receive) -> Response:
        """vLLM's."""
        await self._service.check(body.model)
        reply = await self._service.client.tokenize(
            body.prompt,
            messages=chat_messages(body.messages) if body.messages else None,
            tools=template_tools(body.tools),
            chat_template_kwargs=body.chat_template_kwargs,
            chat_template=body.chat_template,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            add_special_tokens=body.add_special_tokens,
            client=caller.get(),
        )
        return json_response(
            TokenizeResult(
                count=len(reply.token_ids),
                max_model_len=reply.max_model_len,
                tokens=reply.token_ids,
            )
        )

    async def detokenize(self, body: DetokenizeBody, _: Receive) -> Response:
        """vLLM's."""
        await self._service.check(body.model)
        text = await self._service.client.detokenize(body.tokens, client=caller.get())
        return json_response(DetokenizeResult(prompt=text))

    async def status(self, *_: object) -> Response:
        """All that the gateway knows."""
        return json_response(await self._status())

    async def metrics(self, *_: object) -> Response:
        """The same for Prometheus."""
        text = render(await self._status(), self._service.model, self._service.config)
        return Response(text, headers={"content-type": PROMETHEUS})

    async def health(self, *_: object) -> Response:
        """200 if it works."""
        await self._watch.check()
        return json_response(Health(status="ok"))

    async def ready(self, *_: object) -> Response:
        """200 if every stage is there."""
        await self._watch.check_ready()
        return json_response(Health(status="ok"))

    async def version(self, *_: object) -> Response:
        """Of this program."""
        return json_response(Version(version=version("penstock")))

    def _model(self) -> Model:
        return Model(
            id=self._service.model,
            object="model",
            created=self._service.created,
            owned_by="penstock",
            max_model_len=self._service.max_model_len,
        )

    async def _status(self) -> StatusReply:
        try:
            return await asyncio.wait_for(self._service.client.status(metrics=True), LOOK_TIMEOUT)
        except TimeoutError:
            raise ApiError(503, "the gateway does not answer") from None
