"""`POST /v1/completions`: one prompt or several, as text or as token ids."""

from typing import Any, cast

from fastapi import Request
from starlette.responses import Response

from foreword.base.errors import amount
from foreword.front.ask import Ask, Piece
from foreword.server.auth import caller
from foreword.server.delivery import gathered, json_reply
from foreword.server.errors import Refusal, Refused
from foreword.server.intake import read
from foreword.server.openai.generation import (
    CACHE_NAMES,
    Streaming,
    Writer,
    ask_of,
    check_model,
    envelope,
    submitted,
)
from foreword.server.openai.logprobs import CompletionLogprobsWriter
from foreword.server.openai.requests import CompletionRequest
from foreword.server.openai.responses import Completion, CompletionChoice
from foreword.server.report import report_of, usage_of
from foreword.server.service import Answer, service_of


async def create_completion(request: Request) -> Response:
    """Continue one prompt or several."""
    service = service_of(request)
    form = await read(request, CompletionRequest)
    check_model(form, service)
    who = caller(request)
    asks = _asks(form)
    if who.max_live is not None and len(asks) > who.max_live:
        most = amount(who.max_live, "request")
        message = f"prompt has {len(asks)} prompts; your key may have {most} at a time. Send fewer."
        raise Refused(Refusal(status=400, message=message, code="too_many_prompts", field="prompt"))

    def submit(answers: list[Answer]) -> None:
        for ask in asks:
            answers.append(service.front.submit(ask, who))  # noqa: PERF401  those opened before one fails must be known

    answers = await submitted(submit, CACHE_NAMES)
    names = envelope("cmpl", service)
    if form.stream:
        options = form.stream_options
        streaming = Streaming(
            kind="text_completion",
            envelope=names,
            answers=answers,
            service=service,
            with_usage=bool(options and options.include_usage),
            with_report=form.cache.report,
        )
        return streaming.response(_writer(form, len(answers)))
    wholes = await gathered(request.receive, answers)
    choices = [
        CompletionChoice(
            index=index,
            text=whole.text,
            logprobs=None if form.logprobs is None else _logprobs(form).write(whole.tokens),
            finish_reason="stop" if whole.finish == "stop" else "length",
        )
        for index, whole in enumerate(wholes)
    ]
    reply = Completion(
        id=names.id,
        created=names.created,
        model=names.model,
        choices=choices,
        usage=usage_of([whole.usage for whole in wholes]),
        cache=await report_of(wholes[0].usage, answers[0], service) if form.cache.report else None,
    )
    return json_reply(reply, without=() if form.cache.report else ("cache",))


def _prompts(form: CompletionRequest) -> list[str | tuple[int, ...]]:
    prompt = form.prompt
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [tuple(cast(list[int], prompt))]
    return [one if isinstance(one, str) else tuple(one) for one in cast(list[str | list[int]], prompt)]


def _asks(form: CompletionRequest) -> list[Ask]:
    prompts = _prompts(form)
    if form.cache.report and len(prompts) > 1:
        message = "cache.report is for a single prompt; this request has several"
        raise Refused(Refusal(status=400, message=message, code="unsupported_value", field="cache.report"))
    return [ask_of(form, prompt, max_tokens=form.max_tokens, logprobs=form.logprobs) for prompt in prompts]


def _logprobs(form: CompletionRequest) -> CompletionLogprobsWriter:
    return CompletionLogprobsWriter(with_top=bool(form.logprobs))


def _writer(form: CompletionRequest, num_answers: int) -> Writer:
    logprobs = None if form.logprobs is None else [_logprobs(form) for _ in range(num_answers)]

    def write(number: int, piece: Piece) -> list[dict[str, Any]]:
        if not (piece.text or piece.tokens or piece.finish):
            return []
        written = logprobs[number].write(piece.tokens).model_dump() if logprobs and piece.tokens else None
        return [{"index": number, "text": piece.text, "logprobs": written, "finish_reason": piece.finish}]

    return write
