"""Table of all routes, for starlette and for `/openapi.json`."""

from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import Any

from msgspec import UNSET, Struct
from starlette.responses import Response

from penstock.protocol.config import DISTRIBUTION
from penstock.protocol.messages.chat import chat_messages
from penstock.protocol.messages.client import PromptFields
from penstock.protocol.messages.status import StatusReply
from penstock.services.http.generation.chat import chat
from penstock.services.http.generation.completions import complete
from penstock.services.http.generation.replies import (
    ChatReply,
    CompletionReply,
    Model,
    ModelList,
    TokenizeResult,
)
from penstock.services.http.generation.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeBody,
    TokenizeBody,
)
from penstock.services.http.generation.to_generate_request import template_tools
from penstock.services.http.messages.routes import (
    answer_messages,
    count_tokens,
    model_info,
    model_page,
)
from penstock.services.http.messages.schema import (
    CountTokensRequest,
    MessageReply,
    MessagesRequest,
    TokenCount,
)
from penstock.services.http.metrics import render
from penstock.services.http.pooling.routes import embed, rerank, score
from penstock.services.http.pooling.schema import (
    EmbeddingReply,
    EmbeddingRequest,
    RerankReply,
    RerankRequest,
    ScoreReply,
    ScoreRequest,
)
from penstock.services.http.responses.replies import (
    DeletedResponse,
    InputItems,
    InputTokens,
    ResponseReply,
)
from penstock.services.http.responses.routes import (
    count_input_tokens,
    delete,
    list_input_items,
    respond,
    retrieve,
)
from penstock.services.http.responses.schema import (
    InputTokensRequest,
    ResponsesRequest,
)
from penstock.services.http.shared.access import caller
from penstock.services.http.shared.app_state import AppState, Models
from penstock.services.http.shared.errors import fields_as_sent
from penstock.services.http.shared.health import status_of
from penstock.services.http.shared.json_response import json_response

Texts = dict[str, str]
RERANK = "/v1/rerank", "/v2/rerank", "/rerank"
SCORE = "/v1/score", "/score"
_STREAM = "text/event-stream"


class Operation(Struct, frozen=True):
    """One route.

    `run` gets the state of the model that its body names, and the body; without a body it gets all
    models, and the parameters of path and query. It may raise ApiError, MessageError and
    RequestError. The first line of its docstring is the summary of the route.
    """

    method: str
    path: str
    run: Callable[[Any, Any], Awaitable[Response]]
    reply: Any  # type of the reply in JSON; None without one
    body: type[Struct] | None = None
    media_type: str = ""  # in addition to JSON
    is_open: bool = False  # needs no key
    is_batch: bool = False  # its body has several inputs, each of which is a request to the gateway


async def list_models(models: Models, _: Texts) -> Response:
    """List the served models."""
    listed = ModelList(data=[_model(state, name) for name, state in models.by_name.items()])
    return json_response(model_page(listed) if caller.get().is_for_anthropic else listed)


async def describe_model(models: Models, path: Texts) -> Response:
    """Describe a model."""
    model = _model(models.named(path["model"]), path["model"])
    return json_response(model_info(model) if caller.get().is_for_anthropic else model)


async def tokenize(state: AppState, body: TokenizeBody) -> Response:
    """Return the token ids of a prompt or a conversation."""
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


async def detokenize(state: AppState, body: DetokenizeBody) -> Response:
    """Return the text of token ids."""
    with fields_as_sent({"token_ids": "tokens"}.get):
        text = await state.client.detokenize(body.tokens, client=caller.get().client)
    return json_response({"prompt": text})


async def status(models: Models, _: Texts) -> Response:
    """Describe the pipeline and its processes."""
    return json_response(await status_of(models.client, metrics=True))


async def metrics(models: Models, _: Texts) -> Response:
    """Return metrics for Prometheus."""
    status = await status_of(models.client, metrics=True)
    return Response(render(status, models.config), media_type="text/plain; version=0.0.4")


async def health(models: Models, _: Texts) -> Response:
    """Return 200 if the pipeline works."""
    await models.health.check()
    return json_response({"status": "ok"})


async def ready(models: Models, _: Texts) -> Response:
    """Return 200 if every stage is there."""
    await models.health.check_ready()
    return json_response({"status": "ok"})


async def show_version(_: Models, __: Texts) -> Response:
    """Return Penstock's version."""
    return json_response({"version": version(DISTRIBUTION)})


def _model(state: AppState, name: str) -> Model:
    return Model(
        id=name,
        created=state.created,
        root=str(state.config.model_folder),
        max_model_len=state.max_model_len,
    )


_RESPONSES = "/v1/responses"
_RESPONSE = f"{_RESPONSES}/{{response_id}}"
OPERATIONS = [
    Operation("POST", "/v1/chat/completions", chat, ChatReply, ChatRequest, _STREAM),
    Operation("POST", "/v1/completions", complete, CompletionReply, CompletionRequest, _STREAM),
    Operation("POST", "/v1/messages", answer_messages, MessageReply, MessagesRequest, _STREAM),
    Operation("POST", "/v1/messages/count_tokens", count_tokens, TokenCount, CountTokensRequest),
    Operation("POST", _RESPONSES, respond, ResponseReply, ResponsesRequest, _STREAM),
    Operation("GET", _RESPONSE, retrieve, ResponseReply),
    Operation("GET", f"{_RESPONSE}/input_items", list_input_items, InputItems),
    Operation(
        *("POST", f"{_RESPONSES}/input_tokens", count_input_tokens),
        *(InputTokens, InputTokensRequest),
    ),
    Operation("DELETE", _RESPONSE, delete, DeletedResponse),
    Operation("POST", "/v1/embeddings", embed, EmbeddingReply, EmbeddingRequest, is_batch=True),
    *(Operation("POST", one, rerank, RerankReply, RerankRequest, is_batch=True) for one in RERANK),
    *(Operation("POST", one, score, ScoreReply, ScoreRequest, is_batch=True) for one in SCORE),
    Operation("GET", "/v1/models", list_models, ModelList),
    Operation("GET", "/v1/models/{model}", describe_model, Model),
    Operation("POST", "/tokenize", tokenize, TokenizeResult, TokenizeBody),
    Operation("POST", "/detokenize", detokenize, Texts, DetokenizeBody),
    Operation("GET", "/status", status, StatusReply),
    Operation("GET", "/metrics", metrics, None, media_type="text/plain"),
    Operation("GET", "/health", health, Texts, is_open=True),
    Operation("GET", "/ping", health, Texts, is_open=True),
    Operation("POST", "/ping", health, Texts, is_open=True),
    Operation("GET", "/ready", ready, Texts, is_open=True),
    Operation("GET", "/version", show_version, Texts, is_open=True),
]
