"""What all JSON objects of the API share: strict reading, fields known but not served yet, the cache's part.

Reading is strict twice over: a field that is not known is refused by name, and a value of another type is refused
instead of being bent into shape. Nothing that a caller wrote is silently ignored.
"""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, Literal, cast, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from foreword.base.config import MAX_TTL_S
from foreword.cache.departed import Cause
from foreword.front.bounds import MAX_KEY_CHARS, MAX_PRIORITY, MAX_TEMPERATURE, MAX_TOKENS
from foreword.front.changes import Kind

_ALIKE = 0.75
"""How alike an unknown name and a known one must be for the one to be a slip of the other; 1 is the same."""
_ALIKE_OF_FEW = 0.6
"""The same where there are few names to choose from."""
_FEW = 12
"""So many known names are listed when none is alike."""


class Wire(BaseModel):
    """A JSON object that a caller sends."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    telling: ClassVar[str | None] = None
    """A field whose value says what kind of object this is: when it is of no kind we know, that is the complaint, not
    the fields that belong to that kind."""
    elsewhere: ClassVar[Mapping[str, str]] = {}
    """Fields that are looked for here, and where to go with them."""
    example: ClassVar[str | None] = None
    """What to send, for somebody who sent no object."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, data: Any) -> Any:
        # One error for the first unknown name, not one for each: a body may hold millions of them.
        if not isinstance(data, dict):
            such = "" if cls.example is None else f" such as {cls.example}"
            raise PydanticCustomError("no_object", "it must be an object{such}", {"such": such})
        given = cast(dict[str, Any], data)
        known = cls.model_fields
        for name in given:
            if name not in known:
                raise cls._wrong_kind(given) or _unknown(name[:100], list(known), cls.elsewhere.get(name))
        return given

    @classmethod
    def _wrong_kind(cls, given: dict[str, Any]) -> PydanticCustomError | None:
        if cls.telling is None or cls.telling not in given:
            return None
        served = get_args(cls.model_fields[cls.telling].annotation)
        value = given[cls.telling]
        if value in served:
            return None
        text = "{value} is not supported; supported: {served}"
        shown = value[:40] if isinstance(value, str) else type(value).__name__
        context = {"name": cls.telling, "value": shown, "served": ", ".join(served)}
        return PydanticCustomError("field_pair", text, context)


class Reply(BaseModel):
    """A JSON object that the server sends."""

    model_config = ConfigDict(frozen=True)


def hint(name: str, known: Sequence[str]) -> str:
    """What to say about a name that is not known: the one that was probably meant, or which there are."""
    if not known:
        return "none is known here"
    close = get_close_matches(name, known, n=1, cutoff=_ALIKE if len(known) > _FEW else _ALIKE_OF_FEW)
    if close:
        return f"did you mean '{close[0]}'?"
    return f"known are {', '.join(known)}" if len(known) <= _FEW else "GET /openapi.json has all that are known"


def _unknown(name: str, known: list[str], elsewhere: str | None) -> PydanticCustomError:
    context = {"name": name, "hint": elsewhere or hint(name, known)}
    return PydanticCustomError("unknown_field", "unknown field; {hint}", context)


def check_one(form: Wire, names: Sequence[str], *, needed: bool = True) -> None:
    """Of these fields one is given, or none where none is `needed`. Raises PydanticCustomError."""
    given = [name for name in names if getattr(form, name) is not None]
    if len(given) > 1:
        context = {"name": given[-1], "given": " and ".join(given), "names": ", ".join(names)}
        raise PydanticCustomError("field_pair", "{given} are given; give only one of {names}", context)
    if needed and not given:
        raise PydanticCustomError("none_given", "give one of {names}", {"names": ", ".join(names)})


def described_as_one(schema: dict[str, Any], names: Sequence[str]) -> None:
    """Say in a form's JSON schema what `check_one` holds it to: exactly one of these fields."""
    schema["oneOf"] = [{"required": [name], "properties": {name: {"not": {"type": "null"}}}} for name in names]


def only(neutral: str) -> WrapValidator:
    """Mark a field that is known but not served yet: it takes the value that changes nothing and refuses the rest."""
    refusal = PydanticCustomError(
        "unsupported_value",
        "this value is not supported; leave the field out or send {neutral}",
        {"neutral": neutral},
    )

    def check(value: Any, inner: ValidatorFunctionWrapHandler) -> Any:
        try:
            read = inner(value)
        except ValidationError:
            raise refusal from None
        if isinstance(read, bool) and not isinstance(value, bool):
            raise refusal  # 1 is no true
        return read

    return WrapValidator(check)


