"""What a launch may not do on a card: read a number that is computed there, or wait for a copy.

There is no card here. PyTorch's meta device stands in for one: its tensors have shapes and no numbers, so whoever reads
one fails. Copies to it that somebody would wait for on a card are noticed on their way.
"""

import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from foreword.base.ids import PENDING_TOKEN, BlockId, RequestId
from foreword.base.params import Sampling
from foreword.cache.orders import Copy
from foreword.runner import library, sampler
from foreword.runner.attention import flash_attn, flashinfer, sdpa
from foreword.runner.attention.backend import Backend, Extent, Ground
from foreword.runner.attention.interface import attend
from foreword.runner.attention.triton import TritonBackend
from foreword.runner.attention.varlen import VarlenBackend
from foreword.runner.copies import apply_copies
from foreword.runner.graphs import Recorded, ladder
from foreword.runner.layout import lay_out
from foreword.runner.memory import KVMemory
from foreword.runner.runner import ModelCard, ModelRunner
from foreword.runner.survey import survey
from foreword.runner.transfer import Arrival, put, send, staging
from foreword.schedule.plan import Chunk, Draw, Plan
from tests.runner.models import CONFIGS, build

META = torch.device("meta")
GREEDY = Sampling(max_tokens=9)
SAMPLINGS = (
    GREEDY,
    Sampling(max_tokens=9, temperature=0.8),
    Sampling(max_tokens=9, temperature=0.8, top_k=5, logprobs=2),
    Sampling(max_tokens=9, temperature=0.8, top_p=0.9, logprobs=0),
    Sampling(max_tokens=9, logprobs=5),
)
CARD = ModelCard(
    name="tiny",
    directory="",
    device="meta",
    dtype="float32",
    attention="",
    exact=False,
    vocab_size=512,
    max_context=512,
    end_ids=frozenset(),
    num_parameters=0,
    flops_per_token=0,
    flops_per_token_and_key=0,
    ingredients={},
)


class Waiting(AssertionError):
    """A card would be waited for."""


class NobodyWaits(TorchDispatchMode):
    """Lets no copy between the devices pass that blocks, and counts the others."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        named = kwargs or {}
        given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | named
        target = given.get("device")
        match func.overloadpacket.__name__:
            case "to" | "_to_copy" if target is not None and torch.device(target) != given["self"].device:
                self.note(given)
            case "copy_" if given["self"].device != given["src"].device:
                self.note(given)
            case _:
                pass
        return func(*args, **named)

    def note(self, given: dict[str, Any]) -> None:
        if not given.get("non_blocking"):
            raise Waiting("on a card this copy would wait for all that is under way")
        self.copies += 1


class Going:
    """In the place of `Arrival`: nothing ever comes."""

    def __init__(self, tensors: list[Tensor]) -> None:
        assert all(tensor.device == META for tensor in tensors)


class Unlaunched:
    """The kernels of the Triton backend, none of which is ever run."""

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels
        self.launches = 0

    def __getattr__(self, name: str) -> Any:
        return self if name in ("store", "attend", "merge") else getattr(self._kernels, name)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def run(*arguments: Any, **options: Any) -> None:
            self.launches += 1

        return run


class Again:
    """A recorder that repeats what it was told to record."""

    extents = ladder()
    checked, follows = False, False

    def __init__(self) -> None:
        self.replays = 0

    def record(self, work: Callable[[], Tensor], extent: Extent) -> Recorded:
        recorder = self

        class Once:
            def replay(self, rows: int, wanted: int) -> Tensor:
                recorder.replays += 1
                return work()

        work()
        return Once()


def make_sdpa(ground: Ground) -> Backend:
    return sdpa.make(ground)


def make_varlen(ground: Ground) -> Backend:
    backend = VarlenBackend(ground, ground.memory, "stand-in")
    backend.function = lambda query, *_, **__: torch.empty_like(query)
    return backend


def _with(module: str, name: str, member: Any, make: Callable[[Ground], Backend], ground: Ground) -> Backend:
    """Make a backend where a library's module has this member."""
    with pytest.MonkeyPatch.context() as patch:
        theirs = ModuleType(module)
        theirs.__dict__[name] = member
        for part in (module.partition(".")[0], module):
            patch.setitem(sys.modules, part, theirs)
        return make(ground)


def make_flash_attn(ground: Ground) -> Backend:
    def function(q: Tensor, *_: Any, **__: Any) -> Tensor:
        return torch.empty_like(q)

    return _with("flash_attn.flash_attn_interface", "flash_attn_varlen_func", function, flash_attn.make, ground)


def make_flashinfer(ground: Ground) -> Backend:
    class Wrapper:
        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        def plan(self, *told: Any, **_: Any) -> None:
            firsts, pages, blocks, last = told[:4]
            assert firsts.device.type == pages.device.type == last.device.type == "cpu"
            assert blocks.device == META

        def run(self, query: Tensor, pages: tuple[Tensor, Tensor]) -> Tensor:
            return torch.empty_like(query)

    return _with("flashinfer", "BatchPrefillWithPagedKVCacheWrapper", Wrapper, flashinfer.make, ground)


