"""Whether a call of the Triton operations goes the Hopper way, and with which tile; the plain kernels serve the rest.

The public operations come here once they know that the chip is a Hopper, and remember the answer for calls of the same
kind. What they get looks at addresses at every call, because TMA and 16-byte loads want aligned ones.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor

from attnlib.ops.triton.heuristics.device import DeviceLimits
from attnlib.ops.triton.heuristics.hopper_tiles import choose_hopper_decode_tile, choose_hopper_tile
from attnlib.ops.triton.heuristics.tile_table import relevant_work_class
from attnlib.ops.triton.hopper.decode_plan import (
    HopperDecode,
    hopper_decode_workspace_bytes,
    plan_hopper_decode,
)
from attnlib.ops.triton.hopper.kernels.work_counter import PREFILL_COUNTERS
from attnlib.ops.triton.hopper.prefill_plan import HopperPrefill, plan_hopper_prefill
from attnlib.ops.triton.hopper.support import (
    decode_unsupported_reasons,
    prefers_hopper_decode,
    prefill_unsupported_reasons,
)
from attnlib.ops.triton.launch.bound import Remembered
from attnlib.ops.triton.launch.signature import Options

__all__ = [
    "decode_workspace_bytes",
    "find_decode",
    "find_prefill",
    "num_counters",
    "slots_beside_prefill",
    "stride_gaps",
]

_decodes: Remembered[HopperDecode] = Remembered()

_OPERATIONS_PER_BYTE = 150
"""What the chip multiplies while it reads a byte: about 620 TFLOP/s beside 4.2 TB/s on an H200."""


def slots_beside_prefill(num_sms: int, decode_bytes: int, prefill_operations: int) -> int:
    """Decode programs that run beside a prefill: as few as still read at nearly full speed, 2 of 3 multiprocessors; where
    the prefill is the longer one by the bounds, 4 of 11, so that it has more of the chip from the beginning.

    On an H200, 60 requests of 4k beside 2k tokens: 276 us with 88 programs, 283 with 96, 287 with 104, 355 with 48; beside
    8k tokens: 1040 with 48, 1095 with 88 (benchmarks/results/h200/tiles.txt).

    Args:
        num_sms: multiprocessors of the chip.
        decode_bytes: keys and values that the decodes read, by upper bounds.
        prefill_operations: of the prefills, likewise.
    """
    longer = prefill_operations > _OPERATIONS_PER_BYTE * decode_bytes
    return num_sms * 4 // 11 if longer else num_sms * 2 // 3


def stride_gaps(**tensors: Tensor) -> list[str]:
    """Why tensors cannot be read in 16-byte pieces; empty when they can (given that they start on such a boundary)."""
    gaps = []
    for name, tensor in tensors.items():
        for dim, (size, stride) in enumerate(
            zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
        ):
            if size > 1 and (stride % 8 or stride <= 0):
                gaps.append(
                    f"{name} has stride {stride} in dimension {dim}; the Hopper kernels need a multiple of 8"
                )
        if tensor.stride(-1) != 1:
            gaps.append(f"{name} has last stride {tensor.stride(-1)}; the Hopper kernels need 1")
    return gaps


def _features(options: Options) -> dict[str, Any]:
    scales = isinstance(options.k_scale, Tensor) or isinstance(
        options.v_scale, Tensor
    )  # a number is looked at in each call
    return {
        "causal_per_request": isinstance(options.causal, Tensor),
        "alibi": options.alibi_slopes is not None,
        "bias": options.query_bias is not None,
        "scales": scales,
    }


def _layer(query: Tensor, key: Tensor, value: Tensor, limits: DeviceLimits) -> tuple[Any, ...]:
    sizes = (key.shape[3], value.shape[3])
    return (
        limits.capability,
        query.dtype,
        key.dtype,
        sizes,
        key.shape[1],
        query.shape[1] // max(1, key.shape[2]),
    )


def _impossible(query: Tensor, key: Tensor, value: Tensor, options: Options) -> bool:
    """What no gap of a layer can tell: strides, an empty pool, and a scale that would turn the maximum around."""
    tensors = stride_gaps(query=query, key_cache=key, value_cache=value, out=options.out)
    return (
        bool(tensors)
        or key.shape[0] == 0
        or value.dtype != key.dtype
        or options.out.dtype != query.dtype
        or options.scale <= 0
    )


def _visible(options: Options) -> int | None:
    """Keys that one query sees at most, where a window or a chunk says so."""
    left, right = options.window[0], 0 if options.causal is True else options.window[1]
    bounds = [left + right + 1] if left >= 0 and right >= 0 else []
    return min(
        [*bounds, *([options.attention_chunk_size] if options.attention_chunk_size > 0 else [])],
        default=None,
    )


def find_prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_table: Tensor,
    starts: Tensor,
    options: Options,
    limits: DeviceLimits,
    max_query_len: int,
) -> HopperPrefill | None:
    """The Hopper prefill for calls like this one (with an equal `launch_key`); None where it cannot serve them."""
    if prefill_unsupported_reasons(
        *_layer(query, key, value, limits), **_features(options)
    ) or _impossible(query, key, value, options):
        return None
    rows = query.shape[1] // key.shape[2] * max_query_len
    tile = choose_hopper_tile(
        key.shape[3], value.shape[3], rows=min(1 << 20, 1 << max(0, rows - 1).bit_length()), block_size=key.shape[1],
        visible=_visible(options), tuned=limits.tuned,
    )  # fmt: skip
    return plan_hopper_prefill(query, key, value, block_table, starts, options, tile, limits)


def find_decode(
    same: Hashable,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_table: Tensor,
    starts: Tensor,
    options: Options,
    limits: DeviceLimits,
    max_query_len: int,
    visible: int,
    insist: bool,
    slots: int | None = None,
    num_counters: int = 0,
) -> HopperDecode | None:
    """The Hopper decode for calls like this one; None where it cannot serve them or (without `insist`) is the slower one.

    Args:
        same: the call's `launch_key`: calls with equal ones share the launches, however long their sequences grow, within a class of work.
        query: as in `paged_decode`, like what is not named here.
        key: likewise.
        value: likewise.
        block_table: likewise.
        starts: `query_start_loc`.
        options: the call's options.
        limits: the chip.
        max_query_len: upper bound of the query lengths, at least 1.
        visible: the most keys that a request's queries see.
        insist: whether it is wanted even where it is the slower one.
        slots: programs that may run at a time, where something else is to run beside them; None is all that find room.
        num_counters: counters that calls bring.
    """
    if not insist and not prefers_hopper_decode(
        visible, starts.shape[0] - 1, key.shape[2], limits.num_sms
    ):
        return None
    work = relevant_work_class(
        "hopper_decode", starts.shape[0] - 1, key.shape[2], visible, limits.num_sms, limits.tuned
    )
    known = (same, max_query_len, slots, work, num_counters)
    launch = _decodes.get(known)
    if launch is not None and launch.limits is limits:
        return launch
    layer = (*_layer(query, key, value, limits), key.shape[2], limits.num_sms, max_query_len)
    if decode_unsupported_reasons(*layer, **_features(options)) or _impossible(
        query, key, value, options
    ):
        return None
    tile = choose_hopper_decode_tile(
        key.shape[3], value.shape[3], keys_per_sm=work, tuned=limits.tuned
    )
    return _decodes.keep(known, plan_hopper_decode(
        query, key, value, block_table, starts, options, tile, limits, max_query_len, slots, num_counters
    ))  # fmt: skip


def num_counters(limits: DeviceLimits) -> int:
    """Zeros that the Hopper kernels want of a step (`counters` of the operations)."""
    return PREFILL_COUNTERS + limits.num_sms


def decode_workspace_bytes(
    query: Tensor,
    key: Tensor,
    head_size_v: int,
    num_tokens: int,
    max_query_len: int,
    limits: DeviceLimits,
) -> int:
    """Bytes that the Hopper decode wants for such calls; 0 where the plain kernel serves them in any case.

    Args:
        query: any tensor `[*, Hq, D]` of the dtype that will be used.
        key: any cache `[*, N, Hkv, D]`, likewise.
        head_size_v: Dv.
        num_tokens: query tokens of the step.
        max_query_len: upper bound of the query lengths.
        limits: the chip.
    """
    sizes, group = (key.shape[3], head_size_v), query.shape[1] // max(1, key.shape[2])
    layer = (
        limits.capability,
        query.dtype,
        key.dtype,
        sizes,
        key.shape[1],
        group,
        key.shape[2],
        limits.num_sms,
        max_query_len,
    )
    if decode_unsupported_reasons(*layer):
        return 0
    return hopper_decode_workspace_bytes(
        num_tokens, key.shape[2], group, max_query_len, head_size_v, limits.num_sms
    )
