"""Who is asking: the key file, and what the key of a request opens.

    open      /health, /ready, and the dashboard's files, in which there is nothing of anybody
    a key     everything else, each tenant in its own namespace
    admin     routes that are registered with `admin_only`

The tenant comes from the key alone; no field and no other header of a request can name one. A server without a key
file has one tenant, who may do everything.
"""

import fcntl
import logging
import os
import secrets
import stat
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from foreword.base.errors import ConfigError
from foreword.cache.identity import ALONE, Tenant
from foreword.front.ask import Caller
from foreword.server import dashboard
from foreword.server.errors import Refusal, Refused
from foreword.server.keys import Key, Keys, digest, parse, written
from foreword.telemetry import Metrics

_log = logging.getLogger(__name__)

OPEN = frozenset({"/health", "/ready", dashboard.PATH})
"""Paths that need no key."""
OPEN_BELOW = f"{dashboard.PATH}/"
"""Nor does what is below this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """Who a request comes from."""

    tenant: Tenant = ALONE
    admin: bool = False
    max_requests: int | None = None


EVERYBODY = Principal(admin=True)
"""Who comes to a server without keys."""


class KeyFile:
    """A key file that is read again when it changes. Used on one thread."""

    def __init__(self, path: str | Path) -> None:
        """Read it. Raises ConfigError, with the way to mend it, when it cannot be used or holds no key."""
        self._path = Path(path)
        self._seen: tuple[int, ...] | None = None
        self._keys = Keys()
        self._read()
        if not self._keys.keys:
            raise ConfigError(f"{path} holds no key; add one: foreword keys add --file {path} --tenant NAME --admin")

    @property
    def keys(self) -> Keys:
        """The keys of this moment: a changed file counts at once, one that can no longer be used not at all."""
        try:
            self._read()
        except ConfigError as error:
            _log.error("the keys known before go on counting: %s", error)
        return self._keys

    def _read(self) -> None:
        mark = self._mark()
        if mark != self._seen:
            self._seen = mark  # first: what is wrong with it is said once
            self._keys = read_keys(self._path)

    def _mark(self) -> tuple[int, ...]:
        """Changes whenever the file does; empty while it is away."""
        try:
            status = self._path.stat()
        except OSError:
            return ()
        return (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino)


def read_keys(path: Path) -> Keys:
    """The keys in a file that nobody but its owner can read. Raises ConfigError."""
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path} cannot be read: it is no regular file; name what foreword keys add wrote")
        with path.open(encoding="utf-8") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & 0o077:
                raise ConfigError(f"{path} can be read or changed by others (mode {mode:o}); chmod 600 {path}")
            return parse(file.read())
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; make it: foreword keys add --file {path} --tenant NAME") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{path} cannot be read: {reason}") from None
    except ConfigError as error:
        if str(error).startswith(str(path)):
            raise
        raise ConfigError(
            f"{path} cannot be used: {error}. Mend it, or move it away and make a new one: foreword keys add"
        ) from None


def change_keys(path: Path, change: Callable[[Keys], Keys]) -> Keys:
    """Replace the keys in a file, in one move; a missing one is made, readable for its owner only.

    Raises ConfigError.
    """
    try:
        with _locked(path.parent):
            keys = change(read_keys(path) if path.exists() else Keys())
            handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)  # mode 0600
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    file.write(written(keys))
                    file.flush()
                    os.fsync(file.fileno())
                Path(name).replace(path)
            except BaseException:
                Path(name).unlink()
                raise
            return keys
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None


@contextmanager
def _locked(folder: Path) -> Generator[None]:
    """One writer at a time: a change made beside another would bring back what that one took away."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def new_key(tenant: str, *, admin: bool) -> tuple[str, Key]:
    """A fresh key: what its owner sends, and what is kept of it."""
    secret = f"fw-{secrets.token_urlsafe(32)}"
    return secret, Key(sha256=digest(secret), tenant=tenant, admin=admin)


class Authentication:
    """Lets requests in with the principal that their key stands for, and answers 401 to the rest."""

    def __init__(self, app: ASGIApp, keys: KeyFile | None, metrics: Metrics) -> None:
        self._app = app
        self._keys = keys
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "http" and scope["path"] not in OPEN and not scope["path"].startswith(OPEN_BELOW):
            found = principal_of(Headers(scope=scope).getlist("authorization"), self._keys)
            if isinstance(found, Refusal):
                self._metrics.count_refusal(found.status)
                await found.response()(scope, receive, send)
                return
            scope.setdefault("state", {})["principal"] = found
        await self._app(scope, receive, send)


def principal_of(authorization: list[str], file: KeyFile | None) -> Principal | Refusal:
    """Who sends these `Authorization` headers."""
    if file is None:
        return EVERYBODY
    if not authorization:
        return _stranger("No API key: send it as `Authorization: Bearer KEY`.")
    if len(authorization) > 1:
        return _stranger(
            f"There are {len(authorization)} Authorization headers: send one, `Authorization: Bearer KEY`."
        )
    scheme, _, secret = authorization[0].partition(" ")
    keys = file.keys
    key = keys.find(secret.strip()) if scheme.lower() == "bearer" else None
    if key is None:
        return _stranger("This API key is not known here; send one as `Authorization: Bearer KEY`.")
    quota = keys.tenants[key.tenant]
    return Principal(tenant=Tenant.named(key.tenant), admin=key.admin, max_requests=quota.max_requests)


def admin_only(request: Request) -> None:
    """A dependency of routes that are for operators. Raises Refused."""
    if not principal(request).admin:
        message = f"{request.url.path} needs an admin key."
        raise Refused(Refusal(status=403, message=message, code="admin_key_required"))


def principal(request: Request) -> Principal:
    """Who the request comes from."""
    return request.state.principal


def whose(request: Request, file: KeyFile | None, name: str) -> Tenant:
    """The tenant that a request names: the caller's own, or for an admin any. Raises Refused."""
    who, known = principal(request), file is not None and name in file.keys.tenants
    if not known or not (who.admin or name == who.tenant.name):
        raise Refused(Refusal(status=404, message="There is no such tenant.", code="not_found", field="tenant"))
    return Tenant.named(name)


def caller(request: Request) -> Caller:
    """The same as the front wants to know it; the body must have been read."""
    who = principal(request)
    return Caller(tenant=who.tenant, arrived_s=request.state.arrived_s, max_live=who.max_requests)


def _stranger(message: str) -> Refusal:
    return Refusal(status=401, message=message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
