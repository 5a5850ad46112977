"""Tenants of one server: a stranger learns nothing, an owner loses nothing, and what is public is shared by all."""

import json
import random
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from foreword.base.config import CacheConfig, ScheduleConfig
from foreword.server import KeyFile
from foreword.server.auth import change_keys, new_key
from tests.journeys.conftest import Running, running

SECRET = (
    "Our house in the valley is to be sold in March for four hundred thousand, and nobody outside the family may know "
    "before the notary has signed. The keys lie under the third stone by the well. The buyer is a Mister Halvorsen "
    "who has a boat and two horses and wants to move in before the snow melts. The barn is not part of it. "
)
HEAD = (
    "You are the night porter of the Grand Hotel at the lake. You are kind, brief and exact. Breakfast is from seven "
    "to ten in the garden room. The pool on the roof is open from eight to twenty and towels lie beside it. "
)
BLOCK = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class House:
    """One server, seen by each of those who use it."""

    boss: Running
    red: Running
    blue: Running
    file: Path


@contextmanager
def house(folder: Path, cache: CacheConfig, schedule: ScheduleConfig, *, max_requests: int) -> Iterator[House]:
    """A server for two tenants and an operator."""
    file = folder / "keys.json"
    secrets: list[str] = []
    for tenant in ("boss", "red", "blue"):
        secret, key = new_key(tenant, admin=tenant == "boss")
        share = 0.0 if tenant == "boss" else 0.4
        change_keys(file, lambda keys, key=key, share=share: keys.with_key(key, share, max_requests))
        secrets.append(secret)
    with running(cache, schedule, KeyFile(file)) as server:
        boss, red, blue = (replace(server, key=secret) for secret in secrets)
        yield House(boss=boss, red=red, blue=blue, file=file)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("keys")
    with house(folder, CacheConfig(kv_cache="400"), ScheduleConfig(), max_requests=8) as made:
        yield made


@pytest.fixture
def guarded(large: House) -> Iterator[House]:
    large.boss.post("/v1/cache/flush", {})
    yield large
    large.boss.drained()


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """Forty blocks: ten set aside for public heads, twelve for each tenant, six for nobody."""
    schedule = ScheduleConfig(max_running=4, max_batch_tokens=64)
    with house(tmp_path_factory.mktemp("keys"), CacheConfig(kv_cache="40"), schedule, max_requests=2) as made:
        yield made


@pytest.fixture
def tiny(narrow: House) -> Iterator[House]:
    narrow.boss.post("/v1/cache/flush", {})
    yield narrow
    narrow.boss.drained()


def ask(who: Running, prompt: str, **wishes: Any) -> dict[str, Any]:
    """The plain form's answer."""
    response = who.post("/chat", {"prompt": prompt, "max_tokens": 1, **wishes})
    assert response.status_code == 200, response.text
    return response.json()


def fixed(reply: dict[str, Any]) -> dict[str, Any]:
    """All of an answer that is not its text or a time, and might tell what others have cached."""
    return {"prompt": reply["prompt_tokens"], "cached": reply["cached_tokens"], "report": told(reply["cache"])}


def told(report: dict[str, Any]) -> dict[str, Any]:
    """What a report says that is neither a time nor the caller's own text."""
    said = {name: value for name, value in report.items() if name not in ("timings", "saved")}
    if said["left"] is not None:
        said["left"] = said["left"]["cause"]
    if said["where"] is not None:
        said["where"] = {name: value for name, value in said["where"].items() if name != "prompt"}
    return said


def whole(reply: dict[str, Any]) -> int:
    """Tokens that the same prompt finds cached afterwards, when nobody has had a longer one: its full blocks."""
    return reply["prompt_tokens"] // BLOCK * BLOCK


def shuffled(prompt: str, seed: int, tokenizer: Any) -> list[int]:
    """As many tokens as the prompt has, in no order that anybody ever sent."""
    ids = list(tokenizer.encode(prompt))
    random.Random(seed).shuffle(ids)
    return ids


