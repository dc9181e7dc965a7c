"""Bad input gets a clear error before any launch.

`check_call` looks only at what the host knows for free (shapes, dtypes, devices) and runs on every call that differs in any of it from the layer's
last (`call_facts`). `check_values` reads the metadata back
from the device and checks every P- and M-rule that numbers can break; ATTNLIB_VALIDATE=1 turns it on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from attnlib.cache.storage import PagedKVCache
from attnlib.errors import ContractError, LayoutMismatchError

if TYPE_CHECKING:
    from attnlib.layer import Attention

__all__ = ["call_facts", "check_call", "check_values", "per_head"]


def per_head(name: str, tensor: torch.Tensor, num_heads: int, head_size: int) -> torch.Tensor:
    """`[tokens, num_heads, head_size]` of a tensor that came flat or per head; a view, no copy.

    Raises:
        ContractError: a flat tensor of another width. Reshaping it anyway would turn heads into tokens.
    """
    if tensor.dim() != 2:
        return tensor  # `check_call` judges the rest
    if tensor.shape[1] != num_heads * head_size:
        raise ContractError(_wrong_shape(name, tensor, num_heads, head_size))
    return tensor.view(tensor.shape[0], num_heads, head_size)


def call_facts(
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    cache: PagedKVCache | None,
    metadata: Any,
    return_lse: bool,
) -> tuple[Any, ...]:
    """All that `check_call` reads of a call: when one of two calls of a layer with equal facts has passed, so does the other."""
    slots = getattr(metadata, "slot_mapping", None)
    stored = None
    if cache is not None:
        keys = cache.key_cache
        stored = (keys.shape, keys.dtype, keys.device, cache.value_cache.shape, cache.layout)
    return (
        query.shape, query.stride(), query.dtype, query.device,
        None if key is None else (key.shape, key.stride(), key.dtype, key.device),
        None if value is None else (value.shape, value.stride(), value.dtype, value.device),
        stored,
        getattr(metadata, "num_actual_tokens", None),
        None if slots is None else (slots.dtype, slots.shape),
        return_lse,
    )  # fmt: skip


def check_call(
    layer: Attention,
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    cache: PagedKVCache | None,
    metadata: Any,
    return_lse: bool,
) -> None:
    """Shapes, dtypes and devices of one call.

    Raises:
        ContractError: the message names the tensor, what it is and what it must be.
        LayoutMismatchError: the backend does not read the cache's order in memory.
    """
    spec = layer.spec
    _check_tensor("query", query, (spec.num_heads, spec.head_size), spec.dtype, query.device)
    tokens = metadata.num_actual_tokens if hasattr(metadata, "num_actual_tokens") else 0
    if query.shape[0] < tokens:
        raise ContractError(
            f"query has {query.shape[0]} rows, but the batch has {tokens} tokens", rule="M6"
        )
    if (key is None) != (value is None):
        raise ContractError(
            f"{'key' if key is None else 'value'} is None and the other is not: give both or neither"
        )
    if key is not None and value is not None:
        _check_tensor("key", key, (spec.num_kv_heads, spec.head_size), spec.dtype, query.device)
        _check_tensor(
            "value", value, (spec.num_kv_heads, spec.head_size_v), spec.dtype, query.device
        )
        if key.shape[0] != value.shape[0]:
            raise ContractError(
                f"key has {key.shape[0]} rows and value {value.shape[0]}; they must agree"
            )
    if cache is not None:
        _check_cache(layer, cache, key, query.device, metadata)
    elif spec.is_paged:
        raise ContractError(
            f"attn_type={spec.attn_type.value} attends through a cache: pass a PagedKVCache"
        )
    elif key is None:
        raise ContractError(
            f"attn_type={spec.attn_type.value} caches nothing, so key and value must be given with every call"
        )
    elif key.shape[0] < tokens:
        raise ContractError(f"key has {key.shape[0]} rows, but the batch has {tokens} tokens")
    if return_lse and layer.backend.capabilities.lse is not True:
        raise ContractError(
            f"backend {layer.backend.get_name()} cannot return the LSE: set needs_lse=True in the spec and selection finds one that can"
        )


def _check_tensor(
    name: str,
    tensor: torch.Tensor,
    heads: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    if tensor.dim() != 3 or tensor.shape[1:] != heads:
        raise ContractError(_wrong_shape(name, tensor, *heads))
    if tensor.dtype != dtype:
        raise ContractError(f"{name} is {tensor.dtype}, the spec says {dtype}")
    if tensor.device != device:
        raise ContractError(
            f"{name} is on {tensor.device}, query on {device}: all tensors of a call must be on one device"
        )
    if tensor.stride(2) != 1 and tensor.shape[2] > 1:
        raise ContractError(
            f"{name} has stride {tensor.stride(2)} along the head; the last stride must be 1",
            rule="P9",
        )


def _wrong_shape(name: str, tensor: torch.Tensor, num_heads: int, head_size: int) -> str:
    return f"{name} has shape {tuple(tensor.shape)}; it must be [tokens, {num_heads}, {head_size}] or [tokens, {num_heads * head_size}]"


def _check_cache(
    layer: Attention,
    cache: PagedKVCache,
    key: torch.Tensor | None,
    device: torch.device,
    metadata: Any,
) -> None:
    spec = layer.spec
    for name, wanted in (
        ("num_kv_heads", spec.num_kv_heads),
        ("head_size", spec.head_size),
        ("head_size_v", spec.head_size_v),
    ):
        if getattr(cache, name) != wanted:
            raise ContractError(
                f"cache has {name}={getattr(cache, name)}, the spec says {wanted}", rule="P1"
            )
    if cache.block_size != spec.block_size:
        raise ContractError(
            f"cache has block_size={cache.block_size}, the spec says {spec.block_size}", rule="P1"
        )
    if cache.dtype != spec.kv_dtype:
        raise ContractError(f"cache stores {cache.dtype}, the spec says {spec.kv_dtype}", rule="P1")
    if cache.device != device:
        raise ContractError(
            f"cache is on {cache.device}, query on {device}: all tensors of a call must be on one device"
        )
    reads = layer.backend.capabilities.kv_cache_layouts or ("NHD",)
    named = (
        cache.layout is not None
    )  # views of no named order are left to the backend, which has their strides
    if named and cache.layout not in reads and "ANY" not in reads:
        raise LayoutMismatchError(
            f"backend {layer.backend.get_name()} reads {', '.join(reads)}, but the cache is laid out as {cache.layout}: "
            f"allocate it with layout={reads[0]!r} [P2]"
        )
    slots = getattr(metadata, "slot_mapping", None)
    if slots is None:
        return
    if slots.dtype != torch.int64:
        raise ContractError(
            f"slot_mapping is {slots.dtype}; it must be int64, because a pool may have more than 2^31 slots",
            rule="P4",
        )
    if key is not None and layer.spec.kv_sharing is False and key.shape[0] < slots.shape[0]:
        raise ContractError(
            f"slot_mapping names {slots.shape[0]} tokens, but key has {key.shape[0]} rows",
            rule="P4",
        )


def check_values(
    layer: Attention, query: torch.Tensor, cache: PagedKVCache | None, metadata: Any
) -> None:
    """Every rule that numbers can break, read back from the device (a host sync).

    Raises:
        ContractError: the message names the tensor, the request or token, the value and the limit.
    """
    starts, seq_lens = (
        getattr(metadata, "query_start_loc", None),
        getattr(metadata, "seq_lens", None),
    )
    if starts is None or seq_lens is None:
        return  # a foreign backend's metadata that keeps lengths in a form of its own
    starts_host, lens_host = starts.tolist(), seq_lens.tolist()
    _check_starts(starts_host, lens_host, query.shape[0])
    if cache is None:
        return
    table = getattr(metadata, "block_table", None)
    if table is not None:
        _check_table(table.tolist(), lens_host, cache)
    slots = getattr(metadata, "slot_mapping", None)
    if slots is not None:
        _check_slots(slots.tolist(), cache)


def _check_starts(starts: list[int], seq_lens: list[int], num_rows: int) -> None:
    if len(starts) != len(seq_lens) + 1:
        raise ContractError(
            f"query_start_loc has {len(starts)} entries for {len(seq_lens)} requests; it must have one more",
            rule="M1",
        )
    if starts and starts[0] != 0:
        raise ContractError(f"query_start_loc[0]={starts[0]} must be 0", rule="M1")
    for request, (start, end) in enumerate(zip(starts, starts[1:], strict=False)):
        if end < start:
            raise ContractError(
                f"query_start_loc falls from {start} to {end} at request {request}; starts must not decrease",
                rule="M1",
            )
    if starts and starts[-1] > num_rows:
        raise ContractError(
            f"query_start_loc ends at {starts[-1]}, but query has {num_rows} rows", rule="M1"
        )
    for request, length in enumerate(seq_lens):
        if length < 0:
            raise ContractError(f"seq_lens[{request}]={length} must not be negative", rule="M7")


def _check_table(table: list[list[int]], seq_lens: list[int], cache: PagedKVCache) -> None:
    for request, length in enumerate(seq_lens):
        need = -(-length // cache.block_size)
        if need > len(table[request]):
            raise ContractError(
                f"block_table row {request} has {len(table[request])} entries, but seq_lens[{request}]={length} needs {need} blocks of "
                f"{cache.block_size} tokens",
                rule="P3",
            )
        for column, block in enumerate(table[request][:need]):
            if not 0 <= block < cache.num_blocks:
                raise ContractError(
                    f"block_table[{request}][{column}]={block} is outside the pool of {cache.num_blocks} blocks (0 to {cache.num_blocks - 1})",
                    rule="P3",
                )


def _check_slots(slots: list[int], cache: PagedKVCache) -> None:
    seen: dict[int, int] = {}
    for token, slot in enumerate(slots):
        if not -1 <= slot < cache.num_slots:
            raise ContractError(
                f"slot_mapping[{token}]={slot} is outside the cache of {cache.num_slots} slots (-1 writes nothing)",
                rule="P4",
            )
        if slot >= 0 and slot in seen:
            raise ContractError(
                f"slot_mapping[{token}] and slot_mapping[{seen[slot]}] are both {slot}: two tokens cannot share a slot",
                rule="P4",
            )
        seen[slot] = token
