"""What users of silent caches complain about, on a real server: unexplained misses, wrong counts, orders not taken."""

import json
from typing import Any

import httpx
import pytest

from tests.journeys.conftest import Running

HEAD = "You are the receptionist of the Lindenhof. Breakfast is from 7 to 10. The pool is closed on Mondays. " * 4
ROUTES = ("/v1/chat/completions", "/v1/completions", "/chat")


def ask(server: Running, route: str, text: str, stream: bool = False, **cache: Any) -> dict[str, Any]:
    """Send `text` the way the route takes it; the `cache` object of its answer."""
    body: dict[str, Any] = {"max_tokens": 2, "temperature": 0, "cache": {"report": True, **cache}}
    # Before a user's words the template writes a block that all chats have, and earlier tests have left it, flushed.
    body |= {"messages": [{"role": "system", "content": text}]} if "chat/" in route else {"prompt": text}
    if not stream:
        reply = server.post(route, body)
        assert reply.status_code == 200, reply.text
        return reply.json()["cache"]
    response = server.post(route, body | {"stream": True, "stream_options": {"include_usage": True}})
    last = json.loads(response.text.strip().split("\n\n")[-2].removeprefix("data: "))
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == last["cache"]["cached_tokens"]
    return last["cache"]


def whole(report: dict[str, Any]) -> bool:
    """Whether all full blocks before the last token came from the cache."""
    return report["cached_tokens"] >= (report["cached_tokens"] + report["computed_tokens"] - 1) // 16 * 16 > 0


@pytest.mark.parametrize(
    ("route", "stream"), [*((route, False) for route in ROUTES), *((route, True) for route in ROUTES[:2])]
)
def test_read_and_store_are_obeyed_on_every_route(server: Running, route: str, stream: bool) -> None:
    text = route + str(stream) + HEAD
    assert ask(server, route, text, stream, store=False)["cached_tokens"] == 0
    missed = ask(server, route, text, stream)
    assert (missed["cached_tokens"], missed["reason"]) == (0, "not_stored")
    assert missed["cache_creation_input_tokens"] > 64
    unread = ask(server, route, text, stream, read=False)
    assert (unread["cached_tokens"], unread["reason"]) == (0, "read_disabled")
    hit = ask(server, route, text, stream)
    assert whole(hit)
    assert hit["cached_tokens"] == hit["cache_read_input_tokens"] > 64
    part = ask(server, route, text, stream, prefix_length=37)
    assert (part["cached_tokens"], part["tail_tokens"], part["reason"]) == (37, 5, "prefix_length")


@pytest.mark.parametrize("route", ROUTES)
def test_lifetimes_priorities_and_labels_are_taken_and_slips_are_refused(server: Running, route: str) -> None:
    body: dict[str, Any] = {"max_tokens": 1} | (
        {"messages": [{"role": "user", "content": HEAD}]} if "chat/" in route else {"prompt": HEAD}
    )
    for good in ({"ttl": 3600}, {"priority": 0}, {"priority": 100, "ttl": 0.5, "key": "nightly"}):
        assert server.post(route, {**body, "cache": good}).status_code == 200
    before = server.get("/v1/cache").json()["blocks"]
    for bad, name in (({"tttl": 1}, "cache.tttl"), ({"ttl": -1}, "cache.ttl"), ({"priority": 200}, "cache.priority")):
        refused = server.post(route, {**body, "cache": bad})
        assert (refused.status_code, refused.json()["error"]["param"]) == (422, name)
    assert server.get("/v1/cache").json()["blocks"] == before
    assert server.metrics()["foreword_key_prompt_tokens_total{key=nightly,source=cached,tenant=}"] > 0


def test_a_changed_clock_is_named_by_message_and_character(server: Running) -> None:
    def talk(stamp: str) -> dict[str, Any]:
        messages = [{"role": "system", "content": HEAD}, {"role": "user", "content": f"It is {stamp}. May I swim?"}]
        body = {"messages": messages, "max_tokens": 2, "temperature": 0, "cache": {"report": True}}
        return server.post("/v1/chat/completions", body).json()["cache"]

    talk("14:02")
    told = talk("14:03")
    assert told["reason"] == "diverged"
    where = told["where"]
    assert (where["message"], where["role"], where["offset"]) == (1, "user", len("It is 14:0"))
    assert "14:02" in where["cached"]
    assert "14:03" in where["prompt"]
    timings = told["timings"]
    parts = sum(seconds for name, seconds in timings.items() if name != "first_token_s")
    assert parts == pytest.approx(timings["first_token_s"], abs=1e-6)


def test_twenty_prompts_live_side_by_side(server: Running) -> None:
    prompts = [f"Number {n}. " + "A short text that fills a block or two, no more than that. " * 2 for n in range(20)]
    assert not any(whole(ask(server, "/chat", prompt)) for prompt in prompts)
    assert all(whole(ask(server, "/chat", prompt)) for prompt in prompts)


