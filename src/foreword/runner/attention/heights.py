"""How many rows an attention product is made to have, and the trial that proves the choice on the machine at hand.

As with linear layers (see `runner.linear`), a kernel may sum in another order when it is given more rows. Keys are
fixed by the row's tile already; here the number of query rows is confined to few heights, and `choose_heights` tries
whether they agree in every bit. If they do not, every tile is computed alone with all its rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foreword.runner.attention.call import LayerFacts, Scoring, Sight
from foreword.runner.attention.product import attend_product, is_fused
from foreword.runner.attention.tiles import TILE
from foreword.runner.layout import LayerShape

_LEAST_ROWS = 8
"""Stacked rows of a product at least; fewer are computed by other kernels."""
_MIDDLE = (16, 32)
_TRIAL_KEYS = (64, 320, 960)
"""torch's kernel takes at most 512 keys at a time: these make pieces of 64, 320, 512 and 448."""
_TRIAL_SEQUENCES, _TRIAL_HEADS = 3, 4


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
    return Heights(allowed=tuple(sorted({few, *_MIDDLE, TILE})), grouped=few, exact=exact)


def choose_heights(facts: LayerFacts, dtype: torch.dtype) -> Heights:
    """The usual heights if they agree for a layer like this one on the CPU at hand, else ALONE.

    Where products are spelled out, a library may block them by the number of keys, and a trial would have no end.
    """
    if not is_fused(facts.scoring):
        return ALONE
    usual = usual_heights(facts.heads, facts.shape.kv_heads, exact=True)
    for count in _TRIAL_KEYS:
        for states, scoring in (_sums_cancel(facts, count), _scores_cancel(facts, count)):
            if not _agree(_Trial(scoring, *(state.to(dtype) for state in states)), usual):
                return ALONE
    return usual


def heights_by_layer(facts: tuple[LayerFacts, ...], dtype: torch.dtype, *, on_cpu: bool) -> Mapping[int, Heights]:
    """A rule for each layer, by the library's index; layers that compute alike share one trial.

    Off the CPU nothing is tried and nothing promised.
    """
    if not on_cpu:
        return {fact.layer: usual_heights(fact.heads, fact.shape.kv_heads, exact=False) for fact in facts}
    tried: dict[tuple[int, LayerShape, bool, bool], Heights] = {}
    chosen: dict[int, Heights] = {}
    for fact in facts:
        key = (fact.heads, fact.shape, fact.scoring.softcap is None, fact.scoring.sinks is None)
        if key not in tried:
            tried[key] = choose_heights(fact, dtype)
        chosen[fact.layer] = tried[key]
    return chosen


_States = tuple[Tensor, Tensor, Tensor]
"""Queries [n, kv_heads, group, TILE, dim], keys and values [n, kv_heads, count, dim]."""


def _sums_cancel(facts: LayerFacts, count: int) -> tuple[_States, Scoring]:
    """Each value has its negative under an equal key: the weighted sum is nothing but its rounding.

    See `linear` for why. The keys of the last tile, which some rows do not see, bring no value.
    """
    queries, keys, values = _random(facts, count)
    half = max(count - TILE, 0) // 2
    keys[:, :, half : 2 * half] = keys[:, :, :half].flip(2)
    values[:, :, half : 2 * half] = -values[:, :, :half].flip(2)
    if half:
        values[:, :, 2 * half :] = 0
    return (queries, keys, values), replace(facts.scoring, scaling=facts.shape.key_dim**-0.5)


def _scores_cancel(facts: LayerFacts, count: int) -> tuple[_States, Scoring]:
    """Each term of a score has its negative, and a large scale makes something of the rounding that is left."""
    queries, keys, values = _random(facts, count)
    half = facts.shape.key_dim // 2
    keys[..., half : 2 * half] = keys[..., :half].flip(-1)
    queries[..., half : 2 * half] = -queries[..., :half].flip(-1)
    if facts.shape.key_dim % 2:
        queries[..., -1] = 0
    return (queries, keys, values), replace(facts.scoring, scaling=2.0**20)


def _random(facts: LayerFacts, count: int) -> _States:
    shape, generator = facts.shape, torch.Generator().manual_seed(count)
    group, heads = facts.heads // shape.kv_heads, min(shape.kv_heads, _TRIAL_HEADS)
    # Rounded first, so that a value and its negative stay each other's negative.
    queries, keys, values = (
        torch.randn(_TRIAL_SEQUENCES, heads, *size, generator=generator).bfloat16().float()
        for size in ((group, TILE, shape.key_dim), (count, shape.key_dim), (count, shape.value_dim))
    )
    return queries, keys, values


@dataclass(frozen=True, slots=True)
class _Trial:
    """Example states of a layer, and products over parts of them."""

    scoring: Scoring
    queries: Tensor
    keys: Tensor
    values: Tensor

    def product(self, sequences: slice, rows: slice) -> Tensor:
        """Attend from some rows of the last tile of some sequences."""
        group, count = self.queries.shape[2], self.keys.shape[2]
        seen = Sight().visible(torch.arange(count - TILE, count)[rows], torch.arange(count))
        mask = torch.zeros(seen.shape, dtype=self.queries.dtype).masked_fill(~seen, float("-inf"))
        query = self.queries[sequences, :, :, rows]
        stacked = mask.repeat(group, 1).expand(query.shape[0], 1, -1, -1)
        return attend_product(self.scoring, query, self.keys[sequences], self.values[sequences], stacked)


def _agree(trial: _Trial, heights: Heights) -> bool:
    """Whether a row has the same bits at every height, alone and in company."""
    whole = torch.cat([trial.product(slice(i, i + 1), slice(0, TILE)) for i in range(_TRIAL_SEQUENCES)])
    for height in heights.allowed:
        for first in {5, TILE - height} if height < TILE else {0}:
            rows = slice(first, first + height)
            for company in (1, _TRIAL_SEQUENCES):
                if not torch.equal(trial.product(slice(0, company), rows), whole[:company, :, :, rows]):
                    return False
    return True
