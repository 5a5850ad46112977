"""What a model's attention layers are, learned by asking them: one tiny forward that writes everything down.

The configuration alone does not tell: names differ between models, dims differ between layers, and a layer that never
calls attention looks like one that does.
"""

import torch
from torch import Tensor, nn

from foreword.base.errors import InvariantBroken, ModelRefused
from foreword.runner import library
from foreword.runner.attention.call import Call, LayerFacts
from foreword.runner.attention.interface import STEP_ARGUMENT
from foreword.runner.kinds import LAYERS, NotReusable
from foreword.runner.layout import LayerShape


class _Listener:
    """A step that notes each call and attends over its own rows alone."""

    def __init__(self) -> None:
        self.facts: list[LayerFacts] = []
        self.complaints: list[str] = []
        self.looking_ahead: list[int] = []

    def attend(self, call: Call) -> Tensor:
        heads, rows, key_dim = call.query.shape
        kv_heads, _, value_dim = call.value.shape
        shape = LayerShape(kv_heads=kv_heads, key_dim=key_dim, value_dim=value_dim)
        self.facts.append(
            LayerFacts(layer=call.layer, heads=heads, shape=shape, sight=call.sight, scoring=call.scoring)
        )
        if not call.causal:
            self.looking_ahead.append(call.layer)
        if call.strange:
            self.complaints.append(f"layer {call.layer} passes {', '.join(call.strange)}, unknown here")
        if heads % kv_heads or call.key.shape[0] != kv_heads or call.key.shape[2] != key_dim:
            self.complaints.append(f"layer {call.layer} brings keys and values of a shape unknown here")
        return call.query.new_zeros(rows, heads, value_dim)


def survey(name: str, model: nn.Module) -> tuple[LayerFacts, ...]:
    """Ask every layer, in the order of their indices.

    Raises NotReusable with what speaks against keeping the model's state in blocks, and ModelRefused when it looks
    ahead.
    """
    listener = _Listener()
    device = next(model.parameters()).device
    tokens = torch.zeros(1, 2, dtype=torch.long, device=device)
    positions = torch.arange(2, device=device)[None]
    try:
        with torch.inference_mode():
            library.forward(model, tokens, positions, **{STEP_ARGUMENT: listener})
    except (InvariantBroken, TypeError, ValueError, KeyError, RuntimeError) as error:
        raise NotReusable(name, f"its forward does not fit a ragged batch ({error})") from error
    if listener.looking_ahead:
        raise ModelRefused(f"{name}: layers {listener.looking_ahead} look ahead (they are not causal)")
    if listener.complaints:
        raise NotReusable(name, listener.complaints[0])
    seen = [fact.layer for fact in listener.facts]
    if len(set(seen)) != len(seen):
        raise NotReusable(name, "some layer attends more than once a forward")
    kinds = library.layer_kinds(library.config_of(model))
    silent = [i for i, kind in enumerate(kinds) if kind != "dummy" and kind in LAYERS and i not in seen]
    if silent or not seen:
        raise NotReusable(name, f"layers {silent} never reach transformers' AttentionInterface")
    return tuple(sorted(listener.facts, key=lambda fact: fact.layer))
