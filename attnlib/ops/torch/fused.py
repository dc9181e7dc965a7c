"""torch's fused CPU attention, with its LSE.

`scaled_dot_product_attention` does not return the log-sum-exp that sinks and splits need, so this
module calls the operator that implements it. Four properties of that operator matter here: K and V
need one head size; it takes the last stride for 1, whatever it is; its causal mask is aligned to
the top left; it returns 0 with an LSE of 0 for rows that see no key. It supports grouped heads, but
reads K and V once per query head; a few query rows are therefore stacked per KV head, so that K and
V are read once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnlib.ops.params import AttentionParams
from attnlib.ops.torch.quant import may_be_nan
from attnlib.ops.torch.softmax import add_sink, merge_weights

__all__ = ["FusedQuery", "can_fuse", "fused_attention"]

# Most query rows per head that are stacked per KV head; with more, K and V are reused from the
# cache.
_MAX_STACKED_ROWS = 64
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def can_fuse(device: torch.device, dtype: torch.dtype, params: AttentionParams) -> bool:
    """Whether fused attention supports the call: on a CPU, without soft cap and score function."""
    linear = params.logits_soft_cap <= 0 and params.score_function is None
    return device.type == "cpu" and linear and dtype in _DTYPES


class FusedQuery:
    """Query rows prepared for fused attention over one or several splits of their keys.

    Args:
        query: `[B, Hq, L, D]`.
        num_kv_heads: Hkv of the keys.
        head_size_v: Dv of the values.
        bias: `[1 or B, 1 or Hq, L, S]` float32 (float64 with a float64 query) over all keys, -inf
            where hidden; or None.
        params: only `scale` and `sinks` are applied here; `bias` holds the rest.
        k_factor: factor of stored keys, a float or `[1]` or `[Hkv]` float32.
        v_factor: factor of stored values, likewise.
        dtype: dtype of the products (`quant.compute_dtype`); statistics are float32 or float64.
        square_causal: apply a causal mask; only for one split with L == S, where the alignments to
            the top left and to the bottom right are the same.
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
        self.head_size_v, self.padded_size = head_size_v, max(head_size, head_size_v)
        self.sinks, self.k_factor, self.v_factor = params.sinks, k_factor, v_factor
        self.dtype, self.square_causal = dtype, square_causal
        query, self.scale = query.to(dtype), params.scale
        if isinstance(k_factor, Tensor):
            query = query * _per_query_head(k_factor, self.group)
        else:
            self.scale *= k_factor
        self._rows, self._bias = _padded(query, self.padded_size), bias
        if self.group > 1 and num_rows <= _MAX_STACKED_ROWS and not square_causal:
            stacked = (batch, num_kv_heads, self.group * num_rows, self.padded_size)
            self._rows = self._rows.reshape(stacked)
            self._bias = _stacked_bias(bias, num_kv_heads, self.group)

    def attend(
        self, key: Tensor, value: Tensor, keys: slice = slice(None), member: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attention over one split; pass the results to `combine`.

        Args:
            key: `[B, Hkv, S, D]` as stored, S >= 1, finite.
            value: `[B, Hkv, S, Dv]`, likewise.
            keys: the columns of the bias that belong to the split.
            member: the element of the batch whose keys these are, B = 1; None for all. Without a
                bias only.
        """
        key, value = (
            x
            if (x.dtype, x.shape[3], x.stride(3)) == (self.dtype, self.padded_size, 1)
            else self._as_computed(x)
            for x in (key, value)
        )
        bias = None if self._bias is None else self._bias[..., keys]
        rows = self._rows if member is None else self._rows[member : member + 1]
        result: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            rows, key, value, 0.0, self.square_causal, attn_mask=bias, scale=self.scale
        )
        return result

    def _as_computed(self, states: Tensor) -> Tensor:
        return _padded(states.to(self.dtype), self.padded_size)

    def combine(
        self, splits: list[tuple[Tensor, Tensor]], keys: list[slice]
    ) -> tuple[Tensor, Tensor]:
        """Output `[B, Hq, L, Dv]` and natural-log LSE `[B, Hq, L]` over all splits.

        A row that sees no key has output 0 and LSE -inf, or the sink. Splits are combined in the
        dtype of their outputs.
        """
        states = [
            self._clear_empty_rows(*split, part) for split, part in zip(splits, keys, strict=True)
        ]
        out, lse = states[0] if len(states) == 1 else _combine(states)
        out, lse = out.reshape(*self.shape, self.padded_size), lse.reshape(self.shape)
        if may_be_nan(self.k_factor):
            out, lse = self._with_invalid_scales(out, lse)
        empty = (lse == -torch.inf).unsqueeze(-1)
        if self.sinks is not None:
            out, lse = add_sink(out, lse, self.sinks)
        if isinstance(self.v_factor, Tensor):
            out = out * _per_query_head(self.v_factor, self.group)
        elif self.v_factor != 1.0:
            out = out * self.v_factor
        if may_be_nan(self.v_factor):
            out = out.masked_fill(empty, 0.0)  # M5
        return out[..., : self.head_size_v], lse

    def _with_invalid_scales(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """NaN in the rows that see a key through a scale of NaN. The operator takes rows whose
        scores are all NaN for rows without a visible key."""
        factor = torch.as_tensor(self.k_factor, dtype=torch.float32, device=lse.device).reshape(-1)
        invalid = _per_query_head(factor, self.group).isnan() & (lse > -torch.inf).unsqueeze(-1)
        return out.masked_fill(invalid, torch.nan), lse.masked_fill(invalid[..., 0], torch.nan)

    def _clear_empty_rows(self, out: Tensor, lse: Tensor, keys: slice) -> tuple[Tensor, Tensor]:
        """One split with output 0 and LSE -inf in the rows that see none of its keys."""
        if self._bias is None:
            return out, lse
        empty = (self._bias[..., keys] == -torch.inf).all(dim=-1)
        return out.masked_fill(empty.unsqueeze(-1), 0.0), lse.masked_fill(empty, -torch.inf)


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
    """Output `[B, Hq, L, Dv]` and LSE `[B, Hq, L]` over all keys at once; see `FusedQuery`."""
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
    return rows.combine([rows.attend(key, value)], [slice(None)])


def _combine(states: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    outs, logs = torch.stack([out for out, _ in states]), torch.stack([lse for _, lse in states])
    weights, lse = merge_weights(logs)
    return outs.mul_(weights.unsqueeze(-1)).sum(dim=0), lse


def _padded(tensor: Tensor, size: int) -> Tensor:
    """`tensor` with zeros appended to its last dimension, up to `size`; its last stride is 1."""
    padding = size - tensor.shape[-1]
    if padding:
        tensor = torch.nn.functional.pad(tensor, (0, padding))
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _per_query_head(factor: Tensor, group: int) -> Tensor:
    """`factor` `[1]` or `[Hkv]` in a shape that broadcasts over `[B, Hq, L, D]`."""
    return (factor if factor.numel() == 1 else factor.repeat_interleave(group)).view(-1, 1, 1)


def _stacked_bias(bias: Tensor | None, num_kv_heads: int, group: int) -> Tensor | None:
    if bias is None:
        return None
    batch, heads, num_rows, num_keys = bias.shape
    if heads == 1:
        expanded = bias.expand(batch, group, num_rows, num_keys)
        return expanded.reshape(batch, 1, group * num_rows, num_keys)
    return bias.reshape(batch, num_kv_heads, group * num_rows, num_keys)
