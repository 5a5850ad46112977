import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from foreword.runner import linear as linear_module
from foreword.runner.linear import Menu, Portion, PortionedLinear, choose_menu, pad_rows, portion_linears
from tests.runner.models import CONFIGS, build


def menu(*sizes: int) -> Menu:
    """A menu of these sizes; those over 50 are taken turned."""
    return Menu(tuple(Portion(size, turned=size > 50) for size in sizes))


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
    assert max(portion.rows for portion in choose_menu(torch.zeros(96, 192)).portions) == 128
