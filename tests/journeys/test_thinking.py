"""Row 32: chat templates that leave out old thoughts, so that a new turn rewrites what was said before.

What is reused ends exactly where the first rewritten message begins to differ, and the report names that message.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from foreword.cache.identity import ALONE
from foreword.front.ask import Conversation
from foreword.front.front import read_prompt
from foreword.text.chat import for_template
from tests.journeys.conftest import Running, emptied, running_with_templates
from tests.text.embedded import embedded_directory
from tests.text.tooling import called, tool

__all__ = ["embedded_directory"]

BLOCK = 16
_TEMPLATE = """\
{%- set questions = namespace(left=0) %}
{%- for message in messages if message.role == 'user' %}{% set questions.left = loop.length %}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'user' %}{% set questions.left = questions.left - 1 %}{% endif %}
{%- if loop.first %}{% for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}{% endif %}<|im_start|>{{ message.role }}
{% if message.role == 'assistant' and (questions.left == 0 or ALL) %}<think>{{ message.reasoning_content }}{% endif %}
{{- ' ' + message.content }}
{%- for call in message.tool_calls or [] %}<call>{{ call.function.name }}</call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
<think>{% endif %}"""
TEMPLATES = {
    "keeps the latest": _TEMPLATE.replace("ALL", "false"),
    "keeps all": _TEMPLATE.replace("ALL", "true"),
}
"""Of thoughts: those since the last question, as many reasoning models do; or all that come back."""
RESPONSES = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {"content": {}, "thinking": {"open": "<think>", "close": " "}},
}
"""The first word of an answer is what the model says to itself: so even a small model thinks."""

SYSTEM = {"role": "system", "content": "You tell long stories about a small hotel by the lake. Every one has an end."}
TOOLS = [tool("bell", "Rings the bell of a room", room={"type": "integer"})]


@pytest.fixture(scope="module", params=list(TEMPLATES))
def template(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def served(embedded_directory: Path, tmp_path_factory: pytest.TempPathFactory, template: str) -> Iterator[Running]:
    """The embedded model with a template that begins each answer with a thought."""
    folder, templates = tmp_path_factory.mktemp("thinking"), {"template": TEMPLATES[template], "responses": RESPONSES}
    with running_with_templates(embedded_directory, folder, "200", **templates) as server:
        yield server


@pytest.fixture
def thinker(served: Running) -> Iterator[Running]:
    with emptied(served) as server:
        yield server


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def ids(server: Running, messages: Sequence[Any]) -> Sequence[int]:
    return read_prompt(Conversation(for_template(messages), TOOLS), server.assembly.front.served, ALONE).ids


def common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def ask(server: Running, messages: Sequence[Any], **more: Any) -> dict[str, Any]:
    """With a tool: only then an answer is read as anything but text."""
    body = {"messages": messages, "tools": TOOLS, "temperature": 0, "cache": {"report": True}, **more}
    reply = server.post("/v1/chat/completions", body)
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.parametrize("echoed", [True, False], ids=["echoed", "left out"])
def test_five_turns_are_reused_up_to_the_real_change(thinker: Running, template: str, echoed: bool) -> None:
    """Thoughts come back or not; only where they do, and the template writes them again, nothing has changed."""
    guest, messages, changed = f"the guest whose thoughts are {echoed}", [SYSTEM], list[bool]()
    last, thought, total = list[int](), "", 0
    for turn in range(5):
        messages.append(user(f"Tell me the long story of {guest}, part {turn}, from the very beginning."))
        prompt = ids(thinker, messages)
        answer = ask(thinker, messages, max_tokens=48, ignore_eos=True)
        said, usage, report = answer["choices"][0]["message"], answer["usage"], answer["cache"]
        assert usage["prompt_tokens"] == len(prompt)
        changed += [template == "keeps the latest" or (not echoed and thought != "")] if turn else []
        if turn and not changed[-1]:
            # All full blocks, of what was answered too; the token that was drawn last was not computed.
            assert report["cached_tokens"] == (total - 1) // BLOCK * BLOCK > len(last)
            assert report["where"]["message"] is None or report["where"]["message"] >= len(messages) - 2
            assert report["advice"] is None
        elif turn:
            assert report["cached_tokens"] == report["at_token"] == common(last, prompt) >= len(last) - 6
            assert report["reason"] == "diverged"
            where = report["where"]
            assert (where["message"], where["role"], where["offset"]) == (len(messages) - 2, "assistant", 0)
            assert "think" in where["cached"]
        last, total, thought = prompt, usage["total_tokens"], said.get("reasoning_content", "")
        back = {"role": "assistant", "content": said["content"]}
        messages.append({**back, "reasoning_content": thought} if echoed and thought else back)
    assert any(changed) == (template == "keeps the latest" or not echoed)
    told = thinker.get("/v1/cache/advice").json()["advice"]
    assert {one["role"] for one in told} <= ({"assistant"} if any(changed) else set())


@pytest.mark.parametrize("thinks", [True, False])
def test_a_new_question_rewrites_what_an_agent_thought_before(thinker: Running, template: str, thinks: bool) -> None:
    """Five questions, each answered by way of a tool: within one the thoughts stay, at the next question they go.

    Without a thought the template writes an empty one, and takes that back as well.
    """
    messages, seen = [SYSTEM], list[Sequence[int]]()
    for turn in range(5):
        rewritten = _look(
            thinker, messages, user(f"Is guest number {turn} awake, who thinks that all is {thinks}?"), seen
        )
        assert rewritten == (len(messages) - 3 if turn and template == "keeps the latest" else None)
        thought = {"reasoning_content": f"Number {turn} sleeps upstairs, so I ring the bell there"} if thinks else {}
        messages.append({**called("bell", f'{{"room": {turn}}}'), "content": "One moment, please.", **thought})
        result = {"role": "tool", "tool_call_id": "call_1", "content": "It rang three times. Nobody came."}
        assert _look(thinker, messages, result, seen) is None


def _look(server: Running, messages: list[Any], new: Any, seen: list[Sequence[int]]) -> int | None:
    """Say something more, and which of the messages before was rewritten by it; all of it up to there is cached."""
    known = len(messages)
    messages.append(new)
    prompt = ids(server, messages)
    report = ask(server, messages, max_tokens=1)["cache"]
    stored = (min(common(one, prompt), len(one) // BLOCK * BLOCK) for one in seen)
    assert report["cached_tokens"] == max(stored, default=0)
    seen.append(prompt)
    where = report["where"] if report["reason"] == "diverged" else None
    if where is None or where["message"] is None or where["message"] >= known:
        return None
    assert where["role"] == messages[where["message"]]["role"]
    return where["message"]
