"""Decode context parallelism: attnlib's divided keys (X-rules) over vLLM's group of ranks.

vLLM gives every rank the same block table of local positions, writes each rank's share of the new
keys, and the same batch to all ranks, so that they need no agreements.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.distributed.parallel_state import get_dcp_group

from attnlib.cache.storage import PagedKVCache
from attnlib.errors import UnsupportedConfigError
from attnlib.integrations.vllm.batch import common_batch
from attnlib.integrations.vllm.metadata import VllmMetadata
from attnlib.parallel import (
    Interleaved,
    ParallelAttention,
    ParallelBuilder,
    ParallelMetadata,
    RankGroup,
    warmup_parallel,
)
from attnlib.spec import AttentionSpec
from attnlib.workspace import BatchLimits

__all__ = [
    "ContextParallelAttention",
    "DistributedBuilder",
    "divided_layer",
    "rank_group",
    "refuse_prefill_groups",
]


def rank_group() -> RankGroup:
    """The ranks of vLLM's group."""
    group = get_dcp_group()
    return _ranks(group.device_group, group.cpu_group)


@functools.cache
def _ranks(device_group: Any, cpu_group: Any) -> RankGroup:
    """One for all layers, which exchange through the same buffers."""
    return RankGroup(device_group, cpu_group)


def divided_layer(spec: AttentionSpec, **arguments: Any) -> ParallelAttention:
    """A layer over vLLM's group; called while the model is made, when its configuration is set.

    Args:
        spec: of the layer, with the heads of this rank.
        arguments: of `ParallelAttention`.

    Raises:
        UnsupportedConfigError: the layer cannot attend over divided keys, or no backend computes
            its parts; with all reasons.
    """
    config, group = get_current_vllm_config().parallel_config, rank_group()
    if spec.kv_sharing:
        raise UnsupportedConfigError(
            "decode context parallelism: layers that share a cache are not supported"
        )
    if spec.scales_in_page:
        raise UnsupportedConfigError(
            f"decode context parallelism: kv_cache_dtype={spec.kv_cache_dtype}: pages with scales "
            "are not supported; choose auto or fp8"
        )
    method = "all_to_all" if config.dcp_comm_backend == "a2a" else None
    division = Interleaved(group.world_size, config.cp_kv_cache_interleave_size)
    try:
        return ParallelAttention(
            spec, group, division, exchange=method, agreement="never", **arguments
        )
    except UnsupportedConfigError as error:
        raise UnsupportedConfigError(
            f"decode context parallelism: {error}", reasons=error.reasons
        ) from error


def refuse_prefill_groups() -> None:
    """Refuse divided keys whose ranks have other tokens of a prompt.

    Raises:
        UnsupportedConfigError: vLLM divides prompts among the ranks.
    """
    size = get_current_vllm_config().parallel_config.prefill_context_parallel_size
    if size > 1:
        raise UnsupportedConfigError(
            f"decode context parallelism with prefill_context_parallel_size={size}: each rank has "
            "other tokens of a prompt and a part of the cache only; set one of the two to 1"
        )


class ContextParallelAttention:
    """The attention of one layer on one rank.

    Args:
        spec: of the layer, with the heads of this rank.
        scale: softmax scale.
        alibi_slopes: one per query head of this rank, or None.
        sinks: `[num_heads]` of this rank, or None.
        device: of this rank.

    Attributes:
        layer: the divided layer.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        scale: float,
        alibi_slopes: list[float] | None,
        sinks: torch.Tensor | None,
        device: torch.device,
    ) -> None:
        slopes = (
            None
            if alibi_slopes is None
            else torch.tensor(alibi_slopes, dtype=torch.float32, device=device)
        )
        self.layer = divided_layer(
            spec, scale=scale, alibi_slopes=slopes, sinks=sinks, device=device
        )

    @property
    def spec(self) -> AttentionSpec:
        """Of the layer, with the heads of this rank."""
        return self.layer.spec

    def set_block_size(self, block_size: int) -> None:
        """See `AttnlibImpl.set_block_size`."""
        self.layer.set_block_size(block_size)

    def warm_up(
        self,
        cache: PagedKVCache | None,
        builder: ParallelBuilder | None,
        limits: BatchLimits,
        columns: int | None,
    ) -> None:
        """Compile the kernels of all parts; see `AttnlibImpl.warm_up`."""
        assert cache is not None
        if self.layer.cached.backend.get_name() != "torch":
            warmup_parallel(self.layer, cache, limits, builder=builder, max_blocks=columns)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        cache: PagedKVCache | None,
        metadata: VllmMetadata,
        output: torch.Tensor,
    ) -> None:
        """Attend; this rank's share of the new keys is in its cache. See `AttnlibImpl.forward`."""
        assert metadata.distributed is not None and cache is not None
        batch = metadata.distributed[self.spec]
        self.layer(query, key, value, cache, batch, output=output)


class DistributedBuilder:
    """Metadata of batches over a distributed cache.

    Args:
        layers: of the group; they may differ in window, soft cap and sinks.
        limits: the largest batch.

    Attributes:
        builders: attnlib's builders by the spec of a layer.
    """

    def __init__(self, layers: Sequence[ContextParallelAttention], limits: BatchLimits) -> None:
        kinds = {each.spec: each.layer for each in layers}
        self.builders = {spec: layer.make_builder(limits) for spec, layer in kinds.items()}

    def build(self, batch: Any, *, captures: bool = False) -> dict[AttentionSpec, ParallelMetadata]:
        """The parts of one of vLLM's batches. All ranks of the group take the same branch.

        Args:
            batch: vLLM's.
            captures: a CUDA graph will be captured with it.
        """
        found, has_context = {}, _has_context(batch)
        for spec, own in self.builders.items():
            common = common_batch(batch, spec, own.needs_host_lengths)
            if captures:
                found[spec] = own.build_for_cudagraph_capture(common, write=False)
            else:
                found[spec] = own.build(common, write=False, has_context=has_context)
        return found


def _has_context(batch: Any) -> bool:
    """Whether any request may have context; from bounds that are equal on all ranks."""
    bounds = batch.seq_lens_cpu_upper_bound
    if bounds is None:
        return True
    starts = batch.query_start_loc_cpu
    return bool((bounds[: batch.num_reqs] > starts[1:] - starts[:-1]).any())
