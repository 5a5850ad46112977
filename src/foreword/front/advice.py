"""Advice: which span of its prompts a tenant should move, because it keeps ending the match.

Learns from what lookups already found out (`cache.explain`) and from the prompts themselves, on the threads of those
who ask: the engine's knows nothing of it. One divergence is no advice: prompts must part at the same place again and
again, and go on alike behind it, so that the tokens there are computed for nothing. Questions that differ at the end of
a prompt and chats that grow are as it should be.
"""

from array import array
from collections import deque
from dataclasses import dataclass, replace
from threading import Lock

from foreword.base.ids import BlockHash
from foreword.cache.explain import Explanation, Reason
from foreword.cache.identity import Chain
from foreword.front.changes import WORTH, Change, Kind, change, common
from foreword.front.where import Source, Span, between

MIN_CALLS = 3
"""So often a span must have ended a match."""
WINDOW_S = 3600.0
"""What happened longer ago does not count."""

_MISSES: frozenset[Reason] = frozenset({"diverged", "never_seen"})
"""Reasons for which the prompt may be at fault."""
_COMPARABLE: frozenset[Reason] = frozenset({"diverged", "never_seen", "flushed", "expired", "evicted"})
"""Reasons after which the prompt is worth keeping, to compare the next one with."""
_MAX_PROMPTS = 64
_MAX_BYTES = 2 * 2**20
_MAX_HABITS = 32
_MAX_COUNTED = 100
_MAX_PLACES = 4
"""Places in one prompt that are kept apart."""
_LOOK_BACK = 128
"""Blocks before the place where a match ended in which prompts that begin alike are looked for."""
_NEAR = 32
"""Tokens between two changes at the same place: they need not begin in the same digit of a clock."""
_BEGINNING = 3
"""Tokens by which something that is missing again, elsewhere, is known."""
_SHOWN_CHARS = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One span that keeps ending the match, and what to do about it."""

    kind: Kind
    message: int | None
    """Number of the message, from 0; None for a prompt, for a tool, and where tokens do not spell out the text."""
    role: str | None
    tool: int | None = None
    """Number of the tool, from 0, in the list of tools."""
    offset: int | None
    """Characters into the text of the message, the tool or the prompt where the span begins, in the last call."""
    end: int | None
    """Where it ends."""
    at_token: int
    """The first token of it."""
    before: str
    """What stood there in the call before."""
    now: str
    """What stood there in the last one."""
    num_calls: int
    """Calls of the last hour whose match ended here."""
    tokens_per_call: int
    """What each of them computed again because of it, on average."""
    text: str
    """All of it in a sentence, with what to change."""


@dataclass(slots=True, eq=False)
class _Prompt:
    """A prompt to compare with, from a block's border on."""

    place: BlockHash
    """What that block continues: prompts with the same one have the same beginning."""
    start: int
    words: bytes
    """Its tokens from there on, the answer's included."""
    habits: tuple["Habit", ...] = ()
    """What has changed in it before, the latest first."""


class Habit:
    """One span that has ended a match before: how often, and what it cost. Made and told by the `Advisor` only."""

    __slots__ = ("_advice", "_calls", "_last", "_old", "_source", "beginning", "end", "start")

    def __init__(self, last: Change, beginning: tuple[int, ...] = ()) -> None:
        self.beginning = beginning
        """The first tokens of what is missing, for what goes missing here and there; empty for one place."""
        self.start = last.start
        self.end = last.end
        self._calls: deque[tuple[float, int]] = deque(maxlen=_MAX_COUNTED)
        self._last = last
        self._old: tuple[int, ...] = ()
        self._source: Source | None = None
        self._advice: Advice | None = None

    def is_at(self, other: Change) -> bool:
        """Whether this is a change at the same place."""
        return self.start - _NEAR <= other.start <= self.end + _NEAR

    def add(self, last: Change, old: tuple[int, ...], source: Source, now: float) -> None:
        """It happened again; `old`: what stood there before."""
        self.start, self.end = min(self.start, last.start), max(self.end, last.end)
        self._calls.append((now, last.same))
        self._last, self._old, self._source, self._advice = last, old, source, None

    def num_calls(self, now: float) -> int:
        """How often, lately."""
        return sum(moment > now - WINDOW_S for moment, _ in self._calls)

    def waste(self, now: float) -> int:
        """Tokens that it cost lately; 0 unless it keeps happening."""
        lately = [tokens for moment, tokens in self._calls if moment > now - WINDOW_S]
        return sum(lately) if len(lately) >= MIN_CALLS else 0

    def advice(self, now: float) -> Advice | None:
        """What to say about it; None unless it keeps happening. May take milliseconds."""
        num, said, source = self.num_calls(now), self._advice, self._source
        if num < MIN_CALLS or source is None:
            return None
        if said is None or said.num_calls != num:
            lately = list(self._calls)[-num:]
            cost = sum(tokens for _, tokens in lately) // num
            said = self._advice = _advice(source, self._last, self._old, num, cost)
        return said


