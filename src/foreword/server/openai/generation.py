"""What the two generating routes share: the names of an answer, and a request's wishes as an `Ask`."""

import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from foreword.base.errors import ForewordError, InvariantBroken, RequestError
from foreword.front.ask import Ask, Conversation, Piece
from foreword.schedule.plan import Usage
from foreword.server.delivery import EventStream, check_end, merged, opened
from foreword.server.errors import Refused, no_such_model, refusal_of, renamed
from foreword.server.intake import cache_wishes
from foreword.server.openai.requests import GenerationRequest
from foreword.server.report import report_of, usage_of
from foreword.server.service import Answer, Service


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """What every chunk of an answer repeats."""

    id: str
    created: int
    model: str

    def chunk(self, kind: str, choices: Sequence[Mapping[str, Any]], **more: Any) -> dict[str, Any]:
        """One chunk of a stream."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices, **more}


def envelope(prefix: str, service: Service) -> Envelope:
    """A new answer's names."""
    return Envelope(id=f"{prefix}-{uuid4().hex}", created=int(time.time()), model=service.models[0])


def check_model(form: GenerationRequest, service: Service) -> None:
    """Raise Refused when another model is asked for."""
    check_model_name(form.model, service)


def check_model_name(name: str | None, service: Service) -> None:
    """Raise Refused when another model is named."""
    if name is not None and name not in service.models:
        raise Refused(no_such_model(name, service.models))


def ask_of(
    form: GenerationRequest,
    prompt: str | tuple[int, ...] | Conversation,
    *,
    max_tokens: int | None,
    logprobs: int | None,
) -> Ask:
    """The request's wishes for one prompt."""
    stop = (form.stop,) if isinstance(form.stop, str) else tuple(form.stop or ())
    return Ask(
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=1.0 if form.temperature is None else form.temperature,
        top_p=1.0 if form.top_p is None else form.top_p,
        top_k=form.top_k or 0,
        seed=form.seed,
        logprobs=logprobs,
        ignore_eos=bool(form.ignore_eos),
        stop=stop,
        **cache_wishes(form.cache),
    )


CACHE_NAMES: Mapping[str, str] = {
    name: f"cache.{name}" for name in ("prefix_length", "read", "store", "ttl", "priority", "key")
}
"""Fields of an `Ask` by their names on the wire."""


async def submitted(submit: Callable[[list[Answer]], None], names: Mapping[str, str]) -> list[Answer]:
    """Answers that `submit` opens; a RequestError speaks of the fields by their names on this route."""
    try:
        return await opened(submit)
    except RequestError as error:
        raise renamed(error, names) from None


Writer = Callable[[int, Piece], list[dict[str, Any]]]
"""Choices of the chunks that one answer's piece becomes, one list entry for each chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Streaming:
    """One streamed answer: its chunks' names, its wishes for the end."""

    kind: str
    envelope: Envelope
    service: Service
    answers: Sequence[Answer]
    with_usage: bool
    with_report: bool

    def response(self, write: Writer, first: Mapping[str, Any] | None = None) -> EventStream:
        """The stream; `first` is a choice to send ahead of the first piece."""
        return EventStream(self.answers, self._events(write, first), self._failed)

    async def _events(self, write: Writer, first: Mapping[str, Any] | None) -> AsyncGenerator[dict[str, Any], None]:
        empty = {"usage": None} if self.with_usage else {}
        usages: list[Usage] = []
        async for number, piece in merged(self.answers):
            # Not before there is news: a chunk that comes at once would pass for the first token.
            if first is not None:
                yield self.envelope.chunk(self.kind, [first], **empty)
                first = None
            if piece.finish is not None:
                check_end(piece)
                if piece.usage is None:
                    raise InvariantBroken("an answer ended without its usage")
                usages.append(piece.usage)
            choices = write(number, piece)
            last = len(usages) == len(self.answers)
            for place, choice in enumerate(choices, 1):
                report = await self._report(usages) if last and place == len(choices) and not self.with_usage else {}
                yield self.envelope.chunk(self.kind, [choice], **empty, **report)
        if self.with_usage:
            usage = usage_of(usages).model_dump()
            yield self.envelope.chunk(self.kind, [], usage=usage, **await self._report(usages))

    async def _report(self, usages: Sequence[Usage]) -> dict[str, Any]:
        """The `cache` object: on the last chunk, whichever that is."""
        if not self.with_report:
            return {}
        return {"cache": (await report_of(usages[0], self.answers[0], self.service)).model_dump()}

    def _failed(self, error: ForewordError) -> dict[str, Any]:
        return refusal_of(error).body()
