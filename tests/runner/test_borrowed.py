"""FlashAttention 2 and FlashInfer: when they may be used, and what they are asked.

Both need a card. Here stand-ins answer, written after what flash-attn 2.8.3 and flashinfer-python 0.7.4 say of their
functions: they take the arguments that are named there and no others, and hold us to every demand that is made there.
"""

import sys
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from foreword.base.errors import ConfigError
from foreword.runner.attention import borrowed, flash_attn, flashinfer
from foreword.runner.attention.backend import Backend, Ground
from foreword.runner.attention.call import Sight
from foreword.runner.attention.choice import choose
from foreword.runner.attention.tiles import Segment
from tests.runner.paged import Layer, Scene

LAYERS = (
    Layer(key_dim=64, value_dim=64),
    Layer(key_dim=64, value_dim=64, sight=Sight(window=24)),
    Layer(key_dim=64, value_dim=64, kv_heads=1, softcap=3.0),
    Layer(key_dim=64, value_dim=64, kv_heads=4),
    Layer(key_dim=64, value_dim=64),
)
CHUNKS = ((37, 1), (0, 20), (70, 3), (300, 5), (255, 1), (256, 1))
NUM_ROWS = sum(count for _, count in CHUNKS)
PADDED = NUM_ROWS + 3


def attend(query: Tensor, keys: Tensor, values: Tensor, how: tuple[int, float, float]) -> Tensor:
    """One sequence: its last rows over all of its keys, [rows, heads, dim] and [keys, kv_heads, dim].

    `how`: keys seen before a query's own or -1, scale, soft cap or 0.
    """
    left, scale, softcap = how
    rows, end = query.shape[0], keys.shape[0]
    group = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query, keys) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    at, key = torch.arange(end - rows, end)[:, None], torch.arange(end)[None]
    seen = key <= at
    if left >= 0:
        seen &= key >= at - left
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values)


def integers(tensor: Tensor, count: int, *, device: str | None = None) -> list[int]:
    assert tensor.dtype == torch.int32
    assert tensor.shape == (count,)
    assert tensor.is_contiguous()
    assert device is None or tensor.device.type == device
    return tensor.tolist()


