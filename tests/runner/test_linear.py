import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from foreword.runner.linear import TiledLinear, TileRule, choose_tiles, pad_rows, tile_linears
from tests.runner.models import CONFIGS, build

RULES = st.one_of(st.sampled_from([192, 128, 64, 48, 32, 16]).map(TileRule), st.just(TileRule(16, fixed=True)))


@given(count=st.integers(1, 2000), rule=RULES)
def test_products_have_allowed_widths_and_cover_all_rows(count: int, rule: TileRule) -> None:
    padded = rule.pad(count)
    bounds = list(rule.cut(padded))
    assert padded - count < 16
    assert [first for first, _ in bounds] == [0, *(until for _, until in bounds[:-1])]
    assert bounds[-1][1] == padded
    assert {until - first for first, until in bounds} <= set(rule.widths())


@given(count=st.integers(1, 5000))
def test_a_padded_batch_needs_no_more_padding(count: int) -> None:
    assert pad_rows(pad_rows(count)) == pad_rows(count) >= count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rule", [TileRule(64), TileRule(16, fixed=True)])
def test_it_computes_what_it_stands_in_for(dtype: torch.dtype, bias: bool, rule: TileRule) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(96, 160, bias=bias).to(dtype).requires_grad_(False)
    tiled = TiledLinear(linear, rule)
    x = torch.randn(2, 101, 96).to(dtype)
    assert tiled(x).shape == (2, 101, 160)
    assert torch.allclose(tiled(x), linear(x), atol=1e-5 if dtype == torch.float32 else 0.05)
    assert tiled(x[:, :0]).shape == (2, 0, 160)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(192, 576), (576, 1536), (128, 896), (64, 64)])
def test_a_row_has_the_same_bits_among_any_others(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    linear = nn.Linear(shape[1], shape[0], bias=False).to(dtype).requires_grad_(False)
    tiled = TiledLinear(linear, choose_tiles(linear.weight))
    x = torch.randn(400, shape[1]).to(dtype)
    whole = tiled(x)
    for count in (1, 2, 3, 5, 9, 16, 17, 40, 63, 65, 100, 129, 191, 193, 257, 399):
        assert torch.equal(tiled(x[:count]), whole[:count])
        assert torch.equal(tiled(x[400 - count :]), whole[400 - count :])


@settings(max_examples=8)
@given(st.integers(0, 1000))
def test_the_trial_is_repeatable(seed: int) -> None:
    torch.manual_seed(seed)
    assert choose_tiles(torch.randn(64, 128)) == choose_tiles(torch.randn(64, 128))


def test_a_models_linears_are_all_replaced() -> None:
    model = build(CONFIGS["llama"]())
    names = set(model.state_dict())
    assert tile_linears(model)
    assert set(model.state_dict()) == names
    assert not any(type(module) is nn.Linear for module in model.modules())


@pytest.mark.parametrize("family", ["gpt2", "deepseek_v3"])
def test_weights_elsewhere_are_owned_up_to(family: str) -> None:
    assert not tile_linears(build(CONFIGS[family]()))
