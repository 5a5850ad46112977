"""ModelRunner: what computes steps for the engine with a Hugging Face model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor, nn

from foreword.base.errors import ConfigError
from foreword.cache.orders import Compare
from foreword.runner import library
from foreword.runner.attention.backend import Backend
from foreword.runner.attention.call import Step
from foreword.runner.attention.interface import STEP_ARGUMENT
from foreword.runner.batch import Batch, build
from foreword.runner.copies import apply_copies, compare_blocks
from foreword.runner.flight import Flight
from foreword.runner.graphs import Graphs, Recorder
from foreword.runner.memory import KVMemory
from foreword.runner.sampler import draw
from foreword.runner.transfer import send
from foreword.schedule.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """What others need to know about the model being served."""

    name: str
    """What a client calls it."""
    directory: str
    """Local directory or hub id from which the tokenizer can be read."""
    device: str
    dtype: str
    attention: str
    """The backend in use."""
    exact: bool
    """Whether a row's bits depend on its own tokens and positions only: a hit then changes no bit of an answer."""
    vocab_size: int
    max_context: int
    """Positions that the model knows."""
    end_ids: frozenset[int]
    """Token ids that end an answer."""
    num_parameters: int
    flops_per_token: int
    """To compute one token, without attention over earlier ones and without logits."""
    flops_per_token_and_key: int
    """To attend from one token to one earlier position, all layers."""
    ingredients: Mapping[str, str]
    """Everything that changes KV; see `fingerprint`."""
    not_cacheable: str | None = None
    """Why prefixes of this model are not reused; None where they are."""

    def check_context(self, before: "ModelCard") -> None:
        """Raises ConfigError where a model knows other positions than the one before, by which requests are let in."""
        if self.max_context != before.max_context:
            raise ConfigError(
                f"{self.name}: the model that is there now has a context of {self.max_context} tokens, not of"
                f" {before.max_context}; restart"
            )


class ModelRunner:
    """Implements `engine.sockets.Runner`."""

    def __init__(
        self,
        model: nn.Module,
        card: ModelCard,
        memory: KVMemory,
        backend: Backend,
        *,
        room: Callable[[int], int] = int,
        recorder: Recorder | None = None,
    ) -> None:
        """`backend` reads and writes `memory`; `room` says what a step of so many rows is padded to.

        With a recorder steps are recorded and replayed.
        """
        self._model = model
        self._room = room
        self.card = card
        self.memory = memory
        self._backend = backend
        self._keeps_rows = library.forward_takes(type(model), "logits_to_keep")
        self._before: Flight | None = None
        self.depth = 2 if memory.buffer.device.type == "cuda" else 1
        """See `engine.sockets.Runner`. A CPU has nobody else to compute a step while the next one is made."""
        self.record(recorder)
        self.load_again: Callable[[], ModelRunner] | None = None
        """Loads the same place once more, over a small memory of its own. None: it was made of a model in memory."""

    @property
    def num_blocks(self) -> int:
        """Blocks that the memory holds."""
        return self.memory.num_blocks

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.memory.layout.block_size

    @property
    def block_bytes(self) -> int:
        """Bytes of KV in a block, all layers."""
        return self.memory.block_bytes

    @property
    def ingredients(self) -> Mapping[str, str]:
        """Everything that changes KV, for the root of block identity."""
        return self.card.ingredients

    def launch(self, plan: Plan) -> Flight:
        """See `engine.sockets.Runner`. Nothing in here reads a number that the device computes."""
        self.memory.reach(max(chunk.blocks[-1] for chunk in plan.chunks))
        with torch.inference_mode():
            apply_copies(self.memory, plan.copies)
            batch = build(plan.chunks, self._room(plan.num_tokens), self._before)
            recording_s = self._recording_s
            logits = None if self._graphs is None else self._graphs.run(batch)
            if logits is None:
                logits = self._forward(batch)
            drawn = draw(logits[: len(batch.draws)], batch.draws)
        self._before = Flight(batch.drawing, drawn, self._recording_s - recording_s)
        return self._before

    def rest(self) -> bool:
        """See `engine.sockets.Runner`."""
        return self.memory.prepare()

    def reload(self) -> Mapping[str, str]:
        """Load the model again from where it came, while nothing is computed; its ingredients.

        Two sets of weights are in memory for a moment. Raises ConfigError, ModelRefused or what reading a broken file
        raises; then the old model goes on and no block was touched. Otherwise all blocks hold KV of the model before.
        """
        if self.load_again is None:
            raise ConfigError("this model was made in memory; there is nowhere to load it from")
        fresh = self.load_again()
        name, ours, theirs = self.card.name, self.memory, fresh.memory
        for what in ("layout", "buffer.dtype", "buffer.device"):
            if attrgetter(what)(ours) != attrgetter(what)(theirs):
                raise ConfigError(f"{name}: the model that is there now needs another KV memory ({what}); restart")
        fresh.card.check_context(self.card)
        self._model, self._backend = fresh._model, fresh._backend.over(ours)  # noqa: SLF001  one of our own kind
        self.card, self._keeps_rows, self._room = fresh.card, fresh._keeps_rows, fresh._room  # noqa: SLF001
        self._before = None
        self.record(fresh._recorder)  # noqa: SLF001  what was recorded reads the old weights
        return self.ingredients

    def record(self, recorder: Recorder | None) -> None:
        """Forget what was recorded, and record steps with this from now on; None: no longer."""
        device = self.memory.buffer.device
        self._recorder = recorder
        self._graphs = None if recorder is None else Graphs(self._compute, self._backend, recorder, device)

    def compare(self, pairs: Sequence[Compare]) -> tuple[float, ...]:
        """See `engine.sockets.Runner`."""
        with torch.inference_mode():
            return compare_blocks(self.memory, pairs)

    def logits(self, plan: Plan) -> Tensor:
        """Run a plan and return the logits of every row [num_tokens, vocabulary], for tests and checks."""
        with torch.inference_mode():
            apply_copies(self.memory, plan.copies)
            batch = build(plan.chunks, self._room(plan.num_tokens), self._before)
            return self._forward(batch, torch.arange(plan.num_tokens))

    @property
    def _recording_s(self) -> float:
        return 0.0 if self._graphs is None else self._graphs.recording_s

    def _forward(self, batch: Batch, rows: Tensor | None = None) -> Tensor:
        """Logits of `rows`, or of the rows that sample: [rows, vocabulary]."""
        device = self.memory.buffer.device
        step = self._backend.begin(batch.segments, batch.total)
        wanted = batch.last_rows if rows is None else rows
        ids, positions, wanted = (send(numbers, device) for numbers in (batch.ids, batch.positions, wanted))
        batch.fill_in(ids[0])
        return self._compute(ids, positions, step, wanted)

    def _compute(self, ids: Tensor, positions: Tensor, step: Step, wanted: Tensor) -> Tensor:
        arguments: dict[str, object] = {STEP_ARGUMENT: step}
        if self._keeps_rows:
            arguments["logits_to_keep"] = wanted
        logits = library.forward(self._model, ids, positions, **arguments)
        return logits if self._keeps_rows else logits.index_select(0, wanted)
