"""torch's own fused attention on a CPU, with its LSE.

`scaled_dot_product_attention` hides the log-sum-exp that sinks and merging need, so the operator below it is called
directly. Three facts about that operator shape this file: K and V need one head size; its causal mask is top-left
aligned; rows that see nothing come back as 0 with an LSE of 0. Heads of a group share their keys: few rows are stacked
per KV head, so that K and V are read once, and many rows go group member by group member, which copies no K and V.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnlib.ops.torch.rules import ScoreRules
from attnlib.ops.torch.softmax import add_sink

__all__ = ["can_fuse", "fused_attention"]

_STACKED_ROWS = 64
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def can_fuse(device: torch.device, dtype: torch.dtype, soft_cap: float) -> bool:
    """Whether fused attention computes what is asked: on a CPU, without a soft cap."""
    return device.type == "cpu" and soft_cap <= 0 and dtype in _DTYPES


def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    rules: ScoreRules,
    k_factor: float | Tensor = 1.0,
    v_factor: float | Tensor = 1.0,
    *,
    dtype: torch.dtype,
    square_causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """Output `[B, Hq, L, Dv]` and natural-log LSE `[B, Hq, L]` (-inf where a row sees nothing and there is no sink).

    Args:
        query: `[B, Hq, L, D]`; key: `[B, Hkv, S, D]`; value: `[B, Hkv, S, Dv]`, raw as stored, S >= 1, finite.
        bias: `[1 or B, 1 or Hq, L, S]` float32 (float64 with a float64 query), -inf where hidden, or None.
        rules: scale and sinks are applied here; the rest is in the bias already.
        k_factor, v_factor: what a stored value is multiplied by, a float or `[1]` or `[Hkv]` float32.
        dtype: to compute in (see `quant.compute_dtype`); statistics are float32 or better in any case.
        square_causal: mask causally; only with L == S, where top-left and bottom-right are the same.
    """
    head_size_v = value.shape[-1]
    widest = max(key.shape[-1], head_size_v)
    group = query.shape[1] // key.shape[1]
    query, scale = query.to(dtype), rules.scale
    if isinstance(k_factor, Tensor):
        query = query * _per_query_head(k_factor, group)
    else:
        scale = scale * k_factor
    key, value = _widened(key.to(dtype), widest), _widened(value.to(dtype), widest)
    out, lse = _grouped(_widened(query, widest), key, value, bias, scale, square_causal)
    if bias is not None:
        blind = (bias == -torch.inf).all(dim=-1)
        out, lse = out.masked_fill(blind.unsqueeze(-1), 0.0), lse.masked_fill(blind, -torch.inf)
    if rules.sinks is not None:
        out, lse = add_sink(out, lse, rules.sinks)
    if isinstance(v_factor, Tensor):
        out = out * _per_query_head(v_factor, group)
    elif v_factor != 1.0:
        out = out * v_factor
    return out[..., :head_size_v], lse


def _grouped(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float, square_causal: bool
) -> tuple[Tensor, Tensor]:
    batch, num_heads, num_rows, head_size = query.shape
    num_kv_heads = key.shape[1]
    group = num_heads // num_kv_heads
    if group == 1:
        return _call(query, key, value, bias, scale, square_causal)
    members = query.reshape(batch, num_kv_heads, group, num_rows, head_size)
    if num_rows <= _STACKED_ROWS and not square_causal:
        stacked = members.reshape(batch, num_kv_heads, group * num_rows, head_size)
        out, lse = _call(stacked, key, value, _stacked_bias(bias, num_kv_heads, group), scale, False)
    else:
        parts = [
            _call(members[:, :, g], key, value, _member_bias(bias, group, g), scale, square_causal)
            for g in range(group)
        ]
        out, lse = torch.stack([part[0] for part in parts], 2), torch.stack([part[1] for part in parts], 2)
    return out.reshape(batch, num_heads, num_rows, head_size), lse.reshape(batch, num_heads, num_rows)


def _call(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float, square_causal: bool
) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, square_causal, attn_mask=bias, scale=scale
    )
    return result


def _widened(tensor: Tensor, width: int) -> Tensor:
    missing = width - tensor.shape[-1]
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


def _per_query_head(factor: Tensor, group: int) -> Tensor:
    """`[1]` or `[Hkv]` as something that broadcasts over `[B, Hq, L, D]`."""
    return (factor if factor.numel() == 1 else factor.repeat_interleave(group)).view(-1, 1, 1)


def _stacked_bias(bias: Tensor | None, num_kv_heads: int, group: int) -> Tensor | None:
    if bias is None:
        return None
    batch, heads, num_rows, num_keys = bias.shape
    if heads == 1:
        return bias.expand(batch, group, num_rows, num_keys).reshape(batch, 1, group * num_rows, num_keys)
    return bias.reshape(batch, num_kv_heads, group * num_rows, num_keys)


def _member_bias(bias: Tensor | None, group: int, member: int) -> Tensor | None:
    return bias if bias is None or bias.shape[1] == 1 else bias[:, member::group]
