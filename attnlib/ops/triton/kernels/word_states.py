"""States as words of 4 bytes, and the words of states whose splits a decode has not combined."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attnlib.ops.triton.kernels.softmax import LN2, finish_rows

__all__ = ["Splits", "combined_words", "load_words", "store_merged"]


class Splits(NamedTuple):
    """The splits of a token and KV head: fields of `SplitStates`, its header, and the KV heads."""

    outs: Any
    lses: Any
    header: Any
    rows: Any
    kv_heads: Any


@triton.jit
def load_words(words, lses, mask, SIZE: tl.constexpr, LANES: tl.constexpr):
    """The words `[states, LANES]` and LSEs of states; 0 and -inf outside of `mask`."""
    lanes = tl.arange(0, LANES)
    inside = mask[:, None] & (lanes < SIZE)[None, :]
    x = tl.load(words[:, None] + lanes[None, :], mask=inside, other=0)
    return x, tl.load(lses, mask=mask, other=float("-inf"))


@triton.jit
def _first_half(x, KIND: tl.constexpr):
    """The elements of even index in 4 bytes, or all of float32."""
    if KIND == "fp32":
        found = x.to(tl.float32, bitcast=True)
    elif KIND == "bf16":
        found = (x << 16).to(tl.float32, bitcast=True)
    else:
        found = (x & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return found


@triton.jit
def _second_half(x, KIND: tl.constexpr):
    """The elements of odd index."""
    if KIND == "bf16":
        found = (x & -65536).to(tl.float32, bitcast=True)
    else:
        found = (x >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return found


@triton.jit
def _words(x, LANES: tl.constexpr, KIND: tl.constexpr):
    """The words `[rows, LANES]` of float32 elements, rounded to KIND."""
    if KIND == "fp32":
        found = x.to(tl.int32, bitcast=True)
    else:
        TYPE: tl.constexpr = tl.bfloat16 if KIND == "bf16" else tl.float16
        bits = x.to(TYPE).to(tl.int16, bitcast=True).to(tl.int32)
        even, odd = tl.split(tl.reshape(bits, [x.shape[0], LANES, 2]))
        found = (even & 0xFFFF) | (odd << 16)
    return found


@triton.jit
def combined_words(
    splits,
    head,
    mask,
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
    STEP: tl.constexpr,
    KIND: tl.constexpr,
):
    """Combine the splits of some heads of one token, STEP at a time: words `[heads, LANES]` and
    LSEs.

    Args:
        splits: `Splits` of the token and KV head.
        head: numbers of the heads among those of the KV head.
        mask: of the heads.
    """
    EACH: tl.constexpr = 1 if KIND == "fp32" else 2
    HEADS: tl.constexpr = head.shape[0]
    row, first = (splits.header >> 9 & 63) + head, splits.header >> 15
    num_splits = splits.header & 511
    elements = tl.arange(0, EACH * LANES)
    acc = tl.zeros([HEADS, EACH * LANES], tl.float32)
    row_max = tl.full([HEADS], float("-inf"), tl.float32)
    row_sum = tl.zeros([HEADS], tl.float32)
    for base in range(0, num_splits, STEP):
        split = base + tl.arange(0, STEP)
        live = (split < num_splits)[:, None] & mask[None, :]
        partial = tl.where(split == 0, first, (first // 2 + split * splits.kv_heads) * 2)
        place = partial[:, None] * splits.rows + row[None, :]
        part = tl.load(splits.lses + place, mask=live, other=float("-inf"))
        x = tl.load(
            splits.outs + place[:, :, None] * (EACH * SIZE) + elements[None, None, :],
            mask=live[:, :, None] & (elements < EACH * SIZE)[None, None, :],
            other=0.0,
        )
        new_max = tl.maximum(row_max, tl.max(part, 0))
        # -inf - -inf is NaN: splits without a visible key are measured from 0.
        finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(part - finite_max[None, :])
        scale = tl.exp2(row_max - finite_max)
        acc = acc * scale[:, None] + tl.sum(weights[:, :, None] * x, 0)
        row_sum = row_sum * scale + tl.sum(weights, 0)
        row_max = new_max
    factor, base2 = finish_rows(row_max, row_sum, row_sum, 0)
    return _words(acc * factor[:, None], LANES, KIND), base2 * LN2


@triton.jit
def store_merged(
    target, x, weight, total, SIZE: tl.constexpr, LANES: tl.constexpr, KIND: tl.constexpr
):
    """Store the sum of words `[states, LANES]` by the weights of the states, over `total`."""
    lanes = tl.arange(0, LANES)
    # A state without keys may hold anything, and 0 * NaN is NaN.
    seen = (weight != 0.0)[:, None]
    even = tl.sum(tl.where(seen, _first_half(x, KIND) * weight[:, None], 0.0), 0) / total
    even = even.to(target.dtype.element_ty)
    if KIND == "fp32":
        tl.store(target + lanes, even, mask=lanes < SIZE)
    else:
        odd = tl.sum(tl.where(seen, _second_half(x, KIND) * weight[:, None], 0.0), 0)
        odd = (odd / total).to(target.dtype.element_ty)
        both = tl.arange(0, 2 * LANES)
        tl.store(target + both, tl.interleave(even, odd), mask=both < 2 * SIZE)
