"""The library face: `LLM(model).generate(prompts)` and `.chat(messages)`, in your own process, with the same cache.

Importing this loads no torch; making an `LLM` does.
"""

import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from numbers import Integral
from types import TracebackType
from typing import Any, Literal, Self, TypedDict, Unpack, cast, get_args, get_origin, get_type_hints

from foreword.assemble import Assembly, assemble
from foreword.base.config import CacheConfig, Config, ModelConfig, ScheduleConfig, ServerConfig
from foreword.base.errors import CapacityError, ConfigError, InvariantBroken, RequestError, StepFailed, Unavailable
from foreword.base.params import FinishReason
from foreword.cache.explain import Explanation, Reason
from foreword.cache.identity import ALONE
from foreword.cache.pins import Pinned
from foreword.cache.prefix_cache import Flushed
from foreword.front.advice import Advice
from foreword.front.answer import Answer
from foreword.front.ask import Ask, Caller, Conversation, Piece, TokenText
from foreword.front.keeper import Finding
from foreword.front.where import Where
from foreword.text.speech import ToolCall

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text, token ids, or messages."""

Tools = Sequence[Mapping[str, Any]]
"""What may be called in a conversation, in OpenAI's form."""

_SECTIONS = (ModelConfig, CacheConfig, ScheduleConfig)


class Wishes(TypedDict, total=False):
    """What a caller may ask for beside the prompt; meanings and limits as in `front.ask.Ask`."""

    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    logprobs: int | None
    ignore_eos: bool
    stop: str | Sequence[str]
    prefix_length: int | None
    cache: "CacheWishes"
    """What is asked of the cache; the same object as over HTTP."""


class CacheWishes(TypedDict, total=False):
    """What a caller may ask of the cache; meanings and limits as in `front.ask.Ask`."""

    report: bool
    """Say in `Result.where` where the match ended, and in `Result.advice` what to change if it keeps ending there."""
    read: bool
    store: bool
    ttl: float | None
    priority: int | None
    prefix_length: int | None
    key: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One answer with its account."""

    text: str
    token_ids: tuple[int, ...]
    """Ids that were generated, an ending one included."""
    finish_reason: FinishReason
    """Why it ended: "stop" (an end id or a stop string) or "length"."""
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens taken from the cache; `cached_tokens + computed_tokens == prompt_tokens`."""
    computed_tokens: int
    completion_tokens: int
    recalled_tokens: int
    """Prompt tokens with the ids that an earlier answer was given in."""
    reason: Reason
    """Why the cached part ends where it does."""
    explanation: Explanation
    """The same in full: at which token, and how what comes next left the cache."""
    where: Where | None
    """Where in the request that is; with `cache={"report": True}` only."""
    advice: Advice | None
    """What to change in the prompt, if its match ended where many do; with `cache={"report": True}` only."""
    stored_tokens: int
    """Prompt tokens that this request was the first to store, in full blocks."""
    queue_s: float
    """Seconds from the call to the first step of work, less the next two."""
    tokenize_s: float
    """Seconds that chat template and tokenising took."""
    lookup_s: float
    """Seconds that hashing took."""
    prefill_s: float
    """Seconds from the first step of work to the first token."""
    first_token_s: float
    """Seconds from the call to the first token: the sum of the four above."""
    tool_calls: tuple[ToolCall, ...] = ()
    """What the model wants to be called; only where tools may be, and the tokenizer says how to tell."""
    reasoning: str = ""
    """What the model said to itself, likewise."""
    logprobs: tuple[TokenText, ...] | None = None
    """One entry for each generated token, when log-probabilities were asked for."""


