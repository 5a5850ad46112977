"""Norms, gates and rotations by kernels: what the library's modules do, to the last bit or next to it."""

from collections import Counter
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2MLP, Gemma2RMSNorm
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as turn_pairs
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, apply_rotary_pos_emb

from foreword.base.ids import BlockId, RequestId
from foreword.base.params import Sampling
from foreword.runner import library, rowwise
from foreword.runner.native import machine
from foreword.runner.rowwise import Gate, Norm, Turn
from foreword.schedule.plan import Chunk, Draw, Plan
from tests.runner.models import CONFIGS, SIZES, build, runner_around, t

DTYPES = (torch.bfloat16, torch.float32)
ALIKE = {torch.bfloat16: 2**-7, torch.float32: 2e-6}


class Halving(nn.Module):
    """Looks like a norm, and is none."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))
        self.eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x / 2


def take(module: nn.Module) -> nn.Module:
    """What takes a module's place; the module itself if nothing does."""
    holder = nn.ModuleList([module])
    assert rowwise.take_over(holder) == (holder[0] is not module)
    return holder[0]


@pytest.mark.parametrize("kept", DTYPES)
@pytest.mark.parametrize("given", [torch.bfloat16, torch.float16, torch.float32])
def test_a_norm_that_is_given_another_precision_than_its_own(kept: torch.dtype, given: torch.dtype) -> None:
    """Some models keep the weights of norms in float32. No kernel writes numbers of a size that is not the result's."""
    theirs = random_weights(LlamaRMSNorm(64, eps=1e-5), kept)
    ours = take(deepcopy(theirs))
    assert isinstance(ours, Norm)
    x = torch.randn(4, 64).to(given)
    if given is not kept:
        assert torch.equal(ours(x), theirs(x))
        assert ours(x).dtype == theirs(x).dtype
    with pytest.raises(RuntimeError):
        ours(torch.randn(4, 32, dtype=kept))


def random_weights(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(1)
    for weight in module.parameters():
        weight.data = torch.randn_like(weight) * (weight.shape[-1] ** -0.5 if weight.dim() > 1 else 1)
    return module.to(dtype).requires_grad_(False)


def mlp(kind: Any, activation: str) -> nn.Module:
    config = t.LlamaConfig(**{**SIZES, "intermediate_size": 96}, hidden_act=activation, hidden_activation=activation)
    return kind(config)


def alike(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    torch.testing.assert_close(ours, theirs, rtol=ALIKE[theirs.dtype], atol=1e-30)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [LlamaRMSNorm, Gemma2RMSNorm])
@pytest.mark.parametrize("size", [32, 64, 576, 1152])
def test_norms(kind: Any, size: int, dtype: torch.dtype) -> None:
    theirs = random_weights(kind(size, eps=1e-5), dtype)
    ours = take(deepcopy(theirs))
    assert isinstance(ours, Norm)
    assert set(ours.state_dict()) == set(theirs.state_dict())
    for shape in ((1, size), (1, 33, size), (1, 7, 3, size)):
        for scale in (1e-4, 1.0, 50.0):
            x = (scale * torch.randn(shape)).to(dtype)
            alike(ours(x), theirs(x))
    apart = torch.randn(1, 3, 7, size).to(dtype).transpose(1, 2)
    alike(ours(apart), theirs(apart))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kind", "activation"), [(LlamaMLP, "silu"), (Gemma2MLP, "gelu_pytorch_tanh"), (LlamaMLP, "gelu_pytorch_tanh")]
)
def test_gates(kind: Any, activation: str, dtype: torch.dtype) -> None:
    theirs = random_weights(mlp(kind, activation), dtype)
    ours = take(deepcopy(theirs))
    assert isinstance(ours, Gate)
    assert set(ours.state_dict()) == set(theirs.state_dict())
    for rows in (1, 40):
        for scale in (0.1, 1.0, 300.0):
            x = (scale * torch.randn(1, rows, SIZES["hidden_size"])).to(dtype)
            wanted, found = theirs(x).float(), ours(x).float()
            assert torch.isfinite(found).all()
            assert (found - wanted).norm() <= ALIKE[dtype] * wanted.norm()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotations(dtype: torch.dtype) -> None:
    ours = Turn(apply_rotary_pos_emb)
    for rows, heads, dim in ((1, 9, 64), (37, 4, 32), (5, 1, 128), (3, 2, 16)):  # the last is the library's
        query = torch.randn(1, rows, heads * dim).to(dtype).view(1, rows, heads, dim).transpose(1, 2)
        key = torch.randn(1, 1, rows, dim).to(dtype)
        cos, sin = torch.randn(2, 1, rows, dim).to(dtype)
        for own, their in zip(ours(query, key, cos, sin), apply_rotary_pos_emb(query, key, cos, sin), strict=True):
            assert torch.equal(own, their)
    for own, their in zip(
        ours(query, key, cos[:, None], sin[:, None], unsqueeze_dim=0),
        apply_rotary_pos_emb(query, key, cos[:, None], sin[:, None], unsqueeze_dim=0),
        strict=True,
    ):
        assert torch.equal(own, their)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rows_bits_are_its_own(dtype: torch.dtype) -> None:
    norm = take(random_weights(LlamaRMSNorm(576), dtype))
    gate = take(random_weights(mlp(LlamaMLP, "silu"), dtype))
    gate.down_proj = nn.Identity()  # torch's product is not what is asked about
    gate.gate_proj, gate.up_proj = nn.Identity(), nn.Identity()
    turn = Turn(apply_rotary_pos_emb)
    x, cos, sin = (torch.randn(1, 100, 576).to(dtype) for _ in range(3))

    def all_of(rows: slice) -> list[torch.Tensor]:
        own = x[:, rows]
        states = own.view(1, -1, 9, 64).transpose(1, 2)
        angles = (given[:, rows, :64].contiguous() for given in (cos, sin))
        return [norm(own), gate(own), turn(states, states, *angles)[0].transpose(1, 2)]

    whole = all_of(slice(None))
    threads = torch.get_num_threads()
    try:
        for i, rows in enumerate((slice(0, 1), slice(99, 100), slice(10, 17), slice(0, 64), slice(31, 100))):
            torch.set_num_threads(1 + i % 2)
            for part, one in zip(all_of(rows), whole, strict=True):
                assert torch.equal(part, one[:, rows])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "stranger",
    [
        Halving(),
        nn.LayerNorm(64),
        LlamaRMSNorm(48),
        LlamaRMSNorm(64).half(),
        mlp(LlamaMLP, "relu").float(),
        mlp(LlamaMLP, "silu").half(),
    ],
    ids=["no norm", "layer norm", "odd size", "float16 norm", "another gate", "float16 gate"],
)
def test_what_no_kernel_does_stays(stranger: nn.Module) -> None:
    stranger.requires_grad_(False)
    assert take(stranger) is stranger


