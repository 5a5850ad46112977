r"""Where a text may be cut so that its parts, tokenised one by one, give the ids of the whole.

A tokenizer takes special tokens that are spelled out in a text (`<|im_start|>`) out of it before anything else happens,
so what stands between two of them is tokenised without a glance at its neighbours. Each part begins at such a token:

    <|im_start|>user\nHi  |  <|im_end|>\n  |  <|im_start|>assistant\n
"""

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import pairwise
from typing import Any

Encode = Callable[..., Sequence[int]]
"""Ids of a text, with or without what stands around a plain prompt: `encode(text, add_special_tokens=...)`."""

_TRIED = (
    "a ",
    "",
    " ",
    "\n",
    " a",
    "\n\nuser\n",
    "a\t \n",
    "'s",
    "你好",
    "e\u0301 \u00e9",
    "12 3",
    "😀",
    "\u00a0x",
    "A.",
)
"""What is put between special tokens to see whether it stays the same there: where tokenizers look at neighbours."""


class Borders:
    """Cuts texts of one tokenizer at its special tokens."""

    __slots__ = ("_begins", "_lengths", "_names", "after", "before")

    def __init__(self, names: Collection[str], before: Sequence[int] = (), after: Sequence[int] = ()) -> None:
        """`names` are the special tokens as they are spelled, at least one, none inside another."""
        self._names = frozenset(names)
        self._lengths = sorted({len(name) for name in names}, reverse=True)  # the longest name wins
        self._begins = re.compile("|".join(_begin(first, names) for first in sorted({name[0] for name in names})))
        self.before = tuple(before)
        """Ids that are put in front of a plain prompt."""
        self.after = tuple(after)
        """Ids that are put behind it."""

    def cut(self, text: str) -> list[str]:
        """The parts, in order; joined, they are the text. Only the first may begin without a special token."""
        starts, end = [0], 0
        for found in self._begins.finditer(text):
            at = found.start()
            length = self._length(text, at) if at >= end else 0
            if length:
                end = at + length
                if at:
                    starts.append(at)
        return [text[start:stop] for start, stop in pairwise([*starts, len(text)])]

    def is_at(self, text: str) -> bool:
        """Whether the text begins with a special token."""
        return self._length(text, 0) > 0

    def _length(self, text: str, at: int) -> int:
        return next((n for n in self._lengths if text[at : at + n] in self._names), 0)


def _begin(first: str, names: Collection[str]) -> str:
    """A pattern for the first character of those names that begin with it, where two more of theirs follow."""
    rests = sorted({re.escape(name[1:3]) for name in names if name[0] == first})
    return f"{re.escape(first)}(?={'|'.join(rests)})"


def borders_of(added: Iterable[Any], encode: Encode) -> Borders | None:
    """The borders of a tokenizer with these added tokens (`tokenizers.AddedToken`); None where it has none to rely on.

    What the rules below let through is tried on texts that are hard for tokenizers as well.
    """
    first = [token for token in added if not token.normalized]  # those that are looked for before anything else
    names = {token.content for token in first if token.special and not token.lstrip and token.content}
    if not names or any(token.single_word for token in first) or _entangled(names, [t.content for t in first]):
        return None
    whole, plain = list(encode("a", add_special_tokens=True)), list(encode("a", add_special_tokens=False))
    at = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), None)
    if not plain or at is None:
        return None
    borders = Borders(names, whole[:at], whole[at + len(plain) :])
    return borders if _hold(borders, sorted(names), encode) else None


def _entangled(names: Collection[str], others: Iterable[str]) -> bool:
    """Whether another added token could cover the beginning of a special one, so that it is not found there."""
    begins = {name[:n] for name in names for n in range(1, len(name) + 1)}
    for other in others:
        longer = other not in names and any(other[:n] in names for n in range(1, len(other)))
        tails = (other[k:] for k in range(1, len(other)))
        if longer or any(tail in begins or any(tail[:n] in names for n in range(1, len(tail))) for tail in tails):
            return True
    return False


def _hold(borders: Borders, names: Sequence[str], encode: Encode) -> bool:
    count = max(len(names), 3 * len(_TRIED))
    text = _TRIED[0] + "".join(names[i % len(names)] + _TRIED[i % len(_TRIED)] for i in range(count))
    parts = [token for part in borders.cut(text) for token in encode(part, add_special_tokens=False)]
    plain, whole = encode(text, add_special_tokens=False), encode(text, add_special_tokens=True)
    return parts == list(plain) and [*borders.before, *parts, *borders.after] == list(whole)
