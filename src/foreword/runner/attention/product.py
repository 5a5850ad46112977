"""Attention of one block of rows over one block of keys: the only place where scores are made."""

import torch
import torch.nn.functional as F
from torch import Tensor

from foreword.runner.attention.call import Scoring


def is_fused(scoring: Scoring) -> bool:
    """Whether torch's own kernel computes it."""
    return scoring.softcap is None and scoring.sinks is None


def attend_product(scoring: Scoring, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Softmax of the scores, times the values: [n, kv_heads, group, height, value_dim].

    query [n, kv_heads, group, height, key_dim], keys and values [n, kv_heads, count, dim], mask
    [n, 1, group * height, count]. torch's fused kernel knows neither a soft cap nor sinks; with one of them the product
    is spelled out.
    """
    n, kv_heads, group, height, _ = query.shape
    # Laid out alike whatever the queries were cut from: kernels look at strides, and a repeated row has one of zero.
    stacked = query.reshape(n, kv_heads, group * height, -1).contiguous()
    if is_fused(scoring):
        mixed = F.scaled_dot_product_attention(stacked, keys, values, attn_mask=mask, scale=scoring.scaling)
    else:
        weights = _weights(scoring, torch.matmul(stacked, keys.transpose(2, 3)), mask, group)
        mixed = torch.matmul(weights.to(values.dtype), values)
    return mixed.view(n, kv_heads, group, height, -1)


def _weights(scoring: Scoring, scores: Tensor, mask: Tensor, group: int) -> Tensor:
    """Softmax over keys in float32. scores [n, kv_heads, group * height, count]."""
    scores = scores.float() * scoring.scaling
    if scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    scores = scores + mask.float()
    if scoring.sinks is None:
        return torch.softmax(scores, dim=-1)
    n, kv_heads, rows, _ = scores.shape
    sinks = scoring.sinks.float().view(1, kv_heads, group, 1, 1).expand(n, -1, -1, rows // group, 1)
    scores = torch.cat((scores, sinks.reshape(n, kv_heads, rows, 1)), dim=-1)
    return torch.softmax(scores, dim=-1)[..., :-1]
