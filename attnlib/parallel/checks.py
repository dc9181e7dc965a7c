"""Checks of divided layers, before anything is written or sent (X8)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from attnlib.cache.storage import PagedKVCache
from attnlib.errors import ContractError
from attnlib.layer.attention import Attention
from attnlib.layer.cache_checks import check_aliasing, check_cache, check_latent_scales
from attnlib.layer.call import LayerCall, new_output, per_head
from attnlib.layer.checks import check_output, refuse_gradients
from attnlib.layer.tensor_checks import (
    check_output_memory,
    check_tensor_types,
    refuse_in_place,
    refuse_negated,
)
from attnlib.metadata.checks import check_block_size
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.metadata.host_lengths import check_type
from attnlib.ops.addresses import check_block_table, check_slot_values
from attnlib.ops.checks import check_writable
from attnlib.parallel.divisions import Division
from attnlib.parallel.metadata import ParallelMetadata
from attnlib.parallel.prefill_metadata import PrefillMetadata
from attnlib.spec import AttentionSpec

if TYPE_CHECKING:
    from attnlib.parallel.attention import ParallelAttention
    from attnlib.parallel.prefill import ParallelPrefill

__all__ = [
    "ParallelCall",
    "check_batch",
    "check_made_for",
    "check_own_cache",
    "check_parallel_call",
    "sized",
]


class ParallelCall(NamedTuple):
    """The tensors of a call per head; the output exists."""

    query: Tensor
    key: Tensor | None
    value: Tensor | None
    output: Tensor


def check_batch(
    spec: AttentionSpec, division: Division, rank: int, common: CommonAttentionMetadata
) -> None:
    """Whether a batch can be divided.

    Raises:
        ContractError: it is not one of self attention over a block table, has a mask that cannot
            be divided, or a table that is too narrow, of another block size or, on a CPU, without
            a block where the rank has keys.
    """
    check_type(common)
    if common.block_table_tensor is None or common.is_cross_attention:
        raise ContractError(
            "a batch of divided layers is one of self attention with a block table: pass "
            "block_table_tensor and is_cross_attention=False",
            rule="X3",
        )
    if common.query_bias is not None or isinstance(common.causal, Tensor):
        name = "causal per request" if common.query_bias is None else "query_bias"
        raise ContractError(
            f"{name} cannot be divided among ranks: run this batch on one rank", rule="X4"
        )
    if common.causal not in (None, spec.is_causal):
        raise ContractError(
            f"causal={common.causal}, but the layer has mask_kind={spec.mask_kind.value}: "
            "pass None",
            rule="X4",
        )
    check_block_size(common, spec)
    columns = common.block_table_tensor.shape[1]
    if common.seq_lens_cpu is not None and common.num_reqs:
        longest = division.bound(int(common.seq_lens_cpu.max()))
        if longest > columns * spec.block_size:
            raise ContractError(
                f"block_table_tensor has {columns} columns, but the longest request has "
                f"{longest} keys on a rank: it needs {-(-longest // spec.block_size)}",
                rule="X2",
            )
    held = common.seq_lens
    if held.is_cpu:  # values elsewhere are not read
        held = division.count(held, rank)
    check_block_table(common.block_table_tensor, held, spec.block_size, None)


def check_parallel_call(
    layer: ParallelAttention,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    cache: PagedKVCache,
    metadata: ParallelMetadata,
    output: Tensor | None,
) -> ParallelCall:
    """The tensors of a call per head, after all ranks have agreed.

    Raises:
        ContractError: see `ParallelAttention.forward`.
    """
    known = isinstance(metadata, ParallelMetadata) and metadata.agreed
    agreement = layer.agreement
    if (known and agreement == "batch") or (agreement != "never" and _is_capturing()):
        agreement = "never"

    def attempt() -> tuple[object, ParallelCall]:
        call = _checked(layer, query, key, value, cache, metadata, output)
        return (str(layer.spec), f"has_keys={key is not None}"), call

    call = layer.group.agreed(agreement, "call", attempt)
    metadata.agreed = True
    return call


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _checked(
    layer: ParallelAttention,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    cache: PagedKVCache,
    metadata: ParallelMetadata,
    output: Tensor | None,
) -> ParallelCall:
    spec = layer.spec
    if not isinstance(metadata, ParallelMetadata):
        raise ContractError(
            f"metadata is a {type(metadata).__name__}; build it with the builder of "
            "ParallelAttention.make_builder",
            rule="X3",
        )
    check_made_for(layer, metadata)
    check_tensor_types(query, key, value, output)
    refuse_gradients(query, key, value)
    tokens, kv_heads = metadata.num_actual_tokens, spec.num_kv_heads
    form = spec.dtype, cache.device if isinstance(cache, PagedKVCache) else query.device, tokens
    query = sized("query", query, spec.num_heads, spec.head_size, *form)
    if (key is None) != (value is None) or (key is None and metadata.new is not None):
        raise ContractError(
            "key and value are needed: this batch attends to its new tokens directly, or only one "
            "of the two is given",
            rule="X7",
        )
    if key is not None and value is not None:
        key = sized("key", key, kv_heads, spec.head_size, *form)
        value = sized("value", value, kv_heads, spec.head_size_v, *form)
    check_own_cache(layer.cached, query, cache, key)
    _check_addresses(metadata, cache)
    if output is None:
        output = new_output(query, (query.shape[0], spec.num_heads, spec.head_size_v))
    else:
        output = per_head("output", output, spec.num_heads, spec.head_size_v)
        without_batch: Any = None
        check_output(spec, LayerCall(query, None, None, cache, without_batch, output))
        check_writable(output=output)
        refuse_in_place(output, query=query)
        check_output_memory(query, cache, output)
    return ParallelCall(query, key, value, output)


def check_made_for(
    layer: ParallelAttention | ParallelPrefill, metadata: ParallelMetadata | PrefillMetadata
) -> None:
    """Whether a batch was built for layers like this one.

    Raises:
        ContractError: for another spec or division.
    """
    if metadata.made_for != (layer.spec, layer.division):
        spec, division = metadata.made_for
        raise ContractError(
            f"the batch was built for {spec} and {division}, the layer has {layer.spec} and "
            f"{layer.division}: build it with the builder of a layer like this one",
            rule="X3",
        )


def _check_addresses(metadata: ParallelMetadata, cache: PagedKVCache) -> None:
    """On a CPU, whether the slots and blocks of a batch are in the cache."""
    if metadata.slot_mapping is not None:
        check_slot_values(metadata.slot_mapping, cache.num_slots)
    facts = None if metadata.cached is None else metadata.cached.facts
    if facts is not None and facts.block_table is not None and facts.seq_lens is not None:
        check_block_table(facts.block_table, facts.seq_lens, cache.block_size, cache.num_blocks)


def check_own_cache(
    layer: Attention, query: Tensor, cache: PagedKVCache, key: Tensor | None
) -> None:
    """Whether a cache has the form that a layer needs, to write the keys that are given.

    Raises:
        ContractError: it has not, or is not a cache, or its scales differ where they must not.
        LayoutMismatchError: the backend does not read its memory layout.
    """
    if not isinstance(cache, PagedKVCache):
        raise ContractError(f"cache is a {type(cache).__name__}; it must be a PagedKVCache")
    without_slots: Any = SimpleNamespace(slot_mapping=None)
    check_cache(layer, cache, LayerCall(query, None, None, cache, without_slots))
    check_aliasing(layer.spec, cache, key)
    check_latent_scales(layer.spec, cache)


def sized(
    name: str,
    tensor: Tensor,
    heads: int,
    size: int,
    dtype: torch.dtype,
    device: torch.device,
    tokens: int,
) -> Tensor:
    """`[tokens, heads, size]` of a flat or per-head tensor, which may have more rows.

    Raises:
        ContractError: another shape, dtype, device or last stride.
    """
    tensor = per_head(name, tensor, heads, size)
    if tensor.dim() != 3 or tensor.shape[1:] != (heads, size) or tensor.shape[0] < tokens:
        raise ContractError(
            f"{name} has shape {list(tensor.shape)}; it must be [at least {tokens}, {heads}, "
            f"{size}]",
            rule="P9",
        )
    if tensor.dtype != dtype or tensor.device != device or tensor.stride(2) != 1:
        raise ContractError(
            f"{name} is {tensor.dtype} on {tensor.device} with last stride {tensor.stride(2)}; it "
            f"must be {dtype} on {device} with last stride 1",
            rule="P9",
        )
    if tensor.is_neg():
        refuse_negated(name, tensor)
    return tensor
