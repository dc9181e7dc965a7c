"""Packed latents (`ops.packed_latents`): launches of the plain Triton kernels."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnlib.errors import ContractError, UnsupportedConfigError
from attnlib.ops.checks import vector_elements
from attnlib.ops.packed_latents import LATENT, ROTARY, check_latents, check_queries, packed_views
from attnlib.ops.params import AttentionParams
from attnlib.ops.triton import hopper
from attnlib.ops.triton.batch_tensors import BatchTensors
from attnlib.ops.triton.heuristics.device import device_guard, limits_of
from attnlib.ops.triton.heuristics.splits import (
    choose_uniform_splits,
    visible_bound,
)
from attnlib.ops.triton.heuristics.tiles import next_power_of_2
from attnlib.ops.triton.kernels.arguments import AttentionConfig
from attnlib.ops.triton.kernels.packed_latents import (
    packed_latent_kernel,
    packed_latent_write_kernel,
)
from attnlib.ops.triton.kernels.quant import KV_E4M3_BYTES, KV_NATIVE
from attnlib.ops.triton.launch.partials import Partials
from attnlib.ops.triton.launch.settle import settle_keys
from attnlib.sparse.key_selection import KeySelection, SelectedKeys, SelectionScope

__all__ = ["packed_latent_attention", "write_packed_latents"]

_COMPUTE = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
}
_MOST_HEADS = 16
"""Heads of a program: the accumulators of 16 heads are 32 registers of each of 256 threads."""
_BLOCK_N = 32


def write_packed_latents(latents: Tensor, data: Tensor, slot_mapping: Tensor) -> None:
    """Quantize latents and write them to their slots, one program per token. No host sync.

    Args:
        latents: `[T', 576]` with T' >= T, last stride 1, float16, bfloat16 or float32.
        data: `[B, N, 656]` uint8.
        slot_mapping: `[T]` int64, slot = block * N + offset; a negative slot writes nothing.

    Raises:
        ContractError: as `ops.packed_latents.check_latents`, or another last stride.
    """
    parts = packed_views(data)
    check_latents(latents, data, slot_mapping)
    if latents.stride(1) != 1:
        raise ContractError(
            f"latents have strides {latents.stride()}; the last one must be 1: call .contiguous()",
            rule="P14",
        )
    if not slot_mapping.shape[0] or not data.shape[0]:
        return
    elements = parts.elements.view(torch.uint8)
    settle_keys(packed_latent_write_kernel)
    with device_guard(data):
        packed_latent_write_kernel[(slot_mapping.shape[0],)](
            latents,
            elements,
            parts.scales,
            parts.rotary,
            slot_mapping.contiguous(),
            latents.stride(0),
            *elements.stride()[:2],
            *parts.scales.stride()[:2],
            *parts.rotary.stride()[:2],
            BLOCK_SIZE=data.shape[1],
            VEC=vector_elements("latents", latents[:, None]),
            num_warps=4,
        )


def packed_latent_attention(
    query: Tensor,
    data: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    params: AttentionParams,
    *,
    max_query_len: int,
    max_seq_len: int,
    out: Tensor,
    lse: Tensor | None = None,
    selection: KeySelection | None = None,
    selected: SelectedKeys | None = None,
) -> None:
    """Attention over packed latents. Arguments as in `attnlib.ops.torch.packed_latents`. Grids come
    from upper bounds; lengths are read on the device.

    Raises:
        ContractError: tensors of other shapes or dtypes.
        UnsupportedConfigError: causality per request, ALiBi slopes, a query bias, a score function,
            or lists that are not one per query token.
    """
    check_queries(query, out)
    parts = packed_views(data)
    _check_supported(params, selection)
    if query.numel() == 0:
        return
    if any(t.stride(-1) != 1 for t in (query, out, block_table) if t.shape[-1] > 1):
        raise ContractError("query, out and block_table must have last stride 1", rule="P1")
    (num_tokens, num_heads), lists = query.shape[:2], (query_start_loc, seq_lens, block_table)
    indices = None if selection is None or selected is None else selected.indices
    entries = 0 if indices is None else indices.shape[2]
    bounds, causal = (max_query_len, max_seq_len), params.causal is True
    visible = visible_bound(*bounds, params.window, causal, params.attention_chunk_size)
    if selection is not None:
        visible = entries * selection.block_size
    elif _run_hopper((query, parts, out, lse), params, lists, bounds, visible):
        return
    head_blocks = triton.cdiv(num_heads, _tile_heads(num_heads))
    partials = _divide(query, params, visible, head_blocks, lse is not None)
    splits, space = partials.num_splits, partials.allocate(query)
    elements = parts.elements if limits_of(query).has_fp8 else parts.elements.view(torch.uint8)
    strided = (query, elements, parts.scales, parts.rotary, out)
    settle_keys(packed_latent_kernel)
    with device_guard(query):
        packed_latent_kernel[(num_tokens, head_blocks, splits)](
            *(query, elements, parts.scales, parts.rotary, out, space, query_start_loc, seq_lens),
            *(block_table, indices, params.sinks, lse),
            *(float(params.scale), float(params.logits_soft_cap)),
            *(int(n) for n in (*params.window, params.attention_chunk_size)),
            *(query_start_loc.shape[0] - 1, num_tokens, num_heads, entries, splits),
            *(0 if indices is None else indices.stride(0), block_table.stride(0)),
            *(stride for x in strided for stride in x.stride()[:2]),
            0 if lse is None else lse.stride(0),
            CONFIG=_config(query, data, params, selection, splits, lse is not None),
            num_warps=8,
            num_stages=2,
        )
        partials.run(space, params.sinks, out, lse)


def _run_hopper(
    tensors: tuple[Any, ...],
    params: AttentionParams,
    lists: tuple[Tensor, Tensor, Tensor],
    bounds: tuple[int, int],
    visible: int,
) -> bool:
    """Run the Hopper decode where it serves a call; returns whether it does."""
    if (dispatch := hopper.load()) is None:
        return False
    batch = BatchTensors.of(params, *lists, max_query_len=bounds[0], max_seq_len=bounds[1])
    return bool(dispatch.run_packed_latents(*tensors, batch, params, visible))


def _divide(
    query: Tensor, params: AttentionParams, visible: int, head_blocks: int, has_lse: bool
) -> Partials:
    """How the positions of a query token, at most `visible`, are divided over programs."""
    num_tokens, num_heads = query.shape[:2]
    most = 2 * limits_of(query).num_sms
    splits = choose_uniform_splits(num_tokens * head_blocks, visible, _BLOCK_N, most)
    has_sink = params.sinks is not None
    sizes = (splits, num_tokens, num_heads, LATENT)
    return Partials.of_splits(*sizes, has_sink=has_sink, has_lse=has_lse)


def _tile_heads(num_heads: int) -> int:
    return min(_MOST_HEADS, max(16, next_power_of_2(num_heads)))


def _config(
    query: Tensor,
    data: Tensor,
    params: AttentionParams,
    selection: KeySelection | None,
    splits: int,
    has_lse: bool,
) -> AttentionConfig:
    """The constants of the attention kernel."""
    num_heads, left, right = query.shape[1], *params.window
    block_m, has_fp8 = _tile_heads(num_heads), limits_of(query).has_fp8
    return AttentionConfig(
        BLOCK_M=block_m,
        BLOCK_N=_BLOCK_N,
        TILE_HEADS=block_m,
        TILE_TOKENS=1,
        HEAD_BLOCKS=triton.cdiv(num_heads, block_m),
        GROUP=num_heads,
        COMPUTE=_COMPUTE[query.dtype],
        BLOCK_SIZE=data.shape[1],
        D=LATENT + ROTARY,
        D0=LATENT,
        D1=ROTARY,
        DV=LATENT,
        DV0=LATENT,
        LATENT=True,
        KV_KIND=int((KV_NATIVE if has_fp8 else KV_E4M3_BYTES).value),
        CAUSAL=int(params.causal),
        HAS_LEFT=left >= 0,
        HAS_RIGHT=right >= 0,
        HAS_CHUNK=params.attention_chunk_size > 0,
        HAS_CAP=params.logits_soft_cap > 0,
        HAS_SINK=params.sinks is not None,
        HAS_LSE=has_lse,
        SPLIT=splits > 1,
        SELECT=0 if selection is None else selection.block_size,
    )


def _check_supported(params: AttentionParams, selection: KeySelection | None) -> None:
    """Check the parameters and the form of the lists.

    Raises:
        UnsupportedConfigError: what the kernel does not have.
    """
    reasons = [
        name
        for name, given in (
            ("causality per request", isinstance(params.causal, Tensor)),
            ("alibi_slopes", params.alibi_slopes is not None),
            ("a query bias", params.query_bias is not None),
            ("a score function", params.score_function is not None),
            (
                "lists per query head or shared by query tokens",
                selection is not None
                and (
                    selection.query_block_size > 1 or selection.scope == SelectionScope.QUERY_HEAD
                ),
            ),
        )
        if given
    ]
    if reasons:
        raise UnsupportedConfigError(
            f"the Triton kernel over packed latents has no {', '.join(reasons)}: use "
            "attnlib.ops.torch.packed_latents",
            backend="triton",
            reasons=reasons,
        )
