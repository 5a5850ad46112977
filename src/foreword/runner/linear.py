"""Linear layers whose rows do not know how many rows there are.

A matrix library picks its blocking, and with it the order of its sums, by the shape of a product. So a row multiplied
among 30 others may differ in its last bit from the same row among 300, and a prompt computed after a cache hit from
the same prompt computed whole. Here rows are multiplied in portions of few sizes, and `choose_menu` tries every size
with each weight's shape on the machine at hand: what is not equal in every bit to products of 16 rows is struck off.

A portion can be taken in three ways. *Plain* is `x @ weight.T`. *Turned* is `(weight @ x.T).T`: the long sides are the
weight's, which never change, and the number of rows is only the width of the right-hand side, on which the order of
sums hardly ever depends; plain saves turning the result around. *Packed* reads a second copy of the weight that oneDNN
has laid out for its kernels once and for all, which saves doing it at every product. All are tried, and of those with
the same bits the fastest is taken: it may be another one at the next start, and nobody can tell from an answer.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_SMALL = (4, 8)
_GRAIN = 16
_SIZES = (*_SMALL, _GRAIN, 32, 64, 128, 256, 512, 768, 1024)
_FEW_ROWS, _REPEATS = 32, 3
"""Products of few rows are over so soon that they are timed more than once."""
_TRIAL_ELEMENTS = 2**31
"""Rows of the largest size tried, times elements of the weight: a large weight gains nothing from a large portion."""
_LOGITS_OUTPUTS, _LOGITS_ROWS = 16384, 64
"""A layer with that many outputs makes logits: only the rows that sample reach it, so small portions will do."""
_DISTINCT_OUTPUTS = 256
PACKED_BYTES = 2**30
"""Of a model's weights, so many may be there a second time. Larger models gain less: their products take longer."""

Way = Literal["plain", "turned", "packed"]


@dataclass(frozen=True, slots=True)
class Portion:
    """One product."""

    rows: int
    way: Way


@dataclass(frozen=True, slots=True)
class Menu:
    """The products that may be used for one shape of weight, by rising number of rows."""

    portions: tuple[Portion, ...]

    def cut(self, count: int) -> Iterator[Portion]:
        """Portions that together hold `count` rows; only the last may have room to spare."""
        left = count
        while left > 0:
            portion = self._next(left)
            yield portion
            left -= portion.rows

    def _next(self, left: int) -> Portion:
        """One that takes all that is left and wastes little, else the largest that is filled."""
        enough = next((portion for portion in self.portions if portion.rows >= left), None)
        if enough is not None and (enough.rows <= 2 * _GRAIN or 8 * enough.rows <= 9 * left):
            return enough
        return next((portion for portion in reversed(self.portions) if portion.rows <= left), self.portions[0])


def pad_rows(count: int) -> int:
    """The number of rows that a batch of `count` rows is padded to, once for all its layers.

    Padding that number again changes nothing, and every size is a sum of smaller ones: so a layer pads no further, even
    one that lacks some sizes.
    """
    everything = Menu(tuple(Portion(size, "plain") for size in _SIZES))
    padded = sum(portion.rows for portion in everything.cut(count))
    return padded if padded == count else pad_rows(padded)


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight [out, in] in the forms that products read."""

    plain: Tensor
    packed: Tensor | None
    """oneDNN's own layout of it; None where that cannot be had or is not wanted."""

    def product(self, x: Tensor, way: Way) -> Tensor:
        """`x @ weight.T`: x [rows, in] -> [rows, out]."""
        if way == "packed" and self.packed is not None:
            return _onednn()._linear_pointwise.default(x, self.packed, None, "none", [], "")  # noqa: SLF001
        return F.linear(self.plain, x).t() if way == "turned" else F.linear(x, self.plain)


