"""Who multiplies by a model's weights: the kernel for tile registers where there are any, else torch in portions."""

import weakref
from collections.abc import Callable
from copy import deepcopy
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP

from foreword.base.errors import InvariantBroken
from foreword.runner import library, rowwise
from foreword.runner import linear as linear_module
from foreword.runner import products as products_module
from foreword.runner.linear import PortionedLinear, StandIn, pad_rows
from foreword.runner.native import machine, product
from foreword.runner.products import Heard, Products, TiledLinear, listen, take_over
from tests.runner.models import CONFIGS, SIZES, build, runner_around, t

COUNTS = (1, 2, 7, 15, 16, 17, 31, 32, 33, 47, 48, 49, 64, 100, 479, 480, 481, 512, 700)

HAS_TILES = machine.multiplies_tiles()
"""Where the processor has none, the same is asked of torch's products."""
RTOL, ATOL = (2**-8, 1e-4) if HAS_TILES else (2**-7, 2e-2)
"""Our kernel rounds once; torch's way adds the bias to what is rounded already."""
TILED = Products(exact=True, room=int, ingredient="tiles 1")
PORTIONED = Products(exact=True, room=pad_rows, ingredient="torch")


def linear(inputs: int, outputs: int, *, bias: bool = False) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=bias).bfloat16().requires_grad_(False)


def stand_ins(*linears: nn.Linear) -> list[nn.Module]:
    """What takes the place of layers that are given the same rows; these stay as they are."""
    model = nn.ModuleList(deepcopy(linears))
    assert take_over(model, [cast("list[nn.Linear]", list(model))]).exact
    return list(model)


def forward(model: nn.Module) -> None:
    library.forward(model, torch.zeros(1, 2, dtype=torch.long), torch.arange(2)[None])


def take_all(model: nn.Module) -> Products:
    with listen(model) as heard:
        forward(model)
    return take_over(model, heard.families())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(32, 32), (576, 192), (1536, 576), (64, 1024)])
def test_it_multiplies(shape: tuple[int, int], bias: bool) -> None:
    torch.manual_seed(0)
    one = linear(*shape, bias=bias)
    (ours,) = stand_ins(one)
    for count in COUNTS:
        x = torch.randn(count, shape[0]).bfloat16()
        found, theirs = ours(x), F.linear(x.float(), one.weight.float(), bias_of(one))
        assert found.shape == theirs.shape
        assert torch.allclose(found.float(), theirs, rtol=RTOL, atol=ATOL)


def test_a_row_has_the_same_bits_among_any_others() -> None:
    torch.manual_seed(1)
    one, two = linear(1536, 192, bias=True), linear(1536, 64)
    (alone,), (other, beside) = stand_ins(one), stand_ins(two, one)
    x = torch.randn(COUNTS[-1], 1536).bfloat16()
    whole = alone(x)
    threads = torch.get_num_threads()
    try:
        for count in COUNTS:
            torch.set_num_threads(1 + count % 2)
            assert torch.equal(alone(x[:count]), whole[:count])
            assert torch.equal(alone(x[-count:]), whole[-count:])
            given = x[:count]
            assert other(given).shape == (count, 64)
            assert torch.equal(beside(given), whole[:count])
    finally:
        torch.set_num_threads(threads)


def test_panels_are_as_large_as_rows_ask_for_and_enough_for_all_workers() -> None:
    (ours,) = stand_ins(linear(64, 1024))
    assert isinstance(ours, TiledLinear) == HAS_TILES
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for rows, items in ((1, 32), (32, 32), (33, 8), (128, 8), (129, 2), (256, 2), (257, 4)):
            ours(torch.randn(rows, 64).bfloat16())
            if isinstance(ours, TiledLinear):
                assert ours._laid._job[product.Job.NEXT] == items + 2, "each worker asks once in vain"
    finally:
        torch.set_num_threads(threads)


