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
)


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
def test_the_sizes_are_the_same_every_time(seed: int) -> None:
    """Not the ways, of which the fastest is taken: their bits are the same."""
    torch.manual_seed(seed)
    once, again = (choose_menu(torch.randn(64, 128)) for _ in range(2))
    assert [portion.rows for portion in once.portions] == [portion.rows for portion in again.portions]


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fastest_way_of_those_with_the_same_bits(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(2)
    weight, x = torch.randn(192, 576).to(dtype), torch.randn(37, 576).to(dtype)
    outs: list[torch.Tensor] = []
    for best in ("packed", "turned", "plain"):
        monkeypatch.setattr(linear_module, "_time", lambda matrix, x, way, best=best: float(way != best))
        menu = choose_menu(weight)
        assert any(portion.way == best for portion in menu.portions) or (best, dtype) == ("packed", torch.float32)
        outs.append(multiply(x, Matrix(weight, pack(weight)), menu))
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])
    assert all(portion.way != "packed" for portion in choose_menu(weight, packs=False).portions)


def test_without_the_private_operators_there_is_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*arguments: object) -> torch.Tensor:
        raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute '_reorder_linear_weight'")

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", gone)
    weight = torch.randn(64, 64).bfloat16()
    assert pack(weight) is None
    assert all(portion.way != "packed" for portion in choose_menu(weight).portions)
