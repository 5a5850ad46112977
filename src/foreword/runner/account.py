"""What a request of a plain model costs, and how many fit: measured on the model's own cache object, not guessed."""

import logging
from dataclasses import dataclass

import torch
from torch import nn

from foreword.base.config import CacheConfig, ScheduleConfig, parse_kv_cache
from foreword.base.errors import ConfigError
from foreword.runner import kinds, library
from foreword.runner.memory import budget_bytes

_log = logging.getLogger(__name__)

_UNSAID_CONTEXT = 32768
"""Context of a model that names no limit, as recurrent ones do, unless the operator names one."""
_SHORT, _LONG = 8, 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What requests cost, and how many are served at once."""

    num_blocks: int
    """Requests whose state fits at once."""
    context: int
    """Tokens that the state of one request may cover."""
    fixed_bytes: int
    """Of a request's state, whatever its length."""
    token_bytes: int
    """That each of its tokens adds."""

    @property
    def block_bytes(self) -> int:
        """Of one request's state at full length."""
        return self.fixed_bytes + self.context * self.token_bytes


def open_account(name: str, model: nn.Module, cache: CacheConfig, schedule: ScheduleConfig) -> Account:
    """Divide the memory for KV into states of whole requests. Raises ConfigError when not even one fits.

    A model knows more positions than memory may hold; then the context is what one request can have. A model that
    gives no cache back raises LookupError.
    """
    fixed, token = _measure(model)
    context = plain_context(library.config_of(model), schedule.max_context)
    if cache.kv_cache != "auto":
        unit, count = parse_kv_cache(cache.kv_cache)
        if unit == "blocks":
            return Account(num_blocks=count, context=context, fixed_bytes=fixed, token_bytes=token)
    budget = budget_bytes(cache, next(model.parameters()).device)
    count = budget // max(1, fixed + context * token)
    if count == 0:
        context = (budget - fixed) // max(1, token)
        if context < 2:
            raise ConfigError(f"kv_cache is {budget} bytes; one request of {name} needs {fixed + 2 * token}")
        count = 1
    count = min(count, schedule.max_running)
    if count < schedule.max_running:
        _log.warning(
            "%s: %d requests of up to %d tokens run at once; a smaller --max-context or a larger --kv-cache makes room"
            " for more",
            name,
            count,
            context,
        )
    return Account(num_blocks=count, context=context, fixed_bytes=fixed, token_bytes=token)


def plain_context(config: library.Config, wanted: int | None) -> int:
    """Tokens that one request may have: what the model knows, and less where the operator says so."""
    known = kinds.stretched_positions(config)
    return (wanted or _UNSAID_CONTEXT) if known is None else min(wanted or known, known)


def _measure(model: nn.Module) -> tuple[int, int]:
    """Bytes of a state whatever its length, and bytes that each token adds."""
    device = next(model.parameters()).device
    sizes: list[int] = []
    for count in (_SHORT, _LONG):
        positions = torch.arange(count, device=device)[None]
        with torch.inference_mode():
            _, cache = library.forward_with_cache(model, torch.zeros_like(positions), positions, None)
        sizes.append(library.cache_bytes(cache))
    token = -(-(sizes[1] - sizes[0]) // (_LONG - _SHORT))
    return max(0, sizes[0] - _SHORT * token), token