class LLM:
    """A model and its prefix cache in this process.

    >>> with LLM() as llm:  # the embedded SmolLM2-135M-Instruct
    ...     one, two = llm.generate([head + "first question", head + "second question"], max_tokens=32)
    ...     two.cached_tokens

    Every method may be called from any thread; requests of all threads are computed together. After `close` all of
    them raise Unavailable.
    """

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        """`model` is a local directory or hub id; None is the embedded model.

        `settings` are those of the command line with underscores: `device`, `dtype`, `block_size`, `kv_cache`, `cache`,
        `max_context`, ... Raises ConfigError for an unknown one (naming the closest) or a wrong value, ModelRefused
        for a model that cannot be served exactly.
        """
        self._assembly = assemble(_config(model, settings))
        self._stop = weakref.finalize(self, self._assembly.close)

    def generate(
        self, prompts: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]], **wishes: Unpack[Wishes]
    ) -> list[Result]:
        """Answers to prompts, in their order; they run together.

        A prompt is text, tokenised as `/v1/completions` does, or a list of token ids. Wishes hold for all of them.
        Raises RequestError naming the field and the limit, StepFailed when the model failed on a prompt.
        """
        caller = Caller(arrived_s=self._parts.worker.now())
        asks = [Ask(prompt=prompt, **_wishes(wishes)) for prompt in _prompts(prompts)]
        return self._run(asks, caller)

    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Tools | None = None, **wishes: Unpack[Wishes]
    ) -> Result:
        """The assistant's answer to a conversation of `{"role": ..., "content": ...}`, through the model's template.

        `tools` are what it may call, in OpenAI's form, and their order is kept. Raises as `generate`, and RequestError
        naming `messages` or `tools` when they do not fit the template.
        """
        caller = Caller(arrived_s=self._parts.worker.now())
        return self._run([Ask(prompt=Conversation(messages, tools or ()), **_wishes(wishes))], caller)[0]

    def lookup(self, prompt: Prompt, *, tools: Tools | None = None, prefix_length: int | None = None) -> Finding:
        """What a request would find in the cache now, and why no more. Computes nothing and changes nothing.

        A prompt is text, token ids or messages, those with `tools` or without. Raises RequestError.
        """
        return self._parts.keeper.lookup(Ask(prompt=_source(prompt, tools), prefix_length=prefix_length))

    def advice(self) -> tuple[Advice, ...]:
        """Spans of the prompts so far that keep ending the match, the dearest first, and what to change."""
        return tuple(said for _, said in self._parts.keeper.advice(ALONE))

    def warm(self, prompt: Prompt, *, tools: Tools | None = None, **cache: Unpack[CacheWishes]) -> Result:
        """Compute a prompt and keep it, without an answer: the next request that begins like it finds it.

        Of messages that end before a user's turn, what all such conversations begin with. Raises as `generate`.
        """
        ask = Ask(prompt=_source(prompt, tools), **_wishes({"cache": cache}))
        return _collect(self._parts.keeper.warm(ask))

    def pin(self, prompt: Prompt, *, tools: Tools | None = None, ttl: float | None = None) -> Pinned:
        """Let the full blocks of a prefix be evicted last, for `ttl` seconds or until it is unpinned.

        Raises RequestError with the budget (setting `pin_budget`) when it would be exceeded.
        """
        return self._parts.keeper.pin(_source(prompt, tools), ttl_s=ttl)

    def unpin(self, prompt: Prompt, *, tools: Tools | None = None) -> int:
        """Let a pinned prefix be evicted in its turn; how many blocks nothing pins now. Raises NotFound for no pin."""
        return self._parts.keeper.unpin(_source(prompt, tools))

    def flush(self, prompt: Prompt | None = None, *, tools: Tools | None = None) -> Flushed:
        """Forget a prefix with all that continues it, or everything; afterwards no new request hits older entries."""
        return self._parts.keeper.flush(None if prompt is None and tools is None else _source(prompt, tools))

    def reload(self) -> str:
        """Load the weights again from where they came, once the requests under way are done; the new root in hex.

        The cache is empty afterwards. Other threads' requests get Unavailable meanwhile. Raises what loading raises;
        the old weights go on then.
        """
        return self._parts.operator.reload().hex()

    @property
    def assembly(self) -> Assembly:
        """The parts behind this face."""
        return self._assembly

    @property
    def _parts(self) -> Assembly:
        """The parts of an LLM that is open. Raises Unavailable."""
        if not self._stop.alive:
            raise Unavailable("this LLM is closed; make a new one")
        return self._assembly

    def close(self) -> None:
        """Cancel what runs and stop the engine. Calling it twice is harmless."""
        self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, asks: Sequence[Ask], caller: Caller) -> list[Result]:
        """Submit all, as fast as the queue takes them, and collect in order; on an error nothing is left running."""
        waiting: deque[Answer] = deque()
        results: list[Result] = []
        try:
            for ask in asks:
                while (answer := self._submit(ask, caller, patient=bool(waiting))) is None:
                    results.append(_collect(waiting.popleft()))
                waiting.append(answer)
            while waiting:
                results.append(_collect(waiting.popleft()))
        finally:
            for answer in waiting:
                answer.cancel()
        return results

    def _submit(self, ask: Ask, caller: Caller, *, patient: bool) -> Answer | None:
        """None when the queue is full and `patient`: the caller has answers of its own to wait for first."""
        try:
            return self._parts.front.submit(ask, caller)
        except Unavailable:
            raise
        except CapacityError:
            if not patient:
                raise
            return None


def _collect(answer: Answer) -> Result:
    pieces = list(answer)
    last = pieces[-1]
    if last.finish == "error":
        raise StepFailed(last.error or "the step failed")
    if last.finish == "cancelled":
        raise Unavailable(last.error or "the engine was closed while this request ran")
    if last.finish is None or last.usage is None:
        raise InvariantBroken("an answer ended without its finish reason and usage")
    usage = last.usage
    return Result(
        text="".join(piece.text for piece in pieces),
        reasoning="".join(piece.reasoning for piece in pieces),
        tool_calls=tuple(call for piece in pieces for call in piece.calls),
        token_ids=tuple(token for piece in pieces for token in piece.ids),
        finish_reason=last.finish,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        computed_tokens=usage.computed_tokens,
        completion_tokens=usage.completion_tokens,
        recalled_tokens=usage.recalled_tokens,
        reason=usage.reason,
        explanation=usage.explanation,
        where=answer.where(usage.explanation),
        advice=answer.advice(),
        stored_tokens=usage.stored_tokens,
        queue_s=usage.queue_s,
        tokenize_s=usage.tokenize_s,
        lookup_s=usage.lookup_s,
        prefill_s=usage.prefill_s,
        first_token_s=usage.first_token_s,
        logprobs=_logprobs(pieces),
    )


