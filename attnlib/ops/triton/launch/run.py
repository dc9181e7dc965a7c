"""Run a prepared attention launch once, on tensors. A step plan keeps the bound form instead."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from attnlib.errors import ContractError
from attnlib.ops.params import AttentionParams
from attnlib.ops.triton.heuristics.device import DeviceLimits, device_guard
from attnlib.ops.triton.launch.attention import BatchTensors
from attnlib.ops.triton.launch.bound import (
    ALIGNMENT,
    BoundLaunch,
    current_stream,
    launches_observed,
)
from attnlib.ops.triton.launch.sequence import BoundLaunches

__all__ = ["PreparedAttention", "run_attention", "with_workspace"]


class PreparedAttention(Protocol):
    """The launches of one call signature: `PlainAttention`, `HopperDecode`, `HopperPrefill`."""

    @property
    def limits(self) -> DeviceLimits:
        """The chip that tile and grid were chosen for."""

    @property
    def index(self) -> int:
        """The device index."""

    @property
    def kernels(self) -> tuple[BoundLaunch, ...]:
        """The kernels that `run` launches."""

    @property
    def workspace_bytes(self) -> int:
        """Bytes of workspace that `bind` expects in the batch; 0 for none."""

    @property
    def needs_alignment(self) -> bool:
        """Whether query, caches and output must start on 16-byte boundaries."""

    @property
    def as_bytes(self) -> bool:
        """Whether the kernel reads a float8 cache as bytes."""

    def is_direct(self, batch: BatchTensors) -> bool:
        """Whether a direct launch over `batch` is possible, given aligned layer tensors."""

    def bind(self, batch: BatchTensors, direct: bool, aligned: bool = True) -> BoundLaunches:
        """Attach the tensors of a batch."""


def with_workspace(prepared: PreparedAttention, batch: BatchTensors, device: Any) -> BatchTensors:
    """The batch with a workspace that is large enough; allocated when the batch has none.

    Raises:
        ContractError: the workspace of the batch is too small.
    """
    need, space = prepared.workspace_bytes, batch.workspace
    if not need:
        return batch
    if space is None:
        return batch._replace(workspace=torch.empty(need // 4, dtype=torch.float32, device=device))
    if space.nbytes < need:
        raise ContractError(
            f"workspace holds {space.nbytes} bytes and this call needs {need}; allocate what "
            "paged_decode_workspace_bytes returns for its tokens, heads and splits, or pass a "
            "smaller num_splits"
        )
    return batch


def run_attention(
    prepared: PreparedAttention,
    batch: BatchTensors,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor | None,
    params: AttentionParams,
) -> None:
    """Launch once on the current stream: directly where possible, else through Triton.

    Raises:
        ContractError: unaligned tensors where the kernel needs alignment, or a workspace that is
            too small.
    """
    q_ptr, k_ptr, v_ptr, out_ptr = (t.data_ptr() for t in (query, key, value, out))
    aligned = not (q_ptr | k_ptr | v_ptr | out_ptr) & ALIGNMENT
    if prepared.needs_alignment and not aligned:
        raise ContractError(
            "query, key_cache, value_cache and out must start on 16-byte boundaries for the Hopper "
            'kernels; pass kernels="portable"'
        )
    batch = with_workspace(prepared, batch, query.device)
    with device_guard(query):
        if aligned and prepared.is_direct(batch) and not launches_observed():
            given = tuple(map(_address, (lse, params.alibi_slopes, params.sinks)))
            values = (q_ptr, k_ptr, v_ptr, out_ptr, given[0], None, None, *given[1:])
            prepared.bind(batch, True).run(
                current_stream(prepared.index),
                (
                    *values, _address(params.k_scale), _address(params.v_scale),
                    *map(_address, params.layer_score_tensors()),
                ),
            )  # fmt: skip
            return
        if prepared.as_bytes:
            key, value = key.view(torch.uint8), value.view(torch.uint8)
        prepared.bind(batch, False, aligned).run(
            0,
            (
                query, key, value, out, lse, None, None, params.alibi_slopes, params.sinks,
                params.k_scale if isinstance(params.k_scale, Tensor) else float(params.k_scale),
                params.v_scale if isinstance(params.v_scale, Tensor) else float(params.v_scale),
                *params.layer_score_tensors(),
            ),
        )  # fmt: skip


def _address(value: Tensor | float | None) -> float | int | None:
    return (
        value.data_ptr() if isinstance(value, Tensor) else None if value is None else float(value)
    )
