"""`make soak`: ten minutes of everything at once on a tiny pool, then the drain check and a report.

Two tenants ask over shared and private heads, streamed and not, briefly and at length, and every answer is compared
with the one that the same prompt got alone from an empty cache. Others send the same prompts and hang up in the middle;
somebody sends nothing but nonsense; the operator flushes, marks and unmarks public heads and scrapes metrics; some hits
are audited. Every minute all pause, and nothing may be held. `--soak-s` sets how long it goes on.
"""

import json
import random
import resource
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from foreword.base.config import CacheConfig, ScheduleConfig
from tests.journeys.conftest import Running
from tests.journeys.leaving import leave
from tests.journeys.test_tenants import HEAD, SECRET, House, house

PAUSE_EVERY_S = 60.0
HEADS = (HEAD, SECRET, HEAD + SECRET, "The harbour master keeps a list. ", SECRET[:333], "")
TAILS = (
    "Who asks?",
    "When is the pool open, and who keeps the towels?",
    "Write down what you know of the barn.",
    "Count to ten: one, two,",
    "The keys lie under the third stone by the well; the third stone by the well lies under",
    "A boat and two horses.",
    "Is there anything that nobody may know before the notary has signed?",
)
PROMPTS = tuple(head + tail for head in HEADS for tail in TAILS)
OPERATIONS = ("flush", "public", "private", *["metrics", "check"] * 6)
WISHES = {"max_tokens": 6, "temperature": 0}
NONSENSE: tuple[tuple[str, bytes, int], ...] = (
    ("/v1/completions", b"{", 400),
    ("/v1/completions", b"[]", 400),
    ("/v1/completions", b'{"prompt": "x", "tenant": "red"}', 422),
    ("/v1/completions", b'{"prompt": "x", "cache_salt": "red"}', 422),
    ("/v1/completions", json.dumps({"prompt": [5] * 5000}).encode(), 400),
    ("/v1/completions", b'{"prompt": [-1], "max_tokens": 1}', 400),
    ("/v1/completions", b'{"prompt": "x", "max_tokens": 100000}', 400),
    ("/v1/completions", b'{"prompt": "", "max_tokens": 1}', 400),
    ("/v1/chat/completions", b'{"messages": []}', 400),
    ("/chat", b'{"prompt": "x", "prefix_length": 99}', 422),
    ("/v1/cache/flush", b'{"tenant": "nobody"}', 404),
    ("/v1/models/reload", b"{}", 403),
    ("/v1/nothing", b"{}", 404),
)


