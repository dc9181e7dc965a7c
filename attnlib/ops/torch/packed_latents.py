"""Packed latents (`ops.packed_latents`) in plain torch: the reference of the Triton kernels.

Latents are dequantized in float32 and rounded to the dtype of the queries; attention is then that
over latents of this dtype (P14, M12).
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnlib.ops.autocast import without_autocast
from attnlib.ops.packed_latents import (
    GROUP,
    LARGEST,
    LATENT,
    SMALLEST_SCALE,
    check_batch,
    check_latents,
    check_queries,
    packed_views,
)
from attnlib.ops.params import AttentionParams
from attnlib.ops.torch.paged_prefill import paged_prefill
from attnlib.ops.torch.selected_attention import selected_attention
from attnlib.sparse.key_selection import KeySelection, SelectedKeys

__all__ = ["packed_latent_attention", "unpack_latents", "write_packed_latents"]


def write_packed_latents(latents: Tensor, data: Tensor, slot_mapping: Tensor) -> None:
    """Quantize latents and write them to their slots.

    Args:
        latents: `[T', 576]` with T' >= T, float16, bfloat16 or float32: 512 elements and the rotary
            part, which is rounded to bfloat16.
        data: `[B, N, 656]` uint8.
        slot_mapping: `[T]` int64, slot = block * N + offset; a negative slot writes nothing.

    Raises:
        ContractError: as `ops.packed_latents.check_latents`.
    """
    parts = packed_views(data)
    check_latents(latents, data, slot_mapping)
    tokens = torch.nonzero(slot_mapping >= 0).flatten()
    slots, rows = slot_mapping[tokens], latents[tokens]
    groups = rows[:, :LATENT].float().view(-1, LATENT // GROUP, GROUP)
    # By a tensor: torch multiplies by the reciprocal of a number on a GPU, which rounds otherwise.
    largest = groups.abs().amax(-1)
    scales = (largest / torch.full_like(largest, LARGEST)).clamp(min=SMALLEST_SCALE)  # NaN stays
    # At most 448 but for rounding, which the conversion rounds away.
    numbers = (groups / scales[..., None]).to(torch.float8_e4m3fn)
    place = (slots // data.shape[1], slots % data.shape[1])
    parts.elements.view(torch.uint8)[place] = numbers.flatten(1).view(torch.uint8)
    parts.scales[place] = scales
    parts.rotary[place] = rows[:, LATENT:].to(torch.bfloat16)


def unpack_latents(data: Tensor, dtype: torch.dtype) -> Tensor:
    """The real values of packed latents.

    Args:
        data: `[B, N, 656]` uint8.
        dtype: of the result.

    Returns:
        `[B, N, 1, 576]`, a cache of latents without quantization.
    """
    parts = packed_views(data)
    groups = parts.elements.float().view(*data.shape[:2], LATENT // GROUP, GROUP)
    latents = (groups * parts.scales[..., None]).flatten(-2)
    return torch.cat((latents.to(dtype), parts.rotary.to(dtype)), -1).unsqueeze(2)


@torch.no_grad()
@without_autocast
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
    """Attention over packed latents, to all visible keys or to selected ones (M11, M12).

    Args:
        query: `[T, Hq, 576]` float16, bfloat16 or float32, absorbed.
        data: `[B, N, 656]` uint8.
        block_table, query_start_loc, seq_lens, max_query_len, max_seq_len, lse: as in
            `paged_prefill`.
        params: `k_scale` and `v_scale` are 1.
        out: `[T, Hq, 512]`, written.
        selection, selected: the form of the lists, and the lists, which the caller has checked;
            None for all keys.

    Raises:
        ContractError: as `ops.packed_latents.check_batch`.
    """
    check_queries(query, out)
    packed_views(data)
    check_batch(query, data, block_table, query_start_loc, seq_lens, max_seq_len, lse)
    # Blocks of the batch only: others may hold anything.
    end = min(-(-max_seq_len // data.shape[1]), block_table.shape[1])
    used = torch.arange(end, device=data.device) * data.shape[1] < seq_lens[:, None]
    table = torch.where(used, block_table[:, :end], 0).long()
    # On a GPU the ids are not checked; a wrong one must not be an illegal access.
    blocks = table.flatten().clamp(0, max(0, data.shape[0] - 1))
    key = unpack_latents(data[blocks] if data.shape[0] else data, query.dtype)
    renumbered = torch.arange(blocks.numel(), device=data.device, dtype=torch.int32)
    batch = (renumbered.view_as(table), query_start_loc, seq_lens, params)
    if selection is not None and selected is not None:
        selected_attention(
            query, key, key[..., :LATENT], *batch, selection, selected, out=out, lse=lse
        )
        return
    paged_prefill(
        query,
        key,
        key[..., :LATENT],
        *batch,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        out=out,
        lse=lse,
    )
