"""What spoils a prefix without anybody noticing: clocks, ids, tools in another order, templates that rewrite answers.

And what does not: questions at the end, chats that grow.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.journeys.conftest import Running, running_with_templates
from tests.text.embedded import embedded_directory

__all__ = ["embedded_directory"]

RULES = " ".join(f"Room {n} has {2 + n % 3} beds and costs {60 + 5 * n} euros a night." for n in range(1, 25))
HOTEL = "You are the receptionist of the Lindenhof, a small hotel by the lake. Answer in one short sentence."
QUESTIONS = (
    "When is breakfast?",
    "Is the pool open on Monday, and may children swim?",
    "How often does the bus leave for the city?",
    "Which room is the cheapest one?",
    "What do you know about the lake?",
    "May my dog come too?",
)


def chat(server: Running, *contents: str, max_tokens: int = 2) -> dict[str, Any]:
    """A system message, and turns of user and assistant; the whole answer."""
    roles = ("system", *("user", "assistant") * len(contents))
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    body = {"messages": messages, "max_tokens": max_tokens, "temperature": 0, "cache": {"report": True}}
    reply = server.post("/v1/chat/completions", body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def advice(server: Running, query: str = "") -> list[dict[str, Any]]:
    reply = server.get(f"/v1/cache/advice{query}").json()
    assert reply["object"] == "cache.advice"
    return reply["advice"]


def test_a_clock_near_the_top_is_named_with_what_it_costs(server: Running) -> None:
    system = f"{HOTEL} It is 2026-11-29 10:0{{}} now. {RULES}"
    reports = [chat(server, system.format(n), question)["cache"] for n, question in enumerate(QUESTIONS)]
    assert [report["advice"] for report in reports[:3]] == [None] * 3
    last = reports[-1]
    told = last["advice"]
    assert last["reason"] == "diverged"
    assert last["cached_tokens"] == told["at_token"]  # up to the clock, and nothing behind it
    assert (told["kind"], told["message"], told["role"], told["calls"]) == ("changed", 0, "system", 5)
    assert system.format(5)[told["offset"] : told["end"]] == told["now"] == "10:05"
    assert told["before"] == "10:04"
    assert 300 < told["tokens_per_call"] < last["computed_tokens"]
    assert advice(server) == [{**told, "tenant": ""}]
    metrics = server.metrics()
    assert metrics["foreword_ready"] == metrics["foreword_volatile_spans"] == 1
    assert 0 <= metrics["foreword_volatile_tokens"] - told["calls"] * told["tokens_per_call"] < told["calls"]
    moved = [chat(server, f"{HOTEL} {RULES} It is 2026-11-29 10:1{n} now.", QUESTIONS[n])["cache"] for n in range(6)]
    assert all(report["cached_tokens"] > 300 and report["advice"] is None for report in moved[1:])
    assert len(advice(server)) == 1


@pytest.mark.parametrize("route", ["/v1/completions", "/chat"])
def test_a_request_id_before_the_documents_is_named_on_every_route(server: Running, route: str) -> None:
    prompts = [f"{route} Request 7f{n * 7919:06x}. {RULES} Question: {QUESTIONS[n]}" for n in range(5)]
    body: dict[str, Any] = {"max_tokens": 1, "temperature": 0, "cache": {"report": True}}
    told = [server.post(route, {**body, "prompt": prompt}).json()["cache"]["advice"] for prompt in prompts]
    last = told[-1]
    assert told[:3] == [None] * 3
    assert (last["kind"], last["message"], last["role"]) == ("changed", None, None)
    assert prompts[-1][last["offset"] : last["end"]] == last["now"] == f"7f{4 * 7919:06x}."
    assert last["text"].startswith(f"The prompt, characters {last['offset']} to")


def test_the_end_of_a_stream_has_the_advice(server: Running) -> None:
    systems = [{"role": "system", "content": f"Call {n}. {HOTEL} {RULES}"} for n in range(5)]
    body: dict[str, Any] = {"max_tokens": 2, "stream": True, "cache": {"report": True}}
    user = {"role": "user", "content": "Hi"}
    texts = [server.post("/v1/chat/completions", {**body, "messages": [system, user]}).text for system in systems]
    last = json.loads(texts[-1].strip().split("\n\n")[-2].removeprefix("data: "))
    assert last["cache"]["advice"]["kind"] == "changed"


def test_tools_in_another_order_are_named(server: Running) -> None:
    rooms = RULES.split(" Room ")
    tools = [json.dumps({"name": f"tool_{n}", "description": " ".join(rooms[4 * n : 4 * n + 4])}) for n in range(5)]
    system = f"{HOTEL} You may call: {{}}. {' '.join(rooms[20:])}"
    orders = [system.format(", ".join(tools[n:] + tools[:n])) for n in range(5)]
    told = [
        chat(server, order, question)["cache"]["advice"] for order, question in zip(orders, QUESTIONS, strict=False)
    ]
    assert (told[-1]["kind"], told[-1]["message"], told[-1]["role"]) == ("reordered", 0, "system")
    assert "same order" in told[-1]["text"]
    fixed = [chat(server, orders[0], question)["cache"] for question in QUESTIONS]
    assert all(report["cached_tokens"] > 300 and report["advice"] is None for report in fixed[1:])


def test_documents_with_a_question_at_the_end_get_no_advice(server: Running) -> None:
    for question in QUESTIONS:
        for document in (RULES, RULES[::-1]):
            assert chat(server, HOTEL, f"{document} {question}")["cache"]["advice"] is None
    assert advice(server) == []


def test_chats_of_many_turns_reuse_what_was_said_and_get_no_advice(server: Running) -> None:
    """Three users in turn: each turn finds all full blocks of the one before, the answer's included."""
    said = [[HOTEL + RULES[:400]] for _ in range(3)]
    before = [0] * 3
    for question in QUESTIONS:
        for user, contents in enumerate(said):
            contents.append(f"I am guest number {user * 7}. {question}")
            answer = chat(server, *contents, max_tokens=12)
            contents.append(answer["choices"][0]["message"]["content"])
            assert answer["cache"]["cached_tokens"] >= before[user] // 16 * 16
            # The last token of an answer is drawn, not computed.
            before[user] = answer["usage"]["total_tokens"] - 1
            assert answer["cache"]["advice"] is None
    assert min(before) > 300
    assert advice(server) == []