class _Tenant:
    """What is remembered of one tenant's prompts."""

    __slots__ = ("_num_bytes", "_prompts", "habits")

    def __init__(self) -> None:
        self._prompts: deque[_Prompt] = deque()
        self._num_bytes = 0
        self.habits: deque[Habit] = deque(maxlen=_MAX_HABITS)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def keep(self, prompt: _Prompt) -> None:
        self._prompts.append(prompt)
        self._num_bytes += len(prompt.words)
        while len(self._prompts) > _MAX_PROMPTS or self._num_bytes > _MAX_BYTES:
            self._num_bytes -= len(self._prompts.popleft().words)

    def drop(self, prompt: _Prompt) -> None:
        self._prompts.remove(prompt)
        self._num_bytes -= len(prompt.words)

    def nearest(self, chain: Chain, block: int, words: bytes) -> _Prompt | None:
        """The prompt that has most in common with this one, of those that parted from others just before `block`."""
        first = max(0, block - _LOOK_BACK)
        places = {chain.parent(first), *chain.hashes[first:block]}
        best, most = None, 0
        for prompt in self._prompts:
            if prompt.place in places:
                num = prompt.start + common(prompt.words, words, 0, prompt.start)
                if num >= most:
                    best, most = prompt, num
        return best

    def add(self, habit: Habit) -> Habit:
        """One more call for this one; the one that was quiet for longest is forgotten if they are too many."""
        if habit in self.habits:
            self.habits.remove(habit)
        self.habits.append(habit)
        return habit

    def missing(self, beginning: tuple[int, ...], last: Change) -> Habit:
        """The habit of things that begin like this to go missing."""
        found = (habit for habit in self.habits if habit.beginning == beginning)
        return next(found, None) or Habit(last, beginning)


class Advisor:
    """Notices what keeps changing in prompts, each tenant's apart. One for each served model; from any thread.

    Bounded: of each tenant 64 prompts and 2 MiB of tokens, 32 spans, and the prompts that those were last seen in.
    """

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}
        self._lock = Lock()

    def hear(self, chain: Chain, source: Source, explanation: Explanation, now: float) -> Habit | None:
        """A request is over: what its match ended at, if that is a change.

        Takes a tenth of a millisecond, ten times that at 100,000 tokens. `chain`: the prompt and what was
        answered; `now`: seconds on the clock that `advice` is asked by.
        """
        at, num_prompt = explanation.at_token, len(source.ids)
        reason = explanation.reason
        if reason not in _COMPARABLE or num_prompt - at < WORTH:
            return None
        block, words = at // chain.block_size, chain.tokens.tobytes()
        with self._lock:
            tenant = self._tenants.setdefault(chain.tenant.name, _Tenant())
            like = tenant.nearest(chain, block, words)
            last = None
            if like is not None and reason in _MISSES:
                last = change(like.words, words[like.start * 4 : num_prompt * 4])
            if like is None or last is None or not last.start <= at - like.start <= last.end:
                # Either the first of its kind, or what ended the match is another prompt's doing.
                start = block * chain.block_size
                tenant.keep(_Prompt(chain.parent(block), start, words[start * 4 : start * 4 + _MAX_BYTES]))
                return None
            tenant.drop(like)
            like, before = replace(like, words=words[like.start * 4 : like.start * 4 + _MAX_BYTES]), like
            tenant.keep(like)
            return _noted(tenant, like, last, before=before.words, source=source, now=now)

    def advice(self, owner: str, now: float) -> tuple[Advice, ...]:
        """All that there is to say to a tenant, the dearest first. May take milliseconds."""
        with self._lock:
            tenant = self._tenants.get(owner)
            habits = [] if tenant is None else list(tenant.habits)
        found = [said for habit in habits if (said := habit.advice(now)) is not None]
        return tuple(sorted(found, key=lambda said: -said.num_calls * said.tokens_per_call))

    def waste(self, now: float) -> tuple[int, int]:
        """Spans that there is advice about, of all tenants, and the tokens that those cost in the last hour."""
        with self._lock:
            costs = [habit.waste(now) for tenant in self._tenants.values() for habit in tenant.habits]
        return sum(cost > 0 for cost in costs), sum(costs)

    def owners(self) -> list[str]:
        """Of whom anything is remembered."""
        return sorted(self._tenants)

    def num_bytes(self, owner: str) -> int:
        """Bytes that the prompts of a tenant take here."""
        tenant = self._tenants.get(owner)
        return 0 if tenant is None else tenant.num_bytes

    def forget(self, owner: str | None = None) -> None:
        """All of one tenant's, or all."""
        with self._lock:
            if owner is None:
                self._tenants = {}
            else:
                self._tenants.pop(owner, None)


