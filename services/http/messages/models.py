"""The list of models in Anthropic's shape."""

from datetime import UTC, datetime
from typing import Any

from penstock.services.http.replies import Model, ModelList


def model_info(model: Model) -> dict[str, Any]:
    """Return a model as Anthropic describes it."""
    return {
        "type": "model",
        "id": model.id,
        "display_name": model.id,
        "created_at": datetime.fromtimestamp(model.created, UTC),
        "lifecycle": "active",
        "max_input_tokens": model.max_model_len,
        "max_tokens": model.max_model_len,
    }


def model_page(models: ModelList) -> dict[str, Any]:
    """Return all models as one page."""
    ids = [one.id for one in models.data]
    data = [model_info(one) for one in models.data]
    return {"data": data, "first_id": ids[0], "last_id": ids[-1], "has_more": False}
