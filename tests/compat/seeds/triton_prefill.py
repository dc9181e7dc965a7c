"""Rows of the fifth seed: vLLM's Triton prefill."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from tests.compat.seeds import triton_prefill_original
from tests.compat.seeds.table import Seed

__all__ = ["SEED"]

SEED = Seed(
    5,
    "vllm-triton-prefill",
    "attnlib.compat.vllm.v1.attention.ops.triton_prefill_attention",
    triton_prefill_original,
)
row = SEED.row

STARTS, LENS = torch.tensor([16, 0, 9]), torch.tensor([7, 9, 5])  # rows 14 and 15 are of none
ROWS = 23


def prefilled(
    lib: Any,
    heads: tuple[int, int] = (4, 2),
    size: int = 32,
    starts: Tensor = STARTS,
    key_rows: int = ROWS,
    bound: int = 9,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Tensor:
    """The output of three sequences; rows that are not written hold 9."""
    q = torch.randn(ROWS, heads[0], size, dtype=dtype)
    k, v = torch.randn(2, key_rows, heads[1], size, dtype=dtype)
    o = torch.full_like(q, 9.0)
    assert lib.context_attention_fwd(q, k, v, o, starts, LENS, bound, **options) is None
    return o


@row(
    "`context_attention_fwd(q, k, v, o, b_start_loc, b_seq_len, max_input_len, is_causal, "
    "softmax_scale, sliding_window_q, sliding_window_k)`"
)
def _(lib: Any) -> Any:
    given = inspect.signature(lib.context_attention_fwd).parameters.values()
    defaults = [(p.name, str(p.kind), p.default is p.empty or p.default) for p in given]
    return defaults, prefilled(lib), prefilled(lib, key_rows=30)


@row("sequences with gaps, in any order", note="`b_start_loc` may end with the total, too")
def _(lib: Any) -> Any:
    ends = torch.cat([STARTS, torch.tensor([ROWS])])
    return [prefilled(lib, starts=starts) for starts in (STARTS, STARTS.int(), ends)]


@row("rows in gaps stay untouched")
def _(lib: Any) -> Any:
    return prefilled(lib)[14:16], prefilled(lib, starts=torch.tensor([1, 8, 18]))[:1]


@row("GQA")
def _(lib: Any) -> Any:
    return [prefilled(lib, heads=heads) for heads in ((4, 4), (6, 2), (8, 1), (5, 1))]


@row("causal or not")
def _(lib: Any) -> Any:
    return [prefilled(lib), *(prefilled(lib, is_causal=causal) for causal in (True, False))]


@row("`softmax_scale=None` is 1 / sqrt(D)")
def _(lib: Any) -> Any:
    return [prefilled(lib, softmax_scale=scale, size=48) for scale in (None, 0.5, 2.0)]


@row("a window on each side counts the distance")
def _(lib: Any) -> Any:
    sides = [(2, 1), (1, 3), (100, 1), (1, 100)]
    return [
        prefilled(lib, is_causal=causal, sliding_window_q=before, sliding_window_k=after)
        for causal in (False, True)
        for before, after in sides
    ]


@row("a side of 0 or None is unbounded")
def _(lib: Any) -> Any:
    sides = [(0, None), (None, 0), (0, 2), (3, None), (0, 0)]
    return [
        prefilled(lib, is_causal=causal, sliding_window_q=before, sliding_window_k=after)
        for causal in (False, True)
        for before, after in sides
    ]


@row("head sizes that are not a power of two")
def _(lib: Any) -> Any:
    return [prefilled(lib, size=size) for size in (24, 40, 72, 80, 96, 120)]


@row("K and V of equal sizes", note="different ones, too")
def _(lib: Any) -> Any:
    kinds = (torch.float32, torch.float16)
    return [prefilled(lib, size=size, dtype=kind) for size in (16, 64, 128) for kind in kinds]


@row("`get_block_size(dtype)`", note="for code that pads by it; the tiles are from tables")
def _(lib: Any) -> Any:
    return [lib.get_block_size(d) for d in (torch.float32, torch.float16, torch.bfloat16)]


def kernel_arguments_of_attnlib() -> tuple[str, ...]:
    from attnlib.ops.triton.kernels.context_attention import context_attention_kernel

    function = getattr(context_attention_kernel, "fn", context_attention_kernel)
    return tuple(inspect.signature(function).parameters)


@row(
    "`_fwd_kernel`",
    differs="another kernel with other arguments; call `context_attention_fwd`",
    ours=kernel_arguments_of_attnlib,
)
def _(lib: Any) -> Any:
    return lib.KERNEL_ARGUMENTS


@row("page size 1, no pages")
def _(lib: Any) -> Any:
    found = []
    for order in torch.randperm(3), torch.arange(3):  # the batch in another order of its requests
        q, (k, v) = torch.randn(ROWS, 4, 32), torch.randn(2, ROWS, 2, 32)
        o = torch.zeros_like(q)
        lib.context_attention_fwd(q, k, v, o, STARTS[order], LENS[order], 9)
        found.append(o)
    return found
