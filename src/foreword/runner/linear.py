"""Linear layers whose rows do not know how many rows there are.

A matrix library picks its blocking, and with it the order of its sums, by the shape of a product. So a row multiplied
among 30 others may differ in its last bit from the same row among 300, and a prompt computed after a cache hit from
the same prompt computed whole. Two measures take the shape out of it:

- The product is taken as `weight @ x.T`: the long sides are then the weight's, which never change, and the number of
  rows is only the width of the right-hand side, on which the order of sums hardly ever depends.
- Rows are multiplied in tiles, and a tile is padded to one of few widths. `choose_tiles` tries all of those widths
  with each weight's shape on the machine at hand, and takes the largest tile for which they all give the same bits.

If a shape has no such tile, each product gets exactly as many rows as any other, which is equal by construction.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_SMALL = (4, 8)
_GRAIN = 16
_MIDDLE = 64
_TILES = (192, 128, 64, 48, 32, 16)
_DISTINCT_OUTPUTS = 256
_MANY_OUTPUTS = 16384
"""From here on a layer is the one that makes logits: only the rows that sample reach it, so small tiles will do."""


@dataclass(frozen=True, slots=True)
class TileRule:
    """How the rows of one shape of weight are multiplied."""

    rows: int
    """Rows in one product at most."""
    fixed: bool = False
    """Every product has exactly `rows` rows."""

    def widths(self) -> tuple[int, ...]:
        """Every number of rows that a product may have."""
        if self.fixed:
            return (self.rows,)
        return (
            *_SMALL,
            *range(_GRAIN, min(self.rows, _MIDDLE) + 1, _GRAIN),
            *((self.rows,) if self.rows > _MIDDLE else ()),
        )

    def pad(self, count: int) -> int:
        """The number of rows that `count` rows are padded to, so that `cut` has only allowed widths."""
        return -(-count // self.rows) * self.rows if self.fixed else pad_rows(count)

    def cut(self, count: int) -> Iterator[tuple[int, int]]:
        """Bounds of the products for `count` padded rows: as many whole tiles as fit, then smaller ones."""
        row = 0
        while row < count:
            left = count - row
            width = self.rows if left >= self.rows else min(left, _MIDDLE)
            yield row, row + width
            row += width


def pad_rows(count: int) -> int:
    """The number of rows that a batch of `count` rows is padded to: 4, 8, or a multiple of 16."""
    for small in _SMALL:
        if count <= small:
            return small
    return -(-count // _GRAIN) * _GRAIN


class TiledLinear(nn.Module):
    """Stands in for an `nn.Linear`, sharing its parameters."""

    def __init__(self, linear: nn.Linear, rule: TileRule) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = cast("nn.Parameter | None", linear.bias)
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.rule = rule

    def forward(self, x: Tensor) -> Tensor:
        """Take x [..., in_features] to [..., out_features]."""
        rows = x.reshape(-1, self.in_features)
        out = multiply(rows, self.weight, self.rule)
        if self.bias is not None:
            out += self.bias
        return out.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """Shown when the model is printed."""
        return f"in_features={self.in_features}, out_features={self.out_features}, rule={self.rule}"


def multiply(x: Tensor, weight: Tensor, rule: TileRule) -> Tensor:
    """`x @ weight.T` by tiles of rows: x [rows, in], weight [out, in] -> [rows, out]."""
    count = x.shape[0]
    padding = rule.pad(count) - count
    if padding:
        x = F.pad(x, (0, 0, 0, padding))
    bounds = tuple(rule.cut(count + padding))
    if len(bounds) == 1:
        return F.linear(weight, x).t()[:count].contiguous()
    out = x.new_empty(count + padding, weight.shape[0])
    for first, until in bounds:
        out[first:until] = F.linear(weight, x[first:until]).t()
    return out[:count]


def tile_linears(model: nn.Module) -> bool:
    """Put a `TiledLinear` in the place of each `nn.Linear` of a model.

    Returns whether that covers every product with a weight: False where a model keeps weights elsewhere (a mixture's
    experts, for one), whose rows may then still depend on how many there are.
    """
    rules: dict[tuple[torch.Size, torch.dtype], TileRule] = {}
    for parent, name, linear in list(_linears(model)):
        key = (linear.weight.shape, linear.weight.dtype)
        rule = rules.get(key)
        if rule is None:
            rule = rules[key] = choose_tiles(linear.weight)
        setattr(parent, name, TiledLinear(linear, rule))
    return all(_is_covered(module) for module in model.modules())


def choose_tiles(weight: Tensor) -> TileRule:
    """The largest tile with which every width gives the same bits here, for weights of this shape and dtype."""
    tiles = _TILES if weight.shape[0] < _MANY_OUTPUTS else (_GRAIN,)
    stand_in, x = _cancelling(weight, tiles[0])
    for rows in tiles:
        rule = TileRule(rows)
        if _agree(x, rule, lambda part: F.linear(stand_in, part)):
            return rule
    return TileRule(_GRAIN, fixed=True)


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


def _agree(x: Tensor, rule: TileRule, product: Callable[[Tensor], Tensor]) -> bool:
    """Whether a row has the same bits in products of every width of a rule, wherever in the product it stands."""
    whole = torch.cat([product(x[row : row + rule.rows]) for row in range(0, x.shape[0], rule.rows)], dim=1)
    for width in rule.widths():
        parts = [product(x[row : row + width]) for row in (0, x.shape[0] - width)]
        if not (torch.equal(parts[0], whole[:, :width]) and torch.equal(parts[1], whole[:, -width:])):
            return False
    return True


def _linears(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    for parent in model.modules():
        for name, child in parent.named_children():
            # A subclass may compute something else in its forward.
            if type(child) is nn.Linear:
                yield parent, name, child


def _is_covered(module: nn.Module) -> bool:
    if isinstance(module, (TiledLinear, nn.Embedding)):
        return True
    return all(parameter.dim() < 2 for parameter in module.parameters(recurse=False))
