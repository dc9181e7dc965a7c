"""Arguments and compile-time constants that the plain Triton attention kernels share.

What never changes for a layer (dtypes, head sizes, strides, features, tile) becomes compile-time
constants. What changes from step to step stays a plain integer that Triton does not specialize on,
so nothing compiles after warm-up.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from attnlib.errors import ContractError
from attnlib.ops.latent import values_are_prefix
from attnlib.ops.params import AttentionParams
from attnlib.ops.scales import MIN_LATE_SCALE
from attnlib.ops.triton.heuristics.device import DeviceLimits
from attnlib.ops.triton.kernels.quant import KV_NATIVE, KV_PLAIN
from attnlib.ops.triton.launch.bound import ALIGNMENT, BoundLaunch
from attnlib.ops.triton.launch.scales import kv_kind, scale_kind
from attnlib.ops.triton.launch.score import (
    batch_score_values,
    score_arguments,
    score_constants,
    tensor_sizes,
)
from attnlib.ops.triton.launch.sequence import (
    K_SCALE,
    KEY_CACHE,
    LSE,
    OUT,
    QUERY,
    SINKS,
    SLOPES,
    V_SCALE,
    VALUE_CACHE,
    Launches,
    batch_sources,
    bind_step,
    score_sources,
)

__all__ = [
    "BatchTensors",
    "PlainAttention",
    "attention_constants",
    "attention_numbers",
    "check_batch",
    "compute_dtype",
    "holds_scales",
    "reads_bytes",
    "skip_exponent",
    "vector_elements",
]

_UNBOUNDED = 1 << 30
_NUM_BATCH_VALUES = 6
"""Values of a batch that the plain kernels take, besides those of its score function."""
_COMPUTE = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


class BatchTensors(NamedTuple):
    """The tensors of a batch that an attention launch reads, shared by all layers of the step.

    Attributes:
        query_start_loc: `[R + 1]` int32.
        seq_lens: `[R]` int32; without a block table `[R + 1]`, where each request's keys start.
        block_table: `[R, M]` int32; None for packed keys.
        causal_flags: `[R]` bool; None when one flag holds for all requests.
        query_bias: `[T, >= max_query_len]` float32 or None.
        workspace: scratch memory, float32 or uint8; None when nothing is split.
        counters: int32 zeros; None when no kernel needs them.
        max_seq_len: upper bound of the sequence lengths.
        score_tensors: batch tensors of the score function, in its order.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor | None
    causal_flags: Tensor | None = None
    query_bias: Tensor | None = None
    workspace: Tensor | None = None
    counters: Tensor | None = None
    max_seq_len: int = 0
    score_tensors: tuple[Tensor, ...] = ()


def check_batch(batch: BatchTensors, max_query_len: int) -> None:
    """Refuse metadata that the kernels would misread (they index it as dense int32).

    Raises:
        ContractError: the message names the tensor, its dtype or stride, and the required one.
    """
    for name, tensor in (("query_start_loc", batch.query_start_loc), ("seq_lens", batch.seq_lens)):
        if tensor.dim() != 1 or (tensor.shape[0] > 1 and tensor.stride(0) != 1):
            raise ContractError(
                f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}; it must be "
                "one-dimensional and contiguous: call .contiguous()",
                rule="M1",
            )
    table, flags, bias, counters = batch.block_table, *batch[3:5], batch.counters
    if counters is not None and counters.dtype != torch.int32:
        raise ContractError(
            f"counters are {counters.dtype} and must be torch.int32 zeros; create them with "
            "torch.zeros(n, dtype=torch.int32)"
        )
    # PyTorch calls every tensor without elements contiguous, whatever its strides.
    if table is not None and table.shape[0] and table.shape[1] > 1 and table.stride(1) != 1:
        raise ContractError(
            f"block_table has last stride {table.stride(1)}; it must be 1: call .contiguous()",
            rule="P3",
        )
    if flags is not None:
        if flags.dtype not in (torch.bool, torch.uint8):
            raise ContractError(f"causal flags are {flags.dtype}; convert them to torch.bool")
        if flags.shape[0] > 1 and flags.stride(0) != 1:
            raise ContractError(
                f"causal flags have stride {flags.stride(0)}; it must be 1: call .contiguous()"
            )
    if bias is not None:
        if bias.stride(1) != 1 and bias.shape[1] > 1:
            raise ContractError(
                f"query_bias has last stride {bias.stride(1)}; make its last dimension dense"
            )
        if bias.shape[1] < max_query_len:
            raise ContractError(
                f"query_bias has {bias.shape[1]} columns; it needs one for each of the "
                f"max_query_len={max_query_len} keys of the query span"
            )


