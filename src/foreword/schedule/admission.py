"""Which requests can never run, and are refused at the door with their numbers."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from foreword.base.errors import RequestError, amount


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much one request may ask for. `max_context` never exceeds the pool, so one request alone always fits."""

    num_blocks: int
    block_size: int
    max_context: int
    shares: Mapping[str, int] = field(default_factory=dict[str, int])
    """Blocks that each tenant is sure of, by name: nobody else's request may count on them."""
    public_blocks: int = 0
    """Blocks set aside for public heads, which are evicted for nobody."""
    hint: str = ""
    """Ends a refusal: why the context is shorter than the model's."""

    def of(self, tenant: str) -> "Limits":
        """What a request of this tenant may ask for: it must be able to run without what others are sure of."""
        others = self.public_blocks + sum(share for name, share in self.shares.items() if name != tenant)
        room = max(0, self.num_blocks - others) * self.block_size
        if room >= self.max_context:
            return self
        return replace(self, max_context=room, hint=" The rest of the pool is set aside for public heads and others.")

    def check(self, num_prompt: int, max_tokens: int) -> None:
        """Raise RequestError if the request cannot run even alone."""
        if num_prompt < 1:
            raise RequestError("the prompt is empty; give at least one token", field="prompt")
        if max_tokens < 0:
            raise RequestError(f"max_tokens is {max_tokens}; it cannot be negative", field="max_tokens")
        if self.max_context < 2:
            raise RequestError(
                f"no request of yours can run: you can have {amount(self.max_context, 'token')}.{self.hint}"
            )
        if num_prompt >= self.max_context:
            raise RequestError(
                f"the prompt has {amount(num_prompt, 'token')}; at most {self.max_context - 1} fit into the context of"
                f" {self.max_context} with one token of answer. Shorten it.{self.hint}",
                field="prompt",
            )
        if num_prompt + max_tokens > self.max_context:
            raise RequestError(
                f"{num_prompt} prompt tokens and max_tokens {max_tokens} make {num_prompt + max_tokens}; the context is"
                f" {self.max_context}. Ask for at most {self.max_context - num_prompt}, or leave max_tokens out."
                f"{self.hint}",
                field="max_tokens",
            )


def limits(num_blocks: int, block_size: int, max_context: int) -> Limits:
    """Limits of a pool and a context (the model's or the operator's); the pool may be what limits."""
    return Limits(num_blocks=num_blocks, block_size=block_size, max_context=min(max_context, num_blocks * block_size))
