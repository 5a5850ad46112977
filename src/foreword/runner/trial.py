"""A trial at the start: does the model answer in our steps as it does by itself?

What a model's configuration and calls say about it is believed only after this. One sequence is computed in two chunks
next to another one; a model that counts positions by itself, brings a bias in a mask, or carries state from row to row
gives itself away.
"""

import torch
from torch import nn

from foreword.base.errors import ModelRefused
from foreword.base.ids import BlockId, RequestId
from foreword.runner import library
from foreword.runner.kinds import NotReusable
from foreword.runner.plain import PlainRunner
from foreword.runner.runner import ModelRunner
from foreword.schedule.plan import Chunk, Plan

_LENGTH, _FIRST, _MATE = 24, 13, 7
_TOLERANCE, _HALF_TOLERANCE = 1e-3, 0.25
"""Of the norm of the logits, in float32 and in half precision. The latter may flip a mixture's experts; a wrong mask is
worse than that.
"""


def try_out(runner: ModelRunner, model: nn.Module) -> None:
    """Raise NotReusable if paged attention and the library's own disagree.

    Needs a few free blocks, and skips itself where there are none.
    """
    size = runner.block_size
    count, mate_count = -(-_LENGTH // size), -(-_MATE // size)
    if runner.num_blocks < count + mate_count:
        return
    tokens = tuple((7 * i + 3) % runner.card.vocab_size for i in range(_LENGTH))
    table = tuple(BlockId(i) for i in range(count))
    mate = Chunk(RequestId("mate"), 0, tokens[:_MATE], tuple(BlockId(count + i) for i in range(mate_count)), None)
    sequence = RequestId("trial")
    # Nothing is recorded: a recording is compared when it is made, and this one might never be wanted.
    runner.logits(Plan(0, (Chunk(sequence, 0, tokens[:_FIRST], table[: -(-_FIRST // size)], None), mate)))
    ours = runner.logits(Plan(0, (Chunk(sequence, _FIRST, tokens[_FIRST:], table, None),))).float()
    theirs = _library_logits(model, tokens, runner.memory.buffer.device)[_FIRST:].float()
    gap, allowed = _gap(ours, theirs), _allowed(model)
    if not gap <= allowed:
        raise NotReusable(
            runner.card.name,
            f"through paged attention its logits are off by {gap:.2g} of their size, more than {allowed:.2g}; it does"
            " something that a ragged batch does not carry",
        )


def try_out_plain(runner: PlainRunner, model: nn.Module) -> None:
    """Raise ModelRefused if an answer token by token and the same tokens in one forward disagree."""
    tokens = tuple((7 * i + 3) % runner.card.vocab_size for i in range(_LENGTH))
    device = next(model.parameters()).device
    ids, positions = torch.tensor([tokens], device=device), torch.arange(_LENGTH, device=device)[None]
    worst = 0.0
    rows = runner.logits(tokens, prompt=_FIRST)
    for end, ours in enumerate(rows, _FIRST):
        with torch.inference_mode():
            theirs, _ = library.forward_with_cache(model, ids[:, :end], positions[:, :end], None)
        worst = max(worst, _gap(ours.float(), theirs.float()))
    if not worst <= _allowed(model):
        raise ModelRefused(
            f"{runner.card.name}: token by token its logits are off by {worst:.2g} of what one forward gives; its cache"
            " does not carry its whole state"
        )


def _gap(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).square().sum().sqrt() / theirs.square().sum().sqrt())


def _allowed(model: nn.Module) -> float:
    return _TOLERANCE if next(model.parameters()).dtype == torch.float32 else _HALF_TOLERANCE


def _library_logits(model: nn.Module, tokens: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """[tokens, vocabulary] with the library's plainest attention."""
    ids = torch.tensor([tokens], device=device)
    library.use_attention(model, "eager")
    try:
        with torch.inference_mode():
            return library.forward(model, ids, torch.arange(len(tokens), device=device)[None])
    finally:
        library.use_attention(model)
