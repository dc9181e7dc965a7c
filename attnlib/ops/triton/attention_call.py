"""One call of an attention operation, as one value that launches are prepared from."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from attnlib.ops.layer_shape import LayerShape
from attnlib.ops.params import AttentionParams
from attnlib.ops.triton.batch_tensors import BatchTensors
from attnlib.ops.triton.heuristics.device import DeviceLimits, limits_of
from attnlib.ops.triton.launch.signature import call_signature

__all__ = ["AttentionCall"]


@dataclass(eq=False)  # `frozen` makes the constructor three times slower
class AttentionCall:
    """The tensors and parameters of one call, which nothing changes. It lives for the call:
    prepared launches keep no reference to it.

    Attributes:
        query: `[T, Hq, D]`, last stride 1.
        key: the key cache `[B, N, Hkv, D]`, or packed keys `[Tk, Hkv, D]` of a batch without a
            block table.
        value: the same form, with Dv.
        out: `[T, Hq, Dv]`, written.
        lse: `[T, Hq]` float32, written; None where it is not needed (M5).
        batch: the tensors that all layers of the step share, and the bounds of its lengths.
        params: scale, mask, biases, sinks and KV scales.
        limits: the chip that runs it.
        signature: what launches follow from in the layer and its tensors, besides addresses: the
            first part of their keys in the launch cache.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    lse: Tensor | None
    batch: BatchTensors
    params: AttentionParams
    limits: DeviceLimits
    signature: Hashable

    @classmethod
    def of(
        cls,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor | None,
        batch: BatchTensors,
        params: AttentionParams,
    ) -> AttentionCall:
        """A call made without a layer: its chip and its signature are those of its tensors.

        Raises:
            BackendUnavailableError: tensors on a CPU in a process that does not interpret Triton.
        """
        signature = call_signature(query, key, value, out, lse, params)
        return cls(query, key, value, out, lse, batch, params, limits_of(query), signature)

    @cached_property
    def shape(self) -> LayerShape:
        """Sizes and dtypes of the layer.

        Raises:
            ContractError: keys whose last dimension is not dense, or pages of no known format.
        """
        return LayerShape.of(self.query, self.key, self.value, self.params)

    @property
    def num_tokens(self) -> int:
        """T, rows of the queries."""
        return self.query.shape[0]

    @property
    def num_reqs(self) -> int:
        """R, requests of the batch."""
        return self.batch.num_reqs

    @property
    def max_query_len(self) -> int:
        """Upper bound of the query lengths, in tokens."""
        return self.batch.max_query_len

    @property
    def is_paged(self) -> bool:
        """Whether keys and values are in pages that a block table names."""
        return self.batch.block_table is not None

    @property
    def lse_stride(self) -> int:
        """Elements between the rows of the LSE; 0 without one."""
        return 0 if self.lse is None else self.lse.stride(0)

    @property
    def table_stride(self) -> int:
        """Elements between the rows of the block table; 0 without one."""
        table = self.batch.block_table
        return 0 if table is None else table.stride(0)

    @property
    def addresses(self) -> int:
        """The addresses of queries, keys, values and output, joined by `|`: their low bits tell
        whether all are aligned."""
        query, key = self.query.data_ptr(), self.key.data_ptr()
        return query | key | self.value.data_ptr() | self.out.data_ptr()
