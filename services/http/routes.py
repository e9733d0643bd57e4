"""Table of all routes, for starlette and for `/openapi.json`."""

import asyncio
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import Any

from msgspec import UNSET, Struct
from starlette.responses import Response
from starlette.types import Receive

from penstock.protocol.messages.chat import chat_messages
from penstock.protocol.messages.client import PromptFields
from penstock.protocol.messages.status import StatusReply
from penstock.services.http.access import caller
from penstock.services.http.app_state import AppState, Models
from penstock.services.http.chat import chat
from penstock.services.http.completions import complete
from penstock.services.http.errors import ApiError, fields_as_sent
from penstock.services.http.health import STATUS_TIMEOUT, HealthCheck
from penstock.services.http.messages.models import model_info, model_page
from penstock.services.http.messages.replies import MessageReply, TokenCount
from penstock.services.http.messages.routes import answer_messages, count_tokens
from penstock.services.http.messages.schema import CountTokensRequest, MessagesRequest
from penstock.services.http.metrics import render
from penstock.services.http.pooling.routes import PoolingRoutes
from penstock.services.http.pooling.schema import (
    EmbeddingReply,
    EmbeddingRequest,
    PoolingRequest,
    RerankReply,
    RerankRequest,
    ScoreReply,
    ScoreRequest,
)
from penstock.services.http.replies import (
    ChatReply,
    CompletionReply,
    Model,
    ModelList,
    TokenizeResult,
    json_response,
)
from penstock.services.http.responses.input import count_input_tokens, list_input_items
from penstock.services.http.responses.replies import (
    DeletedResponse,
    InputItems,
    InputTokens,
    ResponseReply,
)
from penstock.services.http.responses.routes import cancel, delete, respond, retrieve
from penstock.services.http.responses.schema import InputTokensRequest, ResponsesRequest
from penstock.services.http.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeBody,
    TokenizeBody,
)
from penstock.services.http.to_generate_request import template_tools

Texts = dict[str, str]
RERANK = "/v1/rerank", "/v2/rerank", "/rerank"
SCORE = "/v1/score", "/score"


class Operation(Struct, frozen=True):
    """One route; `run` gets the decoded body, or without one the parameters of path and query."""

    method: str
    path: str
    run: Callable[[Any, Receive], Awaitable[Response]]
    reply: Any
    """type of the reply in JSON; None without one"""
    body: type[Struct] | None = None
    media_type: str = ""
    """in addition to JSON"""
    is_open: bool = False
    """needs no key"""
    is_batch: bool = False
    """its body has several inputs, each of which is a request to the gateway"""


