"""Real servers: the embedded model behind a real socket, loaded once for all journeys."""

import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from foreword.assemble import Assembly, assemble
from foreword.base.config import (
    AttentionName,
    CacheConfig,
    Config,
    DtypeName,
    ModelConfig,
    ScheduleConfig,
    ServerConfig,
)
from foreword.server import KeyFile, Listener, create_app, serving
from foreword.telemetry import Metrics
from tests.text.tooling import write_templates


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """One server, from outside and from inside."""

    url: str
    assembly: Assembly
    key: str | None = None
    """Sent with every request."""

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.key is None else {"authorization": f"Bearer {self.key}"}

    # `verify=False`: nothing here is encrypted, and reading the machine's certificates for each request takes 40 ms.

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, headers=self.headers, timeout=30, verify=False)

    def post(self, path: str, body: object, **headers: str) -> httpx.Response:
        return httpx.post(self.url + path, json=body, headers={**headers, **self.headers}, timeout=120, verify=False)

    def metrics(self) -> dict[str, float]:
        """Counters and gauges as `name{label=value}` -> number."""
        rows: dict[str, float] = {}
        for family in text_string_to_metric_families(self.get("/metrics").text):
            for sample in family.samples:
                labels = ",".join(f"{key}={value}" for key, value in sample.labels.items())
                rows[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
        return rows

    def drained(self, timeout_s: float = 10.0) -> None:
        """The drain check: soon nobody waits, runs or holds, every block is free or cached, and the books agree."""
        end = time.monotonic() + timeout_s
        while True:
            state = self.get("/v1/cache").json()
            if state["requests"] == {"waiting": 0, "running": 0} and state["blocks"]["held"] == 0:
                break
            assert time.monotonic() < end, f"still at work: {state['requests']}, {state['blocks']}"
            time.sleep(0.02)
        blocks = state["blocks"]
        assert blocks["free"] + blocks["cached"] == blocks["capacity"]
        self.assembly.worker.check()


@contextmanager
def running(
    cache: CacheConfig,
    schedule: ScheduleConfig,
    keys: KeyFile | None = None,
    model: str | None = None,
    *,
    attention: AttentionName = "auto",
    dtype: DtypeName = "auto",
) -> Iterator[Running]:
    """Serve a model, or else the embedded one, on a free port."""
    settings = ModelConfig(model=model, device="cpu", attention=attention, dtype=dtype)
    config = Config(model=settings, cache=cache, schedule=schedule, server=ServerConfig(port=0))
    metrics = Metrics()
    assembly = assemble(config, observer=metrics, shares=None if keys is None else keys.keys.shares())
    listener = Listener(config.server, drain_s=5)
    thread = threading.Thread(target=listener.run, args=[create_app(serving(assembly, metrics, keys))])
    thread.start()
    try:
        while not listener.started:
            time.sleep(0.01)
        yield Running(url=listener.url, assembly=assembly)
    finally:
        listener.stop()
        thread.join(15)
        assembly.close(timeout_s=15)


@contextmanager
def running_with_templates(embedded: Path, folder: Path, kv_cache: str, **templates: Any) -> Iterator[Running]:
    """Serve the embedded model, of which a copy goes to `folder`, with other templates beside its tokenizer."""
    model = folder / "model"
    shutil.copytree(embedded, model, symlinks=True)
    write_templates(model, **templates)
    with running(CacheConfig(kv_cache=kv_cache), ScheduleConfig(), model=str(model)) as server:
        yield server


@contextmanager
def emptied(served: Running) -> Iterator[Running]:
    """A server that journeys share, with nothing cached; after each journey it must hold nothing."""
    served.drained()
    served.assembly.keeper.flush()
    yield served
    served.drained()


@pytest.fixture(scope="package")
def loaded() -> Iterator[Running]:
    """The server of most journeys."""
    with running(CacheConfig(kv_cache="640"), ScheduleConfig()) as server:
        yield server


@pytest.fixture
def server(loaded: Running) -> Iterator[Running]:
    """The server of most journeys, emptied."""
    with emptied(loaded) as server:
        yield server


@pytest.fixture
def small() -> Iterator[Running]:
    """A server of its own for one journey: six blocks, two requests at a time, three in the queue."""
    schedule = ScheduleConfig(max_running=2, max_waiting=3, max_batch_tokens=64)
    with running(CacheConfig(kv_cache="6"), schedule) as server:
        yield server
