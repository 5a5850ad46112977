"""Agents: lists of tools, calls and results, over real HTTP with OpenAI's client and a template that writes tools."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from foreword.cache.identity import ALONE
from foreword.front.ask import Conversation
from foreword.front.front import read_prompt
from tests.journeys.conftest import Running, emptied, running_with_templates
from tests.text.embedded import embedded_directory
from tests.text.tooling import ANYTHING, called, tool

__all__ = ["embedded_directory"]

ROOMS = " ".join(f"Room {n} has {2 + n % 3} beds and costs {60 + 5 * n} euros a night." for n in range(1, 9))
SYSTEM = {"role": "system", "content": f"You are the receptionist of the Lindenhof, a small hotel by a lake. {ROOMS}"}
TOOLS = [
    tool("book", "Books a room for some nights", room={"type": "integer"}, nights={"type": "integer"}),
    tool("bill", "Writes the bill of a room", room={"type": "integer"}, paid={"type": "boolean"}),
    tool("call", "Calls a taxi to the door", at={"type": "string"}),
]
QUESTIONS = ("What does room 4 cost?", "Is there a lake?", "Book room 2, please.", "How many beds has room 7?", "Hi!")


@pytest.fixture(scope="module")
def served(embedded_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The embedded model with a template that writes tools, and one that reads any answer as a call."""
    with running_with_templates(
        embedded_directory, tmp_path_factory.mktemp("tools"), "300", responses=ANYTHING
    ) as server:
        yield server


@pytest.fixture
def agent(served: Running) -> Iterator[Running]:
    with emptied(served) as server:
        yield server


def ask(server: Running, *messages: Any, tools: Any = TOOLS, **more: Any) -> Any:
    """One turn through OpenAI's client, with a report."""
    client: Any = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    if tools is not None:
        more["tools"] = tools
    more = {"max_tokens": 4, "temperature": 0, "extra_body": {"cache": {"report": True}}, **more}
    return client.chat.completions.create(model=server.assembly.card.name, messages=list(messages), **more)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def parted(server: Running, one: Conversation, other: Conversation) -> int:
    """The first token in which two prompts differ."""
    front = server.assembly.front.served
    ids = [read_prompt(prompt, front, ALONE).ids for prompt in (one, other)]
    return next(place for place, (a, b) in enumerate(zip(*ids, strict=False)) if a != b)


def stamped(place: str, stamp: str) -> Conversation:
    """The same prompt of an agent, with a stamp at about token 40, in the list of tools, or at the end."""
    near = f"{SYSTEM['content'][:150]} Request {stamp}. {ROOMS}"
    system = {**SYSTEM, "content": near if place == "near the top" else SYSTEM["content"]}
    clock = tool("clock", f"Tells the time; it is {stamp} now", zone={"type": "string"})
    tools = [TOOLS[0], clock, *TOOLS[1:]] if place == "in the tools" else TOOLS
    last = f"What does room 4 cost? Request {stamp}." if place == "at the end" else "What does room 4 cost?"
    return Conversation([system, user(last)], tools)


@pytest.mark.parametrize("place", ["near the top", "in the tools", "at the end"])
def test_a_stamp_ends_the_match_where_it_stands_and_is_named(agent: Running, place: str) -> None:
    """Row 33: what is cached ends with the stamp's first token that differs, wherever it stands."""
    prompts = [stamped(place, f"7f{n}3-{n * n}91-{n}0c") for n in range(5)]
    answers = [ask(agent, *prompt.messages, tools=list(prompt.tools), max_tokens=1) for prompt in prompts]
    reports = [answer.model_extra["cache"] for answer in answers]
    at = max(parted(agent, prompts[-1], other) for other in prompts[:-1])
    last = reports[-1]
    assert last["cached_tokens"] == last["at_token"] == at > 30
    assert answers[-1].usage.prompt_tokens_details.cached_tokens == at
    assert last["reason"] == "diverged"
    told, where = last["advice"], last["where"]
    if place == "at the end":
        assert told is None
        assert (where["message"], where["tool"]) == (1, None)
        return
    assert [report["advice"] for report in reports[:3]] == [None] * 3
    assert told["kind"] == "changed"
    assert told["now"].startswith("7f43-")
    tool_number = 1 if place == "in the tools" else None
    message = None if place == "in the tools" else 0
    assert (told["message"], told["tool"]) == (where["message"], where["tool"]) == (message, tool_number)
    assert agent.get("/v1/cache/advice").json()["advice"] == [{**told, "tenant": ""}]


def test_tools_are_kept_in_the_order_they_came_in(agent: Running) -> None:
    turned = {"function": dict(reversed(TOOLS[0]["function"].items())), "type": "function"}
    assert turned == TOOLS[0]
    first = Conversation([SYSTEM, user(QUESTIONS[0])], TOOLS)
    ask(agent, *first.messages)
    same = ask(agent, *first.messages)
    whole = same.usage.prompt_tokens
    assert same.usage.prompt_tokens_details.cached_tokens >= (whole - 1) // 16 * 16
    for number, tools in ((0, [turned, *TOOLS[1:]]), (1, [TOOLS[0], TOOLS[2], TOOLS[1]])):
        other = Conversation(first.messages, tools)
        answer = ask(agent, *first.messages, tools=tools)
        report = answer.model_extra["cache"]
        assert report["cached_tokens"] == parted(agent, first, other) < whole - 40
        assert (report["reason"], report["where"]["tool"]) == ("diverged", number)
        assert f'"{"function" if number == 0 else "call"}' in report["where"]["prompt"]


