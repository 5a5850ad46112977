"""From logits to tokens, on the device and without looking at what comes out there.

A draw is a function of the row's logits, the request's seed and the index of the token, and of nothing else: running
the same step again draws the same token, whatever shares the batch. So no random generator is kept, and rows are
computed together only where each of them is computed as it would be alone: those that keep equally many tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, cast

import torch
from torch import Tensor

from foreword.base.params import Sampling
from foreword.runner.transfer import Arrival, send
from foreword.schedule.plan import Draw, Sample


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a step draws."""

    tokens: Tensor
    """[rows] on the device: the next step can read them there."""
    arrival: Arrival
    """The same and three tensors for each of `told`, on their way to the host."""
    told: tuple[list[int], ...] = ()
    """Rows of which log-probabilities are told, those that tell equally many together."""

    def samples(self) -> list[Sample]:
        """One for each row, when they are here."""
        tokens, *rest = self.arrival.wait()
        samples = [Sample(token) for token in _integers(tokens)]
        parts = (rest[i : i + 3] for i in range(0, len(rest), 3))
        for rows, (own, best, values) in zip(self.told, parts, strict=True):
            for row, logprob, ids, theirs in zip(rows, _list(own), _list(best), _list(values), strict=True):
                samples[row] = Sample(samples[row].token, logprob, tuple(zip(ids, theirs, strict=True)))
        return samples


def draw(logits: Tensor, draws: Sequence[Draw]) -> Drawn:
    """Draw one token for each row of `logits` [rows, vocabulary]."""
    logits = logits.float()
    tokens = logits.argmax(dim=-1)
    warm: dict[int, list[int]] = {}
    told: dict[int, list[int]] = {}
    for row, (sampling, _) in enumerate(draws):
        if sampling.temperature > 0:
            warm.setdefault(_kept(sampling, logits.shape[1]), []).append(row)
        if sampling.logprobs is not None:
            told.setdefault(min(sampling.logprobs, logits.shape[1]), []).append(row)
    for kept, rows in warm.items():
        where = send(torch.tensor(rows), tokens.device)
        numbers = send(_numbers([draws[row] for row in rows]), tokens.device)
        tokens.index_copy_(0, where, _pick(logits.index_select(0, where), numbers, kept))
    going = [tokens]
    for count, rows in told.items():
        going += _report(logits, tokens, send(torch.tensor(rows), tokens.device), count)
    return Drawn(tokens, Arrival(going), tuple(told.values()))


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) that depends on the seed and the index of the token only."""
    digest = sha256(f"{seed}/{index}".encode()).digest()
    return (int.from_bytes(digest[:8], "little") >> 11) / 2**53


_UNSORTED = 0


def _kept(sampling: Sampling, vocabulary: int) -> int:
    """How many of a row's tokens are put in order, best first, to draw from; `_UNSORTED` where no order is needed."""
    if 0 < sampling.top_k < vocabulary:
        return sampling.top_k
    return vocabulary if sampling.top_p < 1 else _UNSORTED


def _numbers(draws: Sequence[Draw]) -> Tensor:
    """[3, rows] in float64: temperature, the sum of probabilities that is enough, and a uniform number."""
    rows = [
        (sampling.temperature, sampling.top_p if sampling.top_p < 1 else float("inf"), uniform(sampling.seed, number))
        for sampling, number in draws
    ]
    return torch.tensor(rows, dtype=torch.float64).T.contiguous()


def _pick(logits: Tensor, numbers: Tensor, kept: int) -> Tensor:
    """Inverse-transform sampling over rows [n, vocabulary], a token of each, [n]. `numbers` as from `_numbers`."""
    temperature, enough, chance = numbers[:, :, None]
    # Less the best one first: a logit divided by next to nothing is infinite, and the best one's 0 is 0 by anything.
    scaled, order = (logits.double() - logits.amax(dim=-1, keepdim=True)) / temperature, None
    if kept == logits.shape[1]:
        scaled, order = torch.sort(scaled, descending=True, stable=True)
    elif kept != _UNSORTED:
        scaled, order = torch.topk(scaled, kept)
    mass = torch.softmax(scaled, dim=-1).cumsum(dim=-1)
    # The fewest tokens that reach it: all whose predecessors sum to less.
    last = (mass < enough).sum(dim=-1, keepdim=True).clamp_(max=mass.shape[1] - 1)
    # A token of probability 0 has the mass of its predecessor, so right=True never lands on one.
    place = torch.searchsorted(mass, chance * mass.gather(1, last), right=True)
    place = torch.minimum(place, last)
    return (place if order is None else order.gather(1, place))[:, 0]


def _report(logits: Tensor, tokens: Tensor, rows: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """For some rows the log-probabilities of their tokens [n], of the `count` best ones [n, count], and those."""
    logprobs = torch.log_softmax(logits.index_select(0, rows), dim=-1)
    own = logprobs.gather(1, tokens.index_select(0, rows)[:, None])[:, 0]
    best = torch.topk(logprobs, count)
    return own, best.indices, best.values


def _integers(tensor: Tensor) -> list[int]:
    return cast("list[int]", _list(tensor))


def _list(tensor: Tensor) -> list[Any]:
    return cast("list[Any]", cast(Any, tensor).tolist())
