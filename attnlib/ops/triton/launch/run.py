"""Find the launches of a call in the launch cache, or prepare them; and launch once, on tensors.

A step plan (`attnlib.backends.triton.plan`) finds them here too, and keeps the bound form instead.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Protocol

import torch
from torch import Tensor

from attnlib.errors import ContractError
from attnlib.ops.triton.attention_call import AttentionCall
from attnlib.ops.triton.batch_tensors import BatchTensors
from attnlib.ops.triton.heuristics.device import DeviceLimits, device_guard
from attnlib.ops.triton.launch.bound import (
    ALIGNMENT,
    BoundLaunch,
    can_bypass_triton,
    current_stream,
)
from attnlib.ops.triton.launch.cache import LAUNCHES
from attnlib.ops.triton.launch.sequence import KEY_CACHE, VALUE_CACHE, Launches

__all__ = [
    "KernelFamily",
    "PreparedAttention",
    "PreparedConcurrentPrefill",
    "find_launches",
    "run_attention",
    "run_kernels",
    "with_workspace",
]


class KernelFamily(Protocol):
    """Kernels that serve calls of an operation: `Prefill`, `PlainPrefill`, `Decode`, `PlainDecode`,
    `InvariantKernels`."""

    def launch_key(self, call: AttentionCall) -> Hashable:
        """What the launches follow from besides the call's signature and the form of its batch.
        Begins with the name of the operation."""

    def prepare_launches(self, call: AttentionCall) -> PreparedAttention:
        """Choose the kernels, tiles and grids of calls with this key and signature.

        Raises:
            ContractError: tensors that the kernels cannot address.
            UnsupportedConfigError: head sizes for which no tile fits the chip.
        """


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

    @property
    def num_batch_values(self) -> int:
        """The number of values of a batch that the launches take."""

    def launches(self, direct: bool, aligned: bool = True) -> Launches:
        """The launches without the values of a call and of its batch."""

    @property
    def direct(self) -> Launches:
        """The direct launches; read after every kernel has been launched by Triton."""

    def with_scratch(self, batch: BatchTensors) -> BatchTensors:
        """The batch with the counters that the launches need, allocated where it lacks them."""

    def addresses(self, batch: BatchTensors) -> tuple[Any, ...] | None:
        """The values of a batch for direct launches; None where its scratch memory is not aligned,
        which direct launches need."""

    def tensors(self, batch: BatchTensors) -> tuple[Any, ...]:
        """The values of a batch for launches by Triton."""


class PreparedConcurrentPrefill(PreparedAttention, Protocol):
    """A prefill that can start while the kernel launched before it runs: `HopperPrefill`."""

    def launches(self, direct: bool, aligned: bool = True, concurrent: bool = False) -> Launches:
        """The launches; with `concurrent`, they do not wait for the kernel launched before."""


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


def find_launches(family: KernelFamily, call: AttentionCall) -> PreparedAttention:
    """The launches of calls with this signature: from the launch cache, or prepared and kept.

    Raises:
        ContractError: tensors or a batch that the kernels would misread.
        UnsupportedConfigError: head sizes for which no tile fits the chip.
    """
    key = (family.launch_key(call), call.signature, call.batch.form())
    found: PreparedAttention | None = LAUNCHES.get(key)
    if found is None or found.limits is not call.limits:
        call.batch.check()
        found = LAUNCHES.keep(key, family.prepare_launches(call))
    return found


def run_kernels(call: AttentionCall, *families: KernelFamily) -> None:
    """Launch a call once on the current stream, by the first family that serves its addresses and
    its workspace.

    Raises:
        ContractError: tensors that the kernels cannot address, or a workspace that is too small.
        UnsupportedConfigError: head sizes for which no tile fits the chip.
    """
    aligned, space = not call.addresses & ALIGNMENT, call.batch.workspace
    for family in families:
        prepared = find_launches(family, call)
        is_large = space is None or space.nbytes >= prepared.workspace_bytes
        if not prepared.needs_alignment or (is_large and aligned):
            break
    _launch(prepared, call, aligned)


def run_attention(prepared: PreparedAttention, call: AttentionCall) -> None:
    """Launch once on the current stream: directly where possible, else through Triton.

    Raises:
        ContractError: unaligned tensors where the kernel needs alignment, or a workspace that is
            too small.
    """
    _launch(prepared, call, not call.addresses & ALIGNMENT)


def _launch(prepared: PreparedAttention, call: AttentionCall, aligned: bool) -> None:
    """`run_attention` of a call whose addresses are known to be aligned or not."""
    if prepared.needs_alignment and not aligned:
        raise ContractError(
            "query, key_cache, value_cache and out must start on 16-byte boundaries for the Hopper "
            'kernels; pass kernels="portable"'
        )
    batch = prepared.with_scratch(with_workspace(prepared, call.batch, call.query.device))
    addresses = prepared.addresses(batch)
    values = _values(call)
    with device_guard(call.query):
        can_launch = aligned and addresses is not None
        if can_launch and can_bypass_triton(prepared.kernels):
            given = [x.data_ptr() if isinstance(x, Tensor) else x for x in values]
            prepared.direct.submit(current_stream(prepared.index), given, addresses or ())
            return
        if prepared.as_bytes:
            values[KEY_CACHE] = call.key.view(torch.uint8)
            values[VALUE_CACHE] = call.value.view(torch.uint8)
        prepared.launches(False, can_launch).submit(0, values, prepared.tensors(batch))


def _values(call: AttentionCall) -> list[Any]:
    """The values of a call in the order of `launch.sequence`, without new keys and values."""
    params = call.params
    k_scale, v_scale = params.k_scale, params.v_scale
    return [
        *(call.query, call.key, call.value, call.out, call.lse),
        *(None, None),
        *(params.alibi_slopes, params.sinks),
        k_scale if isinstance(k_scale, Tensor) else float(k_scale),
        v_scale if isinstance(v_scale, Tensor) else float(v_scale),
        *params.layer_score_tensors(),
    ]
