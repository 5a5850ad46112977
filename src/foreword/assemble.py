"""Where parts meet: settings in, a running engine with a front out.

Importing this loads no torch; `assemble` and `identify` do, because they load a model.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from foreword.base.config import Config
from foreword.base.errors import ConfigError
from foreword.base.ids import BlockHash
from foreword.cache.expiry import NEVER
from foreword.cache.explain import Reason
from foreword.cache.identity import Space, root
from foreword.cache.prefix_cache import PrefixCache
from foreword.engine.engine import Engine
from foreword.engine.sockets import MonotonicClock, Nobody, Observer
from foreword.engine.worker import Worker
from foreword.front.bounds import Bounds
from foreword.front.front import Front, Served
from foreword.front.keeper import Keeper
from foreword.front.operator import Operator
from foreword.schedule.admission import Limits, limits
from foreword.schedule.audit import Auditor
from foreword.schedule.scheduler import Scheduler
from foreword.text.recall import Recall
from foreword.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from foreword.runner.plain import PlainRunner
    from foreword.runner.runner import ModelCard, ModelRunner

_log = logging.getLogger(__name__)

_AUDIT_TOLERANCE = 0.05
"""Relative error of a block that an audit lets pass where a hit may differ from a miss in its last bits: bfloat16 has
eight bits of precision, and rounding adds up over the layers. A wrong block is off by its own size."""

Progress = Callable[[str], None]
"""Is told in words what is going on, once for each thing that takes long."""


def _in_silence(text: str) -> None:
    del text


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """Everything that serves one model, running."""

    config: Config
    runner: "ModelRunner | PlainRunner"
    front: Front
    operator: Operator
    keeper: Keeper
    worker: Worker
    limits: Limits

    @property
    def card(self) -> "ModelCard":
        """The model in numbers and names."""
        return self.runner.card

    @property
    def root(self) -> BlockHash:
        """Where every chain of block hashes starts; another one once other weights were loaded."""
        return self.front.served.space.root

    @property
    def block_bytes(self) -> int:
        """Bytes of KV in a block, all layers."""
        return self.runner.block_bytes

    def prefill_flops(self, num_tokens: int) -> int:
        """To compute the first tokens of a prompt: token i passes the layers once and attends to i + 1 positions."""
        card, pairs = self.card, num_tokens * (num_tokens + 1) // 2
        return num_tokens * card.flops_per_token + pairs * card.flops_per_token_and_key

    @property
    def effective(self) -> Mapping[str, str | int | bool]:
        """What the settings became: every `auto` and every limit resolved."""
        return {
            "model": self.card.name,
            "device": self.card.device,
            "dtype": self.card.dtype,
            "attention": self.card.attention,
            "cache": self.config.cache.cache and self.card.not_cacheable is None,
            "block_size": self.limits.block_size,
            "num_blocks": self.limits.num_blocks,
            "kv_tokens": self.limits.num_blocks * self.limits.block_size,
            "kv_bytes": self.limits.num_blocks * self.block_bytes,
            "max_context": self.limits.max_context,
            "exact": self.card.exact,
            "recall": self.front.served.recall.on,
            "root": self.root.hex(),
        }

    def close(self, *, drain: bool = False, timeout_s: float | None = None) -> bool:
        """Take no more requests; finish the live ones (`drain`) or cancel them, and end the engine's thread.

        False if it is still at work after `timeout_s` seconds.
        """
        return self.worker.stop(drain=drain, timeout_s=timeout_s)


def assemble(
    config: Config,
    progress: Progress = _in_silence,
    observer: Observer | None = None,
    shares: Mapping[str, float] | None = None,
) -> Assembly:
    """Load the model that the settings name and start its engine.

    `observer` is told of every step, on the engine's thread. `shares` says which part of the pool each tenant is sure
    of; None: there is one tenant only. Raises ConfigError and ModelRefused.
    """
    from foreword.runner.loader import load_runner  # torch: seconds

    runner = load_runner(config, progress)
    if config.cache.exact and not runner.card.exact:
        raise ConfigError(
            f"exact: with {runner.card.name} on {runner.card.device} ({runner.card.attention}, {runner.card.dtype})"
            " a hit is not proven to give the same bits as a miss; leave --exact out, or run a dense model on a CPU"
        )
    tokenizer = Tokenizer(runner.card.directory)
    tokenizer.load()
    room = _with_shares(_limits(config, runner), shares, public=runner.card.not_cacheable is None)
    cache = PrefixCache(
        runner.num_blocks,
        runner.block_size,
        off=_off(config, runner.card),
        shares=None if shares is None else room.shares,
        ttl_s=NEVER if config.cache.ttl is None else config.cache.ttl,
        pin_blocks=int(config.cache.pin_budget * runner.num_blocks),
    )
    schedule = config.schedule
    auditor = _auditor(config, runner.card, cache)
    scheduler = Scheduler(
        cache, max_batch_tokens=_step(config, runner), max_running=schedule.max_running, auditor=auditor
    )
    engine = Engine(scheduler, runner, MonotonicClock(), observer or Nobody(), auditor)
    worker = Worker(engine, room, max_live=schedule.max_running + schedule.max_waiting)
    front = Front(worker, _served(config, runner, tokenizer, room))

    def load() -> Served:
        fresh = Tokenizer(runner.card.directory)
        fresh.load()
        runner.reload()
        return _served(config, runner, fresh, room)

    operator = Operator(front, worker, load, max_public_blocks=room.public_blocks)
    worker.start()
    return Assembly(
        config=config,
        runner=runner,
        front=front,
        operator=operator,
        keeper=Keeper(front, worker),
        worker=worker,
        limits=room,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What makes one model's blocks its own."""

    name: str
    block_size: int
    ingredients: Mapping[str, str]
    root: BlockHash
    not_cacheable: str | None
    """Why its prefixes are not reused; None where they are."""


