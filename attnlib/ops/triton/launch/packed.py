"""Calls over the packed cache of PagedAttention: what their launches share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnlib.errors import ContractError
from attnlib.ops.params import AttentionParams
from attnlib.ops.signature import scale_signature, tensor_signature
from attnlib.ops.triton.heuristics.device import DeviceLimits
from attnlib.ops.triton.heuristics.packed_tiles import packed_tile
from attnlib.ops.triton.heuristics.tiles import Tile, split_head_size
from attnlib.ops.triton.launch.constants import compute_dtype, reads_bytes
from attnlib.ops.triton.launch.scales import kv_kind, scale_kind

__all__ = ["PackedCall", "joined_addresses", "whole_vectors"]

_MAX_REQUESTS = 65534
"""Limit of a grid's third dimension, less the programs for rows past the last request."""


@dataclass(frozen=True, eq=False)
class PackedCall:
    """The tensors and parameters of one call. Prepared launches keep no reference to it.

    Attributes:
        query: `[T, Hq, D]`.
        key: the key cache `[B, Hkv, D / x, N, x]`.
        value: the value cache `[B, Hkv, D, N]`.
        out: `[T, Hq, D]`.
        block_table: `[R, M]`.
        seq_lens: `[R]`.
        params: scale, window, ALiBi slopes and KV scales.
        limits: the chip.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    block_table: Tensor
    seq_lens: Tensor
    params: AttentionParams
    limits: DeviceLimits

    @property
    def num_kv_heads(self) -> int:
        """KV heads."""
        return self.value.shape[1]

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.query.shape[1] // self.value.shape[1]

    @property
    def signature(self) -> tuple[Any, ...]:
        """What launches follow from in tensors and parameters, besides addresses."""
        params = self.params
        tensors = (self.query, self.key, self.value, self.out, self.block_table, self.seq_lens)
        return (
            *(tensor_signature(tensor) for tensor in tensors),
            params.window[0] >= 0,
            params.alibi_slopes is None,
            scale_signature(params.k_scale, self.key),
            scale_signature(params.v_scale, self.value),
        )

    def check_requests(self) -> None:
        """Refuse more requests than a grid has programs for.

        Raises:
            ContractError: the message names the limit.
        """
        num_reqs = self.seq_lens.shape[0]
        if num_reqs > _MAX_REQUESTS:
            raise ContractError(
                f"a batch of {num_reqs} requests exceeds the limit of {_MAX_REQUESTS}; split it "
                "into several calls"
            )

    def tile(self, rows: int) -> Tile:
        """The tile for programs of this many rows."""
        sizes = (self.query.element_size(), self.key.element_size())
        return packed_tile(self.query.shape[2], *sizes, rows, self.limits.shared_memory)

    def constants(self) -> dict[str, Any]:
        """The compile-time arguments that both attention kernels share, by name."""
        query, params = self.query, self.params
        head_size, kind = query.shape[2], kv_kind(self.key.dtype, self.limits.has_fp8)
        d0, d1 = split_head_size(head_size)
        return {
            "BLOCK_SIZE": self.value.shape[3],
            "GROUP": self.group,
            **{"D": head_size, "D0": d0, "D1": d1},
            **{"DV": head_size, "DV0": d0, "DV1": d1},
            "X": self.key.shape[4],
            "KV_KIND": kind,
            "COMPUTE": compute_dtype(query.dtype, kind),
            "HAS_ALIBI": params.alibi_slopes is not None,
            "K_SCALE_KIND": scale_kind("k_scale", params.k_scale),
            "V_SCALE_KIND": scale_kind("v_scale", params.v_scale),
            "VEC_Q": whole_vectors(query),
            "VEC_K": whole_vectors(self.key),
            "VEC_V": whole_vectors(self.value),
            "VEC_O": whole_vectors(self.out),
        }

    def caches(self) -> tuple[Tensor, Tensor]:
        """The caches as the kernels read them: float8 as bytes where the chip does not convert
        it."""
        if reads_bytes(self.key.dtype, self.limits):
            return self.key.view(torch.uint8), self.value.view(torch.uint8)
        return self.key, self.value

    def scales(self) -> tuple[Tensor | float, ...]:
        """The KV scales as runtime arguments."""
        scales = (self.params.k_scale, self.params.v_scale)
        return tuple(scale if isinstance(scale, Tensor) else float(scale) for scale in scales)


def whole_vectors(tensor: Tensor) -> int:
    """Elements per 16 bytes if the first two strides are multiples of 16 bytes, else 1."""
    elements = 16 // tensor.element_size()
    return elements if all(stride % elements == 0 for stride in tensor.stride()[:2]) else 1


def joined_addresses(*tensors: Tensor | None) -> int:
    """The addresses that the kernels are specialized on, joined by `|`."""
    joined = 0
    for tensor in tensors:
        joined |= 0 if tensor is None else tensor.data_ptr()
    return joined
