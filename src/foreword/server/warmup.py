"""The file of `--warm`: prompts that are computed at the start, before `/ready` turns true."""

import logging
from collections.abc import Sequence
from pathlib import Path
from threading import Thread

from foreword.base.errors import ConfigError, ForewordError, RequestError
from foreword.cache.identity import Tenant
from foreword.front.ask import SOMEBODY, Caller
from foreword.front.keeper import Keeper
from foreword.server.auth import KeyFile
from foreword.server.cache_api import WarmRequest
from foreword.server.lists import read_list

_log = logging.getLogger(__name__)


def read_warm(path: str | Path, keys: KeyFile | None) -> tuple[WarmRequest, ...]:
    """The prompts in a file: the same objects as `POST /v1/cache/warm` takes, in a list. Raises ConfigError."""
    forms = read_list(path, WarmRequest, "warm")
    for place, form in enumerate(forms):
        try:
            form.ask()
        except RequestError as error:
            raise ConfigError(f"warm: {path}: prompt {place}: {error.message}") from None
        if form.tenant is not None and (keys is None or form.tenant not in keys.keys.tenants):
            raise ConfigError(
                f"warm: {path}: prompt {place} is for tenant {form.tenant}, and there is none of that name"
            )
        if form.tenant is None and keys is not None:
            raise ConfigError(f"warm: {path}: prompt {place} names no tenant; with --api-keys each must")
    return tuple(forms)


class Warmup:
    """Computes the prompts one after the other in a thread of its own. What cannot be computed is said in the log."""

    def __init__(self, keeper: Keeper, forms: Sequence[WarmRequest]) -> None:
        self._keeper = keeper
        self._forms = tuple(forms)
        self._thread = Thread(target=self._run, name="foreword-warmup", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def done(self) -> bool:
        """Whether all of them are dealt with."""
        return not self._forms or (self._thread.ident is not None and not self._thread.is_alive())

    def _run(self) -> None:
        for place, form in enumerate(self._forms):
            caller = SOMEBODY if form.tenant is None else Caller(tenant=Tenant.named(form.tenant))
            try:
                for piece in self._keeper.warm(form.ask(), caller):
                    if piece.error is not None:
                        _log.error("warm: prompt %d was not computed: %s", place, piece.error)
            except ForewordError as error:
                _log.error("warm: prompt %d was not computed: %s", place, error)
