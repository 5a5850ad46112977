"""`GET /v1/models` and `GET /v1/models/{model}`."""

from fastapi import Request

from foreword.server.errors import Refused, no_such_model
from foreword.server.openai.responses import ModelCard, ModelList
from foreword.server.service import service_of


async def list_models(request: Request) -> ModelList:
    """All names that the model answers to."""
    return ModelList(data=[_card(name, request) for name in service_of(request).models])


async def retrieve_model(request: Request, model: str) -> ModelCard:
    """One of them."""
    service = service_of(request)
    if model not in service.models:
        raise Refused(no_such_model(model, service.models))
    return _card(model, request)


def _card(name: str, request: Request) -> ModelCard:
    return ModelCard(id=name, created=request.app.state.started)
