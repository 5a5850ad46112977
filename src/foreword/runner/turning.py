"""What a model with "dynamic" RoPE remembers of the longest sequence it has seen, kept apart for each request.

Such a model changes the angles of its positions when a sequence grows past what it was trained for, and holds them in
its own modules. Without this a short request would be turned by the length of a longer one that ran before it.
"""

from collections.abc import Mapping

from torch import Tensor, nn

Angles = tuple[Mapping[str, object], ...]
"""One mapping a rotary module: its buffers and numbers, by name."""


class Turning:
    """The rotary modules of one model. A model without any costs nothing."""

    __slots__ = ("_modules", "fresh")

    def __init__(self, model: nn.Module, *, by_length: bool) -> None:
        """`by_length`: whether the model remembers lengths at all; taken before anything was computed."""
        self._modules = [m for m in model.modules() if hasattr(m, "rope_type")] if by_length else []
        self.fresh: Angles = self.take()
        """The angles of a model that has seen nothing."""

    def take(self) -> Angles:
        """A copy of what the modules hold now."""
        return tuple(_state(module) for module in self._modules)

    def put(self, angles: Angles) -> None:
        """Let the modules hold what was taken before."""
        for module, state in zip(self._modules, angles, strict=True):
            for name, value in state.items():
                setattr(module, name, value.clone() if isinstance(value, Tensor) else value)


def _state(module: nn.Module) -> Mapping[str, object]:
    numbers = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, (int, float, Tensor)) and name[0] != "_"
    }
    held = {**numbers, **dict(module.named_buffers(recurse=False))}
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in held.items()}
