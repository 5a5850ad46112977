"""`foreword keys`: who may use a server, as which tenant."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.table import Table
from tyro.conf import Positional, arg, subcommand


@dataclass(frozen=True, slots=True, kw_only=True)
class Add:
    """Make a key for a tenant and print it, once: only its SHA-256 digest is kept in the file.

    A tenant may have several keys; --share and --max-requests are the tenant's, whichever key they came with. A running
    server takes new keys and limits at once; shares of the pool count from its next start.
    """

    file: Path
    """The key file; it is made if there is none."""
    tenant: str
    """Whose key it is. Tenants share nothing of the cache but what an operator makes public."""
    admin: bool = False
    """The key also opens /metrics, flush, public heads and reload, and sees all tenants."""
    share: float | None = None
    """Part of the pool that the tenant is sure of, 0 to 1. Left out: an equal part of what is not assigned."""
    max_requests: int | None = None
    """Prompts that the tenant may have queued or running. Left out: 8."""

    def run(self) -> int:
        """Add and print."""
        from foreword.server.auth import change_keys, new_key

        secret, key = new_key(self.tenant, admin=self.admin)
        change_keys(self.file, lambda keys: keys.with_key(key, self.share, self.max_requests))
        print(secret)
        Console(stderr=True).print(
            f"Key {key.id} of tenant {key.tenant}: keep it, it is shown only once.", highlight=False, soft_wrap=True
        )
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class List:
    """Show the keys in a file by their ids, with their tenants' limits."""

    file: Path
    """The key file."""

    def run(self) -> int:
        """Print a table."""
        from foreword.server.auth import read_keys

        keys = read_keys(self.file)
        table = Table("key", "tenant", "admin", "share", "max requests")
        for key in keys.keys:
            quota = keys.tenants[key.tenant]
            share = "equal part" if quota.share is None else f"{quota.share:g}"
            table.add_row(key.id, key.tenant, "yes" if key.admin else "", share, str(quota.max_requests))
        Console().print(table, highlight=False)
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Revoke:
    """Take a key back; a running server refuses it from the next request on."""

    file: Path
    """The key file."""
    key: Positional[str]
    """The key's id, as `foreword keys list` shows it."""

    def run(self) -> int:
        """Remove and say so."""
        from foreword.server.auth import change_keys

        change_keys(self.file, lambda keys: keys.without(self.key))
        print(f"{self.key} is revoked")
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """Add, list and revoke API keys. A server uses them with --api-keys."""

    verb: Annotated[
        Annotated[Add, subcommand("add", prefix_name=False)]
        | Annotated[List, subcommand("list", prefix_name=False)]
        | Annotated[Revoke, subcommand("revoke", prefix_name=False)],
        arg(name=""),
    ] = field()

    def run(self) -> int:
        """Do what was asked."""
        return self.verb.run()
