"""The served models, and their tokens."""

from datetime import UTC, datetime
from typing import Any

from msgspec import UNSET
from starlette.responses import Response

from penstock.protocol.messages.chat import chat_messages
from penstock.protocol.messages.client import PromptFields
from penstock.services.http.generation.schema import (
    DetokenizeBody,
    Model,
    ModelList,
    TokenizeBody,
    TokenizeResult,
)
from penstock.services.http.generation.to_generate_request import (
    template_tools,
    template_variables,
)
from penstock.services.http.shared.access import caller
from penstock.services.http.shared.app_state import AppState, Models, Operation, Texts
from penstock.services.http.shared.errors import fields_as_sent, json_response


async def list_models(models: Models, _: Texts) -> Response:
    """List the served models."""
    listed = ModelList(data=[_model(state, name) for name, state in models.by_name.items()])
    return json_response(_page(listed) if caller.get().is_for_anthropic else listed)


async def describe_model(models: Models, path: Texts) -> Response:
    """Describe a model."""
    model = _model(models.named(path["model"]), path["model"])
    return json_response(_for_anthropic(model) if caller.get().is_for_anthropic else model)


async def tokenize(state: AppState, body: TokenizeBody) -> Response:
    """Return the token ids of a prompt or a conversation."""
    fields = {name: getattr(body, name, None) for name in PromptFields.__struct_fields__}
    fields["messages"] = chat_messages(body.messages) if body.messages else None
    fields["tools"] = template_tools(body.tools)
    fields["chat_template_kwargs"] = template_variables(body)
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


def _model(state: AppState, name: str) -> Model:
    return Model(
        id=name,
        created=state.created,
        root=str(state.config.model_folder),
        max_model_len=state.max_model_len,
    )


def _for_anthropic(model: Model) -> dict[str, Any]:
    """Return the description of a model in Anthropic's shape."""
    return {
        "type": "model",
        "id": model.id,
        "display_name": model.id,
        "created_at": datetime.fromtimestamp(model.created, UTC),
        "lifecycle": "active",
        "max_input_tokens": model.max_model_len,
        "max_tokens": model.max_model_len,
    }


def _page(models: ModelList) -> dict[str, Any]:
    """Return all models as one page."""
    ids = [model.id for model in models.data]
    data = [_for_anthropic(model) for model in models.data]
    return {"data": data, "first_id": ids[0], "last_id": ids[-1], "has_more": False}


OPERATIONS = [
    Operation("GET", "/v1/models", list_models, ModelList),
    Operation("GET", "/v1/models/{model}", describe_model, Model),
    Operation("POST", "/tokenize", tokenize, TokenizeResult, TokenizeBody),
    Operation("POST", "/detokenize", detokenize, Texts, DetokenizeBody),
]
