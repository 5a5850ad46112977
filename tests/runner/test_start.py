"""What happens once, when a model is given its runner: survey, choice of heights, trial."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from foreword.base.errors import InvariantBroken, ModelRefused
from foreword.runner import library
from foreword.runner.attention.call import LayerFacts, Scoring, Sight
from foreword.runner.attention.heights import ALONE, choose_heights, usual_heights
from foreword.runner.attention.interface import attend
from foreword.runner.layout import LayerShape
from foreword.runner.survey import survey
from tests.runner.models import CONFIGS, WINDOW, build, runner_around


def surveyed(family: str) -> tuple[LayerFacts, ...]:
    library.register_attention(attend)
    model = build(CONFIGS[family]())
    library.use_attention(model)
    return survey(family, model)


def test_what_layers_say() -> None:
    facts = surveyed("gemma2")
    assert [fact.layer for fact in facts] == [0, 1, 2]
    assert [fact.sight.window for fact in facts] == [WINDOW, None, WINDOW]
    assert {fact.scoring.softcap for fact in facts} == {50.0}
    assert {(fact.heads, fact.shape.kv_heads, fact.shape.key_dim) for fact in facts} == {(4, 2, 16)}


def test_other_shapes_and_sights() -> None:
    assert {fact.shape for fact in surveyed("deepseek_v3")} == {LayerShape(kv_heads=4, key_dim=24, value_dim=16)}
    assert all(fact.scoring.sinks is not None for fact in surveyed("gpt_oss"))
    assert Sight(chunk=32) in {fact.sight for fact in surveyed("llama4")}


def refusal(change: Any) -> str:
    library.register_attention(attend)
    model = build(CONFIGS["llama"]())
    library.use_attention(model)
    change(model)
    with pytest.raises(ModelRefused) as caught:
        survey("odd", model)
    return str(caught.value)


def layer(model: Any, index: int = 1) -> Any:
    return model.model.layers[index].self_attn


def test_layers_that_do_not_fit() -> None:
    assert "causal" in refusal(lambda m: setattr(layer(m), "is_causal", False))
    assert "more than once" in refusal(lambda m: setattr(layer(m), "layer_idx", 0))
    assert "no layer index" in refusal(lambda m: setattr(layer(m), "layer_idx", None))

    def mute(model: Any) -> None:
        layer(model).forward = lambda hidden_states, **rest: (hidden_states, None)

    assert "[1] never reach" in refusal(mute)


def test_arguments_that_nobody_understands() -> None:
    def add(model: Any) -> None:
        inner = layer(model).forward
        layer(model).forward = lambda **given: inner(**given, position_bias=torch.ones(1))

    assert "passes position_bias, unknown here" in refusal(add)


def test_a_step_that_got_lost() -> None:
    states = torch.zeros(1, 2, 3, 4)
    with pytest.raises(InvariantBroken, match="did not pass the step on"):
        attend(nn.Identity(), states, states, states, None)
    with pytest.raises(InvariantBroken, match="mask of its own"):
        attend(nn.Identity(), states, states, states, torch.zeros(1), foreword_step=SimpleNamespace())


class Counting(nn.Module):
    """A wrong model: counts positions by itself and so ignores what came before."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner
        self.config = inner.config

    def get_output_embeddings(self) -> nn.Module:
        return self.inner.get_output_embeddings()

    def set_attn_implementation(self, name: str) -> None:
        self.inner.set_attn_implementation(name)

    def forward(self, input_ids: Any, position_ids: Any, **rest: Any) -> Any:
        return self.inner(input_ids=input_ids, position_ids=torch.arange(input_ids.shape[1])[None], **rest)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_trial_finds_a_model_that_counts_by_itself(dtype: torch.dtype) -> None:
    model = build(CONFIGS["llama"](), dtype)
    runner_around(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # so that attention matters
    with pytest.raises(ModelRefused, match="logits are off by"):
        runner_around(Counting(model))


def test_no_room_for_a_trial() -> None:
    assert runner_around(build(CONFIGS["llama"]()), blocks=1).num_blocks == 1


def test_heights() -> None:
    assert usual_heights(9, 3, exact=True).allowed == (3, 16, 32, 64)
    assert usual_heights(4, 4, exact=True).allowed == (8, 16, 32, 64)
    assert usual_heights(64, 2, exact=True).allowed == (1, 16, 32, 64)
    heights = usual_heights(9, 3, exact=True)
    assert [heights.of(count) for count in (1, 3, 4, 16, 17, 33)] == [3, 3, 16, 16, 32, 64]
    assert [ALONE.of(count) for count in (1, 64)] == [64, 64]


def test_products_that_are_spelled_out_are_made_alone() -> None:
    shape = LayerShape(kv_heads=2, key_dim=16, value_dim=16)
    facts = LayerFacts(layer=0, heads=4, shape=shape, sight=Sight(), scoring=Scoring(0.25, softcap=50.0))
    assert choose_heights(facts, torch.float32) == ALONE


def test_heights_that_disagree_fall_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that adds something for short products is found out, and the answers stay right."""
    from foreword.runner.attention import heights, product

    real = product.F.scaled_dot_product_attention

    def moody(query: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        return real(query, *rest, **named) * (1 + 1e-6 * (query.shape[2] < 64))

    monkeypatch.setattr(product.F, "scaled_dot_product_attention", moody)
    shape = LayerShape(kv_heads=2, key_dim=16, value_dim=16)
    facts = LayerFacts(layer=0, heads=4, shape=shape, sight=Sight(), scoring=Scoring(0.25))
    assert heights.choose_heights(facts, torch.float32) == ALONE
