"""Answers on their way out, whole or as a stream, for as long as the client stays.

Every request has one watcher that waits for the client to hang up. When it does, or when anything else ends the
request early, each of its answers is cancelled; the engine drops them within a step. Cancelling twice, or after the
end, is harmless, so all exits share one `finally`.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

import anyio.to_thread
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from foreword.base.errors import ForewordError, InvariantBroken, StepFailed, Unavailable
from foreword.base.params import FinishReason
from foreword.front.ask import Piece, TokenText
from foreword.schedule.plan import Usage
from foreword.server.service import Answer
from foreword.server.wire import Reply
from foreword.text.speech import ToolCall

ResultT = TypeVar("ResultT")


class ClientGone(Exception):
    """The client hung up before the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """One answer, complete."""

    text: str
    tokens: tuple[TokenText, ...]
    finish: FinishReason
    usage: Usage
    reasoning: str
    calls: tuple[ToolCall, ...]


async def opened(submit: Callable[[list[Answer]], None]) -> list[Answer]:
    """Run `submit`, which appends the answers it opens, in a thread; if it fails, none of them is left running."""
    answers: list[Answer] = []
    try:
        # Waits for the thread even when cancelled, so that no answer is opened after the `except` below.
        await anyio.to_thread.run_sync(submit, answers)
    except BaseException:
        cancel(answers)
        raise
    return answers


def cancel(answers: Sequence[Answer]) -> None:
    """Stop all of them."""
    for answer in answers:
        answer.cancel()


async def gathered(receive: Receive, answers: Sequence[Answer]) -> list[Whole]:
    """All answers complete. Raises ClientGone, StepFailed, Unavailable."""
    try:
        return await while_listening(receive, _all(answers))
    finally:
        cancel(answers)


async def while_listening(receive: Receive, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """The work's result; when the client hangs up first, the work is cancelled and ClientGone raised."""
    worker, watcher = asyncio.create_task(work), asyncio.create_task(_hung_up(receive))
    try:
        await asyncio.wait((worker, watcher), return_when=asyncio.FIRST_COMPLETED)
        if worker.done():
            return worker.result()
        raise ClientGone
    finally:
        worker.cancel()
        watcher.cancel()
        await asyncio.gather(worker, watcher, return_exceptions=True)


def check_end(piece: Piece) -> None:
    """Raise what a bad end means: StepFailed for a fault, Unavailable for an engine that ends."""
    if piece.finish == "error":
        raise StepFailed(piece.error or "the step failed")
    if piece.finish == "cancelled":
        raise Unavailable(piece.error or "the server is stopping; the request was cut short", retry_after_s=10.0)


def json_reply(reply: Reply, *, without: Sequence[str] = ()) -> Response:
    """A whole answer as a response, less the fields named."""
    return Response(reply.model_dump_json(exclude=set(without)), media_type="application/json")


async def _all(answers: Sequence[Answer]) -> list[Whole]:
    # One after the other: they run side by side in the engine, and each keeps what it has until it is read.
    return [await _whole(answer) for answer in answers]


async def _whole(answer: Answer) -> Whole:
    texts: list[str] = []
    thoughts: list[str] = []
    tokens: list[TokenText] = []
    calls: list[ToolCall] = []
    async for piece in answer:
        texts.append(piece.text)
        thoughts.append(piece.reasoning)
        tokens += piece.tokens
        calls += piece.calls
        if piece.finish is not None:
            check_end(piece)
            if piece.usage is None:
                break
            return Whole(
                text="".join(texts),
                tokens=tuple(tokens),
                finish=piece.finish,
                usage=piece.usage,
                reasoning="".join(thoughts),
                calls=tuple(calls),
            )
    raise InvariantBroken("an answer ended without its finish reason and usage")


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events, one for each JSON object, `data: [DONE]` at the end; cancels its answers on every exit."""

    media_type = "text/event-stream"

    def __init__(
        self,
        answers: Sequence[Answer],
        events: AsyncGenerator[dict[str, Any], None],
        failed: Callable[[ForewordError], Any],
    ) -> None:
        """`failed` makes the last event out of an error: the status line has long been sent then."""
        # Proxies must neither keep nor collect what is to be seen token by token.
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._answers = answers
        self._events = events
        self._failed = failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the end, or until the client hangs up."""
        del scope
        try:
            await while_listening(receive, self._send_all(send))
        except ClientGone:
            pass
        finally:
            cancel(self._answers)

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with aclosing(self._events) as events:
                async for event in events:
                    await send({"type": "http.response.body", "body": _data(event), "more_body": True})
        except ForewordError as error:
            await send({"type": "http.response.body", "body": _data(self._failed(error)), "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


def _data(event: Any) -> bytes:
    return b"data: " + json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def merged(answers: Sequence[Answer]) -> AsyncGenerator[tuple[int, Piece], None]:
    """Pieces of all answers as they come, each with its answer's number."""
    if len(answers) == 1:
        async for piece in answers[0]:
            yield 0, piece
        return
    # Unbounded, yet no longer than all answers together; a `put` that waited could not be cancelled cleanly.
    pieces: asyncio.Queue[tuple[int, Piece | None]] = asyncio.Queue()

    async def pump(number: int) -> None:
        try:
            async for piece in answers[number]:
                pieces.put_nowait((number, piece))
        finally:
            pieces.put_nowait((number, None))

    tasks = [asyncio.create_task(pump(number)) for number in range(len(answers))]
    try:
        open_ones = len(tasks)
        while open_ones:
            number, piece = await pieces.get()
            if piece is None:
                open_ones -= 1
                await tasks[number]
            else:
                yield number, piece
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
