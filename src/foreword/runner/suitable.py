"""Which models may enter the ragged batch, decided from their configuration before any weight is loaded.

The rule is a closed list: what is not known to be restored exactly from blocks of keys and values is refused, by name
and with its reason. "Its attention can be replaced" is not enough: a hybrid's recurrent layers never reach attention
and would be silently wrong.
"""

from collections.abc import Iterator, Mapping
from typing import Any, cast

from torch import nn

from foreword.base.errors import ModelRefused
from foreword.runner import library

_KEPT_KINDS = frozenset({"full_attention", "sliding_attention", "chunked_attention", "dummy"})
_KNOWN_ROPE = frozenset({"default", "linear", "yarn", "llama3", "proportional"})
_BATCH_ROPE = frozenset({"dynamic", "longrope"})


def refuse_unsuitable(name: str, config: library.Config) -> None:
    """Raise ModelRefused with the first reason against the model, if there is one."""
    model_class = library.causal_class(config)
    for reason in _reasons(config, model_class):
        raise ModelRefused(f"{name}: {reason}")


def _reasons(config: library.Config, model_class: type[nn.Module] | None) -> Iterator[str]:
    if getattr(config, "is_encoder_decoder", False):
        yield "it is an encoder-decoder model; only decoder-only language models are served"
    if library.text_config(config) is not config:
        yield "it takes images or sound besides text; only text models are served"
    if model_class is None:
        yield f"{type(config).__name__} is not a causal language model of transformers {library.VERSION}"
        return
    yield from _layer_reasons(config)
    yield from _rope_reasons(config)
    if getattr(config, "quantization_config", None) is not None:
        yield "its weights are quantised, and a quantised product may depend on what shares the batch"
    if getattr(config, "use_bidirectional_attention", False) or getattr(config, "is_causal", True) is False:
        yield "its attention looks ahead (bidirectional), so a prefix's state depends on what follows it"
    if not library.forward_takes(model_class, "position_ids"):
        yield f"{model_class.__name__} does not take positions, so its tokens cannot share a batch"
    if not library.routes_attention(model_class):
        yield f"the attention of {model_class.__name__} does not go through transformers' AttentionInterface"


def _layer_reasons(config: library.Config) -> Iterator[str]:
    try:
        kinds = library.layer_kinds(config)
    except LookupError as error:
        yield f"transformers cannot say what its layers keep ({error})"
        return
    strange = sorted(set(kinds) - _KEPT_KINDS)
    if strange:
        share = sum(kind in strange for kind in kinds)
        yield (
            f"{share} of its {len(kinds)} layers are of kind {', '.join(strange)}, whose state is not a list of keys"
            " and values and cannot be restored from blocks"
        )


def _rope_reasons(config: library.Config) -> Iterator[str]:
    for kind in sorted(_rope_types(config)):
        if kind in _BATCH_ROPE:
            yield (
                f"its rope type is {kind}: the longest request of a batch changes the keys of all others, so what is"
                " cached would depend on company"
            )
        elif kind not in _KNOWN_ROPE:
            yield f"its rope type {kind} is unknown here"


def _rope_types(config: library.Config) -> set[str]:
    """Every rope type that a configuration names: one dict, or one per kind of layer, under the new or old name."""
    found: set[str] = set()
    for field in ("rope_parameters", "rope_scaling"):
        value = getattr(config, field, None)
        if isinstance(value, Mapping):
            found |= _types_in(cast("Mapping[str, Any]", value))
    return found


def _types_in(parameters: Mapping[str, Any]) -> set[str]:
    kind = parameters.get("rope_type", parameters.get("type"))
    if isinstance(kind, str):
        return {kind}
    found: set[str] = set()
    for value in parameters.values():
        if isinstance(value, Mapping):
            found |= _types_in(cast("Mapping[str, Any]", value))
    return found
