"""What attention costs on a CPU: one layer of SmolLM2-135M in bfloat16, by each backend, on one thread.

    python benchmarks/attention.py

Prints the processor time (not the wall's) of the best of several runs, in milliseconds, as one JSON object a case.
`llvm` uses tile registers where the processor has them; `single` is the same kernel without.
"""

import json
import time
from collections.abc import Mapping
from unittest.mock import patch

import torch

from foreword.runner.attention import llvm, sdpa
from foreword.runner.attention.backend import Backend, Ground
from foreword.runner.attention.call import Call, LayerFacts, Scoring, Sight
from foreword.runner.attention.tiles import Segment
from foreword.runner.layout import LayerShape, lay_out
from foreword.runner.memory import KVMemory
from foreword.runner.native import machine

HEADS, SHAPE = 9, LayerShape(kv_heads=3, key_dim=64, value_dim=64)
SCORING = Scoring(SHAPE.key_dim**-0.5)
LONG = tuple(range(176))


def decoding(count: int, position: int) -> tuple[Segment, ...]:
    """Requests that each compute one row, in blocks of their own."""
    return tuple(Segment(i, position + i, 1, tuple(range(40 * i, 40 * i + 40))) for i in range(count))


def sharing(groups: int, each: int, position: int, shared: int) -> tuple[Segment, ...]:
    """Groups of requests that each compute one row, behind as many tokens in common."""
    num_shared, num_own = shared // 16, -(-(position + 1) // 16) - shared // 16
    heads = [tuple(range(num_shared * group, num_shared * (group + 1))) for group in range(groups)]
    own = [tuple(range(800 + num_own * i, 800 + num_own * (i + 1))) for i in range(groups * each)]
    return tuple(Segment(i, position, 1, heads[i % groups] + own[i]) for i in range(groups * each))


CASES: Mapping[str, tuple[tuple[Segment, ...], int]] = {
    "prefill of 2,800": ((Segment(0, 0, 2800, LONG),), 3),
    "prefill of 724": ((Segment(0, 0, 724, LONG),), 7),
    "24 behind 2,776": ((Segment(0, 2776, 24, LONG),), 15),
    "decode 32 at 530": (decoding(32, 530), 15),
    "decode 32 at 780, of which 720 shared by eight": (sharing(4, 8, 780, 720), 15),
    "decode 8 at 500": (decoding(8, 500), 15),
    "decode 1 at 500": (decoding(1, 500), 15),
}


def backends() -> Mapping[str, Backend]:
    """All over the same memory, full of random numbers."""
    memory = KVMemory(lay_out((SHAPE,), 16), 1600, torch.bfloat16, torch.device("cpu"))
    memory.buffer[:] = torch.randn_like(memory.buffer)
    ground = Ground(
        facts=(LayerFacts(layer=0, heads=HEADS, shape=SHAPE, sight=Sight(), scoring=SCORING),), memory=memory
    )
    with patch.object(machine, "multiplies_tiles", lambda: False):
        single = llvm.make(ground)
    return {"llvm": llvm.make(ground), "single": single, "sdpa": sdpa.make(ground)}


def best(backend: Backend, segments: tuple[Segment, ...], repeats: int) -> float:
    """Milliseconds of processor time."""
    rows = sum(segment.count for segment in segments)
    query, key, value = (torch.randn(heads, rows, 64).bfloat16() for heads in (HEADS, SHAPE.kv_heads, SHAPE.kv_heads))
    call = Call(0, query, key, value, SCORING, Sight())
    step = backend.begin(segments, rows)
    times: list[float] = []
    for _ in range(repeats + 1):
        start = time.thread_time()
        step.attend(call)
        times.append(time.thread_time() - start)
    return round(1000 * min(times[1:]), 3)


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    made = backends()
    for case, (segments, repeats) in CASES.items():
        found = {name: best(backend, segments, repeats) for name, backend in made.items()}
        print(json.dumps({"case": case, "ms": found}), flush=True)


if __name__ == "__main__":
    main()
