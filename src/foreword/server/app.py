"""The app: routes, error forms and the API's description, around one explicit `Service`."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from foreword.base.errors import ForewordError
from foreword.server import admin, cache_api, chat, dashboard, errors, paths, state
from foreword.server.auth import Authentication, admin_only
from foreword.server.delivery import ClientGone
from foreword.server.hosts import HostCheck
from foreword.server.intake import BodyLimit
from foreword.server.openai import chat_completions, completions, models
from foreword.server.openai.requests import ChatRequest, CompletionRequest
from foreword.server.openai.responses import ChatCompletion, Completion
from foreword.server.service import Service
from foreword.server.wire import ErrorReply, Wire

_EVENT: Mapping[str, Any] = {
    "type": "object",
    "description": "One event of the stream: a chunk as JSON, an error, or the word [DONE] at the end.",
    "required": ["data"],
    "properties": {"data": {"type": "string"}},
}
_STREAM: Mapping[str, Any] = {"text/event-stream": {"schema": _EVENT}}  # before OpenAPI 3.2 that is each event's
_REFERENCE = "#/components/schemas/{model}"
_BODIES: tuple[type[Wire], ...] = (
    ChatRequest,
    CompletionRequest,
    chat.PlainRequest,
    admin.PublicHeadRequest,
    cache_api.LookupRequest,
    cache_api.WarmRequest,
    cache_api.PinRequest,
    cache_api.PrefixRequest,
    cache_api.FlushRequest,
)


def create_app(service: Service) -> FastAPI:
    """An ASGI app that serves one model."""
    app = FastAPI(
        title="Foreword",
        summary="Hugging Face models behind an OpenAI-compatible API; no prompt prefix is computed twice.",
        docs_url=None,
        redoc_url=None,
        dependencies=[Depends(paths.known_query)],
    )
    app.state.service = service
    app.state.started = int(time.time())
    config, metrics = service.config.server, service.metrics
    app.add_middleware(BodyLimit, max_body_bytes=config.max_body_bytes, metrics=metrics)
    app.add_middleware(Authentication, keys=service.keys, metrics=metrics)
    app.add_middleware(HostCheck, config=config, metrics=metrics)
    app.add_middleware(paths.HeadAsGet)  # the outermost: it comes first
    _add_error_forms(app)
    _add_generation(
        app, "/v1/chat/completions", chat_completions.create_chat_completion, (ChatRequest, ChatCompletion), _STREAM
    )
    _add_generation(app, "/v1/completions", completions.create_completion, (CompletionRequest, Completion), _STREAM)
    _add_generation(app, "/chat", chat.create_chat, (chat.PlainRequest, chat.PlainReply), {})
    app.add_api_route("/v1/models", models.list_models)
    app.add_api_route("/v1/models/{model:path}", models.retrieve_model, responses=_errors(404))
    app.add_api_route("/v1/cache", state.get_cache, responses=_errors(404))
    app.add_api_route("/", state.get_index)
    app.add_api_route(dashboard.PATH, dashboard.get_page, include_in_schema=False)
    app.add_api_route(f"{dashboard.PATH}/{{name}}", dashboard.get_file, include_in_schema=False)
    app.add_api_route("/health", state.get_health, responses=_answers(state.Health, 200, 503))
    app.add_api_route("/ready", state.get_ready, responses=_answers(state.Health, 200, 503))
    _add_verbs(app)
    _add_for_operators(app)
    app.openapi = _described(app)
    return app


def _add_error_forms(app: FastAPI) -> None:
    app.add_exception_handler(errors.Refused, errors.answer_refused)
    app.add_exception_handler(ForewordError, errors.answer_foreword)
    app.add_exception_handler(HTTPException, paths.answer_http)
    app.add_exception_handler(RequestValidationError, errors.answer_query)
    app.add_exception_handler(Exception, errors.answer_unexpected)
    app.add_exception_handler(ClientGone, _answer_nobody)
    app.add_exception_handler(ClientDisconnect, _answer_nobody)


async def _answer_nobody(request: Request, error: Exception) -> Response:
    del request, error
    return Response(status_code=499)  # nobody reads it; access logs show it


def _add_verbs(app: FastAPI) -> None:
    """What is done to the cache by name: a tenant's own to everybody, all of it to an operator."""
    app.add_api_route("/v1/cache/tree", cache_api.get_tree, responses=_errors(400, 401, 404, 503))
    app.add_api_route("/v1/cache/advice", cache_api.get_advice, responses=_errors(401, 404))
    app.add_api_route("/v1/cache/requests", cache_api.get_requests, responses=_errors(401, 404))
    for name, endpoint, body, locked in (
        ("lookup", cache_api.lookup, cache_api.LookupRequest, False),
        ("warm", cache_api.warm, cache_api.WarmRequest, False),
        ("flush", cache_api.flush, cache_api.FlushRequest, False),
        ("pin", cache_api.pin, cache_api.PinRequest, True),
        ("unpin", cache_api.unpin, cache_api.PrefixRequest, True),
    ):
        app.add_api_route(
            f"/v1/cache/{name}",
            endpoint,
            methods=["POST"],
            dependencies=[Depends(admin_only)] if locked else [],
            responses=_errors(400, 401, 403, 404, 413, 422, 429, 503),
            openapi_extra=_body(body, required=body is not cache_api.FlushRequest),
        )


def _add_for_operators(app: FastAPI) -> None:
    locked = [Depends(admin_only)]
    text: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {}}}}
    app.add_api_route("/metrics", state.get_metrics, dependencies=locked, responses=text)
    app.add_api_route("/v1/cache/public", admin.get_public_heads, dependencies=locked)
    app.add_api_route(
        "/v1/cache/public",
        admin.change_public_heads,
        methods=["POST"],
        dependencies=locked,
        responses=_errors(400, 403, 404, 422),
        openapi_extra=_body(admin.PublicHeadRequest),
    )
    app.add_api_route(
        "/v1/models/reload", admin.reload, methods=["POST"], dependencies=locked, responses=_errors(403, 500, 503)
    )


def _add_generation(
    app: FastAPI,
    path: str,
    endpoint: Callable[..., Any],
    forms: tuple[type[Wire], type[BaseModel]],
    also: Mapping[str, Any],
) -> None:
    """A route that reads its body itself (see `intake`), described by hand; `also`: other forms of its answer."""
    body, reply = forms
    app.add_api_route(
        path,
        endpoint,
        methods=["POST"],
        responses={
            200: {"model": reply, "content": dict(also)},
            **_errors(400, 401, 404, 413, 422, 429, 500, 503),
        },
        openapi_extra=_body(body),
    )


def _body(form: type[Wire], *, required: bool = True) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": _REFERENCE.format(model=form.__name__)}}}
    return {"requestBody": {"required": required, "content": content}}


def _answers(reply: type[BaseModel], *statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": reply} for status in statuses}


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return _answers(ErrorReply, *statuses)


def _described(app: FastAPI) -> Callable[[], dict[str, Any]]:
    """OpenAPI's description with the bodies that FastAPI does not see, since routes read them themselves."""

    def describe() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version="1", summary=app.summary, routes=app.routes)
            _, bodies = models_json_schema([(body, "validation") for body in _BODIES], ref_template=_REFERENCE)
            schema.setdefault("components", {}).setdefault("schemas", {}).update(bodies["$defs"])
            app.openapi_schema = schema
        return app.openapi_schema

    return describe
