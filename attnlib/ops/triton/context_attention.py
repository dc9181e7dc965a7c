"""Attention within sequences that lie anywhere in the packed tokens, with gaps or in any order."""

from __future__ import annotations

import triton
from torch import Tensor

from attnlib.errors import ContractError
from attnlib.ops.params import AttentionParams
from attnlib.ops.signature import tensor_signature
from attnlib.ops.triton.attention_call import AttentionCall
from attnlib.ops.triton.batch_tensors import BatchTensors
from attnlib.ops.triton.heuristics.device import DeviceLimits, device_guard, limits_of
from attnlib.ops.triton.heuristics.layer_tiles import prefill_tile
from attnlib.ops.triton.heuristics.tiles import key_chunks, next_power_of_2
from attnlib.ops.triton.kernels.context_attention import context_attention_kernel
from attnlib.ops.triton.launch.bound import BoundLaunch
from attnlib.ops.triton.launch.cache import LAUNCHES
from attnlib.ops.triton.launch.config import with_config
from attnlib.ops.triton.launch.constants import attention_constants

__all__ = ["context_attention"]

_MAX_ROWS = 128
"""Rows of the largest tile."""
_MAX_REQUESTS = 65535
"""Limit of a grid's third dimension."""


def context_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    start_loc: Tensor,
    seq_lens: Tensor,
    params: AttentionParams,
    *,
    max_seq_len: int,
    out: Tensor,
) -> None:
    """Attention of each sequence's tokens over the same tokens' keys.

    Args:
        query: `[T, Hq, D]` float16, bfloat16 or float32, last stride 1.
        key: `[T, Hkv, D]`, last stride 1.
        value: `[T, Hkv, Dv]`, last stride 1.
        start_loc: `[R]` int32 or int64, the first token of each sequence, in any order.
        seq_lens: `[R]` int32 or int64, tokens of each sequence.
        params: scale, causal (one flag) and window; other features are not supported.
        max_seq_len: upper bound of the sequence lengths.
        out: `[T, Hq, Dv]`; rows of no sequence are left as they are.

    Raises:
        ContractError: tensors that the kernel cannot address.
        UnsupportedConfigError: head sizes for which no tile fits the device.
    """
    num_reqs = seq_lens.shape[0]
    if query.numel() == 0 or num_reqs == 0 or max_seq_len < 1:
        return
    name = (
        "context attention",
        *(tensor_signature(tensor) for tensor in (query, key, value, out)),
        *(start_loc.dtype, seq_lens.dtype, num_reqs, max_seq_len, params.causal is True),
        *(params.window[0] >= 0, params.window[1] >= 0, params.scale > 0),
    )
    batch = BatchTensors.of(params, start_loc, seq_lens, None, max_query_len=max_seq_len)
    call = AttentionCall(query, key, value, out, None, batch, params, limits_of(query), name)
    found: tuple[DeviceLimits, BoundLaunch] | None = LAUNCHES.get(name)
    if found is None or found[0] is not call.limits:
        found = LAUNCHES.keep(name, (call.limits, _prepare(call, num_reqs)))
    arguments = (
        *(query, key, value, out, start_loc, seq_lens, float(params.scale)),
        *(int(n) for n in params.window),
        *(stride for x in (query, key, value, out) for stride in x.stride()[:2]),
    )
    with device_guard(query):
        found[1].run(arguments, call.addresses, query.get_device())


def _prepare(call: AttentionCall, num_reqs: int) -> BoundLaunch:
    """The launch for calls of this signature.

    Raises:
        ContractError: tensors that the kernel cannot address.
        UnsupportedConfigError: head sizes for which no tile fits the device.
    """
    batch, shape, limits = call.batch, call.shape, call.limits
    for name, tensor in (("start_loc", batch.query_start_loc), ("seq_lens", batch.seq_lens)):
        if not tensor.is_contiguous():
            raise ContractError(f"{name} is strided; call .contiguous()", rule="M1")
    if num_reqs > _MAX_REQUESTS:
        raise ContractError(
            f"a batch of {num_reqs} sequences exceeds the limit of {_MAX_REQUESTS}; split it into "
            "several calls"
        )
    rows = min(_MAX_ROWS, next_power_of_2(shape.group * batch.max_query_len))
    tile = prefill_tile(shape, limits, rows)
    tile_heads = min(shape.group, tile.block_m)
    tile_tokens, head_blocks = tile.block_m // tile_heads, triton.cdiv(shape.group, tile_heads)
    shared = attention_constants(call)
    constants = {
        **{name: value for name, value in shared.items() if name not in ("SCORE", "BOUNDS")},
        **key_chunks(shape.head_sizes, tile, shape.query_dtype.itemsize, limits.products),
        "PAGED": False,
        "TILE_HEADS": tile_heads,
        "TILE_TOKENS": tile_tokens,
        "HEAD_BLOCKS": head_blocks,
        **tile.constants,
    }
    tiles = triton.cdiv(batch.max_query_len, tile_tokens)
    grid = (tiles, shape.num_kv_heads * head_blocks, num_reqs)
    return BoundLaunch(context_attention_kernel, grid, with_config(constants))