class StandIn(nn.Module):
    """Stands in for an `nn.Linear`, sharing its parameters."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = cast("nn.Parameter | None", linear.bias)
        self.in_features = linear.in_features
        self.out_features = linear.out_features

    def extra_repr(self) -> str:
        """Shown when the model is printed."""
        return f"in_features={self.in_features}, out_features={self.out_features}"


class PortionedLinear(StandIn):
    """Its product is made by torch, in portions."""

    def __init__(self, linear: nn.Linear, menu: Menu) -> None:
        super().__init__(linear)
        self.menu = menu
        packs = any(portion.way == "packed" for portion in menu.portions)
        self._matrix = Matrix(linear.weight, pack(linear.weight) if packs else None)

    def forward(self, x: Tensor) -> Tensor:
        """Take x [..., in_features] to [..., out_features]."""
        out = multiply(x.reshape(-1, self.in_features), self._matrix, self.menu)
        if self.bias is not None:
            out += self.bias
        return out.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """Shown when the model is printed."""
        return f"{super().extra_repr()}, menu={self.menu}"


def multiply(x: Tensor, matrix: Matrix, menu: Menu) -> Tensor:
    """`x @ weight.T`, portion by portion: x [rows, in] -> [rows, out]."""
    count = x.shape[0]
    portions = tuple(menu.cut(count))
    padding = sum(portion.rows for portion in portions) - count
    if padding:
        x = F.pad(x, (0, 0, 0, padding))
    if len(portions) == 1:
        return matrix.product(x, portions[0].way)[:count].contiguous()
    out = x.new_empty(count + padding, matrix.plain.shape[0])
    first = 0
    for portion in portions:
        until = first + portion.rows
        out[first:until] = matrix.product(x[first:until], portion.way)
        first = until
    return out[:count]


def pack(weight: Tensor) -> Tensor | None:
    """The weight in oneDNN's layout; None where torch does not have the (private) operators or they refuse it."""
    try:
        packed = _onednn()._reorder_linear_weight(weight.detach(), _GRAIN)  # noqa: SLF001
        Matrix(weight, packed).product(weight.new_zeros(1, weight.shape[1]), "packed")
    except (AttributeError, NotImplementedError, RuntimeError):
        return None
    return packed


def _onednn() -> Any:
    """Operators that torch keeps for its own compiler: they may change with any release, so `pack` tries them first."""
    return torch.ops.mkldnn


def choose_menus(linears: Iterable[nn.Linear], *, packs: bool) -> Iterator[tuple[nn.Linear, Menu]]:
    """Each with the products of its weight; weights of one shape and dtype are tried once."""
    menus: dict[tuple[torch.Size, torch.dtype], Menu] = {}
    for linear in linears:
        key = (linear.weight.shape, linear.weight.dtype)
        menu = menus.get(key)
        if menu is None:
            menu = menus[key] = choose_menu(linear.weight, packs=packs)
        yield linear, menu


def choose_menu(weight: Tensor, *, packs: bool = True) -> Menu:
    """All products that give the same bits here as a plain one of 16 rows, for weights of this shape and dtype."""
    most = _LOGITS_ROWS if weight.shape[0] >= _LOGITS_OUTPUTS else max(_LOGITS_ROWS, _TRIAL_ELEMENTS // weight.numel())
    sizes = [size for size in _SIZES if size <= most]
    stand_in, x = _cancelling(weight, sizes[-1])
    matrix = Matrix(stand_in, pack(stand_in) if packs else None)
    wanted = torch.cat([F.linear(stand_in, part) for part in _split(x)], dim=1).t()
    portions = (_fastest(matrix, x[-size:], wanted[-size:]) for size in sizes)
    return Menu(tuple(portion for portion in portions if portion is not None))


def _fastest(matrix: Matrix, x: Tensor, wanted: Tensor) -> Portion | None:
    """The fastest product of these rows with the bits wanted; None if none has them."""
    size, times = x.shape[0], dict[Way, float]()
    for way in ("packed", "turned", "plain"):
        if way == "packed" and matrix.packed is None:
            continue
        # The first run also warms what the next ones are to show.
        if torch.equal(matrix.product(x, way), wanted):
            times[way] = min(_time(matrix, x, way) for _ in range(_REPEATS if size <= _FEW_ROWS else 1))
    return Portion(size, min(times, key=times.__getitem__)) if times else None


def _time(matrix: Matrix, x: Tensor, way: Way) -> float:
    start = perf_counter()
    matrix.product(x, way).contiguous()
    return perf_counter() - start


def _split(x: Tensor) -> Iterator[Tensor]:
    for row in range(0, x.shape[0], _GRAIN):
        yield x[row : row + _GRAIN]


def _cancelling(weight: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """A stand-in of a weight's shape and rows to multiply it with, whose products are nothing but rounding.

    Each term has its negative somewhere else in the sum, so the exact sum is zero and what comes out is the error of
    the order of summing. Two orders that a usual product would tell apart once in ten thousand times differ everywhere.
    """
    outputs, inputs = weight.shape
    half, distinct = inputs // 2, min(outputs, _DISTINCT_OUTPUTS)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(half, generator=generator)
    left, right = torch.randn(distinct, half, generator=generator), torch.randn(rows, half, generator=generator)
    stand_in, x = torch.zeros(distinct, inputs), torch.zeros(rows, inputs)
    stand_in[:, : 2 * half] = torch.cat((left, left[:, order]), dim=1)
    x[:, : 2 * half] = torch.cat((right, -right[:, order]), dim=1)
    repeated = stand_in.to(weight).repeat(-(-outputs // distinct), 1)[:outputs]
    return repeated.contiguous(), x.to(weight)
