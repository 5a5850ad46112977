"""`POST /v1/chat/completions`: a conversation through the model's own chat template."""

from collections.abc import Mapping
from typing import Any, Literal

from fastapi import Request
from starlette.responses import Response

from foreword.base.params import FinishReason
from foreword.front.ask import Ask, Piece
from foreword.server.auth import caller
from foreword.server.delivery import Whole, gathered, json_reply
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
from foreword.server.openai.logprobs import chat_logprobs
from foreword.server.openai.requests import ChatRequest
from foreword.server.openai.responses import AssistantMessage, Called, CallReply, ChatChoice, ChatCompletion
from foreword.server.report import report_of, usage_of
from foreword.server.service import Answer, service_of
from foreword.text.speech import ToolCall

_FIRST: Mapping[str, Any] = {
    "index": 0,
    "delta": {"role": "assistant", "content": ""},
    "logprobs": None,
    "finish_reason": None,
}
"""What a stream's first chunk says: who speaks."""


async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    service = service_of(request)
    form = await read(request, ChatRequest)
    check_model(form, service)
    who = caller(request)

    def submit(answers: list[Answer]) -> None:
        answers.append(service.front.submit(_ask(form), who))

    answers = await submitted(submit, _names(form))
    names = envelope("chatcmpl", service)
    if form.stream:
        options = form.stream_options
        streaming = Streaming(
            kind="chat.completion.chunk",
            envelope=names,
            answers=answers,
            service=service,
            with_usage=bool(options and options.include_usage),
            with_report=form.cache.report,
        )
        return streaming.response(_writer(form), _FIRST)
    whole = (await gathered(request.receive, answers))[0]
    choice = ChatChoice(
        index=0,
        message=_message(whole),
        logprobs=chat_logprobs(whole.tokens) if form.logprobs else None,
        finish_reason=_ended(whole.finish, called=bool(whole.calls)),
    )
    reply = ChatCompletion(
        id=names.id,
        created=names.created,
        model=names.model,
        choices=[choice],
        usage=usage_of([whole.usage]),
        cache=await report_of(whole.usage, answers[0], service) if form.cache.report else None,
    )
    return json_reply(reply, without=() if form.cache.report else ("cache",))


def _message(whole: Whole) -> AssistantMessage:
    return AssistantMessage(
        content=whole.text if whole.text or not whole.calls else None,
        reasoning_content=whole.reasoning or None,
        tool_calls=[_call(call) for call in whole.calls] or None,
    )


def _call(call: ToolCall) -> CallReply:
    return CallReply(id=call.id, function=Called(name=call.name, arguments=call.arguments))


def _ended(finish: FinishReason, *, called: bool) -> Literal["stop", "length", "tool_calls"]:
    if finish != "stop":
        return "length"
    return "tool_calls" if called else "stop"


def _ask(form: ChatRequest) -> Ask:
    max_tokens = form.max_completion_tokens or form.max_tokens
    logprobs = (form.top_logprobs or 0) if form.logprobs else None
    return ask_of(form, form.conversation(), max_tokens=max_tokens, logprobs=logprobs)


def _names(form: ChatRequest) -> dict[str, str]:
    limit = "max_tokens" if form.max_completion_tokens is None else "max_completion_tokens"
    return {
        "prompt": "messages",
        "max_tokens": limit,
        "logprobs": "top_logprobs",
        **CACHE_NAMES,
    }


def _writer(form: ChatRequest) -> Writer:
    num_calls = 0

    def write(number: int, piece: Piece) -> list[dict[str, Any]]:
        nonlocal num_calls
        choices: list[dict[str, Any]] = []
        delta: dict[str, Any] = {"reasoning_content": piece.reasoning} if piece.reasoning else {}
        if piece.text or (piece.tokens and not delta):
            delta["content"] = piece.text
        if piece.calls:
            calls = enumerate(piece.calls, start=num_calls)
            delta["tool_calls"] = [{"index": place, **_call(call).model_dump()} for place, call in calls]
            num_calls += len(piece.calls)
        if delta:
            logprobs = chat_logprobs(piece.tokens).model_dump() if form.logprobs else None
            choices.append({"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": None})
        if piece.finish is not None:
            reason = _ended(piece.finish, called=num_calls > 0)
            choices.append({"index": number, "delta": {}, "logprobs": None, "finish_reason": reason})
        return choices

    return write
