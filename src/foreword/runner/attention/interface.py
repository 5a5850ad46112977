"""The function that models call, and its way of reading their many conventions."""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from foreword.base.errors import InvariantBroken
from foreword.runner.attention.call import Call, Scoring, Sight, Step

STEP_ARGUMENT = "foreword_step"
"""Keyword of the model's forward under which the step travels."""

_UNDERSTOOD = frozenset({"position_ids", "use_cache", "cache_position", "dropout", "is_causal", "position_embeddings"})


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Registered with the library. query [1, H, T, D], key [1, Hkv, T, D], value [1, Hkv, T, Dv] -> [1, T, H, Dv]."""
    step = cast("Step | None", arguments.pop(STEP_ARGUMENT, None))
    if step is None:
        raise InvariantBroken(f"{type(module).__name__} did not pass the step on to its attention")
    if attention_mask is not None:
        raise InvariantBroken(f"{type(module).__name__} brought a mask of its own")
    call = _read_call(module, (query[0], key[0], value[0]), arguments)
    return step.attend(call)[None], None


def _read_call(module: nn.Module, states: tuple[Tensor, Tensor, Tensor], arguments: Mapping[str, Any]) -> Call:
    query, key, value = states
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise InvariantBroken(f"{type(module).__name__} has no layer index")
    scaling = arguments.get("scaling")
    sinks = arguments.get("s_aux")
    known = _UNDERSTOOD | {"scaling", "sliding_window", "softcap", "s_aux"}
    return Call(
        layer=layer,
        query=query,
        key=key,
        value=value,
        scoring=Scoring(
            scaling=float(query.shape[-1] ** -0.5 if scaling is None else scaling),
            softcap=arguments.get("softcap"),
            sinks=sinks if isinstance(sinks, Tensor) else None,
        ),
        sight=Sight(window=_whole(arguments.get("sliding_window")), chunk=_chunk(module, layer)),
        causal=bool(getattr(module, "is_causal", True)) and arguments.get("is_causal", True) is not False,
        strange=tuple(name for name, given in arguments.items() if name not in known and _weighs(given)),
    )


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _weighs(value: object) -> bool:
    """Whether an argument could change a result: a tensor or a number. Flags and None are about outputs."""
    return isinstance(value, torch.Tensor) or (isinstance(value, (int, float)) and not isinstance(value, bool))


def _chunk(module: nn.Module, layer: int) -> int | None:
    """Size of attention chunks; the library says so only in the mask that it builds, so read the configuration."""
    config = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and kinds[layer] == "chunked_attention":
        return _whole(getattr(config, "attention_chunk_size", None))
    return None
