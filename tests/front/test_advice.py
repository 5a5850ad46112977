"""The advisor: speaks when something keeps happening, is silent otherwise, and remembers a bounded lot."""

from collections.abc import Sequence

import pytest

from foreword.cache.explain import Explanation, Reason
from foreword.cache.identity import ALONE, Chain, Space, Tenant, root
from foreword.front.advice import MIN_CALLS, WINDOW_S, Advice, Advisor
from foreword.front.ask import Conversation
from foreword.front.where import Source
from foreword.text.tokenizer import Tokenizer
from tests.text.tooling import tool

SPACE = Space(root({"weights": "w"}, 16), 16)
HEAD = "You are the receptionist of the Lindenhof. Answer in one short sentence, kindly. It is now"
RULES = " ".join(f"Room {n} has {2 + n % 3} beds and costs {60 + 5 * n} euros a night." for n in range(12))

TOOLS = [tool("weather", RULES[:120]), tool("lift", RULES[120:300])]


class Desk:
    """Hears prompts as a server's faces would; what is cached is every prompt that it heard."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.advisor = Advisor()
        self.tokenizer = tokenizer
        self.now = 0.0
        self.known: list[list[int]] = []

    def ask(
        self,
        prompt: str | Conversation,
        *,
        tenant: Tenant = ALONE,
        reason: Reason = "diverged",
        answer: Sequence[int] = (),
    ) -> Advice | None:
        self.now += 1
        raw = isinstance(prompt, str)
        text = prompt if raw else self.tokenizer.render(prompt.messages, prompt.tools)
        ids = self.tokenizer.encode(text, add_special_tokens=raw)
        at = max((_common(ids, other) for other in self.known), default=0)
        self.known.append(ids)
        chain = Chain(SPACE, [*ids, *answer], tenant=tenant)
        source = Source(self.tokenizer, prompt, tuple(ids))
        habit = self.advisor.hear(chain, source, Explanation(reason, at), self.now)
        return None if habit is None else habit.advice(self.now)

    def advice(self, owner: str = "") -> tuple[Advice, ...]:
        return self.advisor.advice(owner, self.now)


def _question(number: int) -> str:
    """Forty words that no other question has in this order."""
    return " ".join(str((number * 7919 + n * n * 104_729) % 9973) for n in range(40))


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@pytest.fixture
def desk(tokenizer: Tokenizer) -> Desk:
    return Desk(tokenizer)


def test_a_span_that_keeps_changing_is_named_with_its_cost(desk: Desk) -> None:
    said = [desk.ask(f"{HEAD} 10:0{n}. {RULES}") for n in range(6)]
    assert said[:MIN_CALLS] == [None] * MIN_CALLS
    last = said[-1]
    assert last is not None
    assert (last.kind, last.message, last.num_calls) == ("changed", None, 5)
    text = f"{HEAD} 10:05. {RULES}"
    assert text[last.offset : last.end] == last.now == "10:05."
    assert last.before == "10:04."
    assert last.tokens_per_call == len(desk.tokenizer.encode(f". {RULES}"))
    assert last.text.startswith(f"The prompt, characters {len(HEAD) + 1} to {len(HEAD) + 6}, changed ('10:04.', then")
    assert "in the last 5 calls that missed here: move it behind what stays the same" in last.text
    assert last.text.endswith(f"It costs {last.tokens_per_call} tokens a call.")
    assert desk.advice() == (last,)
    assert desk.advisor.waste(desk.now) == (1, last.num_calls * last.tokens_per_call)
    assert desk.advisor.waste(desk.now + WINDOW_S) == (0, 0)


@pytest.mark.parametrize("signs", ["🕐🕑🕒🕓🕔", "日月火水木", "äöüßé"])
@pytest.mark.parametrize("beside", [" ", "x", "🕐"])
def test_characters_of_several_tokens_are_shown_whole(desk: Desk, signs: str, beside: str) -> None:
    advice = [desk.ask(f"{HEAD} {beside}{sign}{beside} now. {RULES}") for sign in signs][-1]
    assert advice is not None
    text = f"{HEAD} {beside}{signs[-1]}{beside} now. {RULES}"
    assert text[advice.offset : advice.end] == advice.now
    assert advice.now.strip() == f"{beside}{signs[-1]}{beside}".strip()
    assert advice.before.strip() == f"{beside}{signs[-2]}{beside}".strip()


def test_what_is_as_it_should_be_gets_no_advice(desk: Desk) -> None:
    for n in range(8):
        assert desk.ask(f"{HEAD} ten. {RULES} Question: {_question(n)}?") is None
    assert desk.advisor.waste(desk.now) == (0, 0)
    chat = f"{HEAD} eleven. {RULES}"
    for n in range(8):
        chat += f"\nUser: {_question(n)}?\nAssistant: {_question(n + 100)}."
        assert desk.ask(chat) is None
    assert desk.advice() == ()


def test_one_change_or_two_are_none(desk: Desk) -> None:
    for n in range(MIN_CALLS):
        assert desk.ask(f"{HEAD} version {n}. {RULES}") is None
    assert desk.advice() == ()
    assert desk.ask(f"{HEAD} version {MIN_CALLS}. {RULES}") is not None


def test_what_happens_seldom_is_forgotten_in_between(desk: Desk) -> None:
    for n in range(8):
        desk.now += WINDOW_S / 2
        assert desk.ask(f"{HEAD} version {n}. {RULES}") is None
    for n in range(3):
        desk.ask(f"{HEAD} version 9{n}. {RULES}")
    assert desk.advice() != ()
    desk.now += WINDOW_S + 1
    assert desk.advice() == ()


def test_other_reasons_say_nothing_of_the_prompt(desk: Desk) -> None:
    reasons: tuple[Reason, ...] = ("evicted", "expired", "flushed", "prefix_length", "read_disabled", "not_stored")
    for reason in reasons:
        for n in range(4):
            assert desk.ask(f"{HEAD} 10:0{n}. {RULES}", reason=reason) is None
    assert desk.advice() == ()


def test_the_first_prompt_after_a_flush_is_compared_with(desk: Desk) -> None:
    assert desk.ask(f"{HEAD} 10:00. {RULES}", reason="flushed") is None
    said = [desk.ask(f"{HEAD} 10:0{n + 1}. {RULES}") for n in range(MIN_CALLS)]
    assert said[-1] is not None
    assert said[-1].num_calls == MIN_CALLS


def test_many_kinds_of_prompts_in_turn_are_kept_apart(desk: Desk) -> None:
    for n in range(6):
        for kind in range(20):
            rules = " ".join(_question(1000 * kind + m) for m in range(3))
            desk.ask(f"Kind {kind} {HEAD} 10:0{n}. {rules}")
            desk.ask(f"Steady {kind} {HEAD}. {rules} Now {_question(n)}?")
    said = desk.advice()
    assert len(said) == 20
    assert min(advice.num_calls for advice in said) >= MIN_CALLS


def test_what_goes_missing_again_and_again_is_one_habit_wherever_it_was(desk: Desk) -> None:
    """A template that writes an empty thinking block and takes it out of the history in the next turn."""
    thinking, history, last = "<think>\n\n</think>\n\n", f"{HEAD} ten.", None
    for n in range(5):
        history += f"<|im_end|>\n<|im_start|>user\nQuestion {n * 31}?<|im_end|>\n<|im_start|>assistant\n"
        answer = f"Answer {n * 17}: " + "room after room after room, each one with beds and a price. " * 4
        last = desk.ask(history + thinking, answer=desk.tokenizer.encode(answer))
        desk.known[-1] += desk.tokenizer.encode(answer)
        history += answer
    assert last is not None
    assert (last.kind, last.num_calls) == ("removed", 4)
    assert "<think>" in last.before
    assert "lacked what stood there before" in last.text


def test_parts_in_another_order(desk: Desk) -> None:
    tools = [f'{{"name": "tool_{n}", "description": "{RULES[40 * n : 40 * n + 160]}"}}' for n in range(5)]
    said = [desk.ask(f"{HEAD} ten. Tools: {tools[n:] + tools[:n]} {RULES}") for n in range(5)]
    assert said[-1] is not None
    assert said[-1].kind == "reordered"
    assert "send them in the same order each time" in said[-1].text


def test_a_clock_in_the_list_of_tools(tooled: Tokenizer) -> None:
    desk, last = Desk(tooled), None
    for n in range(5):
        clock = tool("clock", f"What time it is. Now it is 10:0{n} here. {RULES[:200]}")
        last = desk.ask(Conversation([{"role": "user", "content": _question(n)}], [*TOOLS, clock, *TOOLS]))
    assert last is not None
    assert (last.kind, last.message, last.role, last.tool) == ("changed", None, None, 2)
    assert (last.before, last.now) == ("10:03", "10:04")
    assert last.text.startswith(f"Tool 2 (clock), characters {last.offset} to ")


def test_tools_in_another_order(tooled: Tokenizer) -> None:
    desk, last = Desk(tooled), None
    tools = [tool(f"tool_{n}", RULES[40 * n : 40 * n + 160]) for n in range(5)]
    for n in range(5):
        last = desk.ask(Conversation([{"role": "user", "content": RULES}], tools[n:] + tools[:n]))
    assert last is not None
    assert (last.kind, last.message, last.tool) == ("reordered", None, 0)
    assert last.text.startswith("The list of tools, from tool 0 (")
    assert "send them in the same order each time" in last.text


def test_each_tenant_hears_of_its_own(desk: Desk) -> None:
    red, blue = Tenant.named("red"), Tenant.named("blue")
    for n in range(5):
        desk.ask(f"{HEAD} 10:0{n}. {RULES}", tenant=red)
    assert desk.ask(f"{HEAD} 10:06. {RULES}", tenant=blue) is None
    assert desk.advice("blue") == ()
    assert desk.advice("red") != ()
    desk.advisor.forget("red")
    assert desk.advice("red") == ()


def test_memory_is_bounded(desk: Desk) -> None:
    for n in range(70):
        desk.ask(" ".join(_question(1000 * n + m) for m in range(60)))
    num = desk.advisor.num_bytes("")
    assert 2**19 < num <= 2 * 2**20
    for n in range(5):
        desk.ask(f"{HEAD} 10:0{n}. {RULES}")
    assert desk.advisor.num_bytes("") <= 2 * 2**20
    assert len(desk.advice()) >= 1


def test_ids_have_places_too(desk: Desk) -> None:
    for n in range(4):
        ids = (*range(100, 140), 5 + n, *range(200, 300))
        chain = Chain(SPACE, ids)
        desk.advisor.hear(chain, Source(desk.tokenizer, ids, ids), Explanation("diverged", 40), desk.now)
    said = desk.advice()
    assert len(said) == 1
    assert (said[0].message, said[0].offset, said[0].at_token, said[0].tokens_per_call) == (None, None, 40, 100)
    assert said[0].text.startswith("Tokens 40 to 40 of the prompt changed")
