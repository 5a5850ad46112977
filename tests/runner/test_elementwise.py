"""Activations: a row has the same bits beside however many others, on however many threads."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN

from foreword.runner.elementwise import Portioned, take_over
from tests.parity.desk import Desk, random_tokens
from tests.runner.models import CONFIGS, build, runner_around, t

NAMES = ("silu", "sigmoid", "mish", "gelu", "gelu_pytorch_tanh", "gelu_new", "quick_gelu", "relu2", "sqrtsoftplus")
COUNTS = (1, 7, 16, 37, 90, 174, 333)


@pytest.fixture(params=[1, 2, 4])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_a_row_alone_and_in_company(name: str, dtype: torch.dtype) -> None:
    source = torch.Generator().manual_seed(0)
    for size in (64, 100, 1536, 20_000):
        count = 400 if size < 10_000 else 20
        x = (3 * torch.randn(count, 2 * size, generator=source)).to(dtype)[:, :size]  # rows that lie apart
        activation: Any = ACT2FN[name]
        ours = Portioned(activation)
        whole = ours(x)
        torch.testing.assert_close(whole, activation(x))
        for few in (few for few in COUNTS if few <= count):
            for first in (0, count - few):
                rows = x[first : first + few]
                assert torch.equal(ours(rows), whole[first : first + few]), (size, few)
                assert torch.equal(ours(rows.contiguous()[None])[0], whole[first : first + few]), (size, few)
    assert ours(x[:0]).shape == (0, 20_000)


def test_only_activations_are_stood_in_for() -> None:
    model = nn.ModuleDict(
        {"act": ACT2FN["silu"], "learned": nn.PReLU(), "norm": nn.LayerNorm(4), "inner": nn.Softmax()}
    )
    names = set(model.state_dict())
    take_over(model)
    assert [type(module) for module in model.children()] == [Portioned, nn.PReLU, nn.LayerNorm, nn.Softmax]
    assert set(model.state_dict()) == names
    take_over(model)
    assert type(model["act"].activation) is type(ACT2FN["silu"]), "not twice"


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["phi3", "starcoder2"])
def test_models_that_no_kernel_has_the_gates_of(family: str, dtype: torch.dtype) -> None:
    """A prompt in one step and cut anywhere: the same bits in every row."""
    config = CONFIGS["phi3"]() if family == "phi3" else t.Starcoder2Config(**CONFIGS["phi3"]().to_dict())
    config.intermediate_size, config.num_hidden_layers = 5000, 6  # some row of these differs without a stand-in
    runner = runner_around(build(config, dtype), blocks=200)
    assert runner.card.exact
    tokens, desk = random_tokens(205, seed=1), Desk(runner)
    whole = desk.whole(desk.open(tokens), [205])
    for cuts in ((128, 77), (197, 8), (37, 37, 37, 37, 37, 20), (64, 1, 1, 1, 100, 16, 22), (1, 1, 203)):
        assert torch.equal(desk.whole(desk.open(tokens), cuts), whole), cuts
