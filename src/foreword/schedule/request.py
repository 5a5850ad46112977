"""One request: what was asked (`Submission`, frozen) and how far it is (`Request`, the heart's one mutable record)."""

from dataclasses import dataclass

from foreword.base.ids import RequestId
from foreword.base.params import EVERYTHING, Reach, Sampling
from foreword.cache.identity import Chain


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A request as it enters the engine: tokenised, hashed and checked against the vocabulary."""

    id: RequestId
    chain: Chain
    """The prompt. The engine owns it from here on and appends what is generated."""
    sampling: Sampling
    arrival_s: float
    """When the request came in, on the engine's clock."""
    lookup_s: float = 0.0
    """Time spent hashing the prompt."""
    reach: Reach = EVERYTHING
    priority: int = 0
    """Higher goes first; equal ones in order of arrival."""
