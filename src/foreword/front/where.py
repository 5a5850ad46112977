"""Where in a request a match ended: which message, which character, and how what is cached goes on instead.

Works on the tokens themselves, without tokenising anything again, so it holds for any way the tokens came about.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foreword.cache.explain import Explanation, Reason
from foreword.front.ask import Conversation
from foreword.text.tokenizer import Tokenizer
from foreword.text.vocabulary import Vocabulary

_BEFORE, _AFTER = 6, 10
"""Tokens that a snippet shows before and after the place."""

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


@dataclass(frozen=True, slots=True)
class Source:
    """What was asked, in all its forms, for as long as somebody may want to know where a match ended."""

    tokenizer: Tokenizer
    prompt: str | tuple[int, ...] | Conversation
    ids: tuple[int, ...]

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

    def _place(self, at: int) -> tuple[int | None, str | None, int | None]:
        prompt = self.prompt
        if isinstance(prompt, tuple):
            return None, None, None
        text = prompt if isinstance(prompt, str) else self.tokenizer.render(prompt.messages)
        offset = self._offset(text, at)
        if isinstance(prompt, str) or offset is None:
            return None, None, offset
        return message_at(prompt.messages, text, offset)

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


def message_at(
    messages: Sequence[Mapping[str, Any]], text: str, offset: int
) -> tuple[int | None, str | None, int | None]:
    """Number and role of the message whose text, or what the template writes before it, has this character."""
    end = 0
    for number, message in enumerate(messages):
        content = str(message["content"])
        start = text.find(content, end)
        if start < 0:
            content = content.strip()  # many templates take blanks away
            start = text.find(content, end)
        if start < 0:
            return None, None, None
        end = start + len(content)
        if offset < end:
            return number, str(message["role"]), max(0, offset - start)
    return None, None, None


def spelled(vocabulary: Vocabulary, ids: Sequence[int]) -> str:
    """Tokens as text, control tokens written out, without a cut-off character at either end."""
    return b"".join(map(vocabulary.shown, ids)).decode(errors="replace").strip("\ufffd")
