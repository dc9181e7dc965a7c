"""What a backend declares to support of state layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnlib.capabilities.declaration import NOT_STATED, Declaration
from attnlib.sizes import Sizes
from attnlib.spec import CudaGraphSupport

__all__ = ["StateCapabilities"]


@dataclass(frozen=True, kw_only=True)
class StateCapabilities(Declaration):
    """What a backend supports of state layers (T1 to T20). A field that is not stated counts as
    unsupported; a backend that states no `devices` serves no state layer.

    Attributes:
        devices, min_capability, max_capability, rocm: as in `Capabilities`.
        dtypes, state_dtypes, key_sizes, value_sizes, updates, decays: values of the fields of
            the spec with these names.
        conv_widths, conv_activations, chunk_sizes: likewise; "none" is not an activation.
        group_sizes: state heads per key head (T4).
        beta, skip, qk_norm, conv_bias, batch_invariant: the features with these names.
        forms: forms of a slot, the preferred one first (T9).
        default_chunk_size: the length of a chunk for a spec that names none.
        max_rollback: the most tokens that the next step may take back (T10).
        cudagraph: batches that a CUDA graph can capture (T19).
        needs_host_lengths: a step reads lengths and slots on the host.
        fused_step: `StateLayer.step` is one launch for decodes.
        deterministic: two equal calls give equal bits.
    """

    dtypes: tuple[torch.dtype, ...] = NOT_STATED
    state_dtypes: tuple[torch.dtype, ...] = NOT_STATED
    key_sizes: Sizes = NOT_STATED
    value_sizes: Sizes = NOT_STATED
    group_sizes: Sizes = NOT_STATED
    updates: tuple[str, ...] = NOT_STATED
    decays: tuple[str, ...] = NOT_STATED
    beta: bool = NOT_STATED
    skip: bool = NOT_STATED
    qk_norm: bool = NOT_STATED
    conv_widths: Sizes = NOT_STATED
    conv_activations: tuple[str, ...] = NOT_STATED
    conv_bias: bool = NOT_STATED
    forms: tuple[str, ...] = NOT_STATED
    chunk_sizes: Sizes = NOT_STATED
    default_chunk_size: int = 16
    max_rollback: int = NOT_STATED
    batch_invariant: bool = NOT_STATED
    cudagraph: CudaGraphSupport = NOT_STATED
    needs_host_lengths: bool = True
    fused_step: bool = False
    deterministic: bool = True
