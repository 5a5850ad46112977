"""Requests in order of their turn: higher priority first, then arrival. Used for the waiting and for the running."""

from bisect import bisect_left
from collections.abc import Iterator
from operator import attrgetter

from foreword.base.errors import InvariantBroken
from foreword.schedule.request import Request

_turn = attrgetter("turn")


class Queue:
    """A list kept sorted by `Request.turn`."""

    __slots__ = ("_requests",)

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """The requests as they stood when the walk began, earliest turn first."""
        return iter(tuple(self._requests))

    def __contains__(self, request: Request) -> bool:
        place = bisect_left(self._requests, request.turn, key=_turn)
        return place < len(self._requests) and self._requests[place] is request

    def add(self, request: Request) -> None:
        """Put a request in its place."""
        self._requests.insert(bisect_left(self._requests, request.turn, key=_turn), request)

    def remove(self, request: Request) -> None:
        """Take a request out."""
        place = bisect_left(self._requests, request.turn, key=_turn)
        if place == len(self._requests) or self._requests[place] is not request:
            raise InvariantBroken(f"request {request.id} is not in the queue that it should be in")
        del self._requests[place]

    def last_first(self) -> Iterator[Request]:
        """The requests as they stand, latest turn first."""
        return reversed(tuple(self._requests))
