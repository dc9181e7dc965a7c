"""The batch of one step of `generate_batch`: lengths, block table and slots."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from attnlib.cache.slots import compute_slot_mapping
from attnlib.errors import UnsupportedConfigError
from attnlib.integrations.transformers.storage import (
    LayerStorage,
)
from attnlib.layer import Attention
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.spec import CudaGraphSupport

__all__ = ["Step", "common_of_step", "lengths_of", "placement"]


@dataclass(eq=False)
class Step:
    """State shared by the layers of one step.

    A new step begins with other tensors, with a layer that occurs again, or with a capture.

    Attributes:
        starts: `[R+1]`, `cu_seq_lens_q` of the step.
        capturing: the step is recorded in a CUDA graph.
        reached: indices of the layers that have attended.
        metadata: (backend, spec, group) -> metadata of the backend.
    """

    starts: torch.Tensor
    capturing: bool
    reached: set[int] = field(default_factory=set)
    metadata: dict[Any, Any] = field(default_factory=dict)


def lengths_of(storage: LayerStorage, step: Step, kwargs: dict[str, Any]) -> torch.Tensor:
    """`[R]` int32; number of keys of each request, 0 for the padding of a graph."""
    starts = storage.key_starts(kwargs)
    return starts[1:] - starts[:-1]


def placement(
    storage: LayerStorage, lengths: torch.Tensor, kwargs: dict[str, Any], num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(block table, slot mapping, longest sequence) of a layer with full attention."""
    assert storage.pages is not None  # the caller has checked
    block_size, starts = storage.pages.block_size, kwargs["cu_seq_lens_q"].to(torch.int32)
    table = storage.table(kwargs)
    if table is not None and storage.window is not None:
        pages = table[:, :-1]  # the last column holds the slots
        longest = min(pages.shape[1] * block_size, storage.window)
        return pages, table[:, -1].to(torch.int64), longest
    if table is not None:
        slots = compute_slot_mapping(starts, lengths, table, block_size, num_tokens)
        return table, slots, table.shape[1] * block_size
    read, write = kwargs["read_index"][storage.group], kwargs["write_index"][storage.group]
    # An empty read index means that all requests are new: they read what they write.
    source, key_starts = (read, storage.key_starts(kwargs)) if read.numel() else (write, starts)
    longest = min(storage.longest(kwargs), source.numel())
    columns = torch.arange(-(-longest // block_size), device=source.device) * block_size
    positions = (key_starts[:-1, None] + columns).clamp_(max=source.numel() - 1)
    table = (source[positions] // block_size).to(torch.int32)
    tokens = torch.arange(write.numel(), device=write.device)
    # Padding tokens write nothing (P4); transformers would direct them to an unused block.
    return table, torch.where(tokens < starts[-1], write, -1), longest


def common_of_step(
    layer: Attention,
    step: Step,
    lengths: torch.Tensor,
    kwargs: dict[str, Any],
    num_tokens: int,
    longest: int,
) -> CommonAttentionMetadata:
    """The batch without block table and slots.

    Lengths are copied to the host on a CPU, and for backends that need them there (one copy, which
    synchronizes).
    """
    starts = step.starts.to(torch.int32)
    on_host = _needs_host_lengths(layer, starts)
    level = layer.backend.get_builder_cls().cudagraph_support
    if step.capturing and (on_host or level is not CudaGraphSupport.ALWAYS):
        reason = (
            "needs lengths on the host, which a CUDA graph cannot provide"
            if on_host
            else f"captures batches of level {level.name} only, and a step may be any batch"
        )
        raise UnsupportedConfigError(
            f"backend {layer.backend.get_name()} {reason}: pass "
            "ContinuousBatchingConfig(use_cuda_graph=False), or choose another backend",
            backend=layer.backend.get_name(),
        )
    starts_cpu = lengths_cpu = None  # then builders serve mixed batches with prefill kernels
    if on_host:
        both = torch.cat([starts, lengths]).cpu()
        starts_cpu, lengths_cpu = both[: starts.numel()], both[starts.numel() :]
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts_cpu,
        seq_lens=lengths,
        seq_lens_cpu=lengths_cpu,
        num_reqs=lengths.shape[0],
        num_actual_tokens=num_tokens,
        max_query_len=min(
            int(kwargs.get("max_length_q") or kwargs.get("max_seqlen_q") or num_tokens), num_tokens
        ),
        max_seq_len=longest,
    )


def _needs_host_lengths(layer: Attention, starts: torch.Tensor) -> bool:
    return starts.device.type == "cpu" or layer.backend.get_builder_cls().needs_host_lengths
