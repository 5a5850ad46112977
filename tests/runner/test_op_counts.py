"""A step's work is counted, not timed: what one more request or layer may cost in operations."""

from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from foreword.runner import linear
from tests.parity.desk import Desk, random_tokens
from tests.runner.models import CONFIGS, build, runner_around

_VIEWS = set(
    "view _unsafe_view transpose t unsqueeze squeeze expand slice select alias permute detach split as_strided".split()
)


@pytest.fixture(autouse=True)
def one_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products are made in the way that was fastest when a model was loaded, and ways differ in operations."""
    monkeypatch.setattr(linear, "_time", lambda *_: 0.0)


class Operations(TorchDispatchMode):
    """Counts what is dispatched, views left out."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ not in _VIEWS
        return func(*args, **(kwargs or {}))


def decode_operations(num_requests: int, length: int, layers: int = 3) -> int:
    """Of one decode step of requests that are equally long."""
    config = CONFIGS["llama"]()
    config.num_hidden_layers = layers
    desk = Desk(runner_around(build(config), blocks=160))
    lines = [desk.open(random_tokens(length + 1, seed=i)) for i in range(num_requests)]
    for line in lines:
        desk.logits([(line, length)])
    with Operations() as noted:
        desk.logits([(line, 1) for line in lines])
    return noted.count


@pytest.mark.parametrize("length", [20, 100])
def test_a_decode_step_costs_as_many_operations_for_many_requests_as_for_few(length: int) -> None:
    """Numbers of rows that need no padding, so any difference would be work for each request."""
    few = decode_operations(4, length)
    assert few > 0
    assert decode_operations(8, length) <= few
    assert decode_operations(16, length) <= few


def test_operations_grow_with_layers_only_by_a_layer() -> None:
    two, three, four = (decode_operations(4, 20, layers) for layers in (2, 3, 4))
    assert four - three == three - two
    assert three - two <= 75