def test_side_channel_a_strangers_guess_computes_what_a_random_prompt_does(guarded: House) -> None:
    tokenizer = guarded.red.assembly.front.tokenizer
    counters = ("foreword_prompt_tokens_cached_total", "foreword_prompt_tokens_computed_total")
    for num_blocks in (0, 1, 3, len(tokenizer.encode(SECRET)) // BLOCK):
        secret = f"{num_blocks}. {SECRET}"  # another one each time, or blue is told what became of its last guess
        ids = tokenizer.encode(secret)
        tail = shuffled(secret, num_blocks, tokenizer)
        guess = [*ids[: num_blocks * BLOCK], *tail[num_blocks * BLOCK :]]
        other = shuffled(secret, 100 + num_blocks, tokenizer)
        deltas: list[list[float]] = []
        replies: list[dict[str, Any]] = []
        for prompt in (guess, other):
            guarded.boss.post("/v1/cache/flush", {})
            ask(guarded.red, secret)
            before = guarded.boss.metrics()
            body = {"prompt": prompt, "max_tokens": 1, "cache": {"report": True}}
            replies.append(guarded.blue.post("/v1/completions", body).json())
            after = guarded.boss.metrics()
            deltas.append([after[name] - before[name] for name in counters])
        assert deltas[0] == deltas[1] == [0, len(ids)]
        reports = [told(reply["cache"]) for reply in replies]
        assert reports[0] == reports[1]
        assert (reports[0]["reason"], reports[0]["where"]["cached"]) == ("never_seen", None)
        again = ask(guarded.red, secret)
        assert again["cached_tokens"] == whole(again) > 0  # or all of the above proves nothing


def test_a_stranger_who_sends_the_same_chat_recalls_nothing(guarded: House) -> None:
    messages = [{"role": "user", "content": "Tell me of the sea, in English and in 中文."}]
    wish = {"max_tokens": 24, "temperature": 1, "seed": 5, "cache": {"report": True}}
    reply = guarded.red.post("/v1/chat/completions", {"messages": messages, **wish}).json()
    said = reply["choices"][0]["message"]["content"]
    echo = {"messages": [*messages, {"role": "assistant", "content": said}, {"role": "user", "content": "And?"}]}
    found = [who.post("/v1/chat/completions", {**echo, **wish}).json()["cache"] for who in (guarded.blue, guarded.red)]
    assert [report["recalled_tokens"] > 0 for report in found] == [False, True]
    assert [report["cached_tokens"] > reply["usage"]["prompt_tokens"] for report in found] == [False, True]
    assert found[0]["cached_tokens"] == 0


def test_side_channel_the_namespace_comes_from_the_key_only(guarded: House) -> None:
    ask(guarded.red, SECRET)
    salt = guarded.red.assembly.front.served.space.root.hex()
    tricks = {"x-tenant": "red", "x-cache-salt": salt, "x-user": "red", "x-api-key": str(guarded.red.key)}
    ask(guarded.blue, SECRET)
    guarded.boss.post("/v1/cache/flush", {})  # so that blue has lost something by a flush both times
    ask(guarded.red, SECRET)
    plain = fixed(ask(guarded.blue, SECRET))
    guarded.boss.post("/v1/cache/flush", {})
    ask(guarded.red, SECRET)
    reply = guarded.blue.post("/chat", {"prompt": SECRET, "max_tokens": 1}, **tricks)
    assert fixed(reply.json()) == plain
    assert plain["cached"] == 0
    guarded.boss.post("/v1/cache/flush", {})
    ask(guarded.red, SECRET)
    inert = {"user": "red", "metadata": {"tenant": "red"}, "prompt_cache_key": "red", "safety_identifier": "red"}
    body = {"prompt": SECRET, "max_tokens": 1, **inert}
    usage = guarded.blue.post("/v1/completions", body).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    for field in ("tenant", "salt", "cache_salt", "namespace"):
        refused = guarded.blue.post("/v1/completions", {**body, field: "red"})
        assert refused.status_code == 422
        assert "red" not in refused.text.replace(field, "")
    for key in (None, "fw-wrong", "-"):
        stranger = replace(guarded.blue, key=key)
        assert stranger.post("/v1/completions", body).status_code == 401
    assert ask(guarded.red, SECRET)["cached_tokens"] > 0


def test_side_channel_views_metrics_and_errors_show_a_tenant_only_its_own(guarded: House) -> None:
    before = guarded.blue.get("/v1/cache").json()
    ask(guarded.red, SECRET)
    assert guarded.blue.get("/v1/cache").json() == before
    assert before["blocks"] == {"share": 120, "cached": 0, "held": 0, "pinned": 0}
    assert guarded.red.get("/v1/cache").json()["blocks"]["cached"] >= len(SECRET) // 5 // BLOCK
    assert guarded.blue.get("/v1/cache?tenant=red").status_code == 404
    assert guarded.blue.get("/metrics").status_code == 403
    for word in ("Halvorsen", "notary", str(guarded.red.key)):
        for path in ("/v1/cache", "/metrics", "/v1/cache/public"):
            assert word not in guarded.boss.get(path).text
            assert word not in guarded.blue.get(path).text
    tenants = {view["tenant"]: view for view in guarded.boss.get("/v1/cache").json()["tenants"]}
    assert tenants["blue"]["blocks"]["cached"] == 0
    assert tenants["red"]["blocks"]["cached"] > 0
    rows = guarded.boss.metrics()
    assert rows["foreword_tenant_requests_total{tenant=red}"] >= 1


def test_isolation_a_public_head_is_shared_and_nothing_beyond_it(guarded: House) -> None:
    tokenizer = guarded.boss.assembly.front.tokenizer
    blocks = len(tokenizer.encode(HEAD)) // BLOCK
    private = ask(guarded.red, HEAD + SECRET)
    assert ask(guarded.blue, HEAD + SECRET)["cached_tokens"] == private["cached_tokens"] == 0
    marked = guarded.boss.post("/v1/cache/public", {"prompt": HEAD}).json()
    assert marked["head"]["blocks"] == blocks
    guarded.boss.post("/v1/cache/flush", {})
    try:
        assert ask(guarded.red, HEAD + SECRET)["cached_tokens"] == 0
        first = ask(guarded.blue, HEAD + SECRET)
        assert (first["cached_tokens"], first["cache"]["reason"]) == (blocks * BLOCK, "never_seen")
        again = ask(guarded.blue, HEAD + SECRET)
        assert again["cached_tokens"] == whole(again)
        assert ask(guarded.red, HEAD + SECRET)["cached_tokens"] == again["cached_tokens"]
        other = "Is there a boat to the island tonight, and does the porter know when the last taxi leaves?"
        tails = [ask(who, HEAD + other)["cached_tokens"] for who in (guarded.blue, guarded.red)]
        assert [tail // BLOCK for tail in tails] == [blocks] * 2
        tree = guarded.red.get("/v1/cache/tree").json()["nodes"]
        top = next(node["block"] for node in tree if node["owner"] == "public")
        below = guarded.red.get(f"/v1/cache/tree?start={top}").json()["nodes"]
        assert {node["owner"] for node in below} == {"red"}
    finally:
        gone = guarded.boss.post("/v1/cache/public", {"prompt": HEAD, "remove": True}).json()
    assert gone["dropped"] >= blocks
    assert ask(guarded.blue, HEAD + SECRET)["cached_tokens"] == 0
    assert ask(guarded.red, HEAD + SECRET)["cached_tokens"] == 0
    assert ask(guarded.red, HEAD + SECRET)["cached_tokens"] > 0


def test_isolation_a_system_prompt_can_be_a_public_head(guarded: House) -> None:
    system = {"role": "system", "content": HEAD}
    marked = guarded.boss.post("/v1/cache/public", {"messages": [system]}).json()["head"]
    counts: list[int] = []
    try:
        for who, question in ((guarded.red, "When is breakfast?"), (guarded.blue, "Where is the pool?")):
            body = {"messages": [system, {"role": "user", "content": question}], "max_tokens": 1}
            usage = who.post("/v1/chat/completions", body).json()["usage"]
            counts.append(usage["prompt_tokens_details"]["cached_tokens"])
    finally:
        guarded.boss.post("/v1/cache/public", {"messages": [system], "remove": True})
    assert counts == [0, marked["blocks"] * BLOCK]
    assert marked["blocks"] >= 3


def test_the_heads_of_the_readme_can_be_shared(guarded: House) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
    (listed,) = re.findall(r"`heads.json` is a list:\n\n```json\n(.*?)```", readme, re.DOTALL)
    heads = json.loads(listed)
    assert {key for head in heads for key in head} == {"messages", "prompt"}
    try:
        for head in heads:
            assert guarded.boss.post("/v1/cache/public", head).json()["head"]["blocks"] >= 1
    finally:
        for head in heads:
            guarded.boss.post("/v1/cache/public", {**head, "remove": True})
    short = guarded.boss.post("/v1/cache/public", {"prompt": "Translate to French:"}).json()["error"]["message"]
    assert "less than a block of 16" in short
    assert "make it longer" in short


def test_a_flood_by_one_tenant_evicts_nothing_of_anothers_share(tiny: House) -> None:
    mine = SECRET[:500]
    first = ask(tiny.blue, mine)
    assert tiny.blue.get("/v1/cache").json()["blocks"] == {
        "share": 12,
        "cached": first["prompt_tokens"] // 16,
        "held": 0,
        "pinned": 0,
    }
    early = "The first page of the flood is about rivers. " + SECRET[:300]
    ask(tiny.red, early)
    for page in range(12):
        ask(tiny.red, f"Page {page} of the flood is about rivers and seas, page {page}. {SECRET[page * 7 :][:300]}")
    assert tiny.red.get("/v1/cache").json()["blocks"]["cached"] >= 12
    assert tiny.boss.metrics()["foreword_blocks{state=free}"] <= 2
    assert ask(tiny.red, early)["cached_tokens"] < 16  # the flood has washed away its own
    assert ask(tiny.blue, mine)["cached_tokens"] == whole(first)
    tiny.boss.assembly.worker.check()


def test_a_tenant_has_so_much_room_and_so_many_requests(tiny: House) -> None:
    refused = tiny.red.post("/v1/completions", {"prompt": [5] * 200, "max_tokens": 89})
    assert refused.status_code == 400
    assert "the context is 288" in refused.json()["error"]["message"]  # 40 blocks less 10 and 12
    assert "set aside" in refused.json()["error"]["message"]
    assert tiny.red.post("/v1/completions", {"prompt": [5] * 200, "max_tokens": 1}).status_code == 200
    body = {"prompt": "Tell me a long story", "max_tokens": 200, "ignore_eos": True, "stream": True}
    threads: list[threading.Thread] = []
    started = [threading.Event(), threading.Event()]
    over = threading.Event()

    def read(event: threading.Event) -> None:
        with httpx.stream("POST", f"{tiny.red.url}/v1/completions", json=body, headers=tiny.red.headers) as response:
            lines = response.iter_lines()  # kept: httpx hangs up when the iterator goes
            assert next(lines).startswith("data: ")
            event.set()
            over.wait(60)

    for event in started:
        threads.append(threading.Thread(target=read, args=[event]))
        threads[-1].start()
    assert all(event.wait(60) for event in started)
    third = tiny.red.post("/v1/completions", {"prompt": "me too", "max_tokens": 1})
    assert (third.status_code, third.headers["retry-after"]) == (429, "1")
    assert third.json()["error"]["message"].startswith("tenant red has 2 requests queued or running, its limit is 2")
    assert tiny.blue.post("/v1/completions", {"prompt": "not me", "max_tokens": 1}).status_code == 200
    over.set()
    for thread in threads:
        thread.join()
    tiny.boss.drained()
    assert tiny.red.post("/v1/completions", {"prompt": "me too", "max_tokens": 1}).status_code == 200


def test_public_heads_have_a_budget_and_outlive_a_flood(tiny: House) -> None:
    refused = tiny.boss.post("/v1/cache/public", {"prompt": SECRET * 4})
    assert refused.status_code == 400
    assert "10 are allowed, a quarter of the pool" in refused.json()["error"]["message"]
    blocks = tiny.boss.post("/v1/cache/public", {"prompt": HEAD}).json()["num_blocks"]
    try:
        ask(tiny.red, HEAD + "Hello.")
        for page in range(12):
            ask(tiny.red, f"Page {page} of the flood is about rivers and seas, page {page}. {SECRET[page * 7 :][:300]}")
        assert ask(tiny.blue, HEAD + "Good evening.")["cached_tokens"] // BLOCK == blocks
    finally:
        tiny.boss.post("/v1/cache/public", {"prompt": HEAD, "remove": True})


def test_keys_come_and_go_while_it_serves(tiny: House) -> None:
    secret, key = new_key("green", admin=False)
    green = replace(tiny.red, key=secret)
    assert green.get("/v1/models").status_code == 401
    change_keys(tiny.file, lambda keys: keys.with_key(key, None, None))
    assert green.get("/v1/models").status_code == 200
    none_left = green.post("/chat", {"prompt": "hello", "max_tokens": 1})
    assert none_left.status_code == 200, none_left.text
    change_keys(tiny.file, lambda keys: keys.without(key.id))
    assert green.get("/v1/models").status_code == 401


def test_reload_over_http(guarded: House) -> None:
    ask(guarded.red, SECRET)
    assert ask(guarded.red, SECRET)["cached_tokens"] > 0
    assert guarded.red.post("/v1/models/reload", {}).status_code == 403
    reply = guarded.boss.post("/v1/models/reload", {}).json()
    assert (reply["changed"], reply["model"]) == (False, "SmolLM2-135M-Instruct")
    assert reply["root"] == guarded.boss.get("/v1/cache").json()["settings"]["effective"]["root"]
    assert guarded.boss.get("/ready").status_code == 200
    assert ask(guarded.red, SECRET)["cached_tokens"] == 0


def test_advice_is_for_whom_it_is_about(guarded: House) -> None:
    for n in range(5):
        for tenant, text in ((guarded.red, f"It is 10:0{n}. {SECRET}"), (guarded.blue, f"{HEAD} {n}")):
            report = tenant.post("/chat", {"prompt": text, "max_tokens": 1}).json()["cache"]
            assert (report["advice"] is None) == (tenant is guarded.blue or n < 3)
    told = guarded.red.get("/v1/cache/advice").json()["advice"]
    assert [(said["tenant"], said["now"]) for said in told] == [("red", "10:04.")]
    assert guarded.blue.get("/v1/cache/advice").json()["advice"] == []
    assert guarded.boss.get("/v1/cache/advice").json()["advice"] == told
    assert guarded.boss.get("/v1/cache/advice?tenant=blue").json()["advice"] == []
    guarded.red.post("/v1/cache/flush", {})
    assert guarded.boss.get("/v1/cache/advice").json()["advice"] == []
