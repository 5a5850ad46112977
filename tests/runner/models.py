"""Tiny random models of many families, and runners around them."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import torch
import transformers
from torch import nn

from foreword.base.config import CacheConfig, ModelConfig
from foreword.runner import library
from foreword.runner.attention.interface import attend
from foreword.runner.loader import Loaded, equip
from foreword.runner.runner import ModelRunner

t: Any = transformers
"""The library with its types off: configurations are made from tables here."""

SIZES: Mapping[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = 24


def _deepseek() -> Any:
    latent = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
    experts = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
    sizes = {**SIZES, "num_key_value_heads": 4, "head_dim": 8}
    return t.DeepseekV3Config(**sizes, **latent, **experts, moe_intermediate_size=64, first_k_dense_replace=1)


CONFIGS: Mapping[str, Callable[[], Any]] = {
    "llama": lambda: t.LlamaConfig(**SIZES),
    "qwen2": lambda: t.Qwen2Config(**SIZES),
    "qwen3": lambda: t.Qwen3Config(**SIZES),
    "mistral": lambda: t.MistralConfig(**SIZES, sliding_window=WINDOW),
    "gemma2": lambda: t.Gemma2Config(**SIZES, sliding_window=WINDOW),
    "gemma3": lambda: t.Gemma3TextConfig(**SIZES, sliding_window=WINDOW),
    "phi3": lambda: t.Phi3Config(**SIZES),
    "gpt2": lambda: t.GPT2Config(
        vocab_size=512, n_embd=64, n_head=4, n_layer=3, n_positions=512, bos_token_id=1, eos_token_id=2
    ),
    "gpt_oss": lambda: t.GptOssConfig(
        **SIZES, sliding_window=WINDOW, num_local_experts=4, rope_parameters={"rope_type": "default", "rope_theta": 1e4}
    ),
    "llama4": lambda: t.Llama4TextConfig(
        **SIZES, attention_chunk_size=32, num_local_experts=2, intermediate_size_mlp=64
    ),
    "deepseek_v3": _deepseek,
}


def build(config: Any, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """A random model with the library's plainest attention."""
    torch.manual_seed(seed)
    with library.quiet():
        model = t.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return model.to(dtype).eval().requires_grad_(False)


def runner_around(model: nn.Module, *, block_size: int = 16, blocks: int = 64) -> ModelRunner:
    """A runner around a copy of a model in memory."""
    library.register_attention(attend)
    ours = deepcopy(model)
    library.use_attention(ours)
    loaded = Loaded(name="tiny", directory=None, model=ours)
    return equip(loaded, ModelConfig(), CacheConfig(block_size=block_size, kv_cache=str(blocks)))


def own_logits(model: nn.Module, tokens: list[int]) -> torch.Tensor:
    """The library's own full forward: [tokens, vocabulary]."""
    with torch.inference_mode():
        return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


def own_answer(model: Any, tokens: list[int], count: int) -> list[int]:
    """The library's own greedy answer."""
    ids = torch.tensor([tokens])
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
        )
    return out[0, len(tokens) :].tolist()