class PlainAttention:
    """The launches of one call signature of a plain attention kernel, without addresses.

    Args:
        limits: the chip that tile and grid were chosen for.
        index: the device index.
        attend: the attention kernel.
        numbers: its runtime numbers after the scales of the cache (`attention_numbers`).
        table_stride: stride of the block table's rows.
        last: the numbers after the block table and, with splits, the partial results.
        as_bytes: whether the kernel reads a float8 cache as bytes.
        is_decode: whether the kernel takes partial results.
        combine: the kernel that combines splits; None when nothing is split.
        combine_tail: its numbers.
        score_tensors: layer tensors of the score function, of which only the sizes are kept.
        num_batch_tensors: number of its batch tensors.
        workspace_bytes: bytes of partial results.
    """

    needs_alignment = False

    def __init__(
        self,
        limits: DeviceLimits,
        index: int,
        attend: BoundLaunch,
        numbers: tuple[float | int, ...],
        table_stride: int,
        last: tuple[float | int, ...],
        *,
        as_bytes: bool,
        is_decode: bool,
        combine: BoundLaunch | None = None,
        combine_tail: tuple[int, ...] = (),
        score_tensors: tuple[Tensor, ...] = (),
        num_batch_tensors: int = 0,
        workspace_bytes: int = 0,
    ) -> None:
        self.limits = limits
        self.index = index
        self.attend = attend
        self.combine = combine
        self.as_bytes = as_bytes
        self.workspace_bytes = workspace_bytes
        self._numbers = numbers
        self._table_stride = table_stride
        self._last = last
        self._is_decode = is_decode
        self._combine_tail = combine_tail
        self._score_sizes = tensor_sizes(score_tensors)
        self._num_batch_tensors = num_batch_tensors
        self.num_batch_values = _NUM_BATCH_VALUES + 3 * num_batch_tensors

    @property
    def kernels(self) -> tuple[BoundLaunch, ...]:
        """The kernels that `run` launches."""
        return (self.attend,) if self.combine is None else (self.attend, self.combine)

    def launches(self, direct: bool, aligned: bool = True) -> Launches:
        """The launches of both kernels. The order of their arguments is written here.

        Args:
            direct: launch without Triton, on addresses.
            aligned: for launches by Triton, whether all tensors are aligned.
        """
        starts, lens, flags, bias, table, space = batch_sources(_NUM_BATCH_VALUES)
        pointers, sizes = score_arguments(
            self._score_sizes, self._num_batch_tensors, _NUM_BATCH_VALUES
        )
        layer_tensors = score_sources(len(self._score_sizes) // 2)
        arguments = (
            QUERY, KEY_CACHE, VALUE_CACHE, OUT, LSE, starts, lens, flags, SLOPES, SINKS, bias,
            K_SCALE, V_SCALE, *layer_tensors, *pointers, *self._numbers, table, self._table_stride,
            *((space,) if self._is_decode else ()), *self._last, *sizes,
        )  # fmt: skip
        steps = [bind_step(self.attend, direct, aligned, arguments)]
        if self.combine is not None:
            arguments = (space, SINKS, OUT, LSE, *self._combine_tail)
            steps.append(bind_step(self.combine, direct, aligned, arguments))
        return Launches(tuple(steps))

    @cached_property
    def direct(self) -> Launches:
        """The direct launches, made once."""
        return self.launches(True)

    def with_scratch(self, batch: BatchTensors) -> BatchTensors:
        """The batch: the kernels need no counters."""
        return batch

    def addresses(self, batch: BatchTensors) -> tuple[Any, ...] | None:
        """The values of a batch for direct launches; None if its workspace is not aligned."""
        starts, lens, table, flags, bias, space = batch[:6]
        partials = None
        if self.combine is not None:
            assert space is not None  # `workspace_bytes` is not 0
            partials = space.data_ptr()
            if partials & ALIGNMENT:
                return None
        score = batch.score_tensors
        return (
            starts.data_ptr(), lens.data_ptr(), None if flags is None else flags.data_ptr(),
            None if bias is None else bias.data_ptr(), None if table is None else table.data_ptr(),
            partials, *(batch_score_values(score, True) if score else ()),
        )  # fmt: skip

    def tensors(self, batch: BatchTensors) -> tuple[Any, ...]:
        """The values of a batch for launches by Triton."""
        partials, flags = batch.workspace if self.combine is not None else None, batch.causal_flags
        if partials is not None and partials.dtype != torch.float32:
            partials = partials.view(torch.float32)
        if flags is not None and flags.dtype != torch.uint8:
            flags = flags.view(torch.uint8)
        return (
            batch.query_start_loc, batch.seq_lens, flags, batch.query_bias, batch.block_table,
            partials, *batch_score_values(batch.score_tensors, False),
        )  # fmt: skip


def holds_scales(params: AttentionParams) -> bool:
    """Whether the pages of the cache hold its scales (M16)."""
    return isinstance(params.k_scale, Tensor) and params.k_scale.dim() == 4


def skip_exponent(params: AttentionParams) -> float | None:
    """The base-2 logarithm of the weight below which prefills leave tiles out (M18), or None."""
    threshold = params.skip_softmax_threshold
    return math.log2(threshold) if threshold > 0 else None


def reads_bytes(cache_dtype: torch.dtype, limits: DeviceLimits) -> bool:
    """Whether the plain kernels read a cache of this dtype as bytes (float8 on older chips)."""
    return kv_kind(cache_dtype, limits.has_fp8) not in (KV_PLAIN.value, KV_NATIVE.value)


def attention_numbers(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, out: Tensor, lse: Tensor | None,
    params: AttentionParams,
) -> tuple[float | int, ...]:  # fmt: skip
    """The runtime numbers after the scales of the cache, from `scale` to `stride_bt`.

    Raises:
        ContractError: an LSE whose last dimension is not dense.
    """
    left, right = params.window
    bias, chunk = params.query_bias, params.attention_chunk_size
    if lse is not None and lse.stride(1) != 1 and lse.shape[1] > 1:
        raise ContractError(f"lse has last stride {lse.stride(1)}; make its last dimension dense")
    qs, ks, vs, os = query.stride(), key.stride(), value.stride(), out.stride()
    return (
        float(params.scale), float(params.logits_soft_cap),
        min(int(left), _UNBOUNDED), min(int(right), _UNBOUNDED), min(int(chunk), _UNBOUNDED),
        starts.shape[0] - 1, query.shape[0], qs[0], qs[1], ks[0], ks[-3], ks[-2],
        vs[0], vs[-3], vs[-2], os[0], os[1],
        0 if lse is None else lse.stride(0), 0 if bias is None else bias.stride(0),
    )  # fmt: skip


def attention_constants(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, has_lse: bool, params: AttentionParams,
    limits: DeviceLimits,
) -> dict[str, Any]:  # fmt: skip
    """The compile-time arguments that the plain attention kernels share, by name.

    Raises:
        ContractError: a dtype without kernel, heads that do not divide, or a last dimension that is
            not dense.
    """
    if holds_scales(params):
        raise ContractError(
            "the pages of this cache hold its scales (M16), which this kernel does not read: use "
            "paged_decode or paged_prefill without batch_invariant",
            rule="M16",
        )
    num_heads, head_size = query.shape[1:]
    num_kv_heads, head_size_v = value.shape[-2:]
    if num_heads % num_kv_heads:
        raise ContractError(
            f"query has {num_heads} heads and the keys have {num_kv_heads}: the number of query "
            "heads must be a multiple of the number of KV heads"
        )
    kind = kv_kind(key.dtype, limits.has_fp8)
    causal = params.causal
    cap, alibi, bias = params.logits_soft_cap > 0, params.alibi_slopes, params.query_bias
    return {
        "BLOCK_SIZE": value.shape[1] if value.dim() == 4 else 1,
        "GROUP": num_heads // num_kv_heads,
        "D": head_size,
        "DV": head_size_v,
        "KV_KIND": kind,
        "COMPUTE": compute_dtype(query.dtype, kind),
        "CAUSAL": 2 if isinstance(causal, Tensor) else int(causal),
        "HAS_LEFT": params.window[0] >= 0,
        "HAS_RIGHT": params.window[1] >= 0,
        "HAS_CHUNK": params.attention_chunk_size > 0,
        "HAS_CAP": cap,
        "HAS_ALIBI": alibi is not None,
        "HAS_SINK": params.sinks is not None,
        "HAS_BIAS": bias is not None,
        "HAS_LSE": has_lse,
        "K_SCALE_KIND": scale_kind("k_scale", params.k_scale),
        "V_SCALE_KIND": scale_kind("v_scale", params.v_scale),
        "SCALE_LATE": params.scale >= MIN_LATE_SCALE
        and not (cap or alibi is not None or bias is not None or params.score_function is not None),
        **score_constants(params, "triton"),
        "LATENT": key.dim() == 4 and values_are_prefix(key, value),
        "VEC_Q": vector_elements("query", query),
        "VEC_K": vector_elements("key", key),
        "VEC_V": vector_elements("value", value),
        "VEC_O": vector_elements("out", out),
    }


def compute_dtype(query_dtype: torch.dtype, kind: int) -> tl.dtype:
    """The dtype of the matrix products: that of the query. For 16-bit queries over a float8 cache
    it is float16, which holds float8 exactly and takes fewer conversions than bfloat16."""
    if query_dtype not in _COMPUTE:
        raise ContractError(
            f"query has dtype {query_dtype}; the kernels take float16, bfloat16 and float32"
        )
    if kind != KV_PLAIN.value and query_dtype != torch.float32:
        return tl.float16
    return _COMPUTE[query_dtype]


def vector_elements(name: str, tensor: Tensor) -> int:
    """Elements per 16 bytes when every row starts on a 16-byte boundary (given that the tensor
    does), else 1. A paged tensor has a block stride before the last three dimensions."""
    shape, strides = tensor.shape, tensor.stride()
    if strides[-1] != 1 and shape[-1] > 1:
        raise ContractError(
            f"{name} has last stride {strides[-1]}; make its last dimension dense", rule="P1"
        )
    elements = 16 // tensor.element_size()
    outer = [stride for stride, size in zip(strides[-3:-1], shape[-3:-1], strict=True) if size > 1]
    blocks = strides[:-3]
    return elements if all(stride % elements == 0 for stride in (*blocks, *outer)) else 1
