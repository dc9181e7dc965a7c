"""Attention over selected keys of the paged cache (M11)."""

from __future__ import annotations

from torch import Tensor

from attnlib.errors import UnsupportedConfigError
from attnlib.ops.params import AttentionParams
from attnlib.ops.triton.attention_call import AttentionCall
from attnlib.ops.triton.batch_tensors import BatchTensors
from attnlib.ops.triton.heuristics.device import device_guard
from attnlib.ops.triton.launch.bound import ALIGNMENT
from attnlib.ops.triton.launch.selected import clear_rows, count_listed, prepare_selected
from attnlib.sparse.key_selection import KeySelection, SelectedKeys

__all__ = ["selected_attention"]


def selected_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    params: AttentionParams,
    selection: KeySelection,
    selected: SelectedKeys,
    *,
    out: Tensor,
    lse: Tensor | None = None,
    query_start_loc_cpu: Tensor | None = None,
    seq_lens_cpu: Tensor | None = None,
    kernels: str = "auto",
) -> None:
    """Attention of every query token over its selected visible keys.

    Args:
        query, key_cache, value_cache, block_table: as in `paged_prefill`.
        query_start_loc, seq_lens, out, lse: likewise.
        query_start_loc_cpu, seq_lens_cpu: likewise.
        params: scale, mask, soft cap, ALiBi slopes, sinks and KV scales; a query bias and score
            functions are not supported.
        selection: the form of the lists.
        selected: the lists; checked by the caller (`SelectedKeys.check`). Only keys that they
            select are read, and only the block table entries of these.
        kernels: "auto" uses the Hopper kernel over selected latents where it supports the call and
            is faster, "hopper" wherever it supports it, "portable" never.

    Raises:
        ContractError: tensors that the kernel cannot address.
        UnsupportedConfigError: head sizes for which no tile fits the device, a query bias, or a
            score function.
    """
    if query.numel() == 0:
        return
    if params.query_bias is not None or params.score_function is not None:
        raise UnsupportedConfigError(
            "the Triton kernel over selected keys has no query bias and no score functions; use "
            "the torch backend",
            backend="triton",
        )
    rows = count_listed(query, selected)
    if rows < query.shape[0]:
        clear_rows(rows, out, lse)
        query, out, lse = query[:rows], out[:rows], None if lse is None else lse[:rows]
    if rows == 0:
        return
    # No constant follows from the lengths.
    batch = BatchTensors.of(params, query_start_loc, seq_lens, block_table, max_query_len=0)
    call = AttentionCall.of(query, key_cache, value_cache, out, lse, batch, params)
    aligned = not (query.data_ptr() | key_cache.data_ptr() | out.data_ptr()) & ALIGNMENT
    launch = prepare_selected(call, selection, selected, kernels if aligned else "portable")
    with device_guard(query):
        launch.run(call, selected)
