"""What OpenAI's clients send.

Every field of their form stands here as one of three kinds:

    served       it does what OpenAI's documentation says
    inert        it changes nothing here and is accepted: `user`, `metadata`, `store`, `service_tier`, ...
    only(...)    not served yet: the value that changes nothing is accepted, any other is refused by name

Where we differ on purpose: `max_tokens` left out means what is left of the context, on both routes.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from foreword.front.ask import Conversation
from foreword.front.bounds import MAX_LOGPROBS, MAX_SEED, MAX_STOPS, MIN_SEED
from foreword.server.wire import (
    Absent,
    CacheWish,
    No,
    NoEntries,
    NoItems,
    NumTokens,
    One,
    Temperature,
    Text,
    Wire,
    Zero,
    only,
)
from foreword.text.chat import Role

MAX_PROMPTS = 128
"""Prompts in one completion request at most."""

MAX_STOP_CHARS = 1000
"""Characters in one stop string at most."""


def _text_or_list(value: object) -> str:
    return "(list)" if isinstance(value, list) else "(text)"


def _kind_of_prompt(value: object) -> str:
    if not isinstance(value, list):
        return "(text)"
    first: object = value[0] if value else ""  # pyright: ignore[reportUnknownVariableType]
    if isinstance(first, list):
        return "(id lists)"
    return "(texts)" if isinstance(first, str) else "(ids)"


TokenId = Annotated[int, Field(ge=0, lt=2**32)]
Ids = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Prompt = Annotated[
    Annotated[Text, Tag("(text)")]
    | Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True), Tag("(texts)")]
    | Annotated[Ids, Tag("(ids)")]
    | Annotated[list[Ids], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True), Tag("(id lists)")],
    Discriminator(_kind_of_prompt),
]

StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Stop = Annotated[
    Annotated[StopText, Tag("(text)")]
    | Annotated[list[StopText], Field(max_length=MAX_STOPS, fail_fast=True), Tag("(list)")],
    Discriminator(_text_or_list),
]


class StreamOptions(Wire):
    """How a stream ends."""

    example: ClassVar[str | None] = '{"include_usage": true}'

    include_usage: bool | None = None
    """Send one more chunk with `choices: []` and the usage."""
    include_obfuscation: No = None


class GenerationRequest(Wire):
    """What both routes share."""

    elsewhere: ClassVar[Mapping[str, str]] = {
        "prefix_length": 'it goes into cache: {"prefix_length": ...}',
        "report": 'it goes into cache: {"report": true}',
    }

    model: str | None = None
    """One of `GET /v1/models`; left out, the model that is served."""
    max_tokens: NumTokens | None = None
    """Tokens to generate at most; left out, what is left of the context."""
    temperature: Temperature | None = None
    """0 takes the most likely token; left out, 1 as with OpenAI."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    """Draw among this many most likely tokens; 0 means all."""
    seed: Annotated[int, Field(ge=MIN_SEED, le=MAX_SEED)] | None = None
    stop: Stop | None = None
    ignore_eos: bool | None = None
    """Go on after an end-of-sequence token, up to `max_tokens`."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache: CacheWish = CacheWish()

    # Inert: who asks and how it is billed changes no answer here.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    n: One = None
    presence_penalty: Zero = None
    frequency_penalty: Zero = None
    logit_bias: NoEntries = None

    @model_validator(mode="after")
    def _check_stream_options(self) -> "GenerationRequest":
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("field_pair", "it needs stream: true", {"name": "stream_options"})
        return self


class CompletionRequest(GenerationRequest):
    """`POST /v1/completions`."""

    prompt: Prompt
    """Text, token ids, or a list of either: one choice for each."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """0: of the chosen tokens; n: of the n best at each place as well."""

    best_of: One = None
    echo: No = None
    suffix: Absent = None


class TextPart(Wire):
    """A piece of a message's text."""

    telling: ClassVar[str | None] = "type"
    example: ClassVar[str | None] = '{"type": "text", "text": "..."}'

    type: Literal["text"]
    text: str


_CALL: Mapping[str, Any] = {
    "type": "object",
    "required": ["id", "function"],
    "additionalProperties": False,
    "properties": {
        "id": {"type": "string", "minLength": 1},
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name", "arguments"],
            "additionalProperties": False,
            "properties": {"name": {"type": "string", "minLength": 1}, "arguments": {"type": "string"}},
        },
    },
}
"""What `text.tools` holds a call to. It is read there for every face."""


