"""Text in, text out, as values: what a face asks for (`Ask`) and what it gets back (`Piece`)."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foreword.base.params import FinishReason
from foreword.cache.identity import ALONE, Tenant
from foreword.schedule.plan import Usage
from foreword.text.chat import for_template
from foreword.text.speech import ToolCall
from foreword.text.tools import tools_for_template


@dataclass(frozen=True, slots=True, eq=False)
class Conversation:
    """Messages, and what may be called in them: a prompt by way of the model's chat template.

    Raises RequestError naming the part that is wrong, whichever face it came through.
    """

    messages: Sequence[Mapping[str, Any]]
    """Kept in the words of chat templates: `developer` is `system`, content is text, arguments of calls are objects."""
    tools: Sequence[Mapping[str, Any]] = ()
    """In OpenAI's form. Their order and that of their keys is kept: templates write them as they come."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "messages", for_template(self.messages))
        object.__setattr__(self, "tools", tools_for_template(self.tools))

    def __eq__(self, other: object) -> bool:
        """Whether both are the same prompt, the order of keys included."""
        return isinstance(other, Conversation) and self._written() == other._written()

    def __hash__(self) -> int:
        return hash(self._written())

    def _written(self) -> str:
        return json.dumps((self.messages, self.tools))


def field_of(prompt: str | tuple[int, ...] | Conversation) -> str:
    """What errors about a prompt name as the field at fault."""
    return "messages" if isinstance(prompt, Conversation) else "prompt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asks, and since when: what a face knows beside the request, and never takes out of it."""

    tenant: Tenant = ALONE
    """Whose prefixes are read and stored."""
    arrived_s: float | None = None
    """When the request came in, on the engine's clock. None: now."""
    max_live: int | None = None
    """Prompts that the tenant may have queued or running, this one included. None: as many as there is room for."""


SOMEBODY = Caller()
"""The caller on a server that serves one tenant only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One prompt with its wishes, before tokenising and checking. Same defaults on every face."""

    prompt: str | tuple[int, ...] | Conversation
    """Raw text (tokenised as /v1/completions does), token ids taken as they are, or a conversation."""
    max_tokens: int | None = None
    """None: what is left of the context."""
    temperature: float = 0.0
    """0 to 2; 0 takes the most likely token each time."""
    top_p: float = 1.0
    """Above 0, at most 1."""
    top_k: int = 0
    """0: all tokens."""
    seed: int | None = None
    """None: a fresh random seed."""
    logprobs: int | None = None
    """None: none. 0: of the chosen tokens. n <= 20: of the n best at each place as well."""
    ignore_eos: bool = False
    """Go on after an end-of-sequence token, up to `max_tokens`."""
    stop: tuple[str, ...] = ()
    """At most 4 strings, none empty; the answer ends before the first one to be completed."""
    prefix_length: int | None = None
    """Reads never pass this many prompt tokens; stored are the full blocks that hold at least one of them."""
    read: bool = True
    """False: compute the prompt whole."""
    store: bool = True
    """False: leave nothing behind."""
    ttl: float | None = None
    """Seconds after their last use for which this request's blocks are kept. None: as the server is set."""
    priority: int | None = None
    """0 to 100, 50 if not said: blocks of a lower one are evicted first."""
    key: str | None = None
    """A label of the caller's own, for metrics."""
    report: bool = False
    """The answer will be asked where its match ended."""
    warm: bool = False
    """Only compute the prompt: no token is drawn, whatever `max_tokens` says."""


@dataclass(frozen=True, slots=True)
class TokenText:
    """One generated token as text, for log-probabilities."""

    token: int
    text: str
    """The token's own text; a lone fragment of a character shows as U+FFFD."""
    raw: bytes
    logprob: float | None
    top: tuple[tuple[int, str, bytes, float], ...] = ()
    """(token, text, raw bytes, log-probability) of the most likely ones, best first."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A bit of an answer. The pieces' texts, joined, are the answer, less thoughts and calls."""

    text: str
    """New text; never half a character, never part of a stop string."""
    tokens: tuple[TokenText, ...] = ()
    """The tokens behind it, when log-probabilities were asked for."""
    finish: FinishReason | None = None
    """Set on the last piece only."""
    usage: Usage | None = None
    """On the first piece that knows it, and on the last."""
    error: str | None = None
    """With finish "error": what went wrong; with "cancelled": why, unless the caller wanted it."""
    ids: tuple[int, ...] = ()
    """Ids generated since the piece before, an ending one included; their text may be still to come."""
    reasoning: str = ""
    """What the model said to itself, where tools may be called and the tokenizer says how to tell."""
    calls: tuple[ToolCall, ...] = ()
    """Calls of tools that are complete with this piece, likewise."""