def test_a_script_of_known_truth_adds_up(server: Running) -> None:
    before = server.metrics()
    reports = [ask(server, route, HEAD + str(n % 3)) for n in range(4) for route in ROUTES]
    server.post("/v1/cache/lookup", {"prompt": HEAD + "0"})
    warmed = server.post("/v1/cache/warm", {"prompt": HEAD + "4"}).json()
    after = server.metrics()

    def delta(name: str) -> float:
        return sum(after[key] - before.get(key, 0) for key in after if key.split("{")[0] == f"foreword_{name}_total")

    cached = sum(report["cached_tokens"] for report in reports) + warmed["cached_tokens"]
    computed = sum(report["computed_tokens"] for report in reports) + warmed["computed_tokens"]
    assert delta("prompt_tokens_cached") == cached > 0
    assert delta("prompt_tokens_computed") == delta("prompt_tokens_missed") == computed
    assert delta("lookups") == len(reports) + 1
    assert delta("saved_seconds") > 0
    assert delta("tokens_generated") == 2 * len(reports)  # a warm call generates none


def test_a_lookup_is_true_and_changes_nothing(server: Running) -> None:
    ask(server, "/chat", HEAD + "one two three")
    body = {"prompt": HEAD + "one two four"}
    tree, metrics = server.get("/v1/cache/tree").json(), server.metrics()
    found = server.post("/v1/cache/lookup", body).json()
    again = server.get("/v1/cache/tree").json()
    for view in (tree, again):
        for node in view["nodes"]:
            del node["idle_s"]
    assert (again, server.metrics()) == (tree, metrics)
    told = ask(server, "/chat", body["prompt"])
    assert (found["cached_tokens"], found["reason"], found["where"]) == (
        told["cached_tokens"],
        told["reason"],
        told["where"],
    )


def test_the_tree_shows_what_is_there_and_its_blocks_can_be_pinned_and_flushed(server: Running) -> None:
    for end in ("one " * 20, "two " * 20):
        ask(server, "/chat", HEAD + end)
    nodes = server.get("/v1/cache/tree").json()["nodes"]
    top = nodes[0]
    assert top["text"].startswith("You are the receptionist")
    assert (top["parent"], top["children"], top["hits"], top["owner"]) == (None, 2, 1, "")
    assert {node["parent"] for node in nodes[1:]} == {top["block"]}
    pinned = server.post("/v1/cache/pin", {"block": top["block"]}).json()
    assert pinned["blocks"] * 16 == top["tokens"]
    state = server.get("/v1/cache").json()["blocks"]
    assert (state["pinned"], state["pin_budget"]) == (pinned["blocks"], 160)
    assert server.get("/v1/cache/tree").json()["nodes"][0]["pinned"]
    refused = server.post("/v1/cache/pin", {"ids": [5] * 16 * 200})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "ids")
    assert "160 may be" in refused.json()["error"]["message"]
    flushed = server.post("/v1/cache/flush", {"block": nodes[1]["block"]}).json()
    assert flushed == {"object": "cache.flushed", "dropped": nodes[1]["tokens"] // 16, "still_held": 0}
    assert server.post("/v1/cache/unpin", {"block": top["block"]}).json()["unpinned"] == pinned["blocks"]
    gone = server.post("/v1/cache/flush", {"prompt": HEAD}).json()
    assert gone["dropped"] > 0
    assert server.get("/v1/cache/tree").json()["nodes"] == []
    assert server.post("/v1/cache/pin", {"block": top["block"]}).status_code == 404
    assert server.get(f"/v1/cache/tree?start={top['block']}").status_code == 404


@pytest.mark.parametrize("verb", ["lookup", "warm", "pin", "unpin", "flush"])
def test_what_is_wrong_with_a_prompt_is_told_of_the_field_that_held_it(server: Running, verb: str) -> None:
    bodies: list[dict[str, Any]] = [{"ids": [5, 10**6]}]
    if verb == "warm":
        bodies += [{"ids": [5] * 100_000}, {"prompt": "word " * 10_000}]
    if verb not in ("lookup", "warm"):
        bodies += [{"ids": [5, 6]}, {"prompt": "word"}]  # less than a block
    for body in bodies:
        refused = server.post(f"/v1/cache/{verb}", body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, next(iter(body)))


def test_a_flush_under_load_is_honest(server: Running) -> None:
    with httpx.stream(
        "POST",
        server.url + "/v1/completions",
        json={"prompt": HEAD, "max_tokens": 200, "stream": True, "ignore_eos": True},
        timeout=60,
    ) as response:
        lines = response.iter_lines()
        next(lines)
        flushed = server.post("/v1/cache/flush", {}).json()
        assert flushed["still_held"] > 0
        after = ask(server, "/chat", HEAD)
        assert (after["cached_tokens"], after["reason"]) == (0, "flushed")
        assert after["left"]["cause"] == "flushed"
    assert whole(ask(server, "/chat", HEAD))
