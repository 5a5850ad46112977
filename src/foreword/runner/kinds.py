"""The one table of what can be cached, by what a model's layers keep and how its positions turn; docs/models.md has it.

    reusable   a prefix's state is a list of keys and values, one of each per token: any prefix of it can be taken
    masked     the same, but a row sees only some of them: all are stored, and masked
    plain      the state cannot be cut at a prefix: one request a forward, the model's own cache object, no reuse

The rule is a closed list. A kind that is not in it is plain, because "its attention can be replaced" is not enough: a
hybrid's recurrent layers never reach attention and would be silently wrong. Some models cannot be served at all: their
reasons are refusals.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from torch import nn

from foreword.base.errors import ModelRefused
from foreword.runner import library

Use = Literal["reusable", "masked", "plain"]


@dataclass(frozen=True, slots=True)
class Kind:
    """What can be done with one kind of layer, or of positions."""

    use: Use
    why: str
    """With "plain": what speaks against reuse, as a clause about "which". Else: what is kept."""


class NotReusable(ModelRefused):
    """A model that loads, but whose state turned out not to be a list of keys and values. `why` says it in words."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{name}: {why}")
        self.why = why


LAYERS: Mapping[str, Kind] = {
    "full_attention": Kind("reusable", "a key and a value for each token"),
    "sliding_attention": Kind("masked", "keys and values, of which a row sees a window"),
    "chunked_attention": Kind("masked", "keys and values, of which a row sees those of its own chunk"),
    "dummy": Kind("reusable", "nothing of its own"),
    "linear_attention": Kind("plain", "keep a running sum over all tokens, which cannot be cut back to a prefix"),
    "conv": Kind("plain", "keep the last inputs of a convolution, which are those of one prefix only"),
    "hybrid": Kind("plain", "keep a running sum over all tokens beside keys and values"),
    "hybrid_sliding": Kind("plain", "keep a running sum over all tokens beside keys and values"),
    "indexed_attention": Kind("plain", "keep an index of keys beside keys and values"),
    "compressed_sparse_attention": Kind("plain", "keep keys of several tokens merged into one"),
    "heavily_compressed_attention": Kind("plain", "keep keys of many tokens merged into one"),
    "minimax_m3_sparse": Kind("plain", "keep an index of keys beside keys and values"),
    "reference_sliding_attention": Kind(
        "plain", "see the prompt and a window of the answer, so it matters which is which"
    ),
}
"""By the library's name for what a layer keeps."""

_STRANGE = Kind("plain", "are of a kind unknown here")

ROPES: Mapping[str, Kind] = {
    "default": Kind("reusable", "each position turns by its own angle"),
    "linear": Kind("reusable", "each position turns by its own angle"),
    "yarn": Kind("reusable", "each position turns by its own angle"),
    "llama3": Kind("reusable", "each position turns by its own angle"),
    "proportional": Kind("reusable", "each position turns by its own angle"),
    "dynamic": Kind("plain", "turns all keys by the length of the longest request in the batch"),
    "longrope": Kind("plain", "turns all keys otherwise once a request in the batch is long"),
}
"""By the library's name for how positions turn keys (RoPE)."""

_STRANGE_ROPE = Kind("plain", "is unknown here")


def judge(name: str, config: library.Config) -> str | None:
    """Why prefixes of a model cannot be reused, from its configuration alone; None if they can be.

    Raises ModelRefused with the first reason against serving it in any way.
    """
    model_class = library.causal_class(config)
    for reason in _refusals(config, model_class):
        raise ModelRefused(f"{name}: {reason}")
    if model_class is None:
        return None
    why = next(_reasons(config, model_class), None)
    if why is not None and library.cache_argument(model_class) is None:
        raise ModelRefused(
            f"{name}: {why}; and {model_class.__name__} takes no cache of its own from one step to the next"
        )
    return why


def rope_border(config: library.Config) -> int | None:
    """The position from which on a longrope model turns all keys otherwise; None for other models."""
    borders = {
        int(border)
        for kind, parameters in _ropes(config)
        if kind == "longrope"
        and (border := parameters.get("original_max_position_embeddings", _original_positions(config))) is not None
    }
    return min(borders, default=None)


def turns_by_length(config: library.Config) -> bool:
    """Whether the model itself remembers the longest sequence it has seen (RoPE "dynamic")."""
    return any(kind == "dynamic" for kind, _ in _ropes(config))


def stretched_positions(config: library.Config) -> int | None:
    """Positions that a model knows, those that RoPE "dynamic" stretches it to included; None if it names no limit."""
    known = library.known_positions(config)
    if known is None:
        return None
    factors = [float(p.get("factor") or 1.0) for kind, p in _ropes(config) if kind == "dynamic"]
    return int(known * max(1.0, *factors, 1.0))


def _refusals(config: library.Config, model_class: type[nn.Module] | None) -> Iterator[str]:
    if getattr(config, "is_encoder_decoder", False):
        yield "it is an encoder-decoder model; only decoder-only language models are served"
    if library.text_config(config) is not config:
        yield "it takes images or sound besides text; only text models are served"
    if model_class is None:
        yield f"{type(config).__name__} is not a causal language model of transformers {library.VERSION}"
    if getattr(config, "use_bidirectional_attention", False) or getattr(config, "is_causal", True) is False:
        yield "its attention looks ahead (bidirectional), so a prefix's state depends on what follows it"


def _reasons(config: library.Config, model_class: type[nn.Module]) -> Iterator[str]:
    yield from _layer_reasons(config)
    for rope in sorted({kind for kind, _ in _ropes(config)}):
        kind = ROPES.get(rope, _STRANGE_ROPE)
        if kind.use == "plain":
            yield f"its rope type {rope} {kind.why}"
    if getattr(config, "quantization_config", None) is not None:
        yield "its weights are quantised, and a quantised product may depend on what shares the batch"
    if not library.forward_takes(model_class, "position_ids"):
        yield f"{model_class.__name__} does not take positions, so its tokens cannot share a batch"
    if not library.routes_attention(model_class):
        yield f"the attention of {model_class.__name__} does not go through transformers' AttentionInterface"


def _layer_reasons(config: library.Config) -> Iterator[str]:
    try:
        names = library.layer_kinds(config)
    except LookupError as error:
        yield f"transformers cannot say what its layers keep ({error})"
        return
    for name in dict.fromkeys(names):
        kind = LAYERS.get(name, _STRANGE)
        if kind.use == "plain":
            yield f"{names.count(name)} of its {len(names)} layers ({name}) {kind.why}"


def _original_positions(config: library.Config) -> object:
    return getattr(config, "original_max_position_embeddings", None)


def _ropes(config: library.Config) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every rope type of a configuration with its parameters: one, or one for each kind of layer."""
    for field in ("rope_parameters", "rope_scaling"):
        value = getattr(config, field, None)
        if isinstance(value, Mapping):
            yield from _types_in(cast("Mapping[str, Any]", value))


def _types_in(parameters: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    kind = parameters.get("rope_type", parameters.get("type"))
    if isinstance(kind, str):
        yield kind, parameters
        return
    for value in parameters.values():
        if isinstance(value, Mapping):
            yield from _types_in(cast("Mapping[str, Any]", value))