class Routes:
    """Handlers of all routes except the page; the first line of each is its summary."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._health = HealthCheck(models.client, models.config.step_timeout)

    def table(self) -> list[Operation]:
        """Return every route."""
        stream = "text/event-stream"
        return [
            Operation("POST", "/v1/chat/completions", self.chat, ChatReply, ChatRequest, stream),
            Operation(
                "POST", "/v1/completions", self.complete, CompletionReply, CompletionRequest, stream
            ),
            Operation("POST", "/v1/messages", self.messages, MessageReply, MessagesRequest, stream),
            Operation(
                *("POST", "/v1/messages/count_tokens", self.count_tokens),
                *(TokenCount, CountTokensRequest),
            ),
            *self._response_operations(),
            *self._pooling_operations(),
            Operation("GET", "/v1/models", self.models, ModelList),
            Operation("GET", "/v1/models/{model}", self.model, Model),
            Operation("POST", "/tokenize", self.tokenize, TokenizeResult, TokenizeBody),
            Operation("POST", "/detokenize", self.detokenize, Texts, DetokenizeBody),
            Operation("GET", "/status", self.status, StatusReply),
            Operation("GET", "/metrics", self.metrics, None, media_type="text/plain"),
            Operation("GET", "/health", self.health, Texts, is_open=True),
            Operation("GET", "/ping", self.health, Texts, is_open=True),
            Operation("POST", "/ping", self.health, Texts, is_open=True),
            Operation("GET", "/ready", self.ready, Texts, is_open=True),
            Operation("GET", "/version", self.version, Texts, is_open=True),
        ]

    def _response_operations(self) -> list[Operation]:
        stream, path = "text/event-stream", "/v1/responses"
        one = f"{path}/{{response_id}}"
        return [
            Operation("POST", path, self.respond, ResponseReply, ResponsesRequest, stream),
            Operation("GET", one, self.response, ResponseReply, media_type=stream),
            Operation("GET", f"{one}/input_items", self.input_items, InputItems),
            Operation(
                *("POST", f"{path}/input_tokens", self.input_tokens),
                *(InputTokens, InputTokensRequest),
            ),
            Operation("DELETE", one, self.delete_response, DeletedResponse),
            Operation("POST", f"{one}/cancel", self.cancel_response, ResponseReply),
        ]

    def _pooling_operations(self) -> list[Operation]:
        """Return routes of many texts, under the names that clients of Cohere and vLLM use."""
        kinds: dict[str, Any] = {
            "/v1/embeddings": (self.embed, EmbeddingReply, EmbeddingRequest),
            **dict.fromkeys(RERANK, (self.rerank, RerankReply, RerankRequest)),
            **dict.fromkeys(SCORE, (self.score, ScoreReply, ScoreRequest)),
        }
        return [
            Operation("POST", path, run, reply, body, is_batch=True)
            for path, (run, reply, body) in kinds.items()
        ]

    async def chat(self, body: ChatRequest, receive: Receive) -> Response:
        """Answer a conversation."""
        state = await self._models.started(body.model)
        return await chat(state, body, receive)

    async def complete(self, body: CompletionRequest, receive: Receive) -> Response:
        """Continue prompts."""
        state = await self._models.started(body.model)
        return await complete(state, body, receive)

    async def messages(self, body: MessagesRequest, receive: Receive) -> Response:
        """Answer a conversation in Anthropic's form."""
        state = await self._models.started(body.model)
        return await answer_messages(state, body, receive)

    async def count_tokens(self, body: CountTokensRequest, _: Receive) -> Response:
        """Return the length of the prompt of such a conversation."""
        state = await self._models.started(body.model)
        return await count_tokens(state, body)

    async def respond(self, body: ResponsesRequest, receive: Receive) -> Response:
        """Answer the items of a conversation."""
        state = await self._models.started(body.model)
        return await respond(state, body, receive)

    async def embed(self, body: EmbeddingRequest, receive: Receive) -> Response:
        """Return the embeddings of texts."""
        return await (await self._pooling(body)).embed(body, receive)

    async def rerank(self, body: RerankRequest, receive: Receive) -> Response:
        """Sort documents by their relevance to a query."""
        return await (await self._pooling(body)).rerank(body, receive)

    async def score(self, body: ScoreRequest, receive: Receive) -> Response:
        """Return the scores of pairs of texts."""
        return await (await self._pooling(body)).score(body, receive)

    async def _pooling(self, body: PoolingRequest) -> PoolingRoutes:
        return PoolingRoutes(await self._models.started(body.model))

    async def response(self, path: Texts, _: Receive) -> Response:
        """Return a stored response, or the events of one in the background."""
        return await retrieve(self._models.default, path)

    async def input_items(self, given: Texts, _: Receive) -> Response:
        """List the input of a stored response."""
        return await list_input_items(self._models.default, given)

    async def input_tokens(self, body: InputTokensRequest, _: Receive) -> Response:
        """Return the length of the prompt of such items."""
        state = await self._models.started(body.model)
        return await count_input_tokens(state, body)

    async def delete_response(self, path: Texts, _: Receive) -> Response:
        """Forget a stored response."""
        return await delete(self._models.default, path["response_id"])

    async def cancel_response(self, path: Texts, _: Receive) -> Response:
        """End the generation of a response in the background."""
        return await cancel(self._models.default, path["response_id"])

    async def models(self, *_: object) -> Response:
        """List the served models."""
        models = ModelList(data=[*map(_model, self._models.by_name.values())])
        return json_response(model_page(models) if caller.get().is_for_anthropic else models)

    async def model(self, path: Texts, _: Receive) -> Response:
        """Describe a model."""
        model = _model(self._models.named(path["model"]))
        return json_response(model_info(model) if caller.get().is_for_anthropic else model)

    async def tokenize(self, body: TokenizeBody, _: Receive) -> Response:
        """Return the token ids of a prompt or a conversation."""
        state = await self._models.started(body.model)
        fields = {name: getattr(body, name, None) for name in PromptFields.__struct_fields__}
        fields["messages"] = chat_messages(body.messages) if body.messages else None
        fields["tools"] = template_tools(body.tools)
        given = {name: value for name, value in fields.items() if value is not None}
        given["return_token_strs"] = body.return_token_strs
        reply = await state.client.tokenize(**given, client=caller.get().client)
        return json_response(
            TokenizeResult(
                count=len(reply.token_ids),
                max_model_len=reply.max_model_len,
                tokens=reply.token_ids,
                token_strs=UNSET if reply.token_strs is None else reply.token_strs,
            )
        )

    async def detokenize(self, body: DetokenizeBody, _: Receive) -> Response:
        """Return the text of token ids."""
        state = await self._models.started(body.model)
        with fields_as_sent({"token_ids": "tokens"}.get):
            text = await state.client.detokenize(body.tokens, client=caller.get().client)
        return json_response({"prompt": text})

    async def status(self, *_: object) -> Response:
        """Describe the pipeline and its processes."""
        return json_response(await self._status())

    async def metrics(self, *_: object) -> Response:
        """Return metrics for Prometheus."""
        text = render(await self._status(), self._models.config)
        return Response(text, media_type="text/plain; version=0.0.4")

    async def health(self, *_: object) -> Response:
        """Return 200 if the pipeline works."""
        await self._health.check()
        return json_response({"status": "ok"})

    async def ready(self, *_: object) -> Response:
        """Return 200 if every stage is there."""
        await self._health.check_ready()
        return json_response({"status": "ok"})

    async def version(self, *_: object) -> Response:
        """Return Penstock's version."""
        return json_response({"version": version("penstock")})

    async def _status(self) -> StatusReply:
        try:
            return await asyncio.wait_for(self._models.client.status(metrics=True), STATUS_TIMEOUT)
        except TimeoutError:
            raise ApiError(503, "the gateway does not answer") from None


def _model(state: AppState) -> Model:
    return Model(id=state.model, created=state.created, max_model_len=state.max_model_len)