def test_siblings_are_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(CONFIGS["llama"](), torch.bfloat16)
    runs = count_runs(monkeypatch)
    assert take_all(model) == (TILED if HAS_TILES else PORTIONED)
    assert not runs  # nothing is tried out: it is exact by construction
    assert all(type(module) is not nn.Linear for module in model.modules())
    forward(model)
    per_step = 4 * SIZES["num_hidden_layers"] + 1  # q/k/v, o, gate/up, down; logits
    assert sum(name.startswith("product") for name in runs) == HAS_TILES * per_step
    forward(model)
    assert sum(name.startswith("product") for name in runs) == HAS_TILES * 2 * per_step


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_a_gate_and_what_it_lets_through_are_one(activation: str, bias: bool) -> None:
    torch.manual_seed(3)
    config = t.LlamaConfig(**{**SIZES, "intermediate_size": 96}, hidden_act=activation, mlp_bias=bias)
    mlp = LlamaMLP(config).bfloat16().requires_grad_(False)
    apart, together = (nn.ModuleList([deepcopy(mlp)]) for _ in range(2))
    for holder in (apart, together):
        assert rowwise.take_over(holder)
        mlp_of(holder).down_proj = nn.Identity()
    linears = [mlp_of(apart).gate_proj, mlp_of(apart).up_proj]
    mlp_of(apart).gate_proj, mlp_of(apart).up_proj = stand_ins(*linears)
    names = set(together.state_dict())
    assert take_over(together, []).exact
    assert set(together.state_dict()) == names
    assert (mlp_of(together).together is not None) == HAS_TILES
    for count in COUNTS:
        x = torch.randn(1, count, SIZES["hidden_size"]).bfloat16()
        assert torch.equal(mlp_of(together)(x), mlp_of(apart)(x))
    if HAS_TILES:
        with pytest.raises(InvariantBroken, match="made elsewhere"):
            mlp_of(together).gate_proj(torch.zeros(1, 1))


def test_rows_may_lie_apart() -> None:
    """A gate's result does, by an odd number of cache lines; whoever multiplies it takes it as it is."""
    torch.manual_seed(4)
    config = t.LlamaConfig(**{**SIZES, "intermediate_size": 128})
    holder = nn.ModuleList([LlamaMLP(config).bfloat16().requires_grad_(False)])
    assert rowwise.take_over(holder)
    assert take_over(holder, []).exact
    mlp = mlp_of(holder)
    for count in COUNTS:
        x = torch.randn(1, count, SIZES["hidden_size"]).bfloat16()
        if mlp.together is not None:
            let_through = mlp.together(x)
            assert let_through.stride() == (160 * count, 160, 1)
            assert torch.equal(mlp(x), mlp.down_proj(let_through.contiguous()))
        turned = torch.randn(SIZES["hidden_size"], count).bfloat16().t()
        assert torch.equal(mlp(turned), mlp(turned.contiguous()))
    assert (mlp.together is not None) == HAS_TILES


def test_siblings_need_not_come_in_order_nor_together() -> None:
    torch.manual_seed(2)
    family = [linear(64, 32), linear(64, 96, bias=True), linear(64, 64)]
    ours = stand_ins(*family)
    x, y = torch.randn(1, 5, 64).bfloat16(), torch.randn(1, 40, 64).bfloat16()
    for index, given in ((2, x), (0, x), (0, y), (1, x), (1, y), (2, y), (2, y), (0, x)):
        wanted = F.linear(given.float(), family[index].weight.float(), bias_of(family[index]))
        found = ours[index](given)
        assert found.shape == wanted.shape
        assert torch.allclose(found.float(), wanted, rtol=RTOL, atol=ATOL)


def test_rows_that_lie_apart_and_other_types() -> None:
    one = linear(64, 32)
    (ours,), x = stand_ins(one), torch.randn(6, 128).bfloat16()
    assert torch.equal(ours(x[:, ::2]), ours(x[:, ::2].contiguous()))
    with pytest.raises(RuntimeError):
        ours(x[:, ::2].float())


def test_it_has_the_weights_names() -> None:
    model = build(CONFIGS["qwen2"](), torch.bfloat16)
    names = set(model.state_dict())
    take_all(model)
    assert set(model.state_dict()) == names


def test_a_model_of_odd_shapes_is_mixed() -> None:
    config = CONFIGS["llama"]()
    config.vocab_size = 500
    found = take_all(model := build(config, torch.bfloat16))
    assert found.exact
    assert found.room is pad_rows
    kinds = {type(module) for module in model.modules()}
    assert PortionedLinear in kinds
    assert (TiledLinear in kinds) == HAS_TILES


