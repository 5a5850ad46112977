"""Plans by hand: sequences on a runner, with blocks given out one after the other."""

import random
from collections.abc import Sequence as Seq
from itertools import pairwise

import torch

from foreword.base.ids import BlockId, RequestId
from foreword.base.params import Sampling
from foreword.runner.runner import ModelRunner
from foreword.schedule.plan import Chunk, Draw, Plan

GREEDY = Sampling(max_tokens=1)


class Line:
    """One sequence: its tokens, its block table, and how many tokens are computed."""

    def __init__(self, name: str, tokens: list[int], table: list[BlockId], done: int = 0) -> None:
        self.name = RequestId(name)
        self.tokens = list(tokens)
        self.table = table
        self.done = done


class Desk:
    """Gives blocks out and runs plans."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self._free = [BlockId(i) for i in range(runner.num_blocks)]
        self._step = 0

    def open(self, tokens: list[int], *, like: Line | None = None, reuse: int = 0, room: int = 0) -> Line:
        """A new sequence that takes its first `reuse` full blocks from `like`, with room for `room` more tokens."""
        size = self.runner.block_size
        table = list(like.table[:reuse]) if like else []
        while len(table) * size < len(tokens) + room:
            table.append(self._free.pop(0))
        return Line(f"r{id(table)}", tokens, table, reuse * size)

    def close(self, line: Line, keep: int = 0) -> None:
        """Give a sequence's blocks back, all but the first `keep`."""
        self._free = line.table[keep:] + self._free

    def chunk(self, line: Line, count: int, *, draw: bool = False) -> Chunk:
        """The next `count` tokens of a sequence."""
        end = line.done + count
        table = tuple(line.table[: -(-end // self.runner.block_size)])
        tokens = tuple(line.tokens[line.done : end])
        return Chunk(line.name, line.done, tokens, table, Draw(GREEDY, 0) if draw else None)

    def logits(self, parts: Seq[tuple[Line, int]]) -> list[torch.Tensor]:
        """One step over some tokens of each line: their rows' logits, line by line."""
        chunks = tuple(self.chunk(line, count) for line, count in parts)
        self._step += 1
        rows = self.runner.logits(Plan(self._step, chunks))
        for line, count in parts:
            line.done += count
        return list(rows.split([count for _, count in parts]))

    def whole(self, line: Line, cuts: Seq[int]) -> torch.Tensor:
        """All of a line's remaining rows, computed in chunks of the sizes `cuts`."""
        assert line.done + sum(cuts) == len(line.tokens)
        return torch.cat([self.logits([(line, count)])[0] for count in cuts])

    def answer(self, lines: Seq[Line], count: int) -> list[list[int]]:
        """Greedy tokens for all lines at once; what is not computed of a prompt is computed first."""
        answers: list[list[int]] = [[] for _ in lines]
        for _ in range(count):
            chunks = tuple(self.chunk(line, len(line.tokens) - line.done, draw=True) for line in lines)
            self._step += 1
            result = self.runner.launch(Plan(self._step, chunks)).land()
            for line, answer in zip(lines, answers, strict=True):
                line.done = len(line.tokens)
                answer.append(result.samples[line.name].token)
                line.tokens.append(answer[-1])
        return answers


def random_tokens(count: int, seed: int, vocabulary: int = 512) -> list[int]:
    """Token ids that are not special."""
    source = random.Random(seed)
    return [source.randrange(5, vocabulary) for _ in range(count)]


def random_cuts(count: int, seed: int, most: int = 70) -> list[int]:
    """Sizes of chunks that sum to `count`."""
    source = random.Random(seed)
    marks = {0, count}
    while max(b - a for a, b in pairwise(sorted(marks))) > most:
        marks.add(source.randrange(1, count))
    return [b - a for a, b in pairwise(sorted(marks))]
