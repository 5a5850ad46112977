"""Where parts meet: settings in, a running engine with a front out.

Importing this loads no torch; `assemble` and `identify` do, because they load a model.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from foreword.base.config import Config
from foreword.base.errors import ConfigError
from foreword.base.ids import BlockHash
from foreword.cache.identity import Space, root
from foreword.cache.prefix_cache import PrefixCache
from foreword.engine.engine import Engine
from foreword.engine.sockets import MonotonicClock, Nobody, Observer
from foreword.engine.worker import Worker
from foreword.front.bounds import Bounds
from foreword.front.front import Front
from foreword.schedule.admission import Limits, limits
from foreword.schedule.scheduler import Scheduler
from foreword.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from foreword.runner.runner import ModelCard, ModelRunner

_log = logging.getLogger(__name__)

Progress = Callable[[str], None]
"""Is told in words what is going on, once for each thing that takes long."""


def _in_silence(text: str) -> None:
    del text


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """Everything that serves one model, running."""

    config: Config
    card: "ModelCard"
    """The model in numbers and names."""
    root: BlockHash
    """Where every chain of block hashes starts."""
    front: Front
    worker: Worker
    limits: Limits
    block_bytes: int
    """Bytes of KV in a block, all layers."""

    @property
    def effective(self) -> Mapping[str, str | int | bool]:
        """What the settings became: every `auto` and every limit resolved."""
        return {
            "model": self.card.name,
            "device": self.card.device,
            "dtype": self.card.dtype,
            "attention": self.card.attention,
            "cache": self.config.cache.cache,
            "block_size": self.limits.block_size,
            "num_blocks": self.limits.num_blocks,
            "kv_tokens": self.limits.num_blocks * self.limits.block_size,
            "kv_bytes": self.limits.num_blocks * self.block_bytes,
            "max_context": self.limits.max_context,
            "root": self.root.hex(),
        }

    def close(self, *, drain: bool = False, timeout_s: float | None = None) -> bool:
        """Take no more requests; finish the live ones (`drain`) or cancel them, and end the engine's thread.

        False if it is still at work after `timeout_s` seconds.
        """
        return self.worker.stop(drain=drain, timeout_s=timeout_s)


def assemble(config: Config, progress: Progress = _in_silence, observer: Observer | None = None) -> Assembly:
    """Load the model that the settings name and start its engine.

    `observer` is told of every step, on the engine's thread. Raises ConfigError and ModelRefused.
    """
    from foreword.runner.loader import load_runner  # torch: seconds

    runner = load_runner(config, progress)
    tokenizer = Tokenizer(runner.card.directory)
    tokenizer.load()
    room = _limits(config, runner)
    start = root(runner.ingredients, runner.block_size)
    cache = PrefixCache(runner.num_blocks, runner.block_size, enabled=config.cache.cache)
    schedule = config.schedule
    scheduler = Scheduler(cache, max_batch_tokens=schedule.max_batch_tokens, max_running=schedule.max_running)
    engine = Engine(scheduler, runner, MonotonicClock(), observer or Nobody())
    worker = Worker(engine, room, max_live=schedule.max_running + schedule.max_waiting)
    bounds = Bounds(limits=room, vocab_size=runner.card.vocab_size, end_ids=runner.card.end_ids)
    front = Front(engine=worker, tokenizer=tokenizer, space=Space(start, runner.block_size), bounds=bounds)
    worker.start()
    return Assembly(
        config=config,
        card=runner.card,
        root=start,
        front=front,
        worker=worker,
        limits=room,
        block_bytes=runner.block_bytes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What makes one model's blocks its own."""

    name: str
    block_size: int
    ingredients: Mapping[str, str]
    root: BlockHash


def identify(config: Config, progress: Progress = _in_silence) -> Identity:
    """Load the model that the settings name and say what its block hashes start from. Raises as `assemble`."""
    from foreword.runner.loader import load_runner

    runner = load_runner(config, progress)
    return Identity(
        name=runner.card.name,
        block_size=runner.block_size,
        ingredients=dict(runner.ingredients),
        root=root(runner.ingredients, runner.block_size),
    )


def _limits(config: Config, runner: "ModelRunner") -> Limits:
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
