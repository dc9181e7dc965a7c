"""Which kernel runs a Hopper prefill, and the options of the general one."""

from __future__ import annotations

from typing import Any

import torch

from attnlib.ops.triton.attention_call import AttentionCall
from attnlib.ops.triton.heuristics.hopper_tiles import (
    HopperTile,
)
from attnlib.ops.triton.hopper.descriptors import (
    TransposedView,
)
from attnlib.ops.triton.hopper.kernels.consumer_state import BOUNDED
from attnlib.ops.triton.hopper.kernels.prefill import hopper_prefill_kernel
from attnlib.ops.triton.hopper.kernels.prefill_call import PrefillConfig
from attnlib.ops.triton.hopper.kernels.two_accumulators import PART_COLUMNS
from attnlib.ops.triton.hopper.kernels.value_columns import PART_ELEMENTS, PART_KEYS
from attnlib.ops.triton.kernels.quant import KV_PLAIN

__all__ = ["choose_kernel"]

_REGISTERS = 64 * 1024
"""Registers of a multiprocessor."""


def choose_kernel(
    call: AttentionCall,
    tile: HopperTile,
    config: PrefillConfig,
    functions: dict[str, Any],
    invariant: bool,
    transposed: TransposedView | None,
) -> tuple[Any, dict[str, Any]]:
    """The kernel of a call and its compile-time arguments."""
    options: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": True, "launch_pdl": True}
    if invariant:
        from attnlib.ops.triton.hopper.kernels.invariant_prefill import invariant_prefill_kernel

        if tile.ctas_per_sm > 1:
            threads = tile.ctas_per_sm * 128 * (tile.consumers + 1)
            options["maxnreg"] = _REGISTERS // threads // 8 * 8
        return invariant_prefill_kernel, {"CONFIG": config, **options}
    if transposed is not None:
        from attnlib.ops.triton.hopper.kernels.float8_prefill import float8_prefill_kernel

        return float8_prefill_kernel, {"CONFIG": config, **options}
    config = config._replace(VALUE_PARTS=_value_parts(config))
    if tile.sign_softmax and _has_sign_softmax(config, call.query.dtype, functions["SCORE"]):
        config = config._replace(SIGN_SOFTMAX=True)
    own = {name: functions[name] for name in ("SCORE", "KEY_SLOPE", "BOUNDS")}
    return hopper_prefill_kernel, {**own, "CONFIG": config, **options}


def _value_parts(config: PrefillConfig) -> int:
    """The parts of 32 elements that the kernel keeps values in; 0 where it keeps them undivided."""
    divided = (
        config.DV < PART_KEYS.value == config.BLOCK_N
        and config.KV_KIND == KV_PLAIN
        and not config.GATHERS
        and config.KEY_PARTS == 1
        and not config.SPLIT_V
    )
    return -(-config.DV // PART_ELEMENTS.value) if divided else 0


def _has_sign_softmax(config: PrefillConfig, dtype: torch.dtype, score: Any) -> bool:
    """Whether the kernel can look for rising maxima by signs. Weights of float16 would be
    subnormal."""
    # With fewer columns, a threshold is faster.
    is_wide = config.REST_COLUMNS == PART_COLUMNS.value
    sizes = (config.KEY_PARTS, config.WIDTH, config.CONSUMERS, config.BLOCK_N)
    return (
        dtype == torch.bfloat16
        and sizes
        in (
            (1, 128, 2, 128),
            (3, 64, 3, 64),  # parts of 64 elements
            *([(3, 64, 2, 64)] if is_wide else []),
        )
        and (config.WIDTH_V == 128 or is_wide)
        and config.VALUE_PARTS == 0
        and config.KV_KIND == KV_PLAIN
        and not config.GATHERS
        and score is None
        and config.RANGES == 0
        and config.HAS_CAP != BOUNDED.value
    )
