"""Attention of a mixed batch: the decodes and the prefills of one step.

Decodes are bound by memory and prefills by arithmetic, so on a Hopper chip they run at the same time: the decode kernel
takes as many multiprocessors as it needs to keep the memory busy, and the prefill starts on the others (and on those,
once they fall free) without waiting for it. Elsewhere one runs after the other.

POD-Attention (Kamath et al. 2025) gets the same overlap from one fused kernel; here it comes from programmatic dependent
launch, so each keeps its own kernel, and a captured graph keeps the overlap.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from attnlib.ops.params import AttentionParams
from attnlib.ops.triton.heuristics.device import DeviceLimits, device_guard, limits_of
from attnlib.ops.triton.heuristics.splits import visible_bound
from attnlib.ops.triton.hopper.loader import hopper_choice
from attnlib.ops.triton.launch.bound import Remembered
from attnlib.ops.triton.launch.signature import Options, launch_key
from attnlib.ops.triton.paged_decode import paged_decode
from attnlib.ops.triton.paged_prefill import paged_prefill

__all__ = ["Half", "paged_mixed"]


class Half(NamedTuple):
    """The decodes or the prefills of a step; fields as the arguments of `paged_decode`."""

    query: Tensor
    block_table: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    max_query_len: int
    max_seq_len: int
    out: Tensor
    lse: Tensor | None


@dataclass
class _Pair:
    """What serves the two halves of such batches at the same time.

    Attributes:
        limits: the chip that it was worked out for.
        decode: a `HopperDecode`; None where the halves run one after the other.
        prefill: a `HopperPrefill`; likewise.
    """

    limits: DeviceLimits
    decode: Any
    prefill: Any


_pairs: Remembered[_Pair] = Remembered()


def paged_mixed(
    decodes: Half,
    prefills: Half,
    key_cache: Tensor,
    value_cache: Tensor,
    params: AttentionParams,
    *,
    workspace: Tensor | None = None,
    counters: Tensor | None = None,
    kernels: str = "auto",
) -> None:
    """Attention for both halves of a step, concurrently where that is faster.

    Args:
        decodes: the requests with short queries.
        prefills: the other requests.
        key_cache: `[B, N, Hkv, D]`, strided (P1).
        value_cache: `[B, N, Hkv, Dv]`, likewise.
        params: of the whole batch. The rows of `causal` and `query_bias` cover the decodes first,
            then the prefills.
        workspace: for the decodes, as in `paged_decode`.
        counters: as in `paged_decode` and `paged_prefill`.
        kernels: likewise.

    Raises:
        ContractError, UnsupportedConfigError: as `paged_decode` and `paged_prefill` raise them.
    """
    halves = _half_params(decodes, params)
    if not _at_once(
        decodes, prefills, key_cache, value_cache, workspace, counters, kernels, halves
    ):
        shared: dict[str, Any] = {
            "key_cache": key_cache,
            "value_cache": value_cache,
            "counters": counters,
            "kernels": kernels,
        }
        paged_decode(params=halves[0], workspace=workspace, **decodes._asdict(), **shared)
        paged_prefill(params=halves[1], **prefills._asdict(), **shared)


def _half_params(decodes: Half, params: AttentionParams) -> tuple[AttentionParams, AttentionParams]:
    """The parameters of the decodes and of the prefills."""
    causal, bias = params.causal, params.query_bias
    if bias is None and not isinstance(causal, Tensor):
        return params, params
    requests, tokens = decodes.seq_lens.shape[0], decodes.query.shape[0]
    first, second = (
        replace(
            params,
            causal=causal[own] if isinstance(causal, Tensor) else causal,
            query_bias=None if bias is None else bias[rows],
        )
        for own, rows in (
            (slice(requests), slice(tokens)),
            (slice(requests, None), slice(tokens, None)),
        )
    )
    return first, second


def _at_once(
    decodes: Half, prefills: Half, key: Tensor, value: Tensor, workspace: Tensor | None, counters: Tensor | None, kernels: str,
    halves: tuple[AttentionParams, AttentionParams],
) -> bool:  # fmt: skip
    """Launch both halves side by side; whether that could be done."""
    limits = limits_of(decodes.query)
    if (
        limits.capability[0] != 9
        or kernels == "portable"
        or not (decodes.query.numel() and prefills.query.numel())
    ):
        return False
    ask, fill = (
        Options.from_params(params, half.out, half.lse)
        for params, half in zip(halves, (decodes, prefills), strict=True)
    )
    pair = _find(decodes, prefills, key, value, ask, fill, limits, kernels)
    if (
        pair.decode is None
        or pair.prefill is None
        or not pair.prefill.accepts(prefills.query, key, value, fill)
    ):
        return False

    def launch_prefills() -> None:
        pair.prefill.serve(
            prefills.query, key, value, prefills.block_table, prefills.query_start_loc, prefills.seq_lens, fill, prefills.max_seq_len,
            counters, beside=True,
        )  # fmt: skip

    with device_guard(decodes.query):
        return bool(pair.decode.serve(
            decodes.query, key, value, decodes.block_table, decodes.query_start_loc, decodes.seq_lens, ask, workspace,
            beside=launch_prefills,
        ))  # fmt: skip


def _find(
    decodes: Half,
    prefills: Half,
    key: Tensor,
    value: Tensor,
    ask: Options,
    fill: Options,
    limits: DeviceLimits,
    kernels: str,
) -> _Pair:
    halves = ((decodes, ask), (prefills, fill))
    keys = [
        launch_key(
            half.query, key, value, half.query_start_loc, half.seq_lens, half.block_table, options
        )
        for half, options in halves
    ]
    known = (
        *keys,
        decodes.max_query_len,
        decodes.max_seq_len,
        prefills.max_query_len,
        prefills.max_seq_len,
        kernels,
    )
    pair = _pairs.get(known)
    if pair is not None and pair.limits is limits:
        return pair
    decode = prefill = None
    if (fast := hopper_choice()) is not None:
        prefill = fast.find_prefill(
            prefills.query,
            key,
            value,
            prefills.block_table,
            prefills.query_start_loc,
            fill,
            limits,
            prefills.max_query_len,
        )
        visible = _visible(decodes, ask)
        sizes = key.shape[3] + value.shape[3]
        kv_bytes = decodes.seq_lens.shape[0] * visible * key.shape[2] * sizes * key.element_size()
        keys_per_token = min(
            _visible(prefills, fill), max(1, prefills.max_seq_len - prefills.max_query_len // 2)
        )
        slots = fast.slots_beside_prefill(
            limits.num_sms,
            kv_bytes,
            2 * prefills.query.shape[0] * prefills.query.shape[1] * keys_per_token * sizes,
        )
        decode = fast.find_decode(
            keys[0], decodes.query, key, value, decodes.block_table, decodes.query_start_loc, ask, limits, max(1, decodes.max_query_len),
            visible, kernels == "hopper", slots,
        )  # fmt: skip
    return _pairs.keep(known, _Pair(limits, decode, prefill))


def _visible(half: Half, options: Options) -> int:
    """The most keys that the queries of one request can see together."""
    causal = options.causal is True
    return visible_bound(
        half.max_query_len, half.max_seq_len, options.window, causal, options.attention_chunk_size
    )
