"""What OpenAI's clients get back, whole answers only; the chunks of a stream are built beside their routes."""

from typing import Literal

from pydantic import Field

from foreword.server.report import UsageReply
from foreword.server.wire import CacheReport, Reply


class CompletionLogprobs(Reply):
    """Log-probabilities of a completion, one list per question."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class CompletionChoice(Reply):
    """One prompt's answer."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"]


class Completion(Reply):
    """The answer of `POST /v1/completions`."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageReply
    cache: CacheReport | None = None
    """With `cache.report` only."""


class TopLogprob(Reply):
    """One token that could have stood here."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """The token that stands here, and the most likely ones."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Reply):
    """Log-probabilities of a message."""

    content: list[TokenLogprob]
    refusal: None = None


class Called(Reply):
    """A function and what it is called with."""

    name: str
    arguments: str
    """A JSON object, written out."""


class CallReply(Reply):
    """A call that the model wants to be made."""

    id: str
    type: Literal["function"] = "function"
    function: Called


class AssistantMessage(Reply):
    """The assistant's turn."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | None = Field(default=None, exclude_if=lambda value: value is None)
    """What the model said to itself, where the tokenizer says how to tell and tools may be called."""
    tool_calls: list[CallReply] | None = Field(default=None, exclude_if=lambda value: value is None)
    """Likewise: what it wants to be called."""


class ChatChoice(Reply):
    """The answer to a conversation."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(Reply):
    """The answer of `POST /v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageReply
    cache: CacheReport | None = None
    """With `cache.report` only."""


class ModelCard(Reply):
    """One served model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "foreword"


class ModelList(Reply):
    """The answer of `GET /v1/models`."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
