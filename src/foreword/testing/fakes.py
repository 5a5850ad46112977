"""A runner without a model and a clock set by hand.

`FakeRunner` keeps real block contents: the cell of a token is a hash of everything before it, as KV is, and a drawn
token depends on every cell of its context. A block that is read before it was written, mixed up or taken over
therefore shows as another answer than `answer()` gives.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b

from foreword.base.ids import PENDING_TOKEN, BlockId, RequestId
from foreword.cache.orders import Compare
from foreword.schedule.plan import Chunk, Plan, Sample, StepResult

VOCABULARY = 7
"""Fake tokens are 0..6; drawn ones too, so that answers collide with prompts now and then."""


class ManualClock:
    """Stands still until told to move."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def now(self) -> float:
        """The time that was set."""
        return self.time_s


def _cell(before: bytes, token: int) -> bytes:
    return blake2b(before + token.to_bytes(4, "little"), digest_size=8).digest()


def _draw(cells: Sequence[bytes]) -> int:
    return blake2b(b"".join(cells), digest_size=2).digest()[0] % VOCABULARY


@dataclass(frozen=True, slots=True)
class World:
    """All that shapes KV besides tokens, from one position on."""

    name: bytes = b""
    start: int = 0

    def at(self, position: int) -> bytes:
        """What it adds to the cell at a position."""
        return self.name if position == self.start else b""


PLAIN = World()


def cells(tokens: Sequence[int], world: World = PLAIN) -> list[bytes]:
    """What the blocks of these tokens hold, one cell a token; `world` stands for the rest."""
    row: list[bytes] = []
    for position, token in enumerate(tokens):
        row.append(_cell((row[-1] if row else b"") + world.at(position), token))
    return row


def answer(
    prompt: Sequence[int], num_tokens: int, stop_ids: frozenset[int] = frozenset(), world: World = PLAIN
) -> list[int]:
    """The tokens that a correct server gives, computed alone and without a cache."""
    row, out = cells(prompt, world), list[int]()
    while len(out) < num_tokens and not (out and out[-1] in stop_ids):
        out.append(_draw(row))
        row.append(_cell(row[-1] + world.at(len(row)), out[-1]))
    return out


class FakeRunner:
    """Computes plans on lists of bytes, like a card: in the order in which they were launched, when somebody waits.

    A step that nobody waits for any more is computed before the next one, whatever it finds. `refuses` decides whether
    launching a plan raises; `fails` whether landing does, half-way through the writing.
    """

    def __init__(self, num_blocks: int, block_size: int, depth: int = 1) -> None:
        self.block_size = block_size
        self.depth = depth
        self.memory: list[list[bytes | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.worlds: dict[RequestId, World] = {}
        """What else shapes a request's KV (its tenant, adapter, ...); nothing unless set."""
        self.fails: Callable[[Plan], bool] = lambda _: False
        self.refuses: Callable[[Plan], bool] = lambda _: False
        self.tokens_computed = 0
        self._under_way: deque[FakeFlight] = deque()
        self._drawn: dict[RequestId, int] = {}
        """By the step that was computed last."""

    def launch(self, plan: Plan) -> "FakeFlight":
        """Queue a plan. Raises RuntimeError when `refuses` says so."""
        if self.refuses(plan):
            raise RuntimeError("planted refusal")
        flight = FakeFlight(self, plan)
        self._under_way.append(flight)
        return flight

    def rest(self) -> bool:
        """There is nothing to get ready."""
        return False

    def land(self, flight: "FakeFlight") -> StepResult:
        """Compute everything up to a step. Raises RuntimeError when `fails` says so."""
        while self._under_way[0] is not flight:
            with suppress(Exception):
                self._compute_next()
        return self._compute_next()

    def _compute_next(self) -> StepResult:
        """Copy, write, draw."""
        plan = self._under_way.popleft().plan
        fails = self.fails(plan)
        read = [(copy, list(self.memory[copy.source][: copy.num_tokens])) for copy in plan.copies]
        for copy, content in read:
            self.memory[copy.target][: copy.num_tokens] = content
        for chunk in plan.chunks[: len(plan.chunks) // 2] if fails else plan.chunks:
            self._write(chunk)
        if fails:
            raise RuntimeError("planted failure")
        self._drawn = {
            chunk.request: _draw([self._read(chunk.blocks, t) for t in range(chunk.end)])
            for chunk in plan.chunks
            if chunk.draw is not None
        }
        return StepResult({request: Sample(token) for request, token in self._drawn.items()})

    def compare(self, pairs: Sequence[Compare]) -> tuple[float, ...]:
        """0 for equal blocks, 1 for others."""
        return tuple(float(self.memory[pair.own] != self.memory[pair.published]) for pair in pairs)

    def _write(self, chunk: Chunk) -> None:
        before = self._read(chunk.blocks, chunk.start - 1) if chunk.start else b""
        world = self.worlds.get(chunk.request, PLAIN)
        for position, token in enumerate(chunk.tokens, chunk.start):
            known = self._drawn[chunk.request] if token == PENDING_TOKEN else token
            before = _cell(before + world.at(position), known)
            self.memory[chunk.blocks[position // self.block_size]][position % self.block_size] = before
            self.tokens_computed += 1

    def _read(self, blocks: Sequence[BlockId], position: int) -> bytes:
        cell = self.memory[blocks[position // self.block_size]][position % self.block_size]
        if cell is None:
            raise AssertionError(f"position {position} is read before it was ever written")
        return cell


class FakeFlight:
    """Implements `engine.sockets.Flight`."""

    recording_s = 0.0

    def __init__(self, runner: FakeRunner, plan: Plan) -> None:
        self._runner = runner
        self.plan = plan

    def land(self) -> StepResult:
        """See `FakeRunner.land`."""
        return self._runner.land(self)
