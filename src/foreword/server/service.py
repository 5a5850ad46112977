"""What the server stands on, handed to it once and never looked up anywhere else."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fastapi import Request

from foreword.assemble import Assembly
from foreword.base.config import Config
from foreword.engine.state import EngineState
from foreword.front.ask import Ask, Piece
from foreword.telemetry import Metrics

Setting = str | int | float | bool | None
"""A resolved setting's value."""


class Answer(Protocol):
    """One answer on its way; `front.answer.Answer` is one."""

    @property
    def tokenize_s(self) -> float:
        """Seconds that tokenising the prompt took; 0 for a prompt of ids."""
        ...

    def __aiter__(self) -> AsyncIterator[Piece]:
        """Pieces in order; the last one carries `finish` and `usage`."""
        ...

    def cancel(self) -> None:
        """Stop within a step. Harmless after the end."""
        ...


class Front(Protocol):
    """Text in, text out; `front.front.Front` is one. Its methods may take long: never call them on the event loop."""

    def render_chat(self, messages: Sequence[Mapping[str, Any]], /) -> tuple[int, ...]:
        """Token ids of a conversation, ready for the assistant's turn. Raises RequestError."""
        ...

    def submit(self, ask: Ask, /) -> Answer:
        """Check, tokenise and queue one prompt. Raises RequestError and CapacityError."""
        ...


class Engine(Protocol):
    """Whether somebody computes, and how busy they are; `engine.worker.Worker` is one."""

    @property
    def alive(self) -> bool:
        """Whether the engine thread runs."""
        ...

    def state(self) -> EngineState:
        """Numbers of this moment, from any thread."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One model being served."""

    front: Front
    engine: Engine
    metrics: Metrics
    models: tuple[str, ...]
    """Names the model answers to; the first one is the one that answers carry."""
    config: Config
    effective: Mapping[str, Setting] = field(default_factory=dict[str, Setting])
    """Settings that were resolved at start (what `auto` became), for `GET /v1/cache`."""
    cacheable: bool = True
    """Whether prefixes of this model can be reused."""


def serving(assembly: Assembly, metrics: Metrics) -> Service:
    """The service of an assembled model; `metrics` is the observer that it was assembled with."""
    name, asked = assembly.card.name, assembly.config.model.model
    return Service(
        front=assembly.front,
        engine=assembly.worker,
        metrics=metrics,
        models=(name,) if asked is None or asked == name else (name, asked),
        config=assembly.config,
        effective=assembly.effective,
    )


def service_of(request: Request) -> Service:
    """The service that the request's app was made with."""
    return request.app.state.service
