"""Compile the kernels for a card that is not there, and print what came out: run by test_kernels_compile.

A process of its own, because Triton either interprets or compiles. Everything up to the launch is real.
"""

import sys
from types import SimpleNamespace
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from foreword.runner.attention.call import Sight
from foreword.runner.attention.triton import TritonBackend
from tests.runner.paged import Layer, Scene


class Card:
    """As much of a driver as compiling asks for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", int(sys.argv[1]), 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiled:
    """A kernel that is compiled instead of launched."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def compile_(*arguments: Any, **options: Any) -> None:
            made = self.kernel.warmup(*arguments, grid=grid, **options)
            print(self.kernel.__name__, made.metadata.shared, len(made.asm["cubin"]))

        return compile_


def compile_for(layer: Layer, *, shared: int, exact: bool = False) -> None:
    scene = Scene([layer], torch.bfloat16)
    segments = scene.segments((140, 1), (131, 1), (128, 40), shared=shared)
    backend = TritonBackend(scene.exactly() if exact else scene.ground, scene.memory, least_saved=1)
    kernels = {name: thing for name, thing in vars(backend.kernels).items() if not name.startswith("_")}
    compiled = {name: Compiled(kernels[name]) for name in ("store", "attend", "merge")}
    backend.kernels = SimpleNamespace(**{**kernels, **compiled})
    (call,) = scene.calls(42)
    backend.begin(segments, 42).attend(call)


if __name__ == "__main__":
    card: Any = Card()
    driver.set_active(card)
    compile_for(Layer(heads=4, kv_heads=2, key_dim=128, value_dim=128), shared=128)
    compile_for(Layer(key_dim=96, value_dim=64, sight=Sight(window=64), softcap=30.0, sinks=True), shared=0, exact=True)
