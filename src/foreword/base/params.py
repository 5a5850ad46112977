"""What a caller may ask of one request, as frozen values."""

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "cancelled", "error"]
"""Why a request ended: an end-of-sequence token or stop string, its token limit, its caller or the
engine's end, a fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is drawn and when the answer ends. None of it changes KV."""

    max_tokens: int
    """Tokens to generate at most; 0 only computes the prompt."""
    temperature: float = 0.0
    """0 takes the most likely token; above 0 logits are divided by it before the draw."""
    top_p: float = 1.0
    """Draw among the fewest tokens whose probabilities sum to at least this, in (0, 1]."""
    top_k: int = 0
    """Draw among this many most likely tokens; 0 means all."""
    seed: int = 0
    """With the position of the token, decides the draw: the same seed gives the same answer."""
    logprobs: int | None = None
    """Log-probabilities to return: None for none, 0 for the chosen token's, n for the n best as well."""
    stop_ids: frozenset[int] = frozenset()
    """Token ids that end the answer (finish reason "stop"); the id itself is not part of the text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """How far one request may read from and write to the cache, in tokens; None means all the way."""

    read: bool = True
    """False reads nothing, whatever `read_tokens` says; the request asked to be computed whole."""
    read_tokens: int | None = None
    """A match never covers more tokens than this."""
    store_tokens: int | None = None
    """Only full blocks that hold at least one of the first `store_tokens` tokens are published; 0 stores nothing."""

    def readable(self, tokens: int) -> int:
        """How many of `tokens` leading tokens may be read."""
        if not self.read:
            return 0
        return tokens if self.read_tokens is None else min(tokens, self.read_tokens)

    def storable(self, blocks: int, block_size: int) -> int:
        """How many of `blocks` leading full blocks may be published."""
        return blocks if self.store_tokens is None else min(blocks, -(-self.store_tokens // block_size))


EVERYTHING = Reach()

PRIORITY = 50
"""How dear a block is unless a request says otherwise, on a scale of 0 to 100."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """How long and how dearly a request's blocks are kept; None is the server's default.

    What is asked for by name holds for all that the request reads or stores; the default only for what it stores. A
    block keeps the longest time and the highest priority that it was ever given, and so do the blocks before it.
    """

    ttl_s: float | None = None
    """Seconds after its last use for which a block can be found; each hit begins them again."""
    priority: int | None = None
    """0 to 100: lower ones are evicted first; of equal ones those that were never hit, then the least recently used."""

    @property
    def asked(self) -> bool:
        """Whether anything is asked for by name."""
        return self.ttl_s is not None or self.priority is not None


AS_USUAL = Keep()
