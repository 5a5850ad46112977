"""Under which names the server answers, and to whose pages.

A web page may send requests to any server that its browser reaches, 127.0.0.1 too. It may not read what another site
answers, unless its own name is pointed at that address (DNS rebinding): then the server is the page's own site, and
only `Host` gives it away, which holds the page's name. What a page of another site sends without reading is told by
its `Origin`.

`Host` may be localhost, an IP address (nobody can point that elsewhere), the name of `--host`, or one of
`--allowed-hosts`. `Origin` must be the same as `Host`, or a page of one of `--allowed-hosts`: a proxy may have put
another name into `Host`. What is not a browser sends no `Origin`, and may leave out `Host`.

With keys a page has none of them, and the check is made all the same: one rule for all.
"""

import ipaddress
import re

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from foreword.base.config import ServerConfig
from foreword.server.errors import Refusal
from foreword.telemetry import Metrics

_AUTHORITY = re.compile(r"(?:\[([0-9A-Za-z:.%]+)\]|([^\s:@/\[\]]+))(?::\d*)?")
_MAX_SHOWN = 100


class HostCheck:
    """Answers 403 to requests under a name that is not this server's, and to those of other sites' pages."""

    def __init__(self, app: ASGIApp, config: ServerConfig, metrics: Metrics) -> None:
        self._app = app
        self._named = frozenset(config.host_names())
        self._names = self._named | {config.host.lower()}
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        refusal = self._refusal(Headers(scope=scope)) if scope["type"] == "http" else None
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            self._metrics.count_refusal(refusal.status)
            await refusal.response()(scope, receive, send)

    def _refusal(self, headers: Headers) -> Refusal | None:
        hosts = headers.getlist("host")
        for host in hosts:
            if not self._is_ours(host):
                return _foreign_host(host)
        origin = headers.get("origin")
        site = None if origin is None else origin.partition("://")[2]
        if site is None or site in hosts or _name(site) in self._named:
            return None
        return _foreign_origin(origin or "", site)

    def _is_ours(self, host: str) -> bool:
        name = _name(host)
        if "*" in self._named or name in self._names:
            return True
        return name is not None and (name == "localhost" or name.endswith(".localhost") or _is_address(name))


def _name(authority: str) -> str | None:
    """The name or address in `name:port`; None if it is nothing of the kind."""
    found = _AUTHORITY.fullmatch(authority)
    return None if found is None else (found[1] or found[2]).lower().removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _foreign_host(host: str) -> Refusal:
    name = _name(host) or "NAME"
    message = (
        f"Host is {host[:_MAX_SHOWN]!r}: this server answers to localhost, IP addresses and the names it was given."
        f" If this is one of its names, start it with --allowed-hosts {name[:_MAX_SHOWN]}"
    )
    return Refusal(status=403, message=message, code="foreign_host")


def _foreign_origin(origin: str, site: str) -> Refusal:
    message = f"Requests from pages of {origin[:_MAX_SHOWN]} are not taken; send them from a program"
    name = _name(site)
    if name is not None and not _is_address(name):
        message += f", or, if that is a name of this server, start it with --allowed-hosts {name[:_MAX_SHOWN]}"
    return Refusal(status=403, message=f"{message}.", code="foreign_origin")
