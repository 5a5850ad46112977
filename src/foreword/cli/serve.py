"""`foreword serve`: load, listen, serve; drain on the first Ctrl-C, leave on the second."""

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Thread
from types import FrameType
from typing import TYPE_CHECKING

from rich.console import Console
from tyro.conf import OmitArgPrefixes

from foreword.assemble import Assembly, assemble
from foreword.base.config import Config, ScheduleConfig, ServerConfig
from foreword.base.errors import amount
from foreword.cli.flags import CacheFlags, ModelFlags
from foreword.cli.libraries import uncollected
from foreword.cli.loading import loading
from foreword.cli.tracing import tracing
from foreword.engine.sockets import Several

if TYPE_CHECKING:
    from foreword.server import Listener

_LEAVE_S = 2.0
"""Seconds that the step under way gets after a second Ctrl-C."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serve:
    """Serve a model over HTTP: OpenAI's /v1/chat/completions and /v1/completions, and /chat, /metrics, /v1/cache.

    The first Ctrl-C takes no more requests and finishes those under way; the second one leaves at once.
    """

    model: OmitArgPrefixes[ModelFlags] = field(default_factory=ModelFlags)
    cache: OmitArgPrefixes[CacheFlags] = field(default_factory=CacheFlags)
    schedule: OmitArgPrefixes[ScheduleConfig] = field(default_factory=ScheduleConfig)
    server: OmitArgPrefixes[ServerConfig] = field(default_factory=ServerConfig)

    def run(self) -> int:
        """Serve until stopped."""
        with uncollected():
            from foreword import server
            from foreword.telemetry import Metrics

        _log_to_stderr()
        signal.signal(signal.SIGTERM, _as_interrupt)
        config = Config(model=self.model, cache=self.cache, schedule=self.schedule, server=self.server)
        console, metrics = Console(), Metrics()
        # All that can be wrong at once comes before the model, which takes its time.
        listener = server.Listener(self.server)
        keys = server.KeyFile(self.server.api_keys) if self.server.api_keys is not None else None
        heads = server.read_heads(self.server.public_heads) if self.server.public_heads is not None else ()
        prompts = server.read_warm(self.server.warm, keys) if self.server.warm is not None else ()
        spans = tracing(os.environ)
        observer = metrics if spans is None else Several(metrics, spans)
        with loading(console, "Loading the model", self.model.cache_dir) as tell, uncollected():
            assembly = assemble(config, tell, observer, None if keys is None else keys.keys.shares())
            server.mark_heads(assembly.operator, heads)
        warmup = server.Warmup(assembly.keeper, prompts)
        warmup.start()
        app = server.create_app(server.serving(assembly, metrics, keys, warmup.done))
        tenants = None if keys is None else sorted(keys.keys.tenants)
        Thread(target=_say_what_is_served, args=(console, assembly, listener, tenants), daemon=True).start()
        with suppress(KeyboardInterrupt):  # a signal in the moment between the web server's end and here
            listener.run(app, lambda: _say_that_it_stops(console, assembly, listener))
        for name in (signal.SIGINT, signal.SIGTERM):
            signal.signal(name, signal.SIG_IGN)  # the end is near, whoever asks for it again
        # Whoever waited for an answer has it, or has gone.
        assembly.close(drain=False, timeout_s=_LEAVE_S)
        if spans is not None:
            spans.close()
        console.print("Stopped.")
        return 0


def _say_that_it_stops(console: Console, assembly: Assembly, listener: "Listener") -> None:
    state = assembly.worker.state()
    num = state.running + state.waiting
    console.print(
        f"Stopping: {amount(num, 'request')} under way (Ctrl-C again leaves at once)", highlight=False, soft_wrap=True
    )
    Thread(target=_leave_when_forced, args=(assembly, listener), daemon=True).start()


def _leave_when_forced(assembly: Assembly, listener: "Listener") -> None:
    """The last resort after a second signal, for a thread that hangs and would be waited for."""
    while not listener.forced:
        time.sleep(0.05)
    time.sleep(_LEAVE_S)
    assembly.close(drain=False, timeout_s=_LEAVE_S)
    sys.stdout.flush()
    os._exit(0)


def _say_what_is_served(
    console: Console, assembly: Assembly, listener: "Listener", tenants: Sequence[str] | None
) -> None:
    """Once it is true: a script that reads the last line may send its first request, or its first signal."""
    while not listener.started:
        time.sleep(0.01)
    state = assembly.effective
    gib = int(state["kv_bytes"]) / 2**30
    cache = "on" if state["cache"] else "off (every prompt is computed whole)"
    pool = (
        f"{state['num_blocks']:,} blocks of {state['block_size']} tokens = {state['kv_tokens']:,} tokens, {gib:.2f} GiB"
    )
    why = assembly.card.not_cacheable
    if why is not None:
        pool = f"up to {amount(int(state['num_blocks']), 'request')} at once, {gib:.2f} GiB"
    lines = [
        f"[bold]{state['model']}[/] on {state['device']}, {state['dtype']}, attention {state['attention']}",
        f"Cache {cache}: {pool}; context {state['max_context']:,} tokens",
        *(() if why is None else (f"[yellow]Prefixes of this model are not reused:[/] {why}",)),
        f"[green]Listening on {listener.url}[/] (Ctrl-C stops)",
    ]
    if tenants is not None:
        users, public = amount(len(tenants), "tenant"), amount(assembly.operator.num_public_blocks, "block")
        lines.insert(2, f"Keys for {users} ({', '.join(tenants)}); public heads of {public}")
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


def _log_to_stderr() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("foreword").setLevel(logging.INFO)
    web = logging.getLogger("uvicorn.error")
    web.addFilter(_is_a_fault)


def _is_a_fault(record: logging.LogRecord) -> bool:
    """Not one that the web server makes of a request that was cut short when a person stopped it."""
    return record.exc_info is None or not isinstance(record.exc_info[1], asyncio.CancelledError)


def _as_interrupt(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise KeyboardInterrupt
