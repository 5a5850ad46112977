"""Norms, gates and rotations of a model on a CPU, each by one kernel of ours where torch makes it of many small ones.

The library's code stays the definition: what one of its modules or functions does is found out by asking it, on random
numbers, and what no kernel does in the same way stays as it is. Sums are nobody's module: `recorder` sees them on their
way, and has a kernel make them in a recorded step.
"""

import inspect
import struct
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import cache
from math import prod
from typing import cast

import torch
from torch import Tensor, nn

from foreword.runner import library
from foreword.runner.native import machine, rowwise
from foreword.runner.native.activation import Activation
from foreword.runner.native.rowwise import STEP, Form, Job, Kind
from foreword.runner.shelf import NOWHERE, Shelf

_DTYPES = (torch.bfloat16, torch.float32)
_ROWS, _SCALES = 6, (1e-3, 1.0, 30.0)
"""Random rows that a module is asked about, and their sizes: small ones show what epsilon does."""
_ALIKE: Mapping[torch.dtype, float] = {torch.bfloat16: 2**-7, torch.float32: 2e-6}
"""What results may differ by, of their size: a last bit."""
_STRIP_NUMBERS = 2**12
"""Of the rows that a worker takes at once."""
_ALONE_NUMBERS = 2**14
"""Work that is over before a second thread is awake."""
_ROTATION = "apply_rotary_pos_emb"


def take_over(model: nn.Module, shelf: Shelf = NOWHERE) -> bool:
    """Let kernels, kept on a shelf, do what they can of a model on a CPU; whether there was anything."""
    if not machine.is_there():
        return False
    asked = _Asked(shelf)
    found = False
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            ours = asked.norm(child) or asked.gate(child)
            if ours is not None:
                setattr(parent, name, ours)
                found = True
    for module in model.modules():
        theirs = library.called_in_forward(module, _ROTATION)
        turn = None if theirs is None else asked.rotation(theirs)
        if turn is not None:
            library.replace_in_forward(module, _ROTATION, turn)
            found = True
    return found


class Norm(nn.Module):
    """Stands in for a norm by the root of the mean square, sharing its weight."""

    def __init__(self, norm: nn.Module, kind: Kind, plus: float, shelf: Shelf = NOWHERE) -> None:
        """`plus` is what the library's code adds to the weight."""
        super().__init__()
        self._theirs = norm.forward
        self.weight = cast("nn.Parameter", norm.weight)
        self._factors = self.weight.detach().float() + plus
        self._work = Work(Form(kind, half=self.weight.dtype is torch.bfloat16), shelf)
        self._work.job[Job.Y] = self._factors.data_ptr()
        self._work.job[Job.Z] = struct.unpack("<I", struct.pack("<f", _epsilon(norm)))[0]

    def forward(self, x: Tensor) -> Tensor:
        """Take x [..., size] to the same shape."""
        size = x.shape[-1]
        if x.dtype is not self.weight.dtype or size != len(self.weight):
            return self._theirs(x)  # some models keep the weights of norms in float32, whatever else they compute in
        x = x.contiguous()
        out = torch.empty_like(x)
        self._work.run((x.shape[:-1], size, 1), x, out, size * x.element_size())
        return out


class Gate(nn.Module):
    """Stands in for a gated MLP, with the same layers in it."""

    gate_proj: Callable[[Tensor], Tensor]
    up_proj: Callable[[Tensor], Tensor]
    down_proj: Callable[[Tensor], Tensor]

    def __init__(self, mlp: nn.Module, kind: Activation, shelf: Shelf = NOWHERE, *, half: bool) -> None:
        super().__init__()
        self.kind: Activation = kind
        for name, child in mlp.named_children():
            self.add_module(name, child)
        self.together: Callable[[Tensor], Tensor] | None = None
        """Makes both products and what comes of them at once, where somebody can."""
        self._work = Work(Form(kind, half=half), shelf)

    def forward(self, x: Tensor) -> Tensor:
        """Take x [..., size] to the same shape."""
        return self.down_proj(self._by_itself(x) if self.together is None else self.together(x))

    def _by_itself(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x).contiguous(), self.up_proj(x).contiguous()
        out = torch.empty_like(up)
        self._work.job[Job.Y] = up.data_ptr()
        size = gate.shape[-1]
        self._work.run((gate.shape[:-1], size, 1), gate, out, size * gate.element_size())
        return out


