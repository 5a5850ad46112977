"""Every error Foreword raises on purpose, by who has to act.

    ForewordError
    ├── RequestError        the caller: this request is wrong (HTTP 4xx); names the field
    │   └── NotFound        the caller: no such model or resource (HTTP 404)
    ├── CapacityError       the caller, later: the queue is full (HTTP 429)
    │   ├── TenantLimit     the caller, later: too many requests of this tenant (HTTP 429)
    │   └── Unavailable     the caller, elsewhere or later: the engine stops, reloads or is dead (HTTP 503)
    ├── ConfigError         the operator: a setting is wrong or two settings disagree
    ├── ModelRefused        the operator: this model cannot be served, with the reason
    ├── StepFailed          the operator: a forward pass failed for this request, alone
    └── InvariantBroken     us: the books do not add up; stop and dump

An ordinary outcome (a miss, no room, a queue that must wait) is a value, never an exception.
Messages name the value, the limit and the way out.
"""


def amount(num: int, noun: str) -> str:
    """So many, as messages say it: `1 token`, `2 tokens`."""
    return f"{num} {noun}" if num == 1 else f"{num} {noun}s"


class ForewordError(Exception):
    """Root of the tree."""


class RequestError(ForewordError):
    """The request cannot be served as written.

    `field` is the request's field at fault (`"max_tokens"`, `"messages.0.role"`), or None when no
    single field is.
    """

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field


class NotFound(RequestError):
    """The model or resource that the request names does not exist."""


class CapacityError(ForewordError):
    """No room now; the same request may succeed after `retry_after_s` seconds."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TenantLimit(CapacityError):
    """The tenant has as many requests queued or running as it may."""


class Unavailable(CapacityError):
    """Nobody computes now: the engine is stopping, reloading or dead."""


class ConfigError(ForewordError):
    """A setting is out of range, unknown, or contradicts another."""


class ModelRefused(ForewordError):
    """The model cannot be served exactly; the message says why."""


class StepFailed(ForewordError):
    """The forward pass raised for this request even when it ran alone."""


class InvariantBroken(ForewordError):
    """A rule that the code guarantees does not hold: our bug."""
