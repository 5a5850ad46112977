"""The socket: uvicorn around the app.

listener = Listener(config)    listens; the port is known (0 takes a free one) and connections queue up
listener.run(app)              serves in the calling thread until `stop` or a signal, then drains
listener.stop()                from any thread
"""

import ipaddress
import signal
import socket
import threading
from collections.abc import Generator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from foreword.base.config import ServerConfig
from foreword.base.errors import ConfigError

BACKLOG = 2048
"""Connections that may wait to be accepted."""


class _Server(uvicorn.Server):
    """uvicorn that returns after a signal, where its own raises it again and ends the process before the engine."""

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

    def run(self, app: ASGIApp) -> None:
        """Serve until stopped, then finish what is under way. In the main thread SIGINT and SIGTERM stop it.

        A second SIGINT leaves requests unfinished.
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
        self._server = _Server(config)
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
    bound = socket.socket(family, socket.SOCK_STREAM)
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