class Soak:
    """Everybody who is at it, and what came of it."""

    def __init__(self, house: House, lasts_s: float) -> None:
        self.house = house
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.truths = {prompt: self._alone(prompt) for prompt in PROMPTS}
        self.start = time.monotonic()
        self.end = self.start + lasts_s
        self._lock = threading.Condition()
        self._paused = False
        self._active = 0

    def _alone(self, prompt: str) -> str:
        self.house.boss.post("/v1/cache/flush", {})
        reply = self.house.red.post("/v1/completions", {"prompt": prompt, **WISHES}).json()
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        return reply["choices"][0]["text"]

    def run(self) -> None:
        """Set everybody to work until the time is over."""
        house = self.house
        work: list[Callable[[random.Random], None]] = [
            *(lambda draw, who=who: self.ask(who, draw) for who in (house.red, house.blue)),
            *(lambda draw, who=who: self.talk(who, draw) for who in (house.red, house.blue, house.red, house.blue)),
            *(lambda draw, who=who: self.hang_up(who, draw) for who in (house.red, house.blue)),
            lambda draw: self.talk_nonsense(draw),
            lambda draw: self.operate(draw),
        ]
        threads = [threading.Thread(target=self._repeat, args=[one, seed]) for seed, one in enumerate(work)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def ask(self, who: Running, draw: random.Random) -> None:
        prompt = draw.choice(PROMPTS)
        text, cached = self._streamed(who, prompt) if draw.random() < 0.5 else self._whole(who, prompt)
        if text is None:
            self._count("refused: too busy")
            return
        self._count("answers", "answers with a hit" if cached else "answers without a hit")
        if text != self.truths[prompt]:
            self._object(f"{prompt!r} got {text!r}, alone it is {self.truths[prompt]!r} ({cached} tokens cached)")

    def talk(self, who: Running, draw: random.Random) -> None:
        """A long answer, so that the pool gets too small; it begins like the short one."""
        prompt = draw.choice(PROMPTS)
        body = {"prompt": prompt, **WISHES, "max_tokens": 100, "ignore_eos": True}
        response = who.post("/v1/completions", body)
        if response.status_code == 429:
            self._count("refused: too busy")
            return
        self._count("long answers")
        text = response.json()["choices"][0]["text"]
        if not text.startswith(self.truths[prompt]):
            self._object(f"{prompt!r} got {text!r}, alone it is {self.truths[prompt]!r}")

    def _whole(self, who: Running, prompt: str) -> tuple[str | None, int]:
        response = who.post("/v1/completions", {"prompt": prompt, **WISHES})
        if response.status_code == 429:
            return None, 0
        reply = response.json()
        return reply["choices"][0]["text"], reply["usage"]["prompt_tokens_details"]["cached_tokens"]

    def _streamed(self, who: Running, prompt: str) -> tuple[str | None, int]:
        body = {"prompt": prompt, **WISHES, "stream": True, "stream_options": {"include_usage": True}}
        url, text, cached = f"{who.url}/v1/completions", "", 0
        with httpx.stream("POST", url, json=body, headers=who.headers, timeout=120) as response:
            if response.status_code == 429:
                return None, 0
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    text += "".join(choice["text"] for choice in event["choices"])
                    cached = (event.get("usage") or {}).get("prompt_tokens_details", {}).get("cached_tokens", cached)
        return text, cached

    def hang_up(self, who: Running, draw: random.Random) -> None:
        body = {"prompt": draw.choice(PROMPTS), "max_tokens": 100, "ignore_eos": True, "temperature": 0}
        self._count(f"hung up: {leave(who, body, draw)}")

    def talk_nonsense(self, draw: random.Random) -> None:
        path, body, status = draw.choice(NONSENSE)
        who = draw.choice((self.house.red, self.house.blue))
        if draw.random() < 0.2:
            who, status = replace(who, key=draw.choice((None, "fw-wrong"))), 401
        headers = {"content-type": "application/json", **who.headers}
        found = httpx.post(who.url + path, content=body, headers=headers, timeout=60).status_code
        self._count("nonsense refused")
        threading.Event().wait(0.1)
        if found != status:
            self._object(f"{path} with {body[:60]!r} got {found}, not {status}")

    def operate(self, draw: random.Random) -> None:
        boss = self.house.boss
        self._count(what := draw.choice(OPERATIONS))
        if what == "flush":
            assert boss.post("/v1/cache/flush", {}).status_code == 200
        elif what in ("public", "private"):
            reply = boss.post("/v1/cache/public", {"prompt": HEAD, "remove": what == "private"})
            assert reply.status_code in (200, 404), reply.text
        elif what == "metrics":
            self._parts(boss.metrics())
        else:
            boss.assembly.worker.check()
        threading.Event().wait(draw.random())
        if time.monotonic() - self.start > PAUSE_EVERY_S * (1 + self.counts["pauses, all drained"]):
            with self._silence():
                boss.drained(30)
                self._count("pauses, all drained")

    def _parts(self, rows: dict[str, float]) -> None:
        """The tenants' tokens are the whole."""
        for what in ("cached", "computed"):
            parts = sum(n for name, n in rows.items() if name.startswith(f"foreword_tenant_prompt_tokens_{what}"))
            assert parts == rows[f"foreword_prompt_tokens_{what}_total"]

    def _repeat(self, work: Callable[[random.Random], None], seed: int) -> None:
        draw = random.Random(seed)
        try:
            while time.monotonic() < self.end and len(self.wrong) < 10:
                with self._turn():
                    work(draw)
        except Exception as error:  # told at the end, with the rest
            self._object(f"{type(error).__name__}: {error}")

    @contextmanager
    def _turn(self) -> Iterator[None]:
        with self._lock:
            self._lock.wait_for(lambda: not self._paused)
            self._active += 1
        try:
            yield
        finally:
            with self._lock:
                self._active -= 1
                self._lock.notify_all()

    @contextmanager
    def _silence(self) -> Iterator[None]:
        """Everybody else has finished what they were at, and waits."""
        with self._lock:
            self._paused = True
            assert self._lock.wait_for(lambda: self._active == 1, 120)
        try:
            yield
        finally:
            with self._lock:
                self._paused = False
                self._lock.notify_all()

    def _count(self, *names: str) -> None:
        with self._lock:
            self.counts.update(names)

    def _object(self, what: str) -> None:
        with self._lock:
            self.wrong.append(what)

    def report(self, rows: dict[str, float]) -> str:
        """What was done, line by line."""
        named: dict[str, Any] = dict(sorted(self.counts.items()))
        for name in ("prompt_tokens_cached", "prompt_tokens_computed", "tokens_recomputed", "preemptions", "steps"):
            named[name] = int(rows[f"foreword_{name}_total"])
        named["blocks audited"] = int(rows["foreword_blocks_audited_total"])
        named["memory at most, MiB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        lines = "".join(f"\n  {name:24} {number:8}" for name, number in named.items())
        return f"\nSoak of {time.monotonic() - self.start:.0f} s, {len(self.wrong)} faults{lines}\n"


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_soak(tmp_path: Path, pytestconfig: pytest.Config, capsys: pytest.CaptureFixture[str]) -> None:
    cache = CacheConfig(kv_cache="40", audit=0.05)
    schedule = ScheduleConfig(max_running=6, max_waiting=6, max_batch_tokens=128)
    with house(tmp_path, cache, schedule, max_requests=6) as made:
        soak = Soak(made, float(pytestconfig.getoption("--soak-s") or 0))
        soak.run()
        made.boss.drained(60)
        rows = made.boss.metrics()
        with capsys.disabled():
            print(soak.report(rows))
        assert soak.wrong == []
        soak._parts(rows)
        assert rows["foreword_requests_finished_total{finish=error}"] == 0
        assert rows["foreword_requests_finished_total{finish=cancelled}"] > 0
        assert rows["foreword_step_failures_total"] == rows["foreword_blocks_mismatched_total"] == 0
        counts = soak.counts
        assert min(counts["answers with a hit"], counts["answers without a hit"], counts["nonsense refused"]) > 0
        assert made.boss.get("/v1/cache").json()["enabled"] is True
