"""The Triton kernels, run as Python where there is no card: what they compute, launch, and never read."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from foreword.runner.attention import triton
from foreword.runner.attention.backend import Ground
from foreword.runner.attention.call import Call, Sight
from foreword.runner.attention.tiles import Segment
from foreword.runner.attention.triton import TritonBackend, num_parts, tiling
from foreword.runner.attention.work import STORE_ROWS
from foreword.runner.survey import survey
from tests.parity.desk import Desk, random_tokens
from tests.runner.models import CONFIGS, build, own_logits, runner_around
from tests.runner.paged import DEVICE, Layer, Scene

CLOSE = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
RAGGED = ((37, 1), (0, 1), (20, 3), (70, 1), (0, 20))


class Noted:
    """A kernel that notes each launch."""

    def __init__(self, name: str, kernel: Any, launched: list[str]) -> None:
        self.name, self.kernel, self.launched = name, kernel, launched

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.launched.append(self.name)
        return self.kernel[grid]


def count_launches(backend: TritonBackend) -> list[str]:
    """The names of the kernels that a backend launches from now on."""
    launched: list[str] = []
    kernels = {name: thing for name, thing in vars(backend.kernels).items() if not name.startswith("_")}
    noted = {name: Noted(name, kernels[name], launched) for name in ("store", "attend", "merge")}
    backend.kernels = SimpleNamespace(**{**kernels, **noted})
    return launched


def backend_on(ground: Ground, *, programs: int = 1, least_saved: int = 10**6) -> TritonBackend:
    backend = TritonBackend(ground, ground.memory, least_saved)
    backend.num_programs = programs
    return backend


def attend(backend: TritonBackend, segments: tuple[Segment, ...], calls: list[Call]) -> list[Tensor]:
    step = backend.begin(segments, calls[0].query.shape[1])
    return [step.attend(call).float().clone() for call in calls]


def gap(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(
    "layer",
    [
        Layer(),
        Layer(sight=Sight(window=24), key_dim=32, value_dim=32),
        Layer(heads=7, kv_heads=1, key_dim=24, value_dim=40, softcap=20.0),
        Layer(kv_heads=4, key_dim=80, value_dim=80, sight=Sight(chunk=32), sinks=True),
    ],
    ids=["grouped", "window", "odd, capped", "chunks, sinks"],
)
def test_random_ragged_batches(layer: Layer, dtype: torch.dtype) -> None:
    scene = Scene([layer], dtype, size=7 if layer.softcap else 16)
    segments = scene.segments(*RAGGED)
    (call,) = scene.calls(29)
    (ours,) = attend(backend_on(scene.ground), segments, [call])
    assert gap(ours, scene.expected(call, segments)) < CLOSE[dtype]
    assert not ours[26:].any(), "padding"
    assert not scene.memory.buffer[-1].any(), "the null block is never written"


def test_as_the_reference_backend_does() -> None:
    from foreword.runner.attention import sdpa

    scene = Scene([Layer(heads=3, kv_heads=1)])
    segments = scene.segments((37, 1), (0, 20))
    (call,) = scene.calls(21)
    (ours,) = attend(backend_on(scene.ground), segments, [call])
    stored = scene.memory.buffer.clone()
    scene.memory.buffer.nan_to_num_(0)  # it reads whole blocks, and clears those that it is first to write to
    theirs = sdpa.make(scene.ground).begin(segments, 21).attend(call)
    assert gap(ours, theirs) < CLOSE[torch.float32]
    written = [block for segment in segments for block in segment.blocks[segment.start // 16 :]]
    kept = stored[written].isfinite()
    assert kept.any()
    assert torch.equal(stored[written][kept], scene.memory.buffer[written][kept])


@pytest.mark.parametrize("layer", [Layer(kv_heads=1), Layer(kv_heads=1, sight=Sight(window=70), sinks=True)])
def test_keys_in_parts(layer: Layer) -> None:
    """Parts merge to the whole; one that sees no key weighs nothing."""
    scene = Scene([layer])
    segments = scene.segments((300, 1), (3, 1))
    (call,) = scene.calls(2)
    for programs, launches in ((2, ["store", "attend"]), (9, ["store", "attend", "merge"])):
        backend = backend_on(scene.ground, programs=programs)
        launched = count_launches(backend)
        (ours,) = attend(backend, segments, [call])
        assert gap(ours, scene.expected(call, segments)) < CLOSE[torch.float32]
        assert launched == launches


def test_what_is_shared_is_attended_once() -> None:
    layers = [Layer(kv_heads=1), Layer(kv_heads=1, sight=Sight(window=40)), Layer(kv_heads=1, sinks=True)]
    scene = Scene(layers)
    segments = scene.segments((140, 1), (131, 2), (150, 1), (20, 1), shared=128)
    calls = scene.calls(5)
    alone, together = backend_on(scene.ground), backend_on(scene.ground, least_saved=256)
    counts = [count_launches(alone), count_launches(together)]
    unshared, shared = attend(alone, segments, calls), attend(together, segments, calls)
    for one, other, call in zip(unshared, shared, calls, strict=True):
        assert gap(one, other) < CLOSE[torch.float32]
        assert gap(other, scene.expected(call, segments)) < CLOSE[torch.float32]
    assert counts[0] == ["store", "attend"] * 3
    full = ["store", "attend", "attend", "merge"]
    assert counts[1] == [*full, "store", "attend", *full], "a window does not look that far back"
    assert together.plan(segments)[4].members == [0, 1, 2, 3]
    dear = backend_on(scene.ground, least_saved=257)
    assert dear.plan(segments)[4].members == [], "it does not pay"
    assert backend_on(scene.exactly(), least_saved=1).plan(segments)[4].members == []


def test_launches_do_not_grow_with_the_batch() -> None:
    scene = Scene([Layer(heads=2, kv_heads=1)] * 2)
    backend = backend_on(scene.ground)
    launched = count_launches(backend)
    for chunks, attends in ((((5, 1),), 1), (((5, 1), (9, 1), (7, 2)), 1), (((0, 18), (9, 1)), 2)):
        launched.clear()
        rows = sum(count for _, count in chunks)
        attend(backend, scene.segments(*chunks), scene.calls(rows))
        assert launched == ["store", *["attend"] * attends] * 2


class Made(TorchDispatchMode):
    """Notes what makes tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in {"zeros", "empty", "clone", "_to_copy", "copy_", "index_select", "cat"}:
            self.made.append(name)
        return func(*args, **(kwargs or {}))