def flash_attn_varlen_func(  # noqa: PLR0917  (theirs)
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    assert (dropout_p, alibi_slopes, deterministic, return_attn_probs) == (0.0, None, False, False)
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert causal
    assert k.shape == v.shape
    assert k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
    assert block_table is not None
    assert (block_table.dtype, block_table.stride(-1)) == (torch.int32, 1)
    count = block_table.shape[0]
    assert window_size[1] == (-1 if window_size[0] < 0 else 0)
    firsts, begins = integers(cu_seqlens_q, count + 1), integers(cu_seqlens_k, count + 1)
    assert firsts[-1] == q.shape[0]
    out = torch.empty_like(q)
    for i, ((first, last), (begin, end)) in enumerate(zip(pairwise(firsts), pairwise(begins), strict=True)):
        assert last - first <= max_seqlen_q
        assert end - begin <= max_seqlen_k
        keys, values = (states[block_table[i].long()].flatten(0, 1)[: end - begin] for states in (k, v))
        scale = q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
        out[first:last] = attend(q[first:last], keys, values, (window_size[0], scale, softcap))
    return out


class BatchPrefillWithPagedKVCacheWrapper:
    made: ClassVar[list["BatchPrefillWithPagedKVCacheWrapper"]] = []

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", *, backend: str = "auto") -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert float_workspace_buffer.numel() >= 128 * 2**20
        assert float_workspace_buffer.data_ptr() % 16 == 0
        assert (kv_layout, backend) == ("NHD", "fa2")
        self.plans: list[dict[str, Any]] = []
        self.runs = 0
        self.made.append(self)

    def plan(  # noqa: PLR0917  (theirs)
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
    ) -> None:
        assert causal
        count = len(qo_indptr) - 1
        pages = integers(paged_kv_indptr, count + 1, device="cpu")
        self.plans.append(
            {
                "firsts": integers(qo_indptr, count + 1, device="cpu"),
                "pages": pages,
                "blocks": integers(paged_kv_indices, pages[-1]),
                "last": integers(paged_kv_last_page_len, count, device="cpu"),
                "shape": (num_qo_heads, num_kv_heads, head_dim_qk, page_size),
                "dtypes": (q_data_type, kv_data_type),
                "how": (
                    window_left,
                    head_dim_qk**-0.5 if sm_scale is None else sm_scale,
                    0.0 if logits_soft_cap is None else logits_soft_cap,
                ),
            }
        )
        assert all(1 <= last <= page_size for last in self.plans[-1]["last"])

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        plan, (k, v) = self.plans[-1], paged_kv_cache
        self.runs += 1
        heads, kv_heads, dim, page_size = plan["shape"]
        assert q.shape == (plan["firsts"][-1], heads, dim)
        assert k.shape[1:] == v.shape[1:] == (page_size, kv_heads, dim)
        assert k.stride() == v.stride()
        assert q.stride(-1) == k.stride(-1) == 1
        assert (q.dtype, k.dtype) == plan["dtypes"]
        out = torch.empty_like(q)
        for i, ((first, last), (begin, until)) in enumerate(
            zip(pairwise(plan["firsts"]), pairwise(plan["pages"]), strict=True)
        ):
            end = (until - begin - 1) * page_size + plan["last"][i]
            table = torch.tensor(plan["blocks"][begin:until])
            keys, values = (states[table].flatten(0, 1)[:end] for states in (k, v))
            out[first:last] = attend(q[first:last], keys, values, plan["how"])
        return out


really_is_there = borrowed.is_there


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both packages, on an Ampere card."""
    theirs: dict[str, Any] = {
        "flash_attn": {},
        "flash_attn.flash_attn_interface": {"flash_attn_varlen_func": flash_attn_varlen_func},
        "flashinfer": {"BatchPrefillWithPagedKVCacheWrapper": BatchPrefillWithPagedKVCacheWrapper},
    }
    for name, members in theirs.items():
        module = ModuleType(name)
        module.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, module)
    BatchPrefillWithPagedKVCacheWrapper.made.clear()
    monkeypatch.setattr(borrowed, "is_there", lambda module: True)
    monkeypatch.setattr(borrowed, "capability", lambda device: 8)


def on_a_card(*layers: Layer, exact: bool = False, dtype: torch.dtype = torch.bfloat16, size: int = 256) -> Ground:
    memory: Any = SimpleNamespace(
        buffer=SimpleNamespace(device=torch.device("cuda"), dtype=dtype), layout=SimpleNamespace(block_size=size)
    )
    facts = tuple(layer.facts(i) for i, layer in enumerate(layers or LAYERS))
    return Ground(facts=facts, memory=memory, exact=exact)


@pytest.mark.parametrize("backend", [flash_attn, flashinfer])
@pytest.mark.usefixtures("installed")
def test_where_they_can_be_used(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert backend.obstacle(on_a_card()) is None
    assert backend.obstacle(Scene([Layer()]).ground) == "it needs a CUDA card"
    assert "half precision, not in float32" in backend.obstacle(on_a_card(dtype=torch.float32))
    assert "not proven" in backend.obstacle(on_a_card(exact=True))
    assert backend.obstacle(on_a_card(*LAYERS, Layer(key_dim=64, value_dim=64, sinks=True))) == "layer 5 has sinks"
    assert backend.obstacle(on_a_card(Layer(key_dim=64, value_dim=64, sight=Sight(chunk=8)))) == "layer 0 sees chunks"
    assert "keys of 64 and values of 128" in backend.obstacle(on_a_card(Layer(key_dim=64, value_dim=128)))
    assert "keys of 20 and values of 20" in backend.obstacle(on_a_card(Layer(key_dim=20, value_dim=20)))
    monkeypatch.setattr(borrowed, "capability", lambda device: 7)
    assert "compute capability 8.0" in backend.obstacle(on_a_card())
    monkeypatch.setattr(borrowed, "is_there", really_is_there)
    for name in ("flash_attn", "flash_attn.flash_attn_interface", "flashinfer"):
        monkeypatch.delitem(sys.modules, name)
    assert "is not installed" in backend.obstacle(on_a_card())


@pytest.mark.usefixtures("installed")
def test_flash_attn_wants_large_blocks() -> None:
    assert flash_attn.obstacle(on_a_card(size=16)) == (
        "its pages are multiples of 256 tokens and blocks have 16; use --block-size 256"
    )
    assert flashinfer.obstacle(on_a_card(size=16)) is None
    assert flash_attn.obstacle(on_a_card(Layer(key_dim=16))) is None
    assert "keys of 16" in str(flashinfer.obstacle(on_a_card(Layer(key_dim=16))))


@pytest.mark.parametrize("name", ["flash-attn", "flashinfer"])
def test_they_are_refused_on_a_cpu_with_the_reason(name: str) -> None:
    ground = Scene([Layer()]).ground
    with pytest.raises(ConfigError, match=f"attention is {name}.*not {name}: it needs a CUDA card.*auto or .*sdpa"):
        choose(name, ground)
    assert choose("auto", ground).name not in ("flash-attn", "flashinfer")


def attends_as_the_formula(backend: Backend, scene: Scene, segments: tuple[Segment, ...]) -> None:
    """Each layer, with zeros for padding."""
    step = backend.begin(segments, PADDED)
    for call in scene.calls(PADDED):
        ours = step.attend(call)
        assert torch.allclose(ours, scene.expected(call, segments), atol=5e-6)
        assert not ours[NUM_ROWS:].any()


@pytest.mark.usefixtures("installed")
def test_what_flash_attn_is_asked() -> None:
    scene = Scene(LAYERS, size=256)
    segments = scene.segments(*CHUNKS)
    backend = flash_attn.FlashAttnBackend(scene.ground, scene.memory)
    attends_as_the_formula(backend, scene, segments)
    assert not scene.memory.buffer[-1].any()
    assert backend.over(scene.memory).function is flash_attn_varlen_func
    decodes = scene.segments((7, 1), (300, 1))
    step = backend.begin(decodes, 2)
    for call in scene.calls(2):
        assert torch.allclose(step.attend(call), scene.expected(call, decodes), atol=5e-6)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("size", [16, 256])
def test_what_flashinfer_is_asked(size: int) -> None:
    scene = Scene(LAYERS, size=size)
    segments = scene.segments(*CHUNKS)
    backend = flashinfer.FlashInferBackend(scene.ground, scene.memory)
    attends_as_the_formula(backend, scene, segments)
    wrappers = BatchPrefillWithPagedKVCacheWrapper.made
    assert [(len(one.plans), one.runs) for one in wrappers] == [(1, 2), (1, 1), (1, 1), (1, 1)], "two layers are alike"


@pytest.mark.usefixtures("installed")
def test_steps_take_turns_with_flashinfers_wrappers() -> None:
    """One is told of the next step while the copies of the one before may still be under way."""
    scene = Scene(LAYERS[:1])
    backend = flashinfer.FlashInferBackend(scene.ground, scene.memory)
    wrappers = BatchPrefillWithPagedKVCacheWrapper.made
    segments = scene.segments((5, 1))
    for told in ([1], [1, 1], [2, 1], [2, 2]):
        backend.begin(segments, 1).attend(scene.calls(1)[0])
        assert [len(one.plans) for one in wrappers] == told
