"""The socket: uvicorn around the app.

listener = Listener(config)    listens; the port is known (0 takes a free one) and connections queue up
listener.run(app)              serves in the calling thread until `stop` or a signal, then drains
listener.stop()                from any thread
"""

import asyncio
import ipaddress
import signal
import socket
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp

from foreword.base.config import ServerConfig
from foreword.base.errors import ConfigError

BACKLOG = 2048
"""Connections that may wait to be accepted."""

_TICK_S = 0.05
_UNWIND_S = 1.0
"""Seconds that requests get to notice that their connection was cut."""


def _nothing() -> None:
    pass


class _Server(uvicorn.Server):
    """uvicorn that returns after a signal, where its own raises it again and ends the process before the engine.

    The second signal, of either kind, cuts all connections: requests then end as when their client hangs up.
    """

    def __init__(self, config: uvicorn.Config, stopping: Callable[[], None]) -> None:
        super().__init__(config)
        self._stopping = stopping

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop at the first signal, leave at the second."""
        del sig, frame
        self.force_exit = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Finish what is under way, or stop waiting for it: a connection that nobody reads would wait for ever."""
        self._stopping()
        patient = asyncio.create_task(super().shutdown(sockets))
        while not patient.done() and not self.force_exit:
            await asyncio.wait((patient,), timeout=_TICK_S)
        if self.force_exit:
            patient.cancel()
            for connection in list(self.server_state.connections):
                cast(Any, connection).transport.abort()
            if self.server_state.tasks:
                await asyncio.wait(self.server_state.tasks.copy(), timeout=_UNWIND_S)
        await asyncio.gather(patient, return_exceptions=self.force_exit)

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """SIGINT and SIGTERM stop the server while it runs in the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {name: signal.signal(name, self.handle_exit) for name in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for name, action in before.items():
                signal.signal(name, action)


class Listener:
    """One listening socket and the server behind it."""

    def __init__(self, config: ServerConfig, *, drain_s: int | None = None) -> None:
        """Listen; clients that connect before `run` wait for it.

        `drain_s`: seconds that requests under way get after `stop`; None: as long as they take. Raises ConfigError when
        the address is taken, unknown, or public with neither keys nor `insecure`.
        """
        check_address(config)
        self._config = config
        self._drain_s = drain_s
        self._socket = _listening(config)
        self._server: _Server | None = None
        self._stopped = False

    @property
    def port(self) -> int:
        """The port that was bound."""
        return int(self._socket.getsockname()[1])

    @property
    def url(self) -> str:
        """Where a client on this machine finds the server."""
        host = self._config.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def started(self) -> bool:
        """Whether requests are being answered."""
        return self._server is not None and self._server.started

    @property
    def forced(self) -> bool:
        """Whether a second signal came."""
        return self._server is not None and self._server.force_exit

    def run(self, app: ASGIApp, stopping: Callable[[], None] = _nothing) -> None:
        """Serve until stopped, then finish what is under way. In the main thread SIGINT and SIGTERM stop it.

        A second one leaves requests unfinished. `stopping` is called once no new connection is taken.
        """
        config = uvicorn.Config(
            app,
            host=self._config.host,
            port=self._config.port,
            backlog=BACKLOG,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=self._drain_s,
        )
        self._server = _Server(config, stopping)
        self._server.should_exit = self._stopped
        self._server.run(sockets=[self._socket])

    def stop(self) -> None:
        """Take no more connections and let `run` return once requests under way are done."""
        self._stopped = True
        if self._server is not None:
            self._server.should_exit = True

    def close(self) -> None:
        """Give the address back; for a listener that never ran. Whoever waits for an answer is turned away."""
        self._socket.close()


def check_address(config: ServerConfig) -> None:
    """Raise ConfigError for an address that others reach, unless the operator said that he means it."""
    if config.insecure or config.api_keys is not None or _is_loopback(config.host):
        return
    raise ConfigError(
        f"host is {config.host}: there are no API keys, so everybody who reaches the port would share one cache."
        " Listen on 127.0.0.1, give --api-keys, or say --insecure."
    )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _listening(config: ServerConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    # Only of sockets that name the protocol asyncio switches off Nagle's algorithm, which would hold a reply's second
    # write back until the client has acknowledged the first: 40 ms.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((config.host, config.port))
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        message = (
            f"cannot listen on {config.host} port {config.port}: {error.strerror or error}. Choose another --port."
        )
        raise ConfigError(message) from None
    bound.set_inheritable(True)
    return bound
