"""Where in a request a match ended: which message, which character, and how what is cached goes on instead. Spans, too.

Works on the tokens themselves, without tokenising anything again, so it holds for any way the tokens came about.
"""

from bisect import bisect_left, bisect_right
from codecs import getincrementaldecoder
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from foreword.cache.explain import Explanation, Reason
from foreword.front.ask import Conversation
from foreword.text.chat import render_without
from foreword.text.tokenizer import Message, Tokenizer
from foreword.text.vocabulary import Vocabulary

_CONTINUES = bytes(range(0x80, 0xC0))
"""What the bytes of a character after its first one can be in UTF-8."""

_BEFORE, _AFTER = 6, 10
"""Tokens that a snippet shows before and after the place."""

_WORD_CHARS = 40
"""Characters by which a span is widened at most, to begin and end with a word."""

_MARK = "\ue000"
"""Stands around the number of a message where its text was; a character that nobody writes."""

_BLANK = "\0"
"""Stands for text that no message is looked for in."""

_NOWHERE: frozenset[Reason] = frozenset({"cache_disabled", "model_not_cacheable", "read_disabled", "complete"})
"""Reasons that have nothing to do with what stands at the place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """A place in a request."""

    message: int | None
    """Number of the message, from 0; None for a prompt, in the list of tools, and after the last message's text."""
    role: str | None
    offset: int | None
    """Characters into the text of the message, the tool or the prompt.

    None in the calls of a message, and where tokens do not spell out the text."""
    tool: int | None = None
    """Number of the tool, from 0, in the list of tools."""
    cached: str | None
    """How the nearest cached prompt goes on, with some of what comes before; None unless prompts diverge here."""
    prompt: str
    """How this one does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Some words of a request, widened to whole ones. All None where tokens do not spell out the text."""

    message: int | None = None
    """Number of the message, from 0; None for a prompt, and in the list of tools."""
    role: str | None = None
    tool: int | None = None
    """Number of the tool, from 0, in the list of tools."""
    tool_name: str | None = None
    offset: int | None = None
    """Characters into the text of the message, the tool or the prompt."""
    end: int | None = None
    """Where it ends; the same if there is nothing there."""
    before: str = ""
    """What it was widened by."""
    after: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Where a message or a tool stands in the text; a prompt is neither."""

    start: int
    end: int
    message: int | None = None
    role: str | None = None
    tool: int | None = None
    called: bool = False
    """It is what the template wrote of a message's calls, and no text of the message's."""


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
        place = self._place(at)
        found = place[0] if place else None
        return Where(
            message=found.message if found else None,
            role=found.role if found else None,
            tool=found.tool if found else None,
            offset=place[1] if place else None,
            cached=spelled(vocabulary, (*before, *known)) if known else None,
            prompt=spelled(vocabulary, (*before, *self.ids[at : at + _AFTER])),
        )

    def span(self, start: int, end: int) -> Span:
        """The words that these tokens of the prompt spell. May take milliseconds."""
        prompt = self.prompt
        if isinstance(prompt, tuple):
            return Span()
        text = self._text(prompt)
        first, last = self._offset(text, start), self._offset(text, end)
        if first is None or last is None:
            return Span()
        if end > start and _begun(self.tokenizer.vocabulary, self.ids[:end]):
            last += 1
        found = self._part(prompt, text, first)
        if found is None or found.called:
            return Span()
        name = None if found.tool is None or isinstance(prompt, str) else prompt.tools[found.tool]["function"]["name"]
        first, last = (min(max(place, found.start), found.end) for place in (first, last))
        left, right = first, last
        while left > max(found.start, first - _WORD_CHARS) and not text[left - 1].isspace():
            left -= 1
        while right < min(found.end, last + _WORD_CHARS) and not text[right].isspace():
            right += 1
        return Span(
            message=found.message,
            role=found.role,
            tool=found.tool,
            tool_name=name,
            offset=left - found.start,
            end=right - found.start,
            before=text[left:first],
            after=text[last:right],
        )

    def _place(self, at: int) -> tuple[_Part, int | None] | None:
        """The part of the prompt that has this token, and how far into it that is."""
        prompt = self.prompt
        if isinstance(prompt, tuple):
            return None
        text = self._text(prompt)
        offset = self._offset(text, at)
        found = None if offset is None else self._part(prompt, text, offset)
        if offset is None or found is None:
            return None
        return found, None if found.called else max(0, offset - found.start)

    def _text(self, prompt: str | Conversation) -> str:
        return prompt if isinstance(prompt, str) else self.tokenizer.render(prompt.messages, prompt.tools)

    def _part(self, prompt: str | Conversation, text: str, offset: int) -> _Part | None:
        """The message or tool whose text, or what the template writes before it, has this character."""
        if isinstance(prompt, str):
            return _Part(start=0, end=len(text))
        if not prompt.tools:
            return _message(prompt.messages, self._glue(prompt), text, offset, text)
        start, end = _differs(self._with(prompt, 0), text)
        if not start <= offset < end:
            blank = f"{text[:start]}{(end - start) * _BLANK}{text[end:]}"
            return _message(prompt.messages, self._glue(prompt), text, offset, blank)

        @cache
        def begins(number: int) -> int:
            """Up to where the text is the same with the tools before this one only: there it is written."""
            return start if number == 0 else _common(self._with(prompt, number), text)

        number = bisect_right(range(1, len(prompt.tools)), offset, key=begins)
        if number + 1 < len(prompt.tools):
            end = max(begins(number), begins(number + 1))
        return _Part(start=begins(number), end=end, tool=number)

    def _glue(self, prompt: Conversation) -> list[str]:
        """What the template writes before the text of each message, as far as one can tell."""
        marks = [f"{_MARK}{number}{_MARK}" for number in range(len(prompt.messages))]
        marked = [{**message, "content": mark} for message, mark in zip(prompt.messages, marks, strict=True)]
        rest, found = render_without(self.tokenizer, marked, prompt.tools) or "", list[str]()
        for mark in marks:
            before, met, rest = rest.partition(mark)
            if not met:
                break
            found.append(before)
        return found

    def _with(self, prompt: Conversation, num_tools: int) -> str:
        """The text with the first tools only; empty if the template refuses that."""
        return render_without(self.tokenizer, prompt.messages, prompt.tools[:num_tools]) or ""

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


def _message(messages: Sequence[Message], glue: Sequence[str], text: str, offset: int, searched: str) -> _Part | None:
    """The message with this character, its text or what stands before it.

    Each stands behind its glue; where a template writes something else before this very text, it is looked for in
    `searched`.
    """
    end, calls = 0, None
    for number, message in enumerate(messages):
        found = _start(str(message["content"]), glue[number] if number < len(glue) else None, text, end, searched)
        if found is None:
            return None
        start, content = found
        if calls is not None and offset < start:
            return calls
        end = start + len(content)
        role = str(message["role"])
        if offset < end:
            return _Part(start=start, end=end, message=number, role=role)
        called = bool(message.get("tool_calls"))
        calls = _Part(start=end, end=len(text), message=number, role=role, called=True) if called else None
    return calls


def _start(content: str, glue: str | None, text: str, after: int, searched: str) -> tuple[int, str] | None:
    """Where a message's text begins, and the text as it stands there: many templates take blanks away."""
    forms = (content, content.strip())
    for form in forms:
        if glue is not None and text.startswith(f"{glue}{form}", after):
            return after + len(glue), form
    for form in forms:
        if (start := searched.find(form, after)) >= 0:
            return start, form
    return None


