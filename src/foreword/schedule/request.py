"""One request: what was asked (`Submission`, frozen) and how far it is (`Request`, the heart's one mutable record)."""

from dataclasses import dataclass

from foreword.base.ids import RequestId
from foreword.base.params import AS_USUAL, EVERYTHING, FinishReason, Keep, Reach, Sampling
from foreword.cache.explain import Explanation
from foreword.cache.identity import Chain
from foreword.cache.lease import Lease
from foreword.schedule.plan import Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A request as it enters the engine: tokenised, hashed and checked against the vocabulary."""

    id: RequestId
    chain: Chain
    """The prompt. The engine owns it from here on and appends what is generated."""
    sampling: Sampling
    arrival_s: float
    """When the request came in, on the engine's clock."""
    tokenize_s: float = 0.0
    """Time spent making token ids of the prompt, part of the time since arrival."""
    lookup_s: float = 0.0
    """Time spent hashing the prompt, part of the time since arrival."""
    reach: Reach = EVERYTHING
    keep: Keep = AS_USUAL
    key: str = ""
    """The caller's own label, for metrics."""
    priority: int = 0
    """Higher goes first; equal ones in order of arrival."""
    max_live: int | None = None
    """Requests that its tenant may have queued or running, this one included. None: no limit of its own."""
    recalled_tokens: int = 0
    """How many of the prompt's ids are those of earlier answers."""


class Request:
    """A request in the scheduler's hands.

    Positions, in tokens of prompt and answer together:

        0 ........ accounted ..... computed ..... planned ..... len(chain) ..... known
        |<- cached or computed  ->|             |              |                |
            once, for the books    KV committed  KV in a plan   ids known        + ids being sampled

    `computed <= planned <= known`; waiting requests hold no lease and have `computed == planned == 0`.
    """

    __slots__ = (
        "accounted",
        "cached",
        "chain",
        "computed",
        "draws_in_flight",
        "explanation",
        "finish",
        "first_planned_s",
        "first_token_s",
        "id",
        "in_flight",
        "lease",
        "num_generated",
        "num_prompt",
        "planned",
        "recomputed",
        "sampling",
        "stored",
        "submission",
        "turn",
        "uncounted_cached",
    )

    def __init__(self, submission: Submission, seq: int) -> None:
        self.submission = submission
        self.id = submission.id
        self.chain = submission.chain
        self.sampling = submission.sampling
        self.turn = (-submission.priority, seq)
        """Who goes first: smaller is earlier."""
        self.num_prompt = len(submission.chain)
        self.num_generated = 0
        self.lease: Lease | None = None
        self.computed = 0
        self.planned = 0
        self.in_flight = 0
        """Chunks in plans that are neither committed nor aborted."""
        self.draws_in_flight = 0
        self.accounted = 0
        """Leading tokens that were once taken from the cache or computed; work below it is a repetition."""
        self.cached = 0
        """Prompt tokens taken from the cache that the request never computed itself."""
        self.uncounted_cached = 0
        """Part of `cached` that no commit has counted yet."""
        self.recomputed = 0
        self.explanation = Explanation("never_seen", 0)
        """Why the match that it began with ended there."""
        self.stored = 0
        """Blocks that it was the first to publish, less those of its answer."""
        self.first_planned_s: float | None = None
        self.first_token_s: float | None = None
        self.finish: FinishReason | None = None
        """Set when the end is decided; the lease goes back once nothing is in flight."""

    @property
    def to_compute(self) -> int:
        """Tokens that could be planned now, those being sampled included; 0 once the last draw is in flight."""
        if self.finish is not None:
            return 0
        if self.draws_in_flight and self.num_generated + self.draws_in_flight >= self.sampling.max_tokens:
            return 0
        return len(self.chain.tokens) + self.draws_in_flight - self.planned

    @property
    def is_warmed(self) -> bool:
        """Whether all was computed of a request that wants no token."""
        return not self.sampling.max_tokens and self.computed >= self.num_prompt

    def usage(self, now: float) -> Usage:
        """The account so far; `now` stands in for what has not happened yet."""
        asked = self.submission
        started = now if self.first_planned_s is None else self.first_planned_s
        first = now if self.first_token_s is None else self.first_token_s
        return Usage(
            prompt_tokens=self.num_prompt,
            cached_tokens=self.cached,
            computed_tokens=self.num_prompt - self.cached,
            recomputed_tokens=self.recomputed,
            completion_tokens=self.num_generated,
            left_ago_s=None if self.explanation.left is None else started - self.explanation.left.moment_s,
            tail_tokens=min(self.cached, self.explanation.at_token % self.chain.block_size),
            stored_tokens=self.stored * self.chain.block_size,
            explanation=self.explanation,
            queue_s=max(0.0, started - asked.arrival_s - asked.tokenize_s - asked.lookup_s),
            tokenize_s=asked.tokenize_s,
            lookup_s=asked.lookup_s,
            prefill_s=first - started,
            first_token_s=first - asked.arrival_s,
            tenant=self.chain.tenant.name,
            key=asked.key,
            recalled_tokens=asked.recalled_tokens,
        )
