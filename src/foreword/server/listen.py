"""The socket: uvicorn around the app.

listener = Listener(app, config)    binds; the port is known (0 takes a free one) and connections queue up
listener.run()                      serves in the calling thread until `stop` or a signal, then drains
listener.stop()                     from any thread
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

    def __init__(self, app: ASGIApp, config: ServerConfig, *, drain_s: int | None = None) -> None:
        """Bind. `drain_s`: seconds that requests under way get after `stop`; None: as long as they take.

        Raises ConfigError when the address is taken, unknown, or public without `insecure`.
        """
        check_address(config)
        self._socket = _bound(config)
        self._uvicorn = _Server(
            uvicorn.Config(
                app,
                host=config.host,
                port=config.port,
                backlog=BACKLOG,
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=drain_s,
            )
        )

    @property
    def port(self) -> int:
        """The port that was bound."""
        return int(self._socket.getsockname()[1])

    @property
    def url(self) -> str:
        """Where a client on this machine finds the server."""
        host = self._uvicorn.config.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def started(self) -> bool:
        """Whether requests are being answered."""
        return self._uvicorn.started

    def run(self) -> None:
        """Serve until stopped, then finish what is under way. In the main thread SIGINT and SIGTERM stop it.

        A second SIGINT leaves requests unfinished.
        """
        self._uvicorn.run(sockets=[self._socket])

    def stop(self) -> None:
        """Take no more connections and let `run` return once requests under way are done."""
        self._uvicorn.should_exit = True


def check_address(config: ServerConfig) -> None:
    """Raise ConfigError for an address that others reach, unless the operator said that he means it."""
    if config.insecure or _is_loopback(config.host):
        return
    raise ConfigError(
        f"host is {config.host}: there are no API keys, so everybody who reaches the port would share one cache."
        " Listen on 127.0.0.1, or say --insecure."
    )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _bound(config: ServerConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((config.host, config.port))
    except OSError as error:
        bound.close()
        message = (
            f"cannot listen on {config.host} port {config.port}: {error.strerror or error}. Choose another --port."
        )
        raise ConfigError(message) from None
    bound.set_inheritable(True)
    return bound
