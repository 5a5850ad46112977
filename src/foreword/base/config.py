"""All settings, as frozen sections. The command line, `LLM(...)` and the docs are made from these fields.

A field's docstring is its help text. Sections say which room reads them; no room reads another's.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from foreword.base.errors import ConfigError

DeviceName = Literal["auto", "cpu", "cuda"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
AttentionName = Literal["auto", "triton", "varlen", "flashinfer", "flash-attn", "llvm", "sdpa"]

MAX_TTL_S = 31 * 24 * 60 * 60
"""The longest time, in seconds, for which anybody can ask to keep a prefix."""

_UNITS: Mapping[str, int] = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What computes: read by the runner."""

    model: str | None = None
    """A local directory or a Hugging Face hub id. None serves the embedded SmolLM2-135M-Instruct."""
    device: DeviceName = "auto"
    """Where the model runs. auto: cuda if there is a card, else cpu."""
    dtype: DtypeName = "auto"
    """Precision of weights and KV. auto: what the model was saved in, and bfloat16 only where the processor has it."""
    attention: AttentionName = "auto"
    """Attention backend. auto takes the best one that is installed."""
    cache_dir: str | None = None
    """Where converted models, compiled kernels and the like are kept. None: the user's cache folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """What is kept: read by the cache and by the runner's memory."""

    cache: bool = True
    """Reuse prefixes; with --no-cache (in Python cache=False) every prompt is computed whole."""
    block_size: int = 16
    """Tokens in a block, the grain of sharing."""
    exact: bool = False
    """Refuse to start unless a hit is proven to give the same bits as a miss on this machine."""
    audit: float = 0.0
    """Share of hits, 0 to 1, that is recomputed when there is nothing else to do and compared; wrong ones leave the
    cache."""
    ttl: float | None = None
    """Seconds after its last use for which a cached prefix is kept, unless a request says otherwise. None: until the
    room is needed."""
    pin_budget: float = 0.25
    """Share of the pool, 0 to 1, that may be pinned; of a tenant's share the same part."""
    kv_cache: str = "auto"
    """Memory for KV: a size (2GiB, 500MB) or a bare number of blocks (64). auto: a share of what is free."""

    def __post_init__(self) -> None:
        if not 1 <= self.block_size <= 256:
            raise ConfigError(f"block_size is {self.block_size}; it must be between 1 and 256")
        if not 0 <= self.audit <= 1:
            raise ConfigError(f"audit is {self.audit}; it is a share of hits, between 0 and 1")
        if not 0 <= self.pin_budget <= 1:
            raise ConfigError(f"pin_budget is {self.pin_budget}; it is a share of the pool, between 0 and 1")
        if self.ttl is not None and not 0 < self.ttl <= MAX_TTL_S:
            raise ConfigError(f"ttl is {self.ttl}; it is a number of seconds above 0, at most {MAX_TTL_S}")
        if self.kv_cache != "auto":
            parse_kv_cache(self.kv_cache)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    """Who runs: read by the scheduler."""

    max_context: int | None = None
    """Tokens of prompt and answer together at most. None: what the model and the KV memory allow."""
    max_batch_tokens: int = 1024
    """Tokens computed in one step at most."""
    max_running: int = 64
    """Requests computed together at most."""
    max_waiting: int = 1024
    """Requests in the queue at most; the next one is refused with 429."""

    def __post_init__(self) -> None:
        for name in ("max_batch_tokens", "max_running", "max_waiting"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_context is not None and self.max_context < 2:
            raise ConfigError(f"max_context is {self.max_context}; it must be at least 2")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Where it listens: read by the server."""

    host: str = "127.0.0.1"
    """Address to listen on. Any other than loopback needs --api-keys or --insecure."""
    port: int = 8000
    """Port to listen on."""
    allowed_hosts: str | None = None
    """Names, with commas between them, under which clients and web pages reach the server, beside localhost, IP
    addresses and the name of --host: those of a proxy, a container, or this machine on its network. `*` takes any."""
    api_keys: str | None = None
    """File of API keys, made by `foreword keys add`. Each key belongs to a tenant, and tenants share nothing but public
    heads. None: one tenant, no keys."""
    public_heads: str | None = None
    """JSON file of prompts that all tenants share: a list of `{"prompt": text}` and `{"messages": [...]}`. Needs
    --api-keys."""
    warm: str | None = None
    """JSON file of prompts to compute at the start, before /ready turns true: a list of what `POST /v1/cache/warm`
    takes."""
    insecure: bool = False
    """Listen on a public address without API keys: everybody who reaches the port shares one cache."""
    max_body_bytes: int = 32 * 2**20
    """Largest request body, in bytes; a larger one is refused with 413."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; it must be between 0 and 65535")
        for name in self.host_names():
            if name != "*" and not re.fullmatch(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*", name):
                raise ConfigError(
                    f"allowed_hosts names {name!r}; give names such as llm.example.com, without scheme and port and"
                    " with commas between them, or *"
                )
        if self.public_heads is not None and self.api_keys is None:
            raise ConfigError("public_heads needs api_keys: without them there is one tenant, and nobody to share with")

    def host_names(self) -> tuple[str, ...]:
        """The names in `allowed_hosts`, in small letters."""
        names = () if self.allowed_hosts is None else self.allowed_hosts.lower().split(",")
        return tuple(name.strip().removesuffix(".") for name in names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything, composed."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    server: ServerConfig = field(default_factory=ServerConfig)

    def __post_init__(self) -> None:
        least = self.schedule.max_running + self.cache.block_size
        if self.schedule.max_batch_tokens < least:
            raise ConfigError(
                f"max_batch_tokens is {self.schedule.max_batch_tokens}; with max_running {self.schedule.max_running}"
                f" and block_size {self.cache.block_size} it must be at least {least}, so that every running"
                " request gets a token and one prefill a block"
            )
        if self.server.warm is not None and not self.cache.cache:
            raise ConfigError(
                "warm computes prompts for later requests, and without a cache none is kept; leave one out"
            )


def parse_kv_cache(text: str) -> tuple[Literal["blocks", "bytes"], int]:
    """Read `--kv-cache`: a bare whole number counts blocks, a number with a unit counts bytes.

    >>> parse_kv_cache("64"), parse_kv_cache("2GiB")
    (('blocks', 64), ('bytes', 2147483648))

    Raises ConfigError for anything else.
    """
    if re.fullmatch(r"\d+", text) and int(text) >= 1:
        return "blocks", int(text)
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)", text)
    if found and found[2].upper() in _UNITS and (size := int(float(found[1]) * _UNITS[found[2].upper()])) >= 1:
        return "bytes", size
    raise ConfigError(f"kv_cache is {text!r}; give a size such as 2GiB or 500MB, or a bare number of blocks such as 64")
