"""What one step will do (`Plan`), what it brought (`StepResult`), and what follows (`Outcome`).

All frozen, all printable, no tensor anywhere: a plan can be written to a journal and run again. What is made for every
token of every step is a `NamedTuple`, which takes a third of a dataclass's time to make.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from foreword.base.ids import BlockId, RequestId
from foreword.base.params import FinishReason, Sampling
from foreword.cache.explain import Explanation, Reason
from foreword.cache.orders import Copy


class Draw(NamedTuple):
    """Sample one token from the logits of a chunk's last row."""

    sampling: Sampling
    number: int
    """Which output token this is, from 0. With the seed it fixes the random draw."""


class Chunk(NamedTuple):
    """A run of one request's tokens to compute in this step."""

    request: RequestId
    start: int
    """Absolute position of the first token; all earlier positions are already in the blocks."""
    tokens: tuple[int, ...]
    """Ids to compute, at least one. `PENDING_TOKEN` stands for what the step before is sampling."""
    blocks: tuple[BlockId, ...]
    """Block table from position 0 up to and including the block of the chunk's last token."""
    draw: Draw | None
    """Set when the chunk reaches the last known token, so that its last row samples the next one."""

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: first the copies, then one forward pass over all chunks."""

    step: int
    chunks: tuple[Chunk, ...]
    copies: tuple[Copy, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(len(chunk.tokens) for chunk in self.chunks)


class Sample(NamedTuple):
    """One drawn token. Log-probabilities are natural, of the model's own distribution (temperature 1)."""

    token: int
    logprob: float | None = None
    """Log-probability of `token`; None when the request asked for none."""
    top: tuple[tuple[int, float], ...] = ()
    """The most likely (token, log-probability) pairs, best first, as many as were asked for."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the runner brings back: one sample for each chunk that had a draw."""

    samples: Mapping[RequestId, Sample]


@dataclass(frozen=True, slots=True)
class Usage:
    """One request's account. Times are seconds on the engine's clock."""

    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens taken from the cache; `cached_tokens + computed_tokens == prompt_tokens`."""
    computed_tokens: int
    recomputed_tokens: int
    """Tokens computed again after a preemption or a failed step; not part of the sum above."""
    completion_tokens: int
    explanation: Explanation
    """Why the match stopped where it did."""
    queue_s: float
    """From arrival to the plan that gave the first token of work, less the next two."""
    tokenize_s: float
    """Time to make token ids of the prompt, its chat template included; 0 for a prompt of ids."""
    lookup_s: float
    """Time to hash the prompt."""
    prefill_s: float
    """From that first plan to the commit that brought the first output token."""
    first_token_s: float
    """From arrival to that commit: the sum of the four above."""
    tenant: str = ""
    """Whose request it is; empty on a server that serves one tenant only."""
    key: str = ""
    """The caller's own label."""
    left_ago_s: float | None = None
    """How long ago that left which would have matched next, when that is the reason."""
    tail_tokens: int = 0
    """Part of `cached_tokens`: taken from inside a block, where the match ended."""
    stored_tokens: int = 0
    """Prompt tokens, in full blocks, that nobody had published before."""
    recalled_tokens: int = 0
    """Prompt tokens that are those of earlier answers, and not tokenised from the text they came back as."""

    @property
    def reason(self) -> Reason:
        """Why the match stopped where it did, in a word."""
        return self.explanation.reason


class TokenEvent(NamedTuple):
    """News of one request after a step: a token, an end, or both."""

    request: RequestId
    sample: Sample | None = None
    finish: FinishReason | None = None
    error: str | None = None
    """With finish "error": what went wrong, in words; with "cancelled": why, unless the caller wanted it."""
    usage: Usage | None = None
    """With the first token and with the end."""


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """Prompt tokens of one tenant that a step accounted for."""

    cached: int = 0
    computed: int = 0


@dataclass(frozen=True, slots=True)
class StepStats:
    """One committed (or aborted) step in numbers; the deltas that metrics add up."""

    num_chunks: int = 0
    num_tokens: int = 0
    prompt_tokens_cached: int = 0
    prompt_tokens_computed: int = 0
    tokens_recomputed: int = 0
    tokens_generated: int = 0
    num_preemptions: int = 0
    blocks_audited: int = 0
    blocks_mismatched: int = 0
    """Audited blocks that differed; their prefixes are out of the cache."""
    num_failures: int = 0
    tenants: Mapping[str, PromptTokens] = field(default_factory=dict[str, PromptTokens])
    """Whose prompt tokens these were: the sums over all tenants are the two fields above."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a commit or an abort means to the outside."""

    step: int
    events: tuple[TokenEvent, ...]
    stats: StepStats = field(default_factory=StepStats)
