"""Activations of a model on a CPU, so that a row's bits do not depend on how many rows there are.

Torch computes a tensor's numbers in vectors, and number by number what is left at the end of each thread's part. The
two ways differ in a last bit now and then (silu and sigmoid in float32, tanh-gelu), and where parts end depends on how
many rows there are. So a stand-in gives torch portions that no thread shares and that are whole vectors.
"""

from math import gcd

import torch
from torch import Tensor, nn

from foreword.runner import library

_ALONE = 2**14
"""Numbers up to which no operation of torch is divided among threads: gelu is from there on, others from 2**15."""
_VECTORS = 64
"""Numbers that torch takes at a time, at most: two vectors of half precision."""


class Portioned(nn.Module):
    """Stands in for an activation. Its inner sizes are any; a row of more numbers than torch keeps together is one."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """Take x [..., size] to the same shape."""
        size = x.shape[-1]
        rows = x.reshape(-1, size)
        whole = _VECTORS // gcd(size, _VECTORS)  # rows that together are whole vectors
        each = max(1, _ALONE // (size * whole)) * whole
        if len(rows) <= each:
            return self._portion(rows, whole).view(x.shape)
        out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
        for first in range(0, len(rows), each):
            out[first : first + each] = self._portion(rows[first : first + each], whole)
        return out.view(x.shape)

    def _portion(self, rows: Tensor, whole: int) -> Tensor:
        missing = -len(rows) % whole
        if missing:
            rows = torch.cat((rows, rows[-1:].expand(missing, -1)))
        found: Tensor = self.activation(rows.contiguous())
        return found[: len(found) - missing]


def take_over(model: nn.Module) -> None:
    """Put a stand-in in the place of each activation of a model on a CPU."""
    kinds = library.activations()
    for parent in [module for module in model.modules() if not isinstance(module, Portioned)]:
        for name, child in list(parent.named_children()):
            # One with parameters of its own keeps their names.
            if type(child) in kinds and not any(True for _ in child.parameters()):
                setattr(parent, name, Portioned(child))
