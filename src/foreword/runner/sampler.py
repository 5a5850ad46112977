"""From logits to tokens.

A draw is a function of the row's logits, the request's seed and the index of the token, and of nothing else: running
the same step again draws the same token, whatever shares the batch. So no random generator is kept.
"""

from collections.abc import Sequence
from hashlib import sha256
from typing import Any, cast

import torch
from torch import Tensor

from foreword.base.params import Sampling
from foreword.schedule.plan import Draw, Sample


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[Sample]:
    """Draw one token for each row of `logits` [rows, vocabulary]."""
    if not draws:
        return []
    logits = logits.float()
    tokens = _integers(logits.argmax(dim=-1))
    for row in [i for i, draw in enumerate(draws) if draw.sampling.temperature > 0]:
        tokens[row] = _draw(logits[row], draws[row])
    return [_report(logits[i], tokens[i], draw.sampling) for i, draw in enumerate(draws)]


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) that depends on the seed and the index of the token only."""
    digest = sha256(f"{seed}/{index}".encode()).digest()
    return (int.from_bytes(digest[:8], "little") >> 11) / 2**53


def _draw(logits: Tensor, draw: Draw) -> int:
    """Inverse-transform sampling over one row [vocabulary]."""
    sampling = draw.sampling
    scaled = logits.double() / sampling.temperature
    tokens: Tensor | None = None
    if 0 < sampling.top_k < scaled.shape[0]:
        scaled, tokens = torch.topk(scaled, sampling.top_k)
    elif sampling.top_p < 1:
        scaled, tokens = torch.sort(scaled, descending=True, stable=True)
    mass = torch.softmax(scaled, dim=-1).cumsum(dim=-1)
    if sampling.top_p < 1:
        # The fewest tokens that reach top_p: all whose predecessors sum to less than it.
        enough = int((mass < sampling.top_p).sum()) + 1
        mass = mass[:enough]
    mark = uniform(draw.sampling.seed, draw.number) * mass[-1]
    # A token of probability 0 has the mass of its predecessor, so right=True never lands on one.
    place = min(int(torch.searchsorted(mass, mark, right=True)), mass.shape[0] - 1)
    return place if tokens is None else int(tokens[place])


def _report(logits: Tensor, token: int, sampling: Sampling) -> Sample:
    if sampling.logprobs is None:
        return Sample(token)
    logprobs = torch.log_softmax(logits, dim=-1)
    top: tuple[tuple[int, float], ...] = ()
    if sampling.logprobs > 0:
        best = torch.topk(logprobs, min(sampling.logprobs, logprobs.shape[0]))
        top = tuple(zip(_integers(best.indices), _numbers(best.values), strict=True))
    return Sample(token, float(logprobs[token]), top)


def _integers(tensor: Tensor) -> list[int]:
    return cast("list[int]", cast(Any, tensor).tolist())


def _numbers(tensor: Tensor) -> list[float]:
    return cast("list[float]", cast(Any, tensor).tolist())