def test_a_flush_forgets_it(server: Running) -> None:
    for n in range(5):
        chat(server, f"{n} {HOTEL} {RULES}", "Hi")
    assert advice(server) != []
    server.post("/v1/cache/flush", {})
    assert advice(server) == []


@pytest.fixture
def thinking(embedded_directory: Path, tmp_path: Path) -> Iterator[Running]:
    """The embedded model with a template that opens each answer with an empty thinking block, and drops old ones."""
    file = embedded_directory / "chat_template.jinja"
    inline = json.loads((embedded_directory / "tokenizer_config.json").read_text())
    template = file.read_text() if file.exists() else inline["chat_template"]
    opened = template.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert opened != template
    with running_with_templates(embedded_directory, tmp_path, "200", template=opened) as server:
        yield server


def test_a_template_that_drops_thinking_blocks_is_found_out(thinking: Running) -> None:
    contents, reports = ["You tell long stories about a small hotel by the lake."], list[dict[str, Any]]()
    for guest in range(4):
        contents.append(f"Tell me the long story of guest number {guest}, from the very beginning.")
        answer = chat(thinking, *contents, max_tokens=40)
        # What is computed again is the answer before, and few tokens are not worth telling.
        assert answer["usage"]["completion_tokens"] == 40
        contents.append(answer["choices"][0]["message"]["content"])
        reports.append(answer["cache"])
    last = reports[-1]
    told = last["advice"]
    assert [report["advice"] for report in reports[:3]] == [None] * 3
    assert told is not None
    assert (told["kind"], told["message"], told["role"]) == ("removed", len(contents) - 3, "assistant")
    assert "<think>" in told["before"]
    assert "chat template leaves a part of it out" in told["text"]
    assert last["where"]["message"] == told["message"]
    assert last["cached_tokens"] == told["at_token"]