def identify(config: Config, progress: Progress = _in_silence) -> Identity:
    """Load the model that the settings name and say what its block hashes start from. Raises as `assemble`."""
    from foreword.runner.loader import load_runner

    runner = load_runner(config, progress)
    return Identity(
        name=runner.card.name,
        block_size=runner.block_size,
        ingredients=dict(runner.ingredients),
        root=root(runner.ingredients, runner.block_size),
        not_cacheable=runner.card.not_cacheable,
    )


def _served(config: Config, runner: "ModelRunner | PlainRunner", tokenizer: Tokenizer, room: Limits) -> Served:
    card = runner.card
    recall = Recall(tokenizer, off=_off(config, card) is not None)
    if tokenizer.borders is None:
        _log.warning("answers that come back are tokenised again: %s has no special tokens to cut texts at", card.name)
    return Served(
        tokenizer=tokenizer,
        space=Space(root(runner.ingredients, runner.block_size), runner.block_size),
        bounds=Bounds(limits=room, vocab_size=card.vocab_size, end_ids=card.end_ids),
        recall=recall,
    )


def _off(config: Config, card: "ModelCard") -> Reason | None:
    """Why nothing is reused, if so."""
    if not config.cache.cache:
        return "cache_disabled"
    if card.not_cacheable is not None:
        return "model_not_cacheable"
    return None


def _auditor(config: Config, card: "ModelCard", cache: PrefixCache) -> Auditor | None:
    """Who recomputes a share of the hits, if anybody."""
    if not config.cache.audit or cache.off is not None:
        return None
    tolerance = 0.0 if card.exact else _AUDIT_TOLERANCE
    return Auditor(cache, share=config.cache.audit, tolerance=tolerance, max_tokens=config.schedule.max_batch_tokens)


def _step(config: Config, runner: "ModelRunner | PlainRunner") -> int:
    """Tokens of a step. The prompt of a plain model is never cut, so there must be room for the longest one."""
    schedule, plain = config.schedule, runner.card.not_cacheable is not None
    return max(schedule.max_batch_tokens, schedule.max_running + runner.block_size if plain else 0)


def _with_shares(room: Limits, shares: Mapping[str, float] | None, *, public: bool) -> Limits:
    """A quarter of the pool is set aside for public heads, if there can be any; shares are parts of the rest."""
    if shares is None:
        return room
    public_blocks = room.num_blocks // 4 if public else 0
    in_blocks = {name: int(share * (room.num_blocks - public_blocks)) for name, share in shares.items()}
    parted = replace(room, shares=in_blocks, public_blocks=public_blocks)
    least = min(in_blocks, key=lambda name: parted.of(name).max_context, default="")
    if (context := parted.of(least).max_context) < room.max_context:
        _log.warning(
            "the context of tenant %s is %d tokens instead of %d: the rest of the KV memory is set aside for others;"
            " raise --kv-cache or lower their shares",
            least,
            context,
            room.max_context,
        )
    return parted


def _limits(config: Config, runner: "ModelRunner | PlainRunner") -> Limits:
    """The context is the least of what the model knows, what the operator allows and what the pool holds."""
    wanted, known = config.schedule.max_context, runner.card.max_context
    if wanted is not None and wanted > known:
        _log.warning(
            "max_context is %d, but %s knows %d positions; those are the limit", wanted, runner.card.name, known
        )
    context = min(wanted or known, known)
    room = limits(runner.num_blocks, runner.block_size, context)
    if room.max_context < 2:
        raise ConfigError(f"kv_cache holds {room.max_context} token; a request needs at least 2")
    if room.max_context < context:
        _log.warning(
            "the context is %d tokens instead of %d: the KV memory holds no more; raise --kv-cache",
            room.max_context,
            context,
        )
    return room
