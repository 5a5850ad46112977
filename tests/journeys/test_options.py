"""Row 30: no option switches the cache off in silence. What `GET /v1/cache` says of it, a hit test says as well."""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from foreword.base.config import CacheConfig, ScheduleConfig
from foreword.base.errors import ConfigError
from foreword.base.params import EVERYTHING
from foreword.cache.identity import Chain, Tenant
from foreword.server import KeyFile
from foreword.server.auth import change_keys, new_key
from tests.journeys.conftest import Running, running
from tests.runner import models, plain_models

OPTIONS = (
    "cache",
    "exact",
    "audit",
    "ttl",
    "large blocks",
    "tiny pool",
    "sdpa",
    "bfloat16",
    "keys",
    "one at a time",
    "recurrent model",
)
_DESIGN = "++-+++---+-"


def _combinations() -> list[frozenset[str]]:
    """Twelve sets of options: of any two options, each of the four cases is there three times (Plackett and Burman)."""
    shifted = [_DESIGN[-n:] + _DESIGN[:-n] for n in range(len(_DESIGN))]
    on = [frozenset(option for option, sign in zip(OPTIONS, row, strict=True) if sign == "+") for row in shifted]
    return [*on, frozenset()]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[bool, Path]:
    """Two models: with windows, and one that is recurrent."""
    config = models.CONFIGS["mistral"]()
    config.tie_word_embeddings = False
    built = {False: models.build(config), True: plain_models.build("mamba2")}
    return {recurrent: plain_models.save(model, tmp_path_factory.mktemp("model")) for recurrent, model in built.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One server with its operator and two that use it; without keys all three are the same."""

    boss: Running
    red: Running
    blue: Running


@contextmanager
def started(model: Path, options: frozenset[str], folder: Path) -> Iterator[Seen]:
    cache = CacheConfig(
        cache="cache" in options,
        exact="exact" in options,
        audit=1.0 if "audit" in options else 0.0,
        ttl=60.0 if "ttl" in options else None,
        block_size=32 if "large blocks" in options else 16,
        kv_cache="40" if "tiny pool" in options else "200",
    )
    narrow = {"max_running": 1, "max_batch_tokens": 40} if "one at a time" in options else {}
    secrets: list[str | None] = [None] * 3
    if "keys" in options:
        for number, tenant in enumerate(("boss", "red", "blue")):
            secrets[number], key = new_key(tenant, admin=tenant == "boss")
            change_keys(folder / "keys.json", lambda keys, key=key: keys.with_key(key, 0.0, 8))
    with running(
        cache,
        ScheduleConfig(max_context=128, **narrow),
        KeyFile(folder / "keys.json") if "keys" in options else None,
        str(model),
        attention="sdpa" if "sdpa" in options else "auto",
        dtype="bfloat16" if "bfloat16" in options else "float32",
    ) as server:
        boss, red, blue = (replace(server, key=secret) for secret in secrets)
        yield Seen(boss=boss, red=red, blue=blue)


def send(server: Running, seed: int) -> dict[str, Any]:
    """A prompt of 100 tokens, and what the cache did."""
    ids = random.Random(seed).choices(range(100, 500), k=100)
    body = {"prompt": ids, "max_tokens": 1, "temperature": 0, "ignore_eos": True, "cache": {"report": True}}
    reply = server.post("/v1/completions", body)
    assert reply.status_code == 200, reply.text
    return reply.json()["cache"]


@pytest.mark.parametrize("options", _combinations(), ids=lambda options: ", ".join(sorted(options)) or "none")
def test_what_is_said_of_the_cache_is_what_happens(
    folders: Mapping[bool, Path], tmp_path: Path, options: frozenset[str]
) -> None:
    recurrent = "recurrent model" in options
    on = "cache" in options and not recurrent
    if recurrent and "sdpa" in options:  # no such model can have it: refused, not passed over
        with pytest.raises(ConfigError, match=r"attention is sdpa.*leave --attention out"):
            started(folders[True], options, tmp_path).__enter__()
        options -= {"sdpa"}
    with started(folders[recurrent], options, tmp_path) as seen:
        first, again = send(seen.red, 1), send(seen.red, 1)
        mine, all_of_it = (server.get("/v1/cache").json() for server in (seen.red, seen.boss))
        seen.boss.drained()
    assert (first["cached_tokens"], again["cached_tokens"]) == (0, 96 if on else 0)
    for state in (mine, all_of_it):
        assert state["enabled"] is on
        assert state["cacheable"] is not recurrent
        assert ("running sum" in (state["not_cacheable"] or "")) is recurrent
    settings = all_of_it["settings"]
    assert settings["effective"]["cache"] is on
    assert settings["effective"]["exact"] or "exact" not in options
    assert settings["cache"]["cache"] is ("cache" in options)
    assert settings["cache"]["audit"] == ("audit" in options)
    off = "cache_disabled" if "cache" not in options else "model_not_cacheable"
    assert again["reason"] in (("never_seen", "too_short") if on else (off,))


def test_what_a_fault_switches_off_is_said_to_whom_it_concerns(folders: Mapping[bool, Path], tmp_path: Path) -> None:
    """A request of one tenant loses its lease, so that its blocks are held by nobody."""
    with started(folders[False], frozenset({"cache", "keys"}), tmp_path) as seen:
        assembly = seen.boss.assembly
        lost = Chain(assembly.front.served.space, range(100, 150), tenant=Tenant.named("red"))
        assembly.worker.on_cache(lambda cache: cache.reserve(cache.acquire(lost, EVERYTHING), 0, 50))
        send(seen.blue, 2)
        for server, on in ((seen.red, False), (seen.blue, True)):
            reports = [send(server, 1) for _ in range(2)]
            assert (reports[1]["cached_tokens"] > 0) is server.get("/v1/cache").json()["enabled"] is on
            assert (reports[1]["reason"] == "cache_disabled") is not on
        assert seen.boss.get("/v1/cache").json()["enabled"]
        assert seen.boss.metrics()["foreword_tenants_stopped"] == 1