def test_calls_and_results_are_a_conversation_that_grows(agent: Running) -> None:
    """Each turn reuses all before it, the model's own words too; that they are kept as drawn is told by `recalled`."""
    messages: list[Any] = [SYSTEM, user("Which room is the cheapest?")]
    before = 0
    for turn in range(3):
        if turn == 1:
            result = {"role": "tool", "tool_call_id": "call_1", "content": '{"booked": true, "room": 2}'}
            messages += [called("book", '{"room": 2, "nights": 3}'), result]
        answer = ask(agent, *messages, tools=None, max_tokens=10, temperature=1, seed=turn)
        report = answer.model_extra["cache"]
        assert report["cached_tokens"] >= before // 16 * 16
        assert (report["recalled_tokens"] > 0) == (turn > 0)
        before = answer.usage.prompt_tokens + answer.usage.completion_tokens - 1
        messages += [answer.choices[0].message.model_dump(exclude_none=True), user(QUESTIONS[turn])]
    assert before > 250


def test_a_call_is_returned_as_one_and_can_be_sent_back(agent: Running) -> None:
    asked = [SYSTEM, user("Please book room 2.")]
    plain = ask(agent, *asked, tool_choice="none", max_tokens=12)
    assert plain.choices[0].message.tool_calls is None
    assert plain.choices[0].finish_reason in ("stop", "length")
    whole = ask(agent, *asked, max_tokens=200, stop=["but"])
    choice = whole.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    call = choice.message.tool_calls[0]
    assert call.function.name.isidentifier()
    assert call.id.startswith("call_")
    assert set(json.loads(call.function.arguments)) == {"rest"}
    back = choice.message.model_dump(exclude_none=True)
    result = {"role": "tool", "tool_call_id": call.id, "content": "done"}
    again = ask(agent, *asked, back, result)
    assert again.usage.prompt_tokens > whole.usage.prompt_tokens
    assert again.usage.prompt_tokens_details.cached_tokens >= whole.usage.prompt_tokens - 1


def test_a_stream_brings_the_same_call(agent: Running) -> None:
    asked = [SYSTEM, user("Please book room 2.")]
    whole = ask(agent, *asked, max_tokens=200, stop=["but"]).choices[0].message.tool_calls[0]
    chunks = list(ask(agent, *asked, max_tokens=200, stop=["but"], stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert [(call.index, call.function.name, call.function.arguments) for call in calls] == [
        (0, whole.function.name, whole.function.arguments)
    ]
    assert "".join(delta.content or "" for delta in deltas) == ""
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "tool_calls"
    assert chunks[-1].model_extra["cache"]["cached_tokens"] > 0
    cut = list(ask(agent, *asked, max_tokens=2, stream=True))
    assert cut[-1].choices[0].finish_reason == "length"


def test_tools_are_looked_up_and_warmed(agent: Running) -> None:
    body = {"messages": [SYSTEM, user(QUESTIONS[0])], "tools": TOOLS}
    warmed = agent.post("/v1/cache/warm", {"messages": [SYSTEM], "tools": TOOLS}).json()
    assert warmed["stored_tokens"] > 300
    found = agent.post("/v1/cache/lookup", body).json()
    assert found["cached_tokens"] >= warmed["prompt_tokens"] // 16 * 16
    without = agent.post("/v1/cache/lookup", {"messages": body["messages"]}).json()
    assert without["cached_tokens"] < found["cached_tokens"] - 150
    assert ask(agent, *body["messages"]).usage.prompt_tokens_details.cached_tokens == found["cached_tokens"]
    pinned = agent.post("/v1/cache/pin", {"messages": [SYSTEM], "tools": TOOLS}).json()
    assert pinned["cached"] == pinned["blocks"] == warmed["prompt_tokens"] // 16
    flushed = agent.post("/v1/cache/flush", {"messages": [SYSTEM], "tools": TOOLS}).json()
    assert flushed["dropped"] > 0


def test_a_template_that_knows_no_tools_refuses_them(server: Running) -> None:
    for path in ("/v1/chat/completions", "/v1/cache/lookup", "/v1/cache/warm"):
        reply = server.post(path, {"messages": [user("Hi")], "tools": TOOLS})
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (422, "tools")
        assert "chat template does not write them" in error["message"]
        assert "say it in the text of a message, or serve a model whose template knows tools" in error["message"]
    body = {"messages": [user("Hi")], "tools": TOOLS, "tool_choice": "none", "max_tokens": 1}
    assert server.post("/v1/chat/completions", body).status_code == 200
    called_before = {"messages": [user("Hi"), called("f", "{}")]}
    error = server.post("/v1/chat/completions", called_before).json()["error"]
    assert error["param"] == "messages.1.tool_calls"
