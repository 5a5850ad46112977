"""What a request may ask for, and the errors that name the field and the limit when it asks for more."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from random import SystemRandom
from typing import cast

from foreword.base.config import MAX_TTL_S
from foreword.base.errors import RequestError, amount
from foreword.base.params import Keep, Reach, Sampling
from foreword.front.ask import Ask
from foreword.schedule.admission import Limits

MAX_TEMPERATURE = 2.0
MAX_STOPS = 4
MAX_LOGPROBS = 20
MAX_TOKENS = 2**31 - 1
MAX_PRIORITY = 100
MAX_KEY_CHARS = 64
MIN_SEED, MAX_SEED = -(2**63), 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What the served model and its pool allow."""

    limits: Limits
    """How long a request may be."""
    vocab_size: int
    """Ids are 0 <= id < vocab_size: the rows of the model's embedding."""
    end_ids: frozenset[int] = frozenset()
    """Ids that end an answer, unless the request ignores them."""


def check_ids(ids: Sequence[int], vocab_size: int) -> None:
    """Refuse anything but integers within the vocabulary. Raises RequestError naming `prompt`."""
    try:
        wide = array("q", ids)  # checks a hundred thousand ids in a millisecond
        good = not wide or (min(wide) >= 0 and max(wide) < vocab_size)
    except (TypeError, OverflowError):
        good = False
    if not good:
        place = next(i for i, token in enumerate(ids) if not _is_id(token, vocab_size))
        raise RequestError(
            f"prompt has {_shown(ids[place])} at position {place}; token ids are integers from 0 to {vocab_size - 1}",
            field="prompt",
        )


def sampling_of(ask: Ask, prompt_tokens: int, bounds: Bounds) -> Sampling:
    """The request's sampling, checked. Raises RequestError naming the field and its limit."""
    if ask.max_tokens is None:
        max_tokens = max(1, bounds.limits.max_context - prompt_tokens)
    else:
        max_tokens = _integer("max_tokens", ask.max_tokens, 1, MAX_TOKENS)
    bounds.limits.check(prompt_tokens, max_tokens)
    _check_stop(ask.stop)
    _check_bool("ignore_eos", ask.ignore_eos)
    seed = _fresh_seed() if ask.seed is None else _integer("seed", ask.seed, MIN_SEED, MAX_SEED)
    top_k = _integer("top_k", ask.top_k, 0, None)
    return Sampling(
        max_tokens=0 if ask.warm else max_tokens,
        temperature=_number("temperature", ask.temperature, 0.0, MAX_TEMPERATURE),
        top_p=_top_p(ask.top_p),
        top_k=0 if top_k >= bounds.vocab_size else top_k,
        seed=seed,
        logprobs=None if ask.logprobs is None else _integer("logprobs", ask.logprobs, 0, MAX_LOGPROBS),
        stop_ids=frozenset() if ask.ignore_eos else bounds.end_ids,
    )


def reach_of(ask: Ask, prompt_tokens: int) -> Reach:
    """How far the request reads and stores. Raises RequestError when its `prefix_length` is past the prompt."""
    for field, value in (("read", ask.read), ("store", ask.store), ("report", ask.report)):
        _check_bool(field, value)
    length = ask.prefix_length
    if length is not None and _integer("prefix_length", length, 0, None) > prompt_tokens:
        raise RequestError(
            f"prefix_length is {_shown(length)}; the prompt has {amount(prompt_tokens, 'token')},"
            " and a prefix cannot be longer",
            field="prefix_length",
        )
    return Reach(read=ask.read, read_tokens=length, store_tokens=length if ask.store else 0)


def keep_of(ask: Ask) -> Keep:
    """How long and how dearly the request's blocks are kept. Raises RequestError naming `ttl` or `priority`."""
    priority = None if ask.priority is None else _integer("priority", ask.priority, 0, MAX_PRIORITY)
    return Keep(ttl_s=ttl_of(ask.ttl), priority=priority)


def ttl_of(value: object) -> float | None:
    """Seconds for which something is kept. Raises RequestError naming `ttl`."""
    ttl = None if value is None else _number("ttl", value, 0.0, MAX_TTL_S)
    if ttl == 0.0:
        raise RequestError("ttl is 0; it is a number of seconds above 0", field="ttl")
    return ttl


def key_of(ask: Ask) -> str:
    """The caller's label. Raises RequestError naming `key`."""
    if ask.key is None:
        return ""
    if not isinstance(cast(object, ask.key), str) or not 0 < len(ask.key) <= MAX_KEY_CHARS:
        raise RequestError(f"key is {_shown(ask.key)}; it is a text of at most {MAX_KEY_CHARS} characters", field="key")
    return ask.key


def _top_p(value: object) -> float:
    top_p = _number("top_p", value, 0.0, 1.0)
    if top_p == 0.0:
        raise RequestError("top_p is 0; it must be above 0 and at most 1", field="top_p")
    return top_p


def _check_bool(field: str, value: object) -> None:
    if not isinstance(value, bool):
        raise RequestError(f"{field} is {_shown(value)}; it must be true or false", field=field)


def _check_stop(stop: object) -> None:
    if not isinstance(stop, tuple):
        raise RequestError(f"stop is {type(stop).__name__}; it must be a list of strings", field="stop")
    texts = cast(tuple[object, ...], stop)
    if len(texts) > MAX_STOPS:
        raise RequestError(f"stop has {len(texts)} strings; at most {MAX_STOPS} are allowed", field="stop")
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise RequestError(f"stop.{i} is {type(text).__name__}; it must be a string", field="stop")
        if not text:
            raise RequestError(f"stop.{i} is empty; a stop string has at least one character", field="stop")


def _integer(field: str, value: object, least: int, most: int | None) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise RequestError(f"{field} is {_shown(value)}; it must be an integer", field=field)
    if value < least:
        raise RequestError(f"{field} is {_shown(value)}; it must be at least {least}", field=field)
    if most is not None and value > most:
        raise RequestError(f"{field} is {_shown(value)}; it must be at most {most}", field=field)
    return value


def _number(field: str, value: object, least: float, most: float) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise RequestError(f"{field} is {_shown(value)}; it must be a number", field=field)
    if not least <= value <= most:  # NaN is between nothing
        raise RequestError(f"{field} is {_shown(value)}; it must be between {least:g} and {most:g}", field=field)
    return float(value)


def _is_id(value: object, vocab_size: int) -> bool:
    return isinstance(value, int) and 0 <= value < vocab_size


def _shown(value: object) -> str:
    """A value short enough for a message; Python refuses to print integers of thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 128:
        return "a very large integer"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _fresh_seed() -> int:
    return SystemRandom().getrandbits(63)