class Turn:
    """Stands in for a function that turns queries and keys by the angles of their positions."""

    def __init__(self, theirs: Callable[..., tuple[Tensor, Tensor]], shelf: Shelf = NOWHERE) -> None:
        """`theirs` is called where a kernel cannot do it."""
        self._theirs = theirs
        self._works = {dtype: Work(Form("turn", half=dtype is torch.bfloat16), shelf) for dtype in _DTYPES}

    def __call__(
        self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *further: object, **named: object
    ) -> tuple[Tensor, Tensor]:
        """Take query and key [1, heads, T, dim] to the same shapes; cos and sin [1, T, dim]."""
        both = (query, key)
        if further or named or not all(_turns_by(states, cos, sin) for states in both):
            return self._theirs(query, key, cos, sin, *further, **named)
        return self._turn(query, cos, sin), self._turn(key, cos, sin)

    def _turn(self, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        _, heads, rows, dim = states.shape
        out = states.new_empty(1, rows, heads, dim)
        work, element = self._works[states.dtype], states.element_size()
        work.job[Job.Y] = cos.data_ptr()
        work.job[Job.Z] = sin.data_ptr()
        work.job[Job.HEADS] = heads
        work.job[Job.X_HEAD] = states.stride(1) * element
        work.run(((rows,), dim, heads), states, out, states.stride(2) * element)
        return out.transpose(1, 2)


class Sum:
    """Stands in for the sum of two tensors."""

    def __init__(self, shelf: Shelf = NOWHERE) -> None:
        self._works = {dtype: Work(Form("sum", half=dtype is torch.bfloat16), shelf) for dtype in _DTYPES}

    def takes(self, x: object, y: object) -> bool:
        """Whether the kernel takes such terms."""
        if not isinstance(x, Tensor) or not isinstance(y, Tensor) or x.shape != y.shape or x.dtype is not y.dtype:
            return False
        dense = x.is_contiguous() and y.is_contiguous()
        return dense and x.dtype in _DTYPES and x.dim() > 1 and x.numel() > 0 and x.shape[-1] % STEP == 0

    def __call__(self, x: Tensor, y: Tensor, out: Tensor) -> None:
        """Write `x + y`, all [..., size]."""
        work, size = self._works[x.dtype], x.shape[-1]
        work.job[Job.Y] = y.data_ptr()
        work.run((x.shape[:-1], size, 1), x, out, size * x.element_size())


class Work:
    """A kernel and the job that it is given."""

    def __init__(self, form: Form, shelf: Shelf) -> None:
        self.job = machine.new_job(Job)
        self._code = _kernel(form, shelf)

    def run(self, extent: tuple[Sequence[int], int, int], x: Tensor, out: Tensor, x_row: int) -> None:
        """Do it for rows in such a shape, of so many numbers, of which a row of `out` has a multiple.

        Rows of `x` lie `x_row` bytes apart, those of `out` one right after the other.
        """
        rows, size, multiple = extent
        job = self.job
        job[Job.NEXT] = 0
        job[Job.STRIP] = max(1, _STRIP_NUMBERS // (size * multiple))
        job[Job.ROWS] = prod(rows)
        job[Job.SIZE] = size
        job[Job.X] = x.data_ptr()
        job[Job.X_ROW] = x_row
        job[Job.OUT] = out.data_ptr()
        self._code.run(job, rows, _ALONE_NUMBERS // (size * multiple))


class _Asked:
    """What the library's modules do, by their class, size and precision; each kind is asked once."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._norms: dict[object, tuple[Kind, float] | None] = {}
        self._gates: dict[object, Activation | None] = {}
        self._rotations: dict[object, Turn | None] = {}

    def norm(self, module: nn.Module) -> Norm | None:
        """What may take the place of a module, if that is a norm."""
        own = dict(module.named_parameters())
        weight = own.get("weight")
        if weight is None or len(own) > 1 or weight.dim() != 1 or _epsilon(module) is None or not _fits(module, weight):
            return None
        key = (type(module), weight.shape, weight.dtype)
        if key not in self._norms:
            self._norms[key] = _ask_norm(module, weight, self._shelf)
        found = self._norms[key]
        return None if found is None else Norm(module, *found, self._shelf)

    def gate(self, module: nn.Module) -> Gate | None:
        """What may take the place of a module, if that is a gated MLP."""
        children = dict(module.named_children())
        up = children.get("up_proj")
        if set(children) != {"gate_proj", "up_proj", "down_proj", "act_fn"} or type(up) is not nn.Linear:
            return None
        if not _fits(module, up.weight[:, 0]):
            return None
        key = (type(module), type(children["act_fn"]), up.weight.shape, up.weight.dtype)
        if key not in self._gates:
            self._gates[key] = _ask_gate(module, up.weight, self._shelf)
        found = self._gates[key]
        return None if found is None else Gate(module, found, self._shelf, half=up.weight.dtype is torch.bfloat16)

    def rotation(self, theirs: Callable[..., tuple[Tensor, Tensor]]) -> Turn | None:
        """What may take the place of a function, if that turns neighbouring halves."""
        if theirs not in self._rotations:
            self._rotations[theirs] = _ask_rotation(theirs, self._shelf)
        return self._rotations[theirs]


def _ask_norm(module: nn.Module, weight: Tensor, shelf: Shelf) -> tuple[Kind, float] | None:
    """Which norm it is, whatever its weights: of those that come out alike, the one with most bits the same."""
    best: tuple[float, tuple[Kind, float]] | None = None
    module = deepcopy(module)
    module.weight = nn.Parameter(torch.randn(weight.shape, generator=_chance()).to(weight.dtype), requires_grad=False)
    xs = [scale * torch.randn(_ROWS, weight.shape[0], generator=_chance()) for scale in _SCALES]
    x = torch.cat(xs).to(weight.dtype)
    theirs = module(x)
    kinds: tuple[Kind, ...] = ("norm", "late norm")
    for kind in kinds:
        for plus in (0.0, 1.0):
            ours = Norm(module, kind, plus, shelf)(x)
            same = float((ours == theirs).float().mean())
            alike = bool(((ours - theirs).abs() <= _ALIKE[weight.dtype] * theirs.abs()).all())
            if alike and (best is None or same > best[0]):
                best = same, (kind, plus)
    return None if best is None else best[1]


def _ask_gate(module: nn.Module, up: Tensor, shelf: Shelf) -> Activation | None:
    """Which activation its gate has."""
    x = torch.randn(_ROWS, up.shape[1], generator=_chance()).to(up.dtype)
    theirs = module(x).float()
    kinds: tuple[Activation, ...] = ("silu", "gelu")
    for kind in kinds:
        ours = Gate(module, kind, shelf, half=up.dtype is torch.bfloat16)(x).float()
        if (ours - theirs).norm() <= _ALIKE[up.dtype] * theirs.norm():
            return kind
    return None


def _ask_rotation(theirs: Callable[..., tuple[Tensor, Tensor]], shelf: Shelf) -> Turn | None:
    """Whether it does what the kernel does, to the bit."""
    ours = Turn(theirs, shelf)
    for dtype in _DTYPES:
        states = torch.randn(1, _ROWS, 3, 2 * STEP, generator=_chance()).to(dtype).transpose(1, 2)
        cos, sin = torch.randn(2, 1, _ROWS, 2 * STEP, generator=_chance()).to(dtype)
        try:
            wanted = theirs(states, states[:, 1:], cos, sin)
        except (TypeError, ValueError, RuntimeError):
            return None
        found = ours(states, states[:, 1:], cos, sin)
        if not all(torch.equal(own, their) for own, their in zip(found, wanted, strict=True)):
            return None
    return ours


def _turns_by(states: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether the kernel takes such tensors."""
    if states.dim() != 4 or states.shape[0] != 1 or states.dtype not in _DTYPES or states.stride(3) != 1:
        return False
    shape = (1, *states.shape[2:])
    whole = (angles.shape == shape and angles.is_contiguous() and angles.dtype is states.dtype for angles in (cos, sin))
    return states.shape[3] % STEP == 0 and all(whole)


def _fits(module: nn.Module, numbers: Tensor) -> bool:
    """Whether a module's forward takes just one tensor, of numbers that a kernel takes."""
    alone = len(inspect.signature(module.forward).parameters) == 1
    return alone and numbers.dtype in _DTYPES and numbers.device.type == "cpu" and numbers.shape[0] % STEP == 0


def _epsilon(norm: nn.Module) -> float | None:
    """What a norm adds to the mean square, if it names that."""
    found = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    return found if isinstance(found, float) else None


def _chance() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@cache
def _kernel(form: Form, shelf: Shelf) -> machine.Compiled:
    """Compiled once in a process."""
    return machine.Compiled(form.kind, rowwise.write(form), shelf)