def _tell_roles(schema: dict[str, Any]) -> None:
    """Say in the message's JSON schema who may say what, as `text.chat` holds it."""
    others = ("name", "tool_call_id", "tool_calls", "reasoning_content")
    said, nothing, name = {"not": {"type": "null"}}, {"type": "null"}, {"type": "string", "minLength": 1}

    def who(roles: Sequence[str], needed: str, **may: Any) -> dict[str, Any]:
        properties = {"role": {"enum": [*roles]}, **dict.fromkeys(others, nothing), needed: said, **may}
        return {"required": ["role", "content", needed], "properties": properties}

    schema["anyOf"] = [
        who(("system", "developer", "user"), "content"),
        who(("assistant",), "content"),
        who(("assistant",), "tool_calls", tool_calls={"type": "array", "minItems": 1}, reasoning_content={}),
        who(("tool",), "tool_call_id", tool_call_id=name, content=said),
    ]


class ChatMessage(Wire):
    """One turn of the conversation; the fields that only an assistant's turn has may come back as we sent them."""

    model_config = ConfigDict(json_schema_extra=_tell_roles)

    telling: ClassVar[str | None] = "role"
    example: ClassVar[str | None] = '{"role": "user", "content": "..."}'

    role: Role
    """`developer` is OpenAI's newer name for `system` and is treated as such."""
    content: (
        Annotated[
            Annotated[str, Tag("(text)")]
            | Annotated[list[TextPart], Field(min_length=1, fail_fast=True), Tag("(list)")],
            Discriminator(_text_or_list),
        ]
        | None
    ) = None
    """Text, or text parts, which are joined by line feeds. Only beside calls of tools there may be none."""
    tool_calls: list[Annotated[Any, WithJsonSchema(dict(_CALL))]] | None = None
    """An assistant's: as we sent them, each with its `id` and a `function` of `name` and `arguments`."""
    reasoning_content: str | None = None
    """An assistant's: as we sent it, for templates that write it."""
    tool_call_id: str | None = None
    """A tool's: the call that this is the result of."""
    name: str | None = None
    """A tool's."""

    refusal: Absent = None
    audio: Absent = None
    function_call: Absent = None
    annotations: NoItems = None

    def turn(self) -> dict[str, Any]:
        """The same as a `Conversation` takes it, which checks what belongs together."""
        given = {name: getattr(self, name) for name in self.model_fields_set}
        if isinstance(self.content, list):
            given["content"] = "\n".join(part.text for part in self.content)
        return given


_TOOL: Mapping[str, Any] = {
    "type": "object",
    "required": ["type", "function"],
    "additionalProperties": False,
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name"],
            "additionalProperties": False,
            "properties": {
                "name": {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,64}$"},
                "description": {"type": "string"},
                "parameters": {"type": "object"},
                "strict": {"const": False},
            },
        },
    },
}
"""What `text.tools` holds a tool to. It is read there for every face, and as it came: its order is kept."""

Messages = Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
Tools = list[Annotated[Any, WithJsonSchema(dict(_TOOL))]]


def conversation(messages: Sequence[ChatMessage], tools: Tools | None) -> Conversation:
    """Both as a value. Raises RequestError."""
    return Conversation([message.turn() for message in messages], tools or ())


def check_tools(tools: Tools | None, messages: Messages | None) -> None:
    """Tools belong to a conversation. Raises PydanticCustomError."""
    if tools and messages is None:
        raise PydanticCustomError("field_pair", "it belongs to messages, and there are none", {"name": "tools"})


class PlainFormat(Wire):
    """The response format that asks for nothing."""

    type: Literal["text"]


class ChatRequest(GenerationRequest):
    """`POST /v1/chat/completions`."""

    messages: Messages
    tools: Tools | None = None
    """What the model may call, in the order in which it is told of them."""
    tool_choice: Annotated[Literal["none", "auto"] | None, only('"auto" or "none"')] = None
    """none: the model is not told of the tools."""
    parallel_tool_calls: bool | None = None
    """true changes nothing: nobody holds a model to one call."""
    max_completion_tokens: NumTokens | None = None
    """OpenAI's newer name for `max_tokens`."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    functions: NoItems = None
    function_call: Annotated[Literal["none", "auto"] | None, only('"none"')] = None
    response_format: Annotated[PlainFormat | None, only('{"type": "text"}')] = None
    modalities: Annotated[Annotated[list[Literal["text"]], Field(max_length=1)] | None, only('["text"]')] = None
    audio: Absent = None
    prediction: Absent = None
    reasoning_effort: Absent = None
    verbosity: Absent = None
    web_search_options: Absent = None

    @model_validator(mode="after")
    def _check_pairs(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError("field_pair", "it needs logprobs: true", {"name": "top_logprobs"})
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            text = "it is another name of max_tokens, and the two differ"
            raise PydanticCustomError("field_pair", text, {"name": "max_completion_tokens"})
        if self.tools and self.parallel_tool_calls is False:
            text = "a model is not held to one call at a time; leave it out or send true"
            raise PydanticCustomError("field_pair", text, {"name": "parallel_tool_calls"})
        return self

    def conversation(self) -> Conversation:
        """The same as a value. Raises RequestError."""
        whole = conversation(self.messages, self.tools)
        return Conversation(whole.messages) if self.tool_choice == "none" else whole