def _logprobs(pieces: Sequence[Piece]) -> tuple[TokenText, ...] | None:
    tokens = tuple(token for piece in pieces for token in piece.tokens)
    return tokens or None


def _source(prompt: Any, tools: Tools | None = None) -> str | tuple[int, ...] | Conversation:
    """A prompt in the form that the front takes. Raises RequestError naming `prompt` or the message that is wrong."""
    listed = (
        [] if isinstance(prompt, str) else _listed(prompt, "prompt", "text, a list of token ids or a list of messages")
    )
    if listed and isinstance(listed[0], Mapping):
        return Conversation(listed, tools or ())
    if tools:
        raise RequestError("tools belong to messages, and the prompt is none", field="tools")
    return prompt if isinstance(prompt, str) else tuple(listed)


def _prompts(prompts: Any) -> list[str | tuple[int, ...]]:
    """One text or one list of ids is a list of one prompt. Raises RequestError naming `prompts`."""
    if isinstance(prompts, str):
        return [prompts]
    forms = "text, a list of token ids, or a list of those (messages go to chat)"
    listed = _listed(prompts, "prompts", forms)
    if listed and all(isinstance(item, Integral) for item in listed):
        return [tuple(listed)]
    return [
        item if isinstance(item, str) else tuple(_listed(item, f"prompts.{i}", forms)) for i, item in enumerate(listed)
    ]


def _listed(value: Any, field: str, forms: str) -> list[Any]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise RequestError(f"{field} is {type(cast(object, value)).__name__}; it must be {forms}", field=field)
    return list(cast(Iterable[Any], value))


def _wishes(wishes: Wishes) -> dict[str, Any]:
    known = Wishes.__annotations__
    for name in wishes:
        if name not in known:
            raise RequestError(f"{name} is unknown{_closest(name, known)}", field=name)
    asked: dict[str, Any] = {name: value for name, value in wishes.items() if name != "cache"}
    cache: object = wishes.get("cache", {})
    if not isinstance(cache, Mapping):
        raise RequestError(
            f'cache is {type(cache).__name__}; it must be an object such as {{"report": True}}', field="cache"
        )
    for name, value in cast(Mapping[str, Any], cache).items():
        if name not in CacheWishes.__annotations__:
            raise RequestError(
                f"cache.{name} is unknown{_closest(name, CacheWishes.__annotations__)}", field=f"cache.{name}"
            )
        if name in asked and asked[name] != value:
            raise RequestError(f"{name} and cache.{name} differ; give one of them", field=name)
        asked[name] = value
    if "stop" in wishes:
        stop: object = wishes["stop"]
        asked["stop"] = (
            (stop,) if isinstance(stop, str) else tuple(_listed(stop, "stop", "a string or a list of strings"))
        )
    return asked


def _config(model: str | None, settings: Mapping[str, Any]) -> Config:
    """Settings by their flat names as sections. Raises ConfigError."""
    known = {field.name: section for section in _SECTIONS for field in fields(section)}
    chosen: dict[type, dict[str, Any]] = {section: {} for section in _SECTIONS}
    chosen[ModelConfig]["model"] = model
    for name, value in settings.items():
        if name in {field.name for field in fields(ServerConfig)}:
            raise ConfigError(f"{name} is a setting of the server; an LLM listens nowhere")
        if name not in known:
            raise ConfigError(f"there is no setting {name}{_closest(name, known)}")
        _check_type(name, value, get_type_hints(known[name])[name])
        chosen[known[name]][name] = value
    return Config(
        model=ModelConfig(**chosen[ModelConfig]),
        cache=CacheConfig(**chosen[CacheConfig]),
        schedule=ScheduleConfig(**chosen[ScheduleConfig]),
    )


def _check_type(name: str, value: object, hint: Any) -> None:
    choices = get_args(hint)
    if get_origin(hint) is Literal:
        if value not in choices:
            raise ConfigError(f"{name} is {value!r}; choose from {', '.join(map(str, choices))}")
        return
    types = cast("tuple[type, ...]", choices or (hint,))
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        wanted = " or ".join(kind.__name__ for kind in types)
        raise ConfigError(f"{name} is {value!r}; it must be {wanted.replace('NoneType', 'None')}")


def _closest(name: str, known: Mapping[str, object]) -> str:
    close = get_close_matches(str(name), known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; there are {', '.join(sorted(known))}"
