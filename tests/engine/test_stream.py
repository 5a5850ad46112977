"""A request's collector between the engine's thread and an event loop."""

import asyncio

from foreword.base.ids import RequestId
from foreword.engine.stream import Stream
from foreword.schedule.plan import TokenEvent


def test_a_loop_that_was_closed_does_not_harm_the_engine() -> None:
    stream = Stream(RequestId("1"))

    async def read() -> None:
        async for _ in stream:
            pass

    loop = asyncio.new_event_loop()
    waiting = loop.create_task(read())
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    event = TokenEvent(RequestId("1"), finish="cancelled")
    stream.put(event)
    assert list(stream) == [event]
    assert not waiting.done()
