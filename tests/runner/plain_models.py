"""Tiny random models whose prefixes cannot be reused, one of each way to be so, and how they answer by themselves."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models

from foreword.runner import library
from foreword.runner.kinds import rope_border
from tests.runner.models import t

VOCABULARY = 512
BORDER = 64
"""Where longrope turns otherwise, and dynamic RoPE begins to."""

SIZES: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MAMBA2: Mapping[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}
DELTA: Mapping[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


def _longrope() -> Any:
    short, long = [1.0 + 0.1 * i for i in range(8)], [2.0 + 3 * i for i in range(8)]
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": short, "long_factor": long}
    return t.Phi3Config(
        **SIZES,
        original_max_position_embeddings=BORDER,
        rope_parameters={**rope, "original_max_position_embeddings": BORDER},
    )


def _qwen3_next() -> Any:
    experts: Any = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
    return t.Qwen3NextConfig(
        **SIZES, **DELTA, **experts, head_dim=16, shared_expert_intermediate_size=32, layer_types=kinds
    )


CONFIGS: Mapping[str, Callable[[], Any]] = {
    "mamba": lambda: t.MambaConfig(
        vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=3, state_size=8, pad_token_id=0, eos_token_id=2
    ),
    "mamba2": lambda: t.Mamba2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=3,
        state_size=8,
        head_dim=16,
        num_heads=8,
        n_groups=1,
        chunk_size=16,
        pad_token_id=0,
        eos_token_id=2,
    ),
    "lfm2": lambda: t.Lfm2Config(**SIZES, layer_types=["conv", "full_attention", "conv", "full_attention"]),
    "qwen3_next": _qwen3_next,
    "falcon_h1": lambda: t.FalconH1Config(**SIZES, **MAMBA2, head_dim=16, mamba_d_ssm=128),
    "minimax": lambda: t.MiniMaxConfig(
        **SIZES,
        head_dim=16,
        num_local_experts=2,
        num_experts_per_tok=1,
        block_size=16,
        layer_types=["linear_attention", "full_attention"] * 2,
    ),
    "longrope": _longrope,
    "dynamic": lambda: t.LlamaConfig(
        **{**SIZES, "max_position_embeddings": BORDER},
        rope_parameters={"rope_type": "dynamic", "factor": 8.0, "rope_theta": 1e4},
    ),
    "bloom": lambda: t.BloomConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        n_layer=2,
        n_head=4,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    ),
}
"""By what speaks against reuse: a running sum, a convolution, both with attention, angles, an attention of its own."""


def build(family: str) -> Any:
    """A random model whose answers depend on every token: random weights of the usual size make them all alike."""
    torch.manual_seed(0)
    with library.quiet():
        model = t.AutoModelForCausalLM.from_config(CONFIGS[family]())
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data.mul_(4)
    return model.eval().requires_grad_(False)


def answer(model: Any, tokens: Sequence[int], count: int) -> list[int]:
    """The library's own greedy answer of a model that has seen nothing before.

    Without its cache for longrope: older releases lose the prompt where the angles change.
    """
    carries = rope_border(library.config_of(model)) is None
    ids, alone = torch.tensor([list(tokens)]), deepcopy(model)
    with torch.inference_mode(), library.quiet():
        out = alone.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
            use_cache=carries,
        )
    return out[0, len(tokens) :].tolist()


def save(model: Any, folder: Path) -> Path:
    """A model directory as any other, with a tokenizer that knows the words `t0`, `t1`, ... and a chat template."""
    with library.quiet():
        model.save_pretrained(folder)
    made = Tokenizer(tokenizer_models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.decoder = decoders.WordPiece(prefix="", cleanup=False)
    template = "{% for message in messages %}t3 {{ message.content }} {% endfor %}t4"
    t.PreTrainedTokenizerFast(tokenizer_object=made, chat_template=template).save_pretrained(folder)
    return folder