def _noted(tenant: _Tenant, like: _Prompt, last: Change, *, before: bytes, source: Source, now: float) -> Habit:
    """Write a change down where it belongs: at its place, or with what goes missing at other places as well."""
    old = tuple(array("I", before[last.start * 4 : last.old_end * 4]))
    here = replace(last, start=last.start + like.start, end=last.end + like.start, old_end=last.old_end + like.start)
    source = replace(source, ids=array("I", source.ids[: here.end + 1]))
    habit = tenant.add(next((habit for habit in like.habits if habit.is_at(here)), None) or Habit(here))
    habit.add(here, old, source, now)
    others = (other for other in like.habits if other is not habit)
    like.habits = (habit, *others)[:_MAX_PLACES]
    if here.kind == "removed" and habit.num_calls(now) < MIN_CALLS:
        habit = tenant.add(tenant.missing(old[:_BEGINNING], here))
        habit.add(here, old, source, now)
    return habit


def _advice(source: Source, last: Change, old: tuple[int, ...], num_calls: int, cost: int) -> Advice:
    span = source.span(last.start, last.end)
    vocabulary = source.tokenizer.vocabulary
    around = source.ids[: last.start], source.ids[last.end :]
    before, now = (between(vocabulary, around[0], ids, around[1]) for ids in (old, source.ids[last.start : last.end]))
    if span.offset is not None:
        before = f"{span.before}{before}{span.after}"
        now = f"{span.before}{now}{span.after}"
    before, now = _short(before), _short(now)
    text = f"{_place(span, last)} {_happened(last.kind, before, now)} in the last {num_calls} calls that missed here"
    return Advice(
        kind=last.kind,
        message=span.message,
        role=span.role,
        tool=span.tool,
        offset=span.offset,
        end=span.end,
        at_token=last.start,
        before=before,
        now=now,
        num_calls=num_calls,
        tokens_per_call=cost,
        text=f"{text}: {_remedy(last.kind, span.role)}. It costs {cost} tokens a call.",
    )


def _place(span: Span, last: Change) -> str:
    if span.offset is None or span.end is None:
        return f"Tokens {last.start} to {max(last.start, last.end - 1)} of the prompt"
    whose = "The prompt" if span.message is None else f"Message {span.message} ({span.role})"
    if span.tool is not None:
        whose = f"Tool {span.tool} ({span.tool_name})"
        if last.kind == "reordered":
            return f"The list of tools, from tool {span.tool} ({span.tool_name}) on,"
    if span.end <= span.offset + 1:
        return f"{whose}, character {span.offset},"
    return f"{whose}, characters {span.offset} to {span.end - 1},"


def _happened(kind: Kind, before: str, now: str) -> str:
    if kind == "inserted":
        return f"had something new ({now!r})"
    if kind == "removed":
        return f"lacked what stood there before ({before!r})"
    if kind == "reordered":
        return "had the same parts in another order"
    return f"changed ({before!r}, then {now!r})"


def _remedy(kind: Kind, role: str | None) -> str:
    if kind == "removed" and role == "assistant":
        return (
            "an answer is not sent back as it was given, or the chat template leaves a part of it out;"
            " send answers back whole, or use a template that keeps them as they are"
        )
    if kind == "removed":
        return "leave it in; if old messages must go, cut off many at once and seldom"
    if kind == "reordered":
        return "send them in the same order each time"
    return "move it behind what stays the same, or leave it out"


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS // 2]}...{text[-_SHOWN_CHARS // 2 :]}"
