"""What a gate does to a number, by kind."""

from typing import Literal

from foreword.runner.native.writer import EXP2, LOG2_E, Value, Writer

Activation = Literal["silu", "gelu"]
"""gelu by its approximation with tanh."""


def activate(w: Writer, kind: Activation, x: Value) -> Value:
    """The function of each lane, in float32."""
    return _silu(w, x) if kind == "silu" else _gelu(w, x)


def _silu(w: Writer, x: Value) -> Value:
    """Give x / (1 + e^-x)."""
    return w.b.fdiv(x, w.b.fadd(_exp(w, w.b.fneg(x)), w.floats(1.0)))


def _gelu(w: Writer, x: Value) -> Value:
    """Give x / 2 * (1 + tanh(u)) = x / (1 + e^-2u) with u = sqrt(2 / pi) * (x + 0.044715 x^3)."""
    b = w.b
    inner = b.fmul(x, w.fma(b.fmul(x, x), w.floats(0.044715), w.floats(1.0)))
    return b.fdiv(x, b.fadd(_exp(w, b.fmul(inner, w.floats(-2 * 0.7978845608028654))), w.floats(1.0)))


def _exp(w: Writer, x: Value) -> Value:
    b = w.b
    x = b.fmul(x, w.floats(LOG2_E))
    return w.exp2(b.select(b.fcmp_ordered("<", x, w.floats(127.0)), x, w.floats(127.0)), EXP2)
