"""The table of kinds: every way to be reusable, plain or refused, and that users read the same table."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import cache_utils

from foreword.base.errors import ModelRefused
from foreword.runner import kinds, library
from foreword.runner.kinds import LAYERS, ROPES, judge, rope_border, stretched_positions, turns_by_length
from tests.architecture.source import ROOT
from tests.runner import models, plain_models
from tests.runner.models import SIZES, t

REUSABLE = list(models.CONFIGS)
PLAIN: Mapping[str, str] = {
    "mamba": "3 of its 3 layers (linear_attention) keep a running sum",
    "mamba2": "3 of its 3 layers (linear_attention) keep a running sum",
    "lfm2": "2 of its 4 layers (conv) keep the last inputs of a convolution",
    "qwen3_next": "3 of its 4 layers (linear_attention) keep a running sum",
    "falcon_h1": "4 of its 4 layers (hybrid) keep a running sum",
    "minimax": "2 of its 4 layers (linear_attention) keep a running sum",
    "longrope": "its rope type longrope turns all keys otherwise",
    "dynamic": "its rope type dynamic turns all keys by the length of the longest request",
    "bloom": "BloomForCausalLM does not take positions",
}
REFUSED: Mapping[str, tuple[Callable[[], Any], str]] = {
    "t5": (lambda: t.T5Config(), "encoder-decoder"),
    "whisper": (lambda: t.WhisperConfig(), "encoder-decoder"),
    "llava": (lambda: t.LlavaConfig(), "images or sound"),
    "gemma3 that looks ahead": (lambda: t.Gemma3TextConfig(**SIZES, use_bidirectional_attention=True), "looks ahead"),
    "vit": (lambda: t.ViTConfig(), "not a causal language model"),
    "rwkv": (lambda: t.RwkvConfig(), "takes no cache of its own"),
    "gpt": (lambda: t.OpenAIGPTConfig(), "takes no cache of its own"),
}


@pytest.mark.parametrize("family", REUSABLE)
def test_reusable(family: str) -> None:
    assert judge(family, models.CONFIGS[family]()) is None


@pytest.mark.parametrize("family", list(plain_models.CONFIGS))
def test_plain(family: str) -> None:
    why = judge(family, plain_models.CONFIGS[family]())
    assert why is not None
    assert why.startswith(PLAIN[family])


@pytest.mark.parametrize("family", list(REFUSED))
def test_refused(family: str) -> None:
    make, reason = REFUSED[family]
    with pytest.raises(ModelRefused, match=reason):
        judge(family, make())


def test_every_kind_of_the_library_is_in_the_table() -> None:
    """A new kind is plain until somebody has thought about it; this tells that there is one."""
    known: Any = cache_utils
    unknown = set(known.DYNAMIC_LAYER_TYPE_MAPPING) - set(LAYERS)
    assert unknown <= {"moe", "mlp", "mamba", "attention", "deepseek_sparse_attention", "qwen_sparse_attention"}


@pytest.mark.parametrize("kind", ["quantum_attention", "deepseek_sparse_attention"])
def test_an_unknown_kind_is_plain(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "layer_kinds", lambda _: ("full_attention", kind))
    why = judge("new", models.CONFIGS["llama"]())
    assert why == f"1 of its 2 layers ({kind}) are of a kind unknown here"


def test_a_library_that_cannot_tell_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Any) -> tuple[str, ...]:
        raise LookupError("renamed")

    monkeypatch.setattr(library, "layer_kinds", fail)
    assert "cannot say what its layers keep (renamed)" in str(judge("new", models.CONFIGS["llama"]()))


def test_other_ropes() -> None:
    config = models.CONFIGS["llama"]()
    for rope, kind in ROPES.items():
        config.rope_parameters = {"rope_type": rope, "factor": 2.0, "rope_theta": 1e4}
        assert (judge("it", config) is None) == (kind.use == "reusable")
    config.rope_parameters = {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "spiral"}}
    assert judge("it", config) == "its rope type spiral is unknown here"
    config.rope_parameters = None
    config.rope_scaling = {"type": "dynamic"}
    assert "dynamic" in str(judge("it", config))


def test_quantised_weights_are_plain() -> None:
    config = models.CONFIGS["llama"]()
    config.quantization_config = {"quant_method": "bitsandbytes"}
    assert "quantised" in str(judge("it", config))


def test_where_angles_change() -> None:
    longrope, dynamic = plain_models.CONFIGS["longrope"](), plain_models.CONFIGS["dynamic"]()
    assert (rope_border(longrope), rope_border(dynamic)) == (plain_models.BORDER, None)
    assert (turns_by_length(longrope), turns_by_length(dynamic)) == (False, True)
    old = SimpleNamespace(rope_scaling={"type": "longrope"}, original_max_position_embeddings=4096)
    assert rope_border(old) == 4096
    assert rope_border(models.CONFIGS["llama"]()) is None
    assert stretched_positions(dynamic) == 8 * plain_models.BORDER
    assert stretched_positions(longrope) == 512
    assert stretched_positions(plain_models.CONFIGS["mamba"]()) is None


def test_the_page_for_users_has_the_whole_table() -> None:
    page = (Path(ROOT) / "docs" / "models.md").read_text("utf-8")
    for table in (LAYERS, ROPES):
        for name, kind in table.items():
            rows = [line for line in page.splitlines() if line.startswith(f"| `{name}` | {kind.use} |")]
            assert len(rows) == 1, f"docs/models.md needs one row `| `{name}` | {kind.use} | ... |`"


def test_reasons_read_as_clauses() -> None:
    assert all(kind.why and not kind.why.endswith(".") for kind in (*LAYERS.values(), *kinds.ROPES.values()))
