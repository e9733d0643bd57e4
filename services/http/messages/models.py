"""The list of models in Anthropic's shape."""

from datetime import UTC, datetime

from penstock.services.http.messages.replies import ModelInfo, ModelPage
from penstock.services.http.replies import Model, ModelList


def model_info(model: Model) -> ModelInfo:
    """Return a model as Anthropic describes it."""
    return ModelInfo(
        id=model.id,
        display_name=model.id,
        created_at=datetime.fromtimestamp(model.created, UTC),
        max_input_tokens=model.max_model_len,
        max_tokens=model.max_model_len,
    )


def model_page(models: ModelList) -> ModelPage:
    """Return all models as one page."""
    data = [model_info(one) for one in models.data]
    ids = [one.id for one in data]
    return ModelPage(data=data, first_id=ids[0], last_id=ids[-1])
