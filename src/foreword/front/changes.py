"""What changed between two prompts that begin alike: where, how, and how much of the rest stayed the same.

    old   You are ... It is 10:01. <-- 693 tokens of rules --> When is breakfast?
    new   You are ... It is 10:02. <-- 693 tokens of rules --> Is the pool open?
                              ^ a change of one token; 693 tokens after it are in both, and were computed again

Works on token ids as 32-bit words. The time that it takes is bounded, whatever the prompts' lengths: what goes on
differently for more than `MAX_SPAN` tokens is no change of a prompt, but another prompt.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

Kind = Literal["changed", "inserted", "removed", "reordered"]
"""What happened to the words that differ: others stand in their place; they are new; they are gone; they moved."""

WORTH = 32
"""Tokens that must come again after a change: less (the end of a chat template, say) is not worth a word."""
MAX_SPAN = 512
"""Tokens that a change may have in the new prompt."""

_WORD = 4
_ANCHOR = 16
_STRIDE = 8
_WINDOW = 8_192
"""Tokens of the old prompt, from the change on, that the new one's are looked for in."""


@dataclass(frozen=True, slots=True)
class Change:
    """One change; places are tokens of the new prompt."""

    kind: Kind
    start: int
    """The first token that differs."""
    end: int
    """Where both go on alike; `start` if something is gone."""
    old_end: int
    """The same place in the old prompt, counted as `start` is."""
    same: int
    """Tokens behind it that the old prompt has as well, up to the next change."""


@dataclass(frozen=True, slots=True)
class _Run:
    """Tokens that both prompts have."""

    new: int
    old: int
    length: int


def common(one: bytes, other: bytes, start: int = 0, other_start: int = 0) -> int:
    """How many tokens both have alike from these tokens on. O(that number)."""
    most = min(len(one) // _WORD - start, len(other) // _WORD - other_start)

    def alike(first: int, last: int) -> bool:
        return _cut(one, start + first, start + last) == _cut(other, other_start + first, other_start + last)

    low, stride = 0, _ANCHOR
    while low + stride <= most and alike(low, low + stride):
        low, stride = low + stride, 2 * stride
    high = min(most, low + stride)
    while low < high:
        middle = (low + high + 1) // 2
        if alike(low, middle):
            low = middle
        else:
            high = middle - 1
    return low


def change(old: bytes, new: bytes) -> Change | None:
    """The first change between two prompts after which enough comes again; None if there is none such."""
    start = common(old, new)
    runs = list(_runs(old, new, start))
    if not runs:
        return None
    first = runs[0]
    if any(later.old < earlier.old for earlier, later in pairwise(runs)):
        last = runs[-1]
        return Change("reordered", start, last.new + last.length, first.old, sum(run.length for run in runs))
    kind: Kind = "removed" if first.new == start else "inserted" if first.old == start else "changed"
    return Change(kind, start, first.new, first.old, first.length)


def _runs(old: bytes, new: bytes, start: int) -> Iterator[_Run]:
    """What both have after `start`, as it comes in the new prompt, each token of the old one at most once."""
    at, spare, end, taken = start, MAX_SPAN // _STRIDE, len(new) // _WORD, list[_Run]()
    while spare and at + _ANCHOR <= end:
        found = _find(old, _cut(new, at, at + _ANCHOR), start, taken)
        if found is None:
            at, spare = at + _STRIDE, spare - 1
            continue
        back, floor = 0, max(start, taken[-1].new + taken[-1].length if taken else 0)
        while at - back > floor and found - back > start and _same(old, found - back - 1, new, at - back - 1):
            back += 1
        run = _Run(at - back, found - back, back + _ANCHOR + common(old, new, found + _ANCHOR, at + _ANCHOR))
        taken.append(run)
        at, spare = run.new + run.length, spare - 1
        if run.length >= WORTH:
            yield run


def _find(old: bytes, piece: bytes, start: int, taken: list[_Run]) -> int | None:
    """Where the old prompt has these tokens: behind those found last, else before them where none was found."""
    last = taken[-1].old + taken[-1].length if taken else start
    for begin, stop in ((last, last + _WINDOW), (start, last)):
        at = old.find(piece, begin * _WORD, stop * _WORD)
        while at >= 0:
            token = at // _WORD
            within = next((run for run in taken if run.old <= token < run.old + run.length), None)
            if at % _WORD == 0 and within is None:
                return token
            # A run that is taken is left in one leap, else a long one would be searched token by token.
            at = old.find(piece, at + 1 if within is None else (within.old + within.length) * _WORD, stop * _WORD)
    return None


def _same(one: bytes, at: int, other: bytes, other_at: int) -> bool:
    return _cut(one, at, at + 1) == _cut(other, other_at, other_at + 1)


def _cut(words: bytes, start: int, end: int) -> bytes:
    return words[start * _WORD : end * _WORD]
