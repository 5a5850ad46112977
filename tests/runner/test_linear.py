from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from foreword.runner import linear as linear_module
from foreword.runner.linear import (
    Matrix,
    Menu,
    Portion,
    PortionedLinear,
    choose_menu,
    multiply,
    pack,
    pad_rows,
    portion_linears,
)
from tests.runner.models import CONFIGS, build


def menu(*sizes: int) -> Menu:
    """A menu of these sizes; those over 50 are taken turned."""
    return Menu(tuple(Portion(size, "turned" if size > 50 else "plain") for size in sizes))


MENUS = st.sampled_from([menu(16), menu(4, 8, 16, 32), menu(4, 8, 16, 32, 64, 128), menu(4, 16, 256, 1024)])


@given(count=st.integers(1, 3000), menu=MENUS)
def test_portions_hold_all_rows_and_waste_little(count: int, menu: Menu) -> None:
    portions = list(menu.cut(count))
    assert set(portions) <= set(menu.portions)
    room = sum(portion.rows for portion in portions)
    assert sum(portion.rows for portion in portions[:-1]) < count <= room
    assert room - count <= max(16, count / 8)


def test_a_padded_batch_needs_no_more_padding() -> None:
    lesser = (menu(4, 8, 16), menu(4, 8, 16, 32, 64), menu(4, 8, 16, 32, 64, 128, 256))
    for count in range(1, 3000):
        padded = pad_rows(count)
        assert pad_rows(padded) == padded >= count
        assert padded - count <= max(16, count / 4)
        for few in lesser:
            assert sum(portion.rows for portion in few.cut(padded)) == padded


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("menu", [menu(4, 8, 16, 32, 64), menu(16)])
def test_it_computes_what_it_stands_in_for(dtype: torch.dtype, bias: bool, menu: Menu) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(96, 160, bias=bias).to(dtype).requires_grad_(False)
    ours = PortionedLinear(linear, menu)
    x = torch.randn(2, 101, 96).to(dtype)
    for rows in (x, x[:, :1], x[:, :33]):
        assert ours(rows).shape == (*rows.shape[:2], 160)
        assert torch.allclose(ours(rows), linear(rows), atol=1e-5 if dtype == torch.float32 else 0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(192, 576), (576, 1536), (128, 896), (64, 64)])
def test_a_row_has_the_same_bits_among_any_others(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    linear = nn.Linear(shape[1], shape[0], bias=False).to(dtype).requires_grad_(False)
    ours = PortionedLinear(linear, choose_menu(linear.weight))
    x = torch.randn(1100, shape[1]).to(dtype)
    whole = ours(x)
    for count in (1, 2, 3, 5, 9, 16, 17, 40, 63, 65, 100, 129, 257, 400, 513, 700, 1024, 1099):
        assert torch.equal(ours(x[:count]), whole[:count])
        assert torch.equal(ours(x[1100 - count :]), whole[1100 - count :])


@settings(max_examples=8)
@given(st.integers(0, 1000))
def test_the_trial_is_repeatable(seed: int) -> None:
    torch.manual_seed(seed)
    assert choose_menu(torch.randn(64, 128)) == choose_menu(torch.randn(64, 128))


def test_a_models_linears_are_all_replaced() -> None:
    model = build(CONFIGS["llama"]())
    names = set(model.state_dict())
    assert portion_linears(model)
    assert set(model.state_dict()) == names
    assert not any(type(module) is nn.Linear for module in model.modules())


@pytest.mark.parametrize("family", ["gpt2", "deepseek_v3"])
def test_weights_elsewhere_are_owned_up_to(family: str) -> None:
    assert not portion_linears(build(CONFIGS[family]()))


def test_what_differs_is_struck_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that sums in another order from 200 rows on."""
    real = F.linear

    def moody(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if max(x.shape[0], weight.shape[0]) < 200:
            return real(x, weight)
        half = x.shape[1] // 2
        return real(x[:, :half], weight[:, :half]) + real(x[:, half:], weight[:, half:])

    monkeypatch.setattr(linear_module.F, "linear", moody)
    assert max(portion.rows for portion in choose_menu(torch.zeros(96, 192), packs=False).portions) == 128


def test_packed_products_are_used_where_their_bits_agree() -> None:
    """In bfloat16 they do on every processor tried, at least for few rows; in float32 the libraries differ."""
    torch.manual_seed(2)
    weight = torch.randn(192, 576).bfloat16()
    with_copy, without = choose_menu(weight), choose_menu(weight, packs=False)
    assert any(portion.way == "packed" for portion in with_copy.portions)
    assert all(portion.way != "packed" for portion in without.portions)
    x = torch.randn(37, 576).bfloat16()
    matrix = Matrix(weight, pack(weight))
    assert torch.equal(multiply(x, matrix, with_copy), multiply(x, matrix, without))


def test_a_large_model_is_not_there_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(CONFIGS["llama"]()).bfloat16()
    packed = [module for module in model.modules() if isinstance(module, nn.Linear)]
    size = sum(linear.weight.nbytes for linear in packed)
    for limit, twice in ((size, True), (size - 1, False)):
        monkeypatch.setattr(linear_module, "_PACKED_BYTES", limit)
        copy = deepcopy(model)
        assert portion_linears(copy)
        ways = {
            portion.way
            for module in copy.modules()
            if isinstance(module, PortionedLinear)
            for portion in module.menu.portions
        }
        assert ("packed" in ways) == twice


def test_without_the_private_operators_there_is_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*arguments: object) -> torch.Tensor:
        raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute '_reorder_linear_weight'")

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", gone)
    weight = torch.randn(64, 64).bfloat16()
    assert pack(weight) is None
    assert all(portion.way != "packed" for portion in choose_menu(weight).portions)
