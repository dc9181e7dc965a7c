"""Decode context parallelism: a cache that is distributed over the ranks of a group.

Each rank stores every `world_size`-th run of `interleave` tokens of a request, and all query heads
of the group share its KV head. A query attends on all ranks, and the results are combined by their
log-sum-exp (LSE).

- One token per request: the new keys are written first, so that the cache of the group contains
  all keys that a query sees. One attention over the local keys, one combination.
- More tokens: which cached keys a query sees would depend on its position. The context is attended
  in the cache and combined, the new tokens are attended locally with a causal mask, and the two
  states are merged.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.distributed.parallel_state import get_dcp_group
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

from attnlib.cache.storage import PagedKVCache
from attnlib.errors import UnsupportedConfigError
from attnlib.integrations.vllm.layer_spec import select
from attnlib.integrations.vllm.metadata import DistributedBatch, VllmMetadata
from attnlib.integrations.vllm.warm import run_batches
from attnlib.layer import Attention
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.spec import AttentionSpec, AttentionType, MaskKind
from attnlib.workspace import BatchLimits

__all__ = ["ContextParallelAttention", "DistributedBuilder", "combination", "dcp_rejections"]


def dcp_rejections(spec: AttentionSpec) -> list[str]:
    """Why layers of this kind cannot attend over a distributed cache; empty if they can."""
    reasons = []
    if spec.attn_type is not AttentionType.DECODER:
        reasons.append(f"attn_type={spec.attn_type.value} has no cache to distribute")
    if not spec.visible_window.is_full and spec.visible_window.left is not None:
        reasons.append("a sliding window: a rank does not know the positions of its keys")
    if spec.has_alibi:
        reasons.append("ALiBi: a rank does not know the positions of its keys")
    if spec.has_sink:
        reasons.append("attention sinks: every rank would count them")
    if spec.kv_sharing:
        reasons.append("layers that share a cache")
    return reasons


def _cached_spec(spec: AttentionSpec, world_size: int) -> AttentionSpec:
    """Attention of the query heads of all ranks over this rank's part of the cache. The keys are
    not at the positions of the queries, so they are keys of another sequence."""
    return spec.replace(
        num_heads=spec.num_heads * world_size,
        attn_type=AttentionType.ENCODER_DECODER,
        mask_kind=MaskKind.BIDIRECTIONAL,
        needs_lse=True,
    )


def _new_spec(spec: AttentionSpec) -> AttentionSpec:
    """Causal attention among the new tokens, which are not read from the cache."""
    return spec.replace(
        attn_type=AttentionType.ENCODER_ONLY,
        mask_kind=MaskKind.CAUSAL,
        kv_cache_dtype="auto",
        needs_lse=True,
    )


class ContextParallelAttention:
    """The attention of one layer on one rank.

    Args:
        spec: of the layer, with the heads of this rank.
        scale: softmax scale.
        device: of this rank.
        combine: see `combination`.

    Raises:
        UnsupportedConfigError: the layer cannot attend over a distributed cache, or no backend
            computes its parts; with all reasons.
    """

    def __init__(
        self, spec: AttentionSpec, scale: float, device: torch.device, combine: Any
    ) -> None:
        if reasons := dcp_rejections(spec):
            raise UnsupportedConfigError(
                f"decode context parallelism: {'; '.join(reasons)}", reasons=reasons
            )
        self._group = get_dcp_group()
        cached, new = _cached_spec(spec, self._group.world_size), _new_spec(spec)
        self._cached = Attention(cached, backend=select(cached), scale=scale, device=device)
        self._new = Attention(new, backend=select(new), scale=scale, device=device)
        self._combine, self._device = combine, device
        on_gpu = device.type != "cpu"
        ops = importlib.import_module(f"attnlib.ops.{'triton' if on_gpu else 'torch'}.merge_states")
        self._merge = ops.merge_states

    def set_block_size(self, block_size: int) -> None:
        """See `AttnlibImpl.set_block_size`."""
        self._cached.set_block_size(block_size)

    def warm_up(
        self,
        cache: PagedKVCache | None,
        builder: DistributedBuilder | None,
        limits: BatchLimits,
        columns: int | None,
    ) -> None:
        """Compile the kernels of both parts; see `AttnlibImpl.warm_up`."""
        cached, new = (None, None) if builder is None else (builder.cached, builder.new)
        run_batches(self._cached, cache, limits, cached, columns, self._device)
        run_batches(self._new, None, limits, new, None, self._device)

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
        batch = metadata.distributed
        assert batch is not None and cache is not None and key is not None and value is not None
        if batch.cached is None:  # no request has context
            self._new(query, key, value, None, batch.new, output=output)
            return
        queries = self._group.all_gather(query.contiguous(), dim=1)
        partial, lse = self._cached(queries, None, None, cache, batch.cached, True)
        if batch.new is None:
            output.copy_(self._combine(partial, lse, self._group))
            return
        context, context_lse = self._combine(partial, lse, self._group, return_lse=True)
        _, new_lse = self._new(query, key, value, None, batch.new, True, output=output)
        self._merge(context, context_lse.contiguous(), output, new_lse, output)


class DistributedBuilder:
    """Metadata of batches over a distributed cache.

    Args:
        specs: of the layers of the group, which must be equal.
        device: of this rank.
        limits: the largest batch.
        interleave: consecutive tokens that one rank stores.

    Attributes:
        cached, new: attnlib's builders of the two parts of a batch.

    Raises:
        ValueError: the layers of the group differ.
    """

    def __init__(
        self,
        specs: Sequence[AttentionSpec],
        device: torch.device,
        limits: BatchLimits,
        interleave: int,
    ) -> None:
        if len(specs) != 1:
            raise ValueError(f"decode context parallelism needs layers of one kind, got {specs}")
        group = get_dcp_group()
        self._world_size, self._rank, self._interleave = (
            group.world_size,
            group.rank_in_group,
            interleave,
        )
        cached, new = _cached_spec(specs[0], group.world_size), _new_spec(specs[0])
        self.cached = select(cached).make_builder(cached, device, limits=limits)
        self.new = select(new).make_builder(new, device, limits=limits)

    def build(self, batch: Any) -> DistributedBatch:
        """The parts of one of vLLM's batches. All ranks of the group take the same branch."""
        if batch.max_query_len <= 1:
            cached = self._over_cache(batch, batch.dcp_local_seq_lens)
            return DistributedBatch(cached, None)
        starts = batch.query_start_loc
        context = batch.seq_lens - (starts[1:] - starts[:-1])
        local = get_dcp_local_seq_lens(context, self._world_size, self._rank, self._interleave)
        cached = self._over_cache(batch, local) if _has_context(batch) else None
        query_lens = batch.query_start_loc_cpu[1:] - batch.query_start_loc_cpu[:-1]
        new = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=batch.query_start_loc_cpu,
            seq_lens=starts[1:] - starts[:-1],
            seq_lens_cpu=query_lens,
            num_reqs=batch.num_reqs,
            num_actual_tokens=batch.num_actual_tokens,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_query_len,
        )
        return DistributedBatch(cached, self.new.build(0, new))

    def _over_cache(self, batch: Any, local_lens: torch.Tensor) -> Any:
        """The queries of a batch over this rank's part of their keys."""
        run = self._world_size * self._interleave
        common = CommonAttentionMetadata(
            query_start_loc=batch.query_start_loc,
            query_start_loc_cpu=batch.query_start_loc_cpu,
            seq_lens=local_lens,
            seq_lens_cpu=local_lens.cpu() if self.cached.needs_host_lengths else None,
            num_reqs=batch.num_reqs,
            num_actual_tokens=batch.num_actual_tokens,
            max_query_len=batch.max_query_len,
            max_seq_len=-(-batch.max_seq_len // run) * self._interleave,
            block_table_tensor=batch.block_table_tensor,
            is_cross_attention=True,
        )
        return self.cached.build(0, common)


def _has_context(batch: Any) -> bool:
    """Whether any request may have context; from bounds that are equal on all ranks."""
    bounds = batch.seq_lens_cpu_upper_bound
    if bounds is None:
        return True
    starts = batch.query_start_loc_cpu
    return bool((bounds[: batch.num_reqs] > starts[1:] - starts[:-1]).any())


def combination() -> Any:
    """vLLM's function that combines the states of the ranks, by `--dcp-comm-backend`. Called while
    the model is made, when vLLM's configuration is set.

    Raises:
        ImportError: a release of vLLM that has no such function.
    """
    all_to_all = get_current_vllm_config().parallel_config.dcp_comm_backend == "a2a"
    name = "dcp_a2a_lse_reduce" if all_to_all else "cp_lse_ag_out_rs"
    for module in ("dcp", "dcp_alltoall", "common"):
        try:
            ops = importlib.import_module(f"vllm.v1.attention.ops.{module}")
        except ModuleNotFoundError:
            continue
        if hasattr(ops, name):
            return getattr(ops, name)
    raise ImportError(f"vllm.v1.attention.ops has no {name}: this vLLM is not supported")