def mlp_of(holder: nn.ModuleList) -> Any:
    return holder[0]


def count_runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    runs: list[str] = []
    run = machine.Compiled.run

    def noted(self: machine.Compiled, *given: Any, **named: Any) -> None:
        runs.append(self.name)
        run(self, *given, **named)

    monkeypatch.setattr(machine.Compiled, "run", noted)
    return runs


def bias_of(one: nn.Linear) -> torch.Tensor | None:
    return None if one.bias is None else one.bias.float()


def test_families_are_those_who_are_given_the_same_rows() -> None:
    a, b, c, d, e = (linear(32, 32) for _ in range(5))
    x, y, z = (torch.zeros(1, 32) for _ in range(3))
    heard = Heard([(a, x), (b, x), (c, y), (d, z), (e, x), (d, z)])
    assert list(heard.families()) == [(a, b), (c,), (e,)]  # d is called twice


@pytest.mark.parametrize(
    ("dtype", "tiles"), [(torch.float32, lambda: True), (torch.bfloat16, lambda: False), (torch.float16, lambda: True)]
)
def test_without_tiles(dtype: torch.dtype, tiles: Callable[[], bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "multiplies_tiles", tiles)
    model = build(CONFIGS["llama"](), dtype)
    names = set(model.state_dict())
    assert take_all(model) == PORTIONED
    assert set(model.state_dict()) == names
    kinds = {type(module) for module in model.modules()}
    assert PortionedLinear in kinds
    assert not {nn.Linear, TiledLinear} & kinds


@pytest.mark.parametrize("family", ["gpt2", "deepseek_v3"])
def test_weights_elsewhere_are_owned_up_to(family: str) -> None:
    assert not take_all(build(CONFIGS[family](), torch.bfloat16)).exact


def test_a_large_model_is_not_there_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(CONFIGS["llama"](), torch.bfloat16)
    size = sum(module.weight.nbytes for module in model.modules() if isinstance(module, nn.Linear))
    monkeypatch.setattr(linear_module, "_time", lambda matrix, x, way: float(way != "packed"))
    monkeypatch.setattr(machine, "multiplies_tiles", lambda: False)
    for limit, twice in ((size, True), (size - 1, False)):
        monkeypatch.setattr(products_module, "PACKED_BYTES", limit)
        take_all(copy := deepcopy(model))
        ways = {p.way for one in copy.modules() if isinstance(one, PortionedLinear) for p in one.menu.portions}
        assert ("packed" in ways) == twice


@pytest.mark.parametrize("tied", [False, True])
def test_what_is_laid_out_is_there_only_once(tied: bool) -> None:
    config = CONFIGS["llama"]()
    config.tie_word_embeddings = tied
    model: Any = build(config, torch.bfloat16)
    before = {name: (tensor.shape, tensor.dtype) for name, tensor in model.state_dict().items()}
    wanted, size = weakref.ref(model.model.layers[0].self_attn.q_proj.weight), sum(p.nbytes for p in model.parameters())
    taken = deepcopy(model.model.embed_tokens.weight)
    take_all(model)
    assert (wanted() is None) == HAS_TILES
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in model.state_dict().items()} == before
    layers = [module for module in model.modules() if isinstance(module, StandIn)]
    assert len(layers) == 7 * SIZES["num_hidden_layers"] + 1
    assert all(layer.weight.is_meta == HAS_TILES for layer in layers)
    assert torch.equal(model.model.embed_tokens.weight, taken), "the table of embeddings is read as it was"
    kept = sum(parameter.nbytes for parameter in model.parameters() if not parameter.is_meta)
    assert taken.nbytes <= kept
    assert (kept < size / 2) == HAS_TILES


def test_a_step_is_padded_only_for_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    for tiles in (HAS_TILES, False):
        monkeypatch.setattr(machine, "multiplies_tiles", lambda tiles=tiles: tiles)
        runner = runner_around(build(CONFIGS["llama"](), torch.bfloat16))
        assert runner.card.exact
        assert runner.card.ingredients["products"] == ("tiles 1" if tiles else "torch")