Absent = Annotated[None, only("null")]
One = Annotated[Annotated[int, Field(ge=1, le=1)] | None, only("1")]
Yes = Annotated[Literal[True] | None, only("true")]
No = Annotated[Literal[False] | None, only("false")]
Zero = Annotated[Annotated[float, Field(ge=0, le=0)] | None, only("0")]
NoItems = Annotated[Annotated[list[Any], Field(max_length=0)] | None, only("[]")]
NoEntries = Annotated[Annotated[dict[str, Any], Field(max_length=0)] | None, only("{}")]

Text = Annotated[str, Field(min_length=1)]
NumTokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
PrefixLength = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
Temperature = Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)]


TTL = Annotated[float, Field(gt=0, le=MAX_TTL_S)]
Priority = Annotated[int, Field(ge=0, le=MAX_PRIORITY)]
Key = Annotated[str, Field(min_length=1, max_length=MAX_KEY_CHARS)]


class Keeping(Wire):
    """How long and how dearly what a request stores is kept."""

    ttl: TTL | None = None
    """Seconds after its last use for which it can be found; left out, as `--ttl` says."""
    priority: Priority | None = None
    """0 to 100, 50 if left out: lower ones are evicted first, of equal ones those that were never hit."""
    prefix_length: PrefixLength | None = None
    """Reads never pass this many prompt tokens; stored are the full blocks that hold at least one of them."""
    key: Key | None = None
    """A label of your own, for metrics."""


class CacheWish(Keeping):
    """What a request asks of the cache."""

    example: ClassVar[str | None] = '{"report": true}'

    report: bool = False
    """Send the `cache` object with the answer."""
    read: bool = True
    """false: compute the prompt whole."""
    store: bool = True
    """false: leave nothing behind."""


class Timings(Reply):
    """Where the time to the first token went, in seconds; the parts add up to the last one."""

    queue_s: float
    """From the body's last byte to the first step, less the next two."""
    tokenize_s: float
    """Chat template and tokenising."""
    lookup_s: float
    """Hashing."""
    fetch_s: float
    prefill_s: float
    """From the first step to the first token."""
    first_token_s: float


class Saved(Reply):
    """What the cached tokens would have cost."""

    prefill_flops: int
    """An estimate from the model's sizes."""
    seconds: float
    """An estimate from the server's own steps: cached tokens times what one more token in a step has cost."""


class LeftReply(Reply):
    """How a block left the cache."""

    cause: Cause
    """`pressure`: its owner needed the room; `quota`: others did, and its owner was over its share; `expired`;
    `flushed`; `audit`: found wrong."""
    ago_s: float


class WhereReply(Reply):
    """A place in a request."""

    message: int | None
    role: str | None
    tool: int | None
    """Number of the tool, from 0, for a place in the list of tools."""
    offset: int | None
    """Characters into the text of the message, the tool (as the template writes it) or the prompt."""
    cached: str | None
    """How the nearest cached prompt goes on there."""
    prompt: str
    """How this one does."""


class AdviceReply(Reply):
    """A span of prompts that keeps ending the match."""

    kind: Kind
    """What happens to it: `changed`, `inserted`, `removed`, or parts are `reordered`."""
    message: int | None
    """Number of the message, from 0; null for a prompt, for a tool, and where tokens do not spell out the text."""
    role: str | None
    tool: int | None
    """Number of the tool, from 0, for a place in the list of tools."""
    offset: int | None
    """Characters into the text of the message, the tool or the prompt where it begins, in the last call."""
    end: int | None
    """Where it ends."""
    at_token: int
    """Its first token."""
    before: str
    """What stood there in the call before."""
    now: str
    """What stood there in the last one."""
    calls: int
    """Of the last hour, whose match ended here."""
    tokens_per_call: int
    """Computed again because of it, on average."""
    text: str
    """All of it in a sentence, with what to change."""


class CacheReport(Reply):
    """What the cache did for one request."""

    cached_tokens: int
    computed_tokens: int
    recomputed_tokens: int
    recalled_tokens: int
    """Prompt tokens with the ids that an earlier answer was given in."""
    reason: str
    """Why the match ended where it did."""
    at_token: int
    """The first token that had to be computed."""
    tiers: dict[str, int]
    """Cached tokens by where they came from."""
    tail_tokens: int
    """Of the cached tokens: taken from inside a block."""
    left: LeftReply | None
    """With `flushed`, `expired` and `evicted`: how what comes next left the cache."""
    where: WhereReply | None
    """Where in the request the match ended; null when it ended for no reason in the request."""
    advice: AdviceReply | None
    """With what keeps happening: what to change in the prompt."""
    cache_read_input_tokens: int
    """Anthropic's name for `cached_tokens`."""
    cache_creation_input_tokens: int
    """Prompt tokens that this request was the first to store, in full blocks."""
    timings: Timings
    saved: Saved


class ErrorDetail(Reply):
    """One error, in OpenAI's words."""

    message: str
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: str | None = None
    """The request's field at fault, if a single one is."""
    code: str


class ErrorReply(Reply):
    """What every refusal and failure looks like."""

    error: ErrorDetail
