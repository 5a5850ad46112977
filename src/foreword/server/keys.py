"""API keys as values: who may come in, as which tenant, and how much of the server each tenant may use.

The file holds SHA-256 digests of the keys, never a key:

    {"format": 1,
     "tenants": {"red": {"share": 0.25, "max_requests": 8}, "blue": {"share": null, "max_requests": 8}},
     "keys": [{"sha256": "9f86d081...", "tenant": "red", "admin": false}]}

Knows no file and no HTTP; `auth` reads, writes and asks.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from typing import Any, cast

from foreword.base.errors import ConfigError
from foreword.cache.identity import PUBLIC

MAX_REQUESTS = 8
"""Prompts that a tenant may have queued or running, unless it is told otherwise."""

ID_LENGTH = 8
"""Characters of a key's digest that name it to people."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """What a tenant may use."""

    share: float | None = None
    """Part of the pool that it is sure of, 0 to 1. None: an equal part of what nobody is sure of."""
    max_requests: int = MAX_REQUESTS
    """Prompts that it may have queued or running."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key, as far as the server needs to know it."""

    sha256: str
    """Hexadecimal digest of the key."""
    tenant: str
    admin: bool = False
    """Whether it also opens the routes that are for operators."""

    @property
    def id(self) -> str:
        """A short name for people."""
        return self.sha256[:ID_LENGTH]


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """All keys and their tenants; every tenant has a key and every key a tenant."""

    tenants: Mapping[str, Quota] = field(default_factory=dict[str, Quota])
    keys: tuple[Key, ...] = ()

    def find(self, secret: str) -> Key | None:
        """The key that this is. Digests are compared, so that time tells nothing about a key."""
        wanted = digest(secret)
        return next((key for key in self.keys if key.sha256 == wanted), None)

    def shares(self) -> dict[str, float]:
        """The part of the pool that each tenant is sure of; together at most 1.

        What is not assigned is cut into equal parts: one for each tenant without a share, and one for nobody, so
        that there is room for tenants that are added later.
        """
        given = {name: quota.share for name, quota in self.tenants.items() if quota.share is not None}
        rest = max(0.0, 1.0 - sum(given.values())) / (len(self.tenants) - len(given) + 1)
        return {name: given.get(name, rest) for name in self.tenants}

    def with_key(self, key: Key, share: float | None, max_requests: int | None) -> "Keys":
        """With one more key; its tenant's quota changes where it is given. Raises ConfigError."""
        if any(key.id == other.id for other in self.keys):
            raise ConfigError(f"there is a key {key.id} already; try again")
        quota = self.tenants.get(key.tenant, Quota())
        if share is not None:
            quota = replace(quota, share=share)
        if max_requests is not None:
            quota = replace(quota, max_requests=max_requests)
        return _checked(Keys(tenants={**self.tenants, key.tenant: quota}, keys=(*self.keys, key)))

    def without(self, name: str) -> "Keys":
        """Without the key of this id; with its last key a tenant goes as well. Raises ConfigError."""
        left = tuple(key for key in self.keys if key.id != name)
        if len(left) == len(self.keys):
            if (whole := self.find(name)) is not None:  # a secret: it is not written anywhere
                raise ConfigError(f"this is a whole key; name it by its id, {whole.id}")
            known = ", ".join(key.id for key in self.keys) or "none"
            shown = name if re.fullmatch(f"[0-9a-f]{{1,{ID_LENGTH}}}", name) else "with that id"
            raise ConfigError(f"there is no key {shown}; there are: {known}")
        named = {key.tenant for key in left}
        return Keys(tenants={tenant: quota for tenant, quota in self.tenants.items() if tenant in named}, keys=left)


def digest(secret: str) -> str:
    """What is stored of a key. Keys are long and random, so that a plain hash of one cannot be guessed back."""
    return sha256(secret.encode(errors="surrogateescape")).hexdigest()


def parse(text: str) -> Keys:
    """Read a key file's text. Raises ConfigError saying what is wrong and where."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"it is not valid JSON: {error}") from None
    top = _fields(data, "the file", format=int, tenants=dict, keys=list)
    if top["format"] != 1:
        raise ConfigError(f"format is {top['format']}; this version reads format 1")
    tenants = {name: _quota(name, entry) for name, entry in top["tenants"].items()}
    return _checked(Keys(tenants=tenants, keys=tuple(_key(entry, i) for i, entry in enumerate(top["keys"]))))


def written(keys: Keys) -> str:
    """The text that `parse` reads back."""
    data = {
        "format": 1,
        "tenants": {name: asdict(quota) for name, quota in keys.tenants.items()},
        "keys": [asdict(key) for key in keys.keys],
    }
    return json.dumps(data, indent=2) + "\n"


def _quota(name: str, entry: object) -> Quota:
    where = f"tenants.{name}"
    found = _fields(entry, where, share=(int, float, type(None)), max_requests=int)
    try:
        share = None if found["share"] is None else float(found["share"])
    except OverflowError:
        raise ConfigError(f"{where}.share is not between 0 and 1") from None
    return Quota(share=share, max_requests=found["max_requests"])


def _key(entry: object, place: int) -> Key:
    return Key(**_fields(entry, f"keys.{place}", sha256=str, tenant=str, admin=bool))


def _fields(data: object, where: str, **kinds: type | tuple[type, ...]) -> dict[str, Any]:
    """An object that has exactly these fields, of these types."""
    if not isinstance(data, dict):
        raise ConfigError(f"{where} is no object")
    found = cast(dict[str, Any], data)
    for name in found:
        if name not in kinds:
            raise ConfigError(f"{where} has an unknown field {name!r}; known: {', '.join(kinds)}")
    for name, kind in kinds.items():
        if name not in found:
            raise ConfigError(f"{where} has no {name}")
        value = found[name]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ConfigError(f"{where}.{name} has the wrong type")
    return found


def _checked(keys: Keys) -> Keys:
    """The same keys, if they make sense together."""
    _check_tenants(keys)
    for key in keys.keys:
        if not re.fullmatch(r"[0-9a-f]{64}", key.sha256):
            raise ConfigError(f"the key {key.id!r} has no SHA-256 digest: 64 hexadecimal digits, lower case")
        if key.tenant not in keys.tenants:
            raise ConfigError(f"the key {key.id} is for tenant {key.tenant!r}, which is not among tenants")
    if len({key.id for key in keys.keys}) < len(keys.keys):
        raise ConfigError("two keys have one id")
    if idle := set(keys.tenants) - {key.tenant for key in keys.keys}:
        raise ConfigError(f"tenant {min(idle)!r} has no key")
    return keys


def _check_tenants(keys: Keys) -> None:
    for name, quota in keys.tenants.items():
        if not _NAME.fullmatch(name) or name.lower() == PUBLIC:
            raise ConfigError(
                f"{name!r} is no name for a tenant: letters, digits, dots, dashes, underscores, 64 at most;"
                f" {PUBLIC!r} is taken"
            )
        if quota.share is not None and not 0 <= quota.share <= 1:
            raise ConfigError(f"the share of {name} is {quota.share}; it must be between 0 and 1")
        if quota.max_requests < 1:
            raise ConfigError(f"max_requests of {name} is {quota.max_requests}; it must be at least 1")
    total = sum(quota.share or 0.0 for quota in keys.tenants.values())
    if total > 1 + 1e-9:
        raise ConfigError(f"the shares of all tenants make {total:g} together; that must be at most 1")