def test_later_layers_make_no_tensors() -> None:
    scene = Scene([Layer(kv_heads=1)] * 3)
    segments, calls = scene.segments((200, 1), (9, 1)), scene.calls(2)
    step = backend_on(scene.ground, programs=8).begin(segments, 2)
    counts: list[int] = []
    for call in calls:
        with Made() as noted:
            step.attend(call)
        counts.append(len(noted.made))
    inside = counts[1]  # what the interpreter itself does for each launch
    assert counts == [inside + 3, inside, inside], "out, parts and their weights, once"


@pytest.mark.parametrize("layer", [Layer(heads=2, kv_heads=1), Layer(heads=2, kv_heads=1, sight=Sight(window=50))])
def test_exact_rows_know_nothing_of_chunks_and_company(layer: Layer) -> None:
    scene = Scene([layer], torch.bfloat16)
    (whole,) = scene.segments((0, 150))
    (mate,) = scene.segments((41, 1))
    (call,) = scene.calls(151)
    backend = backend_on(scene.exactly(), programs=1)
    assert backend.exact
    assert not backend_on(scene.ground).exact
    reference = attend(backend, (whole,), [part(call, range(150))])[0]
    for cuts in ((149, 1), (64, 64, 20, 2), (1, 3, 110, 36)):
        start, rows = 0, []
        for count in cuts:
            own = Segment(1, start, count, whole.blocks[: -(-(start + count) // 16)])
            mixed = part(call, (150, *range(start, start + count)))
            rows.append(attend(backend, (Segment(0, 41, 1, mate.blocks), own), [mixed])[0][1:])
            start += count
        assert torch.equal(torch.cat(rows), reference), cuts


def part(call: Call, rows: Any) -> Call:
    """Some rows of a call."""
    query, key, value = (states[:, list(rows)] for states in (call.query, call.key, call.value))
    return Call(call.layer, query, key, value, call.scoring, call.sight)


@pytest.mark.parametrize("family", ["gemma2", "deepseek_v3"])
def test_models(family: str) -> None:
    """Windows with a soft cap; values narrower than keys."""
    model = build(CONFIGS[family]())
    runner = runner_around(model)
    ground = Ground(facts=survey("tiny", runner._model), memory=runner.memory)
    runner._backend = backend_on(ground)
    tokens = random_tokens(41, seed=1)
    desk = Desk(runner)
    line = desk.open(tokens)
    mate = desk.open(random_tokens(20, seed=2))
    rows = [desk.logits([(line, 30)])[0], desk.logits([(mate, 5), (line, 10)])[1], desk.logits([(line, 1)])[0]]
    assert gap(torch.cat(rows), own_logits(model, tokens)) < 2e-5


def test_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene([Layer()])
    if DEVICE.type == "cpu":
        assert triton.obstacle(scene.ground) == "its kernels need a CUDA card"
    card = Ground(facts=scene.ground.facts, memory=elsewhere(scene))
    assert triton.obstacle(card) is None
    wide = Ground(facts=(Layer(key_dim=288).facts(0),), memory=elsewhere(scene))
    assert "up to 256 dimensions, and these have 288" in str(triton.obstacle(wide))
    monkeypatch.setattr(triton.importlib.util, "find_spec", lambda name: None)
    assert triton.obstacle(card) == "the package triton is not installed"


def elsewhere(scene: Scene) -> Any:
    """A memory that says that it is on a card."""
    return SimpleNamespace(buffer=SimpleNamespace(device=torch.device("cuda")), layout=scene.memory.layout)


def test_tiles_and_parts() -> None:
    assert tiling(2, 128, torch.bfloat16, exact=False).cutting(2).narrow == 8
    assert tiling(7, 64, torch.float16, exact=False).cutting(7).wide == 18
    assert tiling(32, 64, torch.float16, exact=False).narrow_rows == 32
    assert tiling(1, 256, torch.bfloat16, exact=True).narrow_rows == 0
    assert [num_parts(strips, 8, 264) for strips in (1, 4, 16, 33, 64)] == [32, 8, 2, 1, 1]
    assert num_parts(1, 1, 10**6) == 32
    assert STORE_ROWS % 16 == 0
