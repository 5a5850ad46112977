"""PlainRunner: steps for models whose state cannot be cut at a prefix. One request a forward, nothing is shared.

A block is here the whole state of one request: the cache object that the model itself makes and carries on. So a block
has room for the whole context, a request never needs a second one, and the pool counts how many requests fit at once.
The state of a request that is over stays until its block goes to another one; there are never more than blocks.

A prompt is computed in one forward and an answer token by token, as `model.generate` does. A request that comes back
after a failed step is computed in the very same pieces again: so its answer does not depend on the failure.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from foreword.base.errors import ConfigError, InvariantBroken
from foreword.base.ids import PENDING_TOKEN, BlockId, RequestId
from foreword.cache.orders import Compare
from foreword.runner import kinds, library
from foreword.runner.account import Account
from foreword.runner.flight import Flight
from foreword.runner.runner import ModelCard
from foreword.runner.sampler import draw
from foreword.runner.turning import Angles, Turning
from foreword.schedule.plan import Chunk, Plan

_REMEMBERED = 4096
"""Requests whose prompt's length is kept for the case that they have to begin again."""


class _State:
    """One request's state, at rest between two forwards."""

    __slots__ = ("angles", "cache", "request", "tokens")

    def __init__(self, request: RequestId, angles: Angles) -> None:
        self.request = request
        self.tokens: list[int] = []
        """What the cache covers."""
        self.cache: object = None
        self.angles = angles


class PlainRunner:
    """Implements `engine.sockets.Runner` without any reuse."""

    depth = 1
    """A state grows by a token that is known here: the library's cache and ours have to agree on what it covers."""

    def __init__(self, model: nn.Module, card: ModelCard, account: Account) -> None:
        self._model = model
        self.card = card
        self.account = account
        self._states: dict[BlockId, _State] = {}
        self._prompts: OrderedDict[RequestId, int] = OrderedDict()
        config = library.config_of(model)
        self._border = kinds.rope_border(config)
        self._turning = Turning(model, by_length=kinds.turns_by_length(config))
        self.load_again: Callable[[], PlainRunner] | None = None
        """Loads the same place once more. None: it was made of a model in memory."""

    @property
    def num_blocks(self) -> int:
        """Requests whose state fits at once."""
        return self.account.num_blocks

    @property
    def block_size(self) -> int:
        """Tokens in a block: the whole context."""
        return self.account.context

    @property
    def block_bytes(self) -> int:
        """Bytes of one request's state at full length."""
        return self.account.block_bytes

    @property
    def ingredients(self) -> Mapping[str, str]:
        """Everything that changes the state, for the root of block identity."""
        return self.card.ingredients

    def launch(self, plan: Plan) -> Flight:
        """See `engine.sockets.Runner`. Chunks are computed one after the other."""
        if plan.copies:
            raise InvariantBroken(f"{self.card.name}: blocks of a plain model are never copied")
        with torch.inference_mode():
            ends = [(chunk, self._compute(chunk)) for chunk in plan.chunks]
            drawing = [(chunk.request, chunk.draw, row) for chunk, row in ends if chunk.draw is not None]
            rows = torch.stack([row for _, _, row in drawing]) if drawing else torch.empty(0, 1)
            drawn = draw(rows, [one for _, one, _ in drawing])
        return Flight(tuple(request for request, _, _ in drawing), drawn)

    def rest(self) -> bool:
        """A state is made when its request comes: there is nothing to get ready."""
        return False

    def compare(self, pairs: Sequence[Compare]) -> tuple[float, ...]:
        """Nothing, of nothing: no block of a plain model is ever published."""
        if pairs:
            raise InvariantBroken(f"{self.card.name}: blocks of a plain model are never compared")
        return ()

    def reload(self) -> Mapping[str, str]:
        """Load the model again from where it came, while nothing is computed; its ingredients.

        Two sets of weights are in memory for a moment. Raises ConfigError, ModelRefused or what reading a broken file
        raises; the old model goes on then.
        """
        if self.load_again is None:
            raise ConfigError("this model was made in memory; there is nowhere to load it from")
        fresh = self.load_again()
        theirs, ours = fresh.account, self.account
        if (theirs.fixed_bytes, theirs.token_bytes) != (ours.fixed_bytes, ours.token_bytes):
            raise ConfigError(f"{self.card.name}: the model that is there now keeps another state; restart")
        fresh.card.check_context(self.card)
        self._model, self._turning = fresh._model, fresh._turning  # noqa: SLF001  one of our own kind
        self.card, self._border = fresh.card, fresh._border  # noqa: SLF001
        self._states.clear()
        return self.ingredients

    def logits(self, tokens: Sequence[int], *, prompt: int) -> list[Tensor]:
        """Of a sequence by itself, [vocabulary] each: after its first `prompt` tokens, and after every later one."""
        state = _State(RequestId("trial"), self._turning.fresh)
        with torch.inference_mode():
            first = self._forward(state, tokens[:prompt])
            return [first, *(self._add(state, token) for token in tokens[prompt:])]

    def state_bytes(self, block: BlockId) -> int:
        """Bytes that the state in a block takes now."""
        return library.cache_bytes(self._states[block].cache)

    # ---------------------------------------------------------------- one chunk

    def _compute(self, chunk: Chunk) -> Tensor:
        """Bring a request's state forward; the logits of the chunk's last row, [vocabulary]."""
        if len(chunk.blocks) != 1:
            raise InvariantBroken(f"{chunk.request}: the state of a plain model's request lies in one block")
        block = chunk.blocks[0]
        if chunk.start == 0:
            return self._begin(block, chunk)
        state = self._states.get(block)
        if state is None or state.request != chunk.request or len(state.tokens) != chunk.start:
            raise InvariantBroken(f"{chunk.request}: block {block} does not hold its first {chunk.start} tokens")
        if len(chunk.tokens) != 1:
            raise InvariantBroken(f"{chunk.request}: a plain model's prompt was cut at {chunk.start}")
        if chunk.tokens[0] == PENDING_TOKEN:
            raise InvariantBroken(f"{chunk.request}: a token is pending, but a plain model's steps do not overlap")
        return self._add(state, chunk.tokens[0])

    def _begin(self, block: BlockId, chunk: Chunk) -> Tensor:
        """A fresh state; what a request generated before it had to begin again is added as it was the first time."""
        first = self._prompts.setdefault(chunk.request, len(chunk.tokens))
        self._prompts.move_to_end(chunk.request)
        if len(self._prompts) > _REMEMBERED:
            self._prompts.popitem(last=False)
        state = self._states[block] = _State(chunk.request, self._turning.fresh)
        row = self._forward(state, chunk.tokens[:first])
        for token in chunk.tokens[first:]:
            row = self._add(state, token)
        return row

    def _add(self, state: _State, token: int) -> Tensor:
        if len(state.tokens) != self._border:
            return self._forward(state, (token,))
        # From here on the model turns all keys otherwise, and those that it holds are turned the former way.
        tokens, state.tokens, state.cache = (*state.tokens, token), [], None
        return self._forward(state, tokens)

    def _forward(self, state: _State, tokens: Sequence[int]) -> Tensor:
        self._turning.put(state.angles)
        start, device = len(state.tokens), next(self._model.parameters()).device
        ids = torch.tensor([tokens], device=device)
        positions = torch.arange(start, start + len(tokens), device=device)[None]
        row, state.cache = library.forward_with_cache(self._model, ids, positions, state.cache)
        state.tokens.extend(tokens)
        state.angles = self._turning.take()
        return row
