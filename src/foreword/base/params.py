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
    """Tokens to generate at most, >= 1."""
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

    read_tokens: int | None = None
    """A match never covers more tokens than this; 0 reads nothing."""
    store_tokens: int | None = None
    """Only full blocks that hold at least one of the first `store_tokens` tokens are published."""

    def readable(self, tokens: int) -> int:
        """How many of `tokens` leading tokens may be read."""
        return tokens if self.read_tokens is None else min(tokens, self.read_tokens)

    def storable(self, blocks: int, block_size: int) -> int:
        """How many of `blocks` leading full blocks may be published."""
        return blocks if self.store_tokens is None else min(blocks, -(-self.store_tokens // block_size))


EVERYTHING = Reach()