def make_triton(ground: Ground) -> Backend:
    backend = TritonBackend(ground, ground.memory, least_saved=1)
    backend.kernels = Unlaunched(backend.kernels)
    return backend


@pytest.fixture
def without_numbers(monkeypatch: pytest.MonkeyPatch) -> Iterator[NobodyWaits]:
    """As on a card; tensors are made on the host, since making one there waits too."""
    made = torch.tensor

    def on_the_host(data: Any, *, device: Any = None, **options: Any) -> Tensor:
        if device is not None and torch.device(device).type != "cpu":
            raise Waiting("torch.tensor makes it on the host and waits for the copy")
        return made(data, **options)

    monkeypatch.setattr(torch, "tensor", on_the_host)
    monkeypatch.setattr(sampler, "Arrival", Going)
    with NobodyWaits() as watch:
        yield watch


def launch_some(watch: NobodyWaits, make: Callable[[Ground], Backend], recorder: Again | None) -> ModelRunner:
    """Prefills with copies, then decodes of pending tokens, then both at once."""
    library.register_attention(attend)
    model = build(CONFIGS["llama"]())
    library.use_attention(model)
    facts = survey("tiny", model)
    layout = lay_out(tuple(fact.shape for fact in facts), 16)
    memory = KVMemory(layout, 64, torch.float32, META)
    backend = make(Ground(facts=facts, memory=memory))
    runner = ModelRunner(deepcopy(model).to(META, non_blocking=True), CARD, memory, backend, recorder=recorder)
    watch.copies = 0  # those of the weights
    shared = (BlockId(0), BlockId(1))
    for step in range(4):
        chunks = tuple(
            Chunk(
                RequestId(str(i)),
                32 + (4 + step if step else 0),
                (PENDING_TOKEN,) if step else (5, 6, 7, 8, 9),
                (*shared, BlockId(2 + i)),
                Draw(sampling, step),
            )
            for i, sampling in enumerate(SAMPLINGS)
        )
        if step == 2:
            chunks += (Chunk(RequestId("new"), 0, tuple(range(3, 43)), (BlockId(20), BlockId(21), BlockId(22)), None),)
        flight = runner.launch(Plan(step, chunks, (Copy(BlockId(30), BlockId(31), 7),) if step == 0 else ()))
        assert flight.requests == tuple(str(i) for i in range(5))
        assert flight.drawn.tokens.shape == (5,)
    return runner


@pytest.mark.parametrize("make", [make_sdpa, make_varlen, make_flash_attn, make_flashinfer, make_triton])
def test_a_launch_reads_nothing_back_and_waits_for_no_copy(
    make: Callable[[Ground], Backend], without_numbers: NobodyWaits
) -> None:
    launch_some(without_numbers, make, None)
    assert without_numbers.copies > 20


def test_a_recorded_one_does_not_either(without_numbers: NobodyWaits) -> None:
    recorder = Again()
    launch_some(without_numbers, make_triton, recorder)
    assert recorder.replays == 2, "two decodes of one size; prefills that share blocks have no room in a recorded one"
    assert without_numbers.copies > 20


def test_the_watch_sees_who_waits(without_numbers: NobodyWaits, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = torch.arange(3)
    assert send(numbers, META).device == META
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), pytest.raises(Waiting):
            numbers.to(META)
    with pytest.raises(Waiting):
        torch.tensor([1], device=META)
    with pytest.raises(Waiting):
        torch.empty(3, device=META).copy_(torch.ones(3))
    with pytest.raises(RuntimeError, match="meta"):
        sampler.draw(torch.empty(1, 9, device=META), [Draw(GREEDY, 0)]).tokens.item()
    with pytest.raises(NotImplementedError):
        Arrival([torch.empty(1, device=META)])
    memory = KVMemory(lay_out(tuple(fact.shape for fact in survey("tiny", _tiny())), 16), 4, torch.float32, META)
    monkeypatch.setattr("foreword.runner.copies.send", lambda tensor, device: tensor.to(device))
    with pytest.raises(Waiting):
        apply_copies(memory, (Copy(BlockId(0), BlockId(1), 5),))


def _tiny() -> Any:
    library.register_attention(attend)
    model = build(CONFIGS["llama"]())
    library.use_attention(model)
    return model


def test_on_a_cpu_nothing_is_moved() -> None:
    numbers = torch.arange(3)
    assert send(numbers, numbers.device) is numbers
    assert staging(numbers) is numbers
    put(numbers, numbers)
    assert Arrival([numbers]).wait()[0] is numbers
    away = torch.empty(3, dtype=torch.long, device=META)
    assert staging(away).device.type == "cpu"
    put(staging(away), away)
