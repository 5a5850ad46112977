"""Where in a request a match ended: which message, which character, and how what is cached goes on instead. Spans, too.

Works on the tokens themselves, without tokenising anything again, so it holds for any way the tokens came about.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from foreword.cache.explain import Explanation, Reason
from foreword.front.ask import Conversation
from foreword.text.tokenizer import Tokenizer
from foreword.text.vocabulary import Vocabulary

_BEFORE, _AFTER = 6, 10
"""Tokens that a snippet shows before and after the place."""

_WORD_CHARS = 40
"""Characters by which a span is widened at most, to begin and end with a word."""

_NOWHERE: frozenset[Reason] = frozenset({"cache_disabled", "model_not_cacheable", "read_disabled", "complete"})
"""Reasons that have nothing to do with what stands at the place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """A place in a request."""

    message: int | None
    """Number of the message, from 0; None for a prompt, and after the last message's text."""
    role: str | None
    offset: int | None
    """Characters into the message's text, or into the prompt; None where tokens do not spell out the text."""
    cached: str | None
    """How the nearest cached prompt goes on, with some of what comes before; None unless prompts diverge here."""
    prompt: str
    """How this one does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Some words of a request, widened to whole ones. All None where tokens do not spell out the text."""

    message: int | None = None
    """Number of the message, from 0; None for a prompt."""
    role: str | None = None
    offset: int | None = None
    """Characters into the message's text, or into the prompt."""
    end: int | None = None
    """Where it ends; the same if there is nothing there."""
    before: str = ""
    """What it was widened by."""
    after: str = ""


@dataclass(frozen=True, slots=True)
class _Message:
    """Where a message stands in the rendered text; `number` is None for a prompt."""

    number: int | None
    role: str | None
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Source:
    """What was asked, in all its forms, for as long as somebody may want to know where a match ended."""

    tokenizer: Tokenizer
    prompt: str | tuple[int, ...] | Conversation
    ids: Sequence[int]

    def where(self, explanation: Explanation) -> Where | None:
        """The place that an explanation speaks of; None if the reason is no place. May take milliseconds."""
        at = explanation.at_token
        if explanation.reason in _NOWHERE or at >= len(self.ids):
            return None
        vocabulary = self.tokenizer.vocabulary
        before = self.ids[max(0, at - _BEFORE) : at]
        known = explanation.continues[:_AFTER]
        message, role, offset = self._place(at)
        return Where(
            message=message,
            role=role,
            offset=offset,
            cached=spelled(vocabulary, (*before, *known)) if known else None,
            prompt=spelled(vocabulary, (*before, *self.ids[at : at + _AFTER])),
        )

    def span(self, start: int, end: int) -> Span:
        """The words that these tokens of the prompt spell. May take milliseconds."""
        prompt = self.prompt
        if isinstance(prompt, tuple):
            return Span()
        text = prompt if isinstance(prompt, str) else self.tokenizer.render(prompt.messages)
        first, last = self._offset(text, start), self._offset(text, end)
        if first is None or last is None:
            return Span()
        found = _message(prompt, text, first)
        if found is None:
            return Span()
        first, last = (min(max(place, found.start), found.end) for place in (first, last))
        left, right = first, last
        while left > max(found.start, first - _WORD_CHARS) and not text[left - 1].isspace():
            left -= 1
        while right < min(found.end, last + _WORD_CHARS) and not text[right].isspace():
            right += 1
        return Span(
            message=found.number,
            role=found.role,
            offset=left - found.start,
            end=right - found.start,
            before=text[left:first],
            after=text[last:right],
        )

    def _place(self, at: int) -> tuple[int | None, str | None, int | None]:
        prompt = self.prompt
        if isinstance(prompt, tuple):
            return None, None, None
        text = prompt if isinstance(prompt, str) else self.tokenizer.render(prompt.messages)
        offset = self._offset(text, at)
        found = None if offset is None else _message(prompt, text, offset)
        if offset is None or found is None:
            return None, None, None
        return found.number, found.role, max(0, offset - found.start)

    def _offset(self, text: str, at: int) -> int | None:
        """Characters of the text that the first `at` tokens spell; None if they spell something else."""
        vocabulary, ids = self.tokenizer.vocabulary, self.ids[:at]
        plain = [token for token in ids if token not in vocabulary.special_ids]
        for tokens in (ids, plain):
            spelling = b"".join(map(vocabulary.shown, tokens)).decode(errors="ignore")
            for known in (spelling, spelling.removeprefix(" ")):
                if text.startswith(known):
                    return len(known)
        return None


def _message(prompt: str | Conversation, text: str, offset: int) -> _Message | None:
    """The message whose text, or what the template writes before it, has this character."""
    if isinstance(prompt, str):
        return _Message(None, None, 0, len(text))
    end = 0
    for number, message in enumerate(prompt.messages):
        content = str(message["content"])
        start = text.find(content, end)
        if start < 0:
            content = content.strip()  # many templates take blanks away
            start = text.find(content, end)
        if start < 0:
            return None
        end = start + len(content)
        if offset < end:
            return _Message(number, str(message["role"]), start, end)
    return None


def spelled(vocabulary: Vocabulary, ids: Sequence[int]) -> str:
    """Tokens as text, control tokens written out, without a cut-off character at either end."""
    return b"".join(map(vocabulary.shown, ids)).decode(errors="replace").strip("\ufffd")
