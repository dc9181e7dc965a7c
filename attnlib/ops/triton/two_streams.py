"""Attention to own latents in a window and to compressed entries in one launch (M17), on Hopper."""

from __future__ import annotations

from torch import Tensor

from attnlib.ops.params import AttentionParams
from attnlib.ops.triton.attention_call import AttentionCall
from attnlib.ops.triton.batch_tensors import BatchTensors
from attnlib.ops.triton.entry_stream import EntryStream
from attnlib.ops.triton.heuristics.device import (
    DeviceLimits,
    device_guard,
    programmatic_launch,
)
from attnlib.ops.triton.hopper.streams_plan import HopperStreams, streams_reasons
from attnlib.ops.triton.launch.bound import ALIGNMENT
from attnlib.ops.triton.launch.cache import LAUNCHES
from attnlib.ops.triton.launch.partials import Partials
from attnlib.ops.triton.launch.selected import clear_rows, count_listed

__all__ = ["two_stream_attention"]

_STEP = 8
"""Splits that the combine kernel loads at a time: DeepSeek V4's lists have five."""


class _Launch:
    """The launches of one call signature, or none where another path serves it.

    Args:
        call: a call of this signature, of which no tensor is kept.
        attend: the attention kernel; None where it does not serve the call.
    """

    def __init__(self, call: AttentionCall, attend: HopperStreams | None) -> None:
        self.limits: DeviceLimits = call.limits
        self.attend = attend
        self._partials = Partials.of_splits(
            1 if attend is None else attend.num_splits,
            *(call.num_tokens, call.shape.num_heads, call.shape.head_size_v),
            has_sink=call.params.sinks is not None,
            has_lse=call.lse is not None,
            overlap=programmatic_launch(call.limits, call.num_tokens * call.shape.num_heads),
            step=_STEP,
        )

    def run(self, call: AttentionCall, entries: EntryStream) -> None:
        """Launch on the current stream of the current device."""
        assert self.attend is not None
        space = self._partials.allocate(call.query)
        self.attend.run(call, entries, space)
        self._partials.run(space, call.params.sinks, call.out, call.lse)


def two_stream_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    params: AttentionParams,
    entries: EntryStream,
    *,
    out: Tensor,
    lse: Tensor | None = None,
) -> bool:
    """Attention of every query token over its window of own latents and over its entries.

    Args:
        query, key_cache, value_cache, block_table: as in `paged_prefill`.
        query_start_loc, seq_lens, out, lse: likewise.
        params: of the layer, with its mask and sinks.
        entries: the second stream; checked by the caller.

    Returns:
        Whether the call was computed. If not, nothing was written, and the streams must be
        attended to separately.

    Raises:
        ContractError: tensors that the kernel cannot address.
    """
    rows, whole = count_listed(query, entries.selected), (out, lse)
    if rows < query.shape[0]:
        query, out, lse = query[:rows], out[:rows], None if lse is None else lse[:rows]
    batch = BatchTensors.of(params, query_start_loc, seq_lens, block_table, max_query_len=0)
    call = AttentionCall.of(query, key_cache, value_cache, out, lse, batch, params)
    launch = _prepare(call, entries)
    if launch.attend is None or rows == 0:
        return False
    clear_rows(rows, *whole)
    with device_guard(query):
        launch.run(call, entries)
    return True


def _prepare(call: AttentionCall, entries: EntryStream) -> _Launch:
    """The launches of a call. Cached by everything that they depend on."""
    lists = entries.selected
    count = entries.max_entries if lists is None else lists.indices.shape[2]
    # Both grow with the sequences; the launch follows from the power of 2.
    count = 1 << (count - 1).bit_length()
    aligned = not (call.addresses | entries.key_cache.data_ptr()) & ALIGNMENT
    form = (call.signature, call.batch.form(), entries.signature)
    key = ("streams", form, count, aligned)
    found: _Launch | None = LAUNCHES.get(key)
    if found is not None and found.limits is call.limits:
        return found
    call.batch.check()
    attend = None if streams_reasons(call, entries) else HopperStreams(call, entries, count)
    kept: _Launch = LAUNCHES.keep(key, _Launch(call, attend))
    return kept
