"""Between the host and the device, without one waiting for the other. On a CPU all of this is the tensor itself.

A copy out of ordinary memory waits until the card has done everything before it. So what goes to a card is put into
pinned memory first, fresh each time: torch hands pinned memory out again only when the copies out of it are done. What
comes back is waited for by an event of its own, not by all that was launched since.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor


def pin(numbers: Tensor, device: torch.device) -> Tensor:
    """A host tensor where a copy to the device need not wait."""
    return numbers.pin_memory() if device.type == "cuda" else numbers


def send(numbers: Tensor, device: torch.device) -> Tensor:
    """A host tensor on the device, by one copy that nobody waits for."""
    return pin(numbers, device).to(device, non_blocking=True)


def staging(target: Tensor) -> Tensor:
    """Host memory of a tensor's shape, to be written into before `put`: on a CPU the tensor itself.

    Nobody reads it any more, and what is in it may be anything.
    """
    if target.device.type == "cpu":
        return target
    return torch.empty(target.shape, dtype=target.dtype, pin_memory=target.device.type == "cuda")


def put(staged: Tensor, target: Tensor) -> None:
    """Bring what was written into its `staging` memory to a tensor, by one copy that nobody waits for."""
    if staged is not target:
        target.copy_(staged, non_blocking=True)


class Arrival:
    """Tensors on their way to the host, behind all that was launched before."""

    __slots__ = ("_event", "_tensors")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tuple(tensor.to("cpu", non_blocking=True) for tensor in tensors)
        self._event: Any = None
        if any(tensor.device.type == "cuda" for tensor in tensors):
            self._event = cast(Any, torch.cuda).Event()
            self._event.record()

    def wait(self) -> tuple[Tensor, ...]:
        """They are here. Raises what went wrong on the device."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensors
