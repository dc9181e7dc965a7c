"""torch's own fused attention on a CPU, with its LSE.

`scaled_dot_product_attention` hides the log-sum-exp that sinks and merging need, so the operator below it is called
directly. Three facts about that operator shape this file: K and V need one head size; its causal mask is top-left
aligned; rows that see nothing come back as 0 with an LSE of 0. It shares a KV head among query heads by itself, but
reads K and V once per query head: few rows are stacked per KV head instead, so that K and V are read once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnlib.ops.params import AttentionParams
from attnlib.ops.torch.softmax import add_sink

__all__ = ["FusedQuery", "can_fuse", "fused_attention"]

_STACKED_ROWS = 64
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def can_fuse(device: torch.device, dtype: torch.dtype, soft_cap: float) -> bool:
    """Whether fused attention computes what is asked: on a CPU, without a soft cap."""
    return device.type == "cpu" and soft_cap <= 0 and dtype in _DTYPES


class FusedQuery:
    """Query rows made ready for fused attention over one or several parts of their keys.

    Args:
        query: `[B, Hq, L, D]`.
        num_kv_heads, head_size_v: of the keys and values to come.
        bias: `[1 or B, 1 or Hq, L, S]` float32 (float64 with a float64 query) over all keys, -inf where hidden, or None.
        params: scale and sinks are applied here; the rest is in the bias already.
        k_factor, v_factor: what a stored value is multiplied by, a float or `[1]` or `[Hkv]` float32.
        dtype: to compute in (see `quant.compute_dtype`); statistics are float32 or better in any case.
        square_causal: mask causally; only for one part with L == S, where top-left and bottom-right are the same.
    """

    def __init__(
        self,
        query: Tensor,
        num_kv_heads: int,
        head_size_v: int,
        bias: Tensor | None,
        params: AttentionParams,
        k_factor: float | Tensor = 1.0,
        v_factor: float | Tensor = 1.0,
        *,
        dtype: torch.dtype,
        square_causal: bool = False,
    ) -> None:
        batch, num_heads, num_rows, head_size = query.shape
        self.shape, self.group = (batch, num_heads, num_rows), num_heads // num_kv_heads
        self.head_size_v, self.widest = head_size_v, max(head_size, head_size_v)
        self.sinks, self.v_factor = params.sinks, v_factor
        self.dtype, self.square_causal = dtype, square_causal
        query, self.scale = query.to(dtype), params.scale
        if isinstance(k_factor, Tensor):
            query = query * _per_query_head(k_factor, self.group)
        else:
            self.scale *= k_factor
        self._rows, self._rows_bias = _widened(query, self.widest), bias
        if self.group > 1 and num_rows <= _STACKED_ROWS and not square_causal:
            self._rows = self._rows.reshape(batch, num_kv_heads, self.group * num_rows, self.widest)
            self._rows_bias = _stacked_bias(bias, num_kv_heads, self.group)

    def over(self, key: Tensor, value: Tensor, keys: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Attention over one part, `key [B, Hkv, S, D]`, `value [B, Hkv, S, Dv]`: raw as stored, S >= 1, finite.

        `keys` says where in the bias the part lies. The result is for `finished` only.
        """
        key, value = (
            _widened(key.to(self.dtype), self.widest),
            _widened(value.to(self.dtype), self.widest),
        )
        bias = None if self._rows_bias is None else self._rows_bias[..., keys]
        result: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            self._rows, key, value, 0.0, self.square_causal, attn_mask=bias, scale=self.scale
        )
        return result

    def finished(
        self, parts: list[tuple[Tensor, Tensor]], keys: list[slice]
    ) -> tuple[Tensor, Tensor]:
        """Output `[B, Hq, L, Dv]` and natural-log LSE `[B, Hq, L]` over all parts.

        A row that sees nothing has LSE -inf, or its sink. Several parts are merged in the precision they came in.
        """
        seen = [self._seen(*part, place) for part, place in zip(parts, keys, strict=True)]
        out, lse = seen[0] if len(seen) == 1 else _merged(seen)
        out, lse = out.reshape(*self.shape, self.widest), lse.reshape(self.shape)
        if self.sinks is not None:
            out, lse = add_sink(out, lse, self.sinks)
        if isinstance(self.v_factor, Tensor):
            out = out * _per_query_head(self.v_factor, self.group)
        elif self.v_factor != 1.0:
            out = out * self.v_factor
        return out[..., : self.head_size_v], lse

    def _seen(self, out: Tensor, lse: Tensor, keys: slice) -> tuple[Tensor, Tensor]:
        """One part with 0 and -inf in the rows that see nothing of it."""
        if self._rows_bias is None:
            return out, lse
        blind = (self._rows_bias[..., keys] == -torch.inf).all(dim=-1)
        return out.masked_fill(blind.unsqueeze(-1), 0.0), lse.masked_fill(blind, -torch.inf)


def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    params: AttentionParams,
    k_factor: float | Tensor = 1.0,
    v_factor: float | Tensor = 1.0,
    *,
    dtype: torch.dtype,
    square_causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """Output `[B, Hq, L, Dv]` and LSE `[B, Hq, L]` over keys and values in one part; see `FusedQuery`."""
    rows = FusedQuery(
        query,
        key.shape[1],
        value.shape[-1],
        bias,
        params,
        k_factor,
        v_factor,
        dtype=dtype,
        square_causal=square_causal,
    )
    return rows.finished([rows.over(key, value)], [slice(None)])


def _merged(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    outs, logs = torch.stack([out for out, _ in parts]), torch.stack([lse for _, lse in parts])
    lse = torch.logsumexp(logs, dim=0)
    shares = torch.exp(logs - lse.masked_fill(lse == -torch.inf, 0.0))
    return outs.mul_(shares.unsqueeze(-1)).sum(dim=0), lse


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
        return bias.expand(batch, group, num_rows, num_keys).reshape(
            batch, 1, group * num_rows, num_keys
        )
    return bias.reshape(batch, num_kv_heads, group * num_rows, num_keys)
