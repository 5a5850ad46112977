"""PyTorch's paged attention: when it may be used, and what it is asked. It needs a card; here a stand-in answers."""

import inspect
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention.varlen import varlen_attn

from foreword.runner.attention import varlen
from foreword.runner.attention.backend import Ground
from foreword.runner.attention.call import Sight
from foreword.runner.attention.varlen import KERNELS, VarlenBackend, obstacle
from tests.runner.paged import Layer, Scene


def on_a_card(*layers: Layer, exact: bool = False, dtype: torch.dtype = torch.bfloat16) -> Ground:
    memory: Any = SimpleNamespace(buffer=SimpleNamespace(device=torch.device("cuda"), dtype=dtype))
    facts = tuple(layer.facts(i) for i, layer in enumerate(layers or (Layer(),)))
    return Ground(facts=facts, memory=memory, exact=exact)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "capability", lambda device: 9)
    real = varlen.is_there
    monkeypatch.setattr(varlen, "is_there", lambda module: module == KERNELS[9].package or real(module))


@pytest.mark.usefixtures("hopper")
def test_where_it_can_be_used() -> None:
    assert obstacle(on_a_card()) is None
    assert obstacle(on_a_card(Layer(sight=Sight(window=8)))) is None
    assert obstacle(Scene([Layer()]).ground) == "it needs a CUDA card"
    assert "half precision, not in float32" in str(obstacle(on_a_card(dtype=torch.float32)))
    assert "not proven" in str(obstacle(on_a_card(exact=True)))
    assert obstacle(on_a_card(Layer(), Layer(softcap=3.0))) == "layer 1 has a soft cap or sinks"
    assert obstacle(on_a_card(Layer(sinks=True))) == "layer 0 has a soft cap or sinks"
    assert obstacle(on_a_card(Layer(sight=Sight(chunk=8)))) == "layer 0 sees chunks"
    assert "keys of 24 and values of 16" in str(obstacle(on_a_card(Layer(key_dim=24))))


@pytest.mark.usefixtures("hopper")
def test_a_release_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.nn.attention.varlen as module

    monkeypatch.setattr(module, "varlen_attn", lambda query, key, value: query)
    assert "no varlen_attn with a block table" in str(obstacle(on_a_card()))


def test_other_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "capability", lambda device: 8)
    assert "Hopper and Blackwell" in str(obstacle(on_a_card()))
    monkeypatch.setattr(varlen, "capability", lambda device: 10)
    assert obstacle(on_a_card()) == "the package that brings flash_attn.cute (FA4) is not installed"


def stand_in(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **given: Any) -> torch.Tensor:
    """The function's own definition, one sequence after the other; arguments that it does not name are an error."""
    inspect.signature(varlen_attn).bind(query, key, value, **given)
    out = torch.empty_like(query)
    firsts = given["cu_seq_q"].tolist()
    assert given["cu_seq_q"].dtype == given["seqused_k"].dtype == given["block_table"].dtype == torch.int32
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    left, right = given["window_size"]
    assert right == 0
    for i, (first, last) in enumerate(pairwise(firsts)):
        end = int(given["seqused_k"][i])
        assert last - first <= given["max_q"]
        assert end <= given["max_k"]
        table = given["block_table"][i].long()
        keys, values = (states[table].flatten(0, 1)[:end] for states in (key, value))
        group = query.shape[1] // keys.shape[1]
        assert given["enable_gqa"] is (group > 1)
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", query[first:last], keys) * given["scale"]
        at = torch.arange(end - (last - first), end)[:, None]
        seen = torch.arange(end)[None] <= at
        if left >= 0:
            seen &= torch.arange(end)[None] >= at - left
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        out[first:last] = torch.einsum("hqk,khd->qhd", weights, values)
    return out


def test_what_it_is_asked() -> None:
    scene = Scene([Layer(), Layer(sight=Sight(window=24)), Layer(kv_heads=4)])
    segments = scene.segments((37, 1), (0, 20), (70, 3))
    backend = VarlenBackend(scene.ground, scene.memory, "varlen, FA3 1")
    backend.function = stand_in
    step = backend.begin(segments, 26)
    for call in scene.calls(26):
        ours = step.attend(call)
        assert torch.allclose(ours, scene.expected(call, segments), atol=5e-6)
        assert not ours[24:].any()
    assert not scene.memory.buffer[-1].any()
    assert not backend.exact