def _differs(one: str, other: str) -> tuple[int, int]:
    """Where in the other text that begins and ends which the first has not."""
    start = _common(one, other)
    rest = min(len(one), len(other)) - start
    same = bisect_left(range(1, rest + 1), True, key=lambda n: one[len(one) - n :] != other[len(other) - n :])
    return start, len(other) - same


def _common(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    longest = range(1, min(len(one), len(other)) + 1)
    return bisect_left(longest, True, key=lambda n: one[:n] != other[:n])


def between(vocabulary: Vocabulary, before: Sequence[int], ids: Sequence[int], after: Sequence[int]) -> str:
    """Tokens as text, with the rest of a character that they have only a part of, out of those around them."""
    if not ids:
        return ""
    spelling, ended = (b"".join(map(vocabulary.shown, some)) for some in (ids, after[:4]))
    tail = ended[: len(ended) - len(ended.lstrip(_CONTINUES))]
    return (_begun(vocabulary, before) + spelling + tail).decode(errors="replace").strip("\ufffd")


def _begun(vocabulary: Vocabulary, ids: Sequence[int]) -> bytes:
    """The bytes of a character that these tokens begin and do not end."""
    decoder = getincrementaldecoder("utf-8")("ignore")
    decoder.decode(b"".join(map(vocabulary.shown, ids[-4:])))
    return decoder.getstate()[0]


def spelled(vocabulary: Vocabulary, ids: Sequence[int]) -> str:
    """Tokens as text, control tokens written out, without a cut-off character at either end."""
    return b"".join(map(vocabulary.shown, ids)).decode(errors="replace").strip("\ufffd")