def test_a_rotation_of_pairs_is_no_rotation_of_halves() -> None:
    class Attention(nn.Module):
        def forward(self, states: torch.Tensor) -> object:
            return apply_rotary_pos_emb(states, states, states, states)

    module = Attention()
    assert library.called_in_forward(module, "apply_rotary_pos_emb") is apply_rotary_pos_emb
    library.replace_in_forward(module, "apply_rotary_pos_emb", turn_pairs)
    assert not rowwise.take_over(nn.ModuleList([nn.Linear(32, 32)]))
    assert rowwise.take_over(nn.ModuleList([module]))
    assert isinstance(module.forward.__func__.__globals__["apply_rotary_pos_emb"], Turn)
    assert Attention.forward.__globals__["apply_rotary_pos_emb"] is apply_rotary_pos_emb


def test_without_llvm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "is_there", lambda: False)
    assert not rowwise.take_over(nn.ModuleList([LlamaRMSNorm(64)]))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3"])
def test_launches_of_a_step(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A guard against a release that takes a step apart again: each layer is a handful of kernels."""
    launches = Counter[str]()

    really = machine.Compiled.run

    def counted(self: machine.Compiled, *given: Any, **named: Any) -> None:
        launches[self.name] += 1
        really(self, *given, **named)

    monkeypatch.setattr(machine.Compiled, "run", counted)
    config = CONFIGS[family]()
    config.head_dim = 32
    runner = runner_around(build(config, torch.bfloat16))
    table = tuple(BlockId(i) for i in range(2))
    draw = Draw(Sampling(max_tokens=4), 0)
    runner.launch(Plan(0, (Chunk(RequestId("it"), 0, tuple(range(3, 23)), table, None),))).land()
    runner.record(None)
    launches.clear()
    runner.launch(Plan(0, (Chunk(RequestId("it"), 20, (5,), table, draw),))).land()
    layers = SIZES["num_hidden_layers"]
    gemma, of_heads = family.startswith("gemma"), 2 * layers * (family in ("qwen3", "gemma3"))
    activation, tiles = "gelu" if gemma else "silu", machine.multiplies_tiles()
    wanted = {
        "late norm" if gemma else "norm": (4 if gemma else 2) * layers + 1 + of_heads,
        activation: 0 if tiles else layers,
        "turn": 2 * layers,
        "store": layers,
        "attention": layers,
        f"product, {activation}": layers * tiles,
        "product": (3 * layers + 1) * tiles,
    }
    assert launches == {name: count for name, count in wanted.items() if count}
