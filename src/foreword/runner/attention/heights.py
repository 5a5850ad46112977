"""How many rows an attention product is made to have, and the trial that proves the choice on the machine at hand.

As with linear layers (see `runner.linear`), a kernel may sum in another order when it is given more rows. Keys are
fixed by the row's tile already; here the number of query rows is confined to few heights, and `choose_heights` tries
whether they agree in every bit. If they do not, every tile is computed alone with all its rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from foreword.runner.attention.call import LayerFacts, Sight
from foreword.runner.attention.product import attend_product
from foreword.runner.attention.tiles import TILE

_LEAST_ROWS = 8
"""Stacked rows of a product at least; fewer are computed by other kernels."""
_MIDDLE = 16
_TRIAL_KEYS = (64, 512, 1280, 2048)
_TRIAL_SEQUENCES = 8


@dataclass(frozen=True, slots=True)
class Heights:
    """The rows that one sequence may bring to a product."""

    allowed: tuple[int, ...]
    """Rising; the last is TILE."""
    grouped: int
    """Tiles of at most this many rows share a product with others; 0 where none do."""
    exact: bool
    """Whether all of them agree in every bit, as far as the trial went."""

    def of(self, count: int) -> int:
        """The height for `count` rows of one tile."""
        return next(height for height in self.allowed if height >= count)


ALONE = Heights(allowed=(TILE,), grouped=0, exact=True)
"""Every product has the same shape for the same tile: exact by construction, and slow to decode."""


def usual_heights(heads: int, kv_heads: int, *, exact: bool) -> Heights:
    """Few rows for decoding, some for a tail, a whole tile for a prefill."""
    few = -(-_LEAST_ROWS // (heads // kv_heads))
    return Heights(allowed=tuple(sorted({few, _MIDDLE, TILE})), grouped=few, exact=exact)


def choose_heights(facts: LayerFacts, dtype: torch.dtype) -> Heights:
    """The usual heights if they agree for a layer like this one on the CPU at hand, else ALONE."""
    usual = usual_heights(facts.heads, facts.shape.kv_heads, exact=True)
    return usual if all(_agree(facts, usual, count, dtype) for count in _TRIAL_KEYS) else ALONE


def _agree(facts: LayerFacts, heights: Heights, count: int, dtype: torch.dtype) -> bool:
    """Whether a row has the same bits at every height, alone and in company, over `count` keys."""
    shape, group = facts.shape, facts.heads // facts.shape.kv_heads
    generator = torch.Generator().manual_seed(count)
    queries, keys, values = (
        torch.randn(_TRIAL_SEQUENCES, shape.kv_heads, *size, generator=generator).to(dtype)
        for size in ((group, TILE, shape.key_dim), (count, shape.key_dim), (count, shape.value_dim))
    )
    seen = Sight().visible(torch.arange(count - TILE, count), torch.arange(count))
    mask = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, float("-inf"))

    def product(sequences: slice, rows: slice) -> Tensor:
        query = queries[sequences, :, :, rows]
        stacked = mask[rows].repeat(group, 1).expand(query.shape[0], 1, -1, -1)
        return attend_product(facts.scoring, query, keys[sequences], values[sequences], stacked)

    whole = torch.cat([product(slice(i, i + 1), slice(0, TILE)) for i in range(_TRIAL_SEQUENCES)])
    for height in heights.allowed:
        for first in {0, 5, TILE - height} if height < TILE else {0}:
            rows = slice(first, first + height)
            for company in (1, 3, _TRIAL_SEQUENCES):
                if not torch.equal(product(slice(0, company), rows), whole[:company, :, :, rows]):
                    return False
    return True
