"""Checks of divided layers, before anything is written or sent (X8)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from attnlib.cache.storage import PagedKVCache
from attnlib.errors import AttnlibError, ContractError, UnsupportedConfigError
from attnlib.layer.cache_checks import check_cache
from attnlib.layer.call import LayerCall, per_head
from attnlib.parallel.divisions import Division
from attnlib.parallel.exchange import ExchangeMethod, choose_exchange
from attnlib.parallel.group import RankGroup
from attnlib.parallel.metadata import ParallelMetadata
from attnlib.spec import AttentionSpec

if TYPE_CHECKING:
    from attnlib.parallel.attention import ParallelAttention

__all__ = ["ParallelCall", "check_parallel_call", "checked_method", "checked_per_head"]

_AGREEMENTS = ("call", "batch", "never")


class ParallelCall(NamedTuple):
    """The tensors of a call per head; the output exists."""

    query: Tensor
    key: Tensor | None
    value: Tensor | None
    output: Tensor


def checked_method(
    spec: AttentionSpec,
    group: RankGroup,
    division: Division,
    exchange: str | None,
    agreement: str,
) -> ExchangeMethod:
    """The exchange of a layer.

    Raises:
        ContractError: a value that is not known, or a division for another number of ranks.
        UnsupportedConfigError: batch invariance with a sum in an order that NCCL chooses.
    """
    names = [method.value for method in ExchangeMethod]
    for name, value, known in (
        ("agreement", agreement, _AGREEMENTS),
        ("exchange", exchange or names[0], names),
    ):
        if value not in known:
            raise ContractError(f"{name}={value!r} must be one of {', '.join(known)}", rule="X8")
    if division.world_size != group.world_size:
        raise ContractError(
            f"{division} is for {division.world_size} ranks, the group has {group.world_size}",
            rule="X1",
        )
    if exchange is None:
        return choose_exchange(spec, group.world_size)
    method = ExchangeMethod(exchange)
    if spec.batch_invariant and method is ExchangeMethod.REDUCE_SCATTER:
        raise UnsupportedConfigError(
            "batch_invariant=True with exchange='reduce_scatter': its sums have no fixed order; "
            "use 'all_to_all'",
            reasons=["reduce_scatter is not batch invariant"],
        )
    return method


def checked_per_head(
    name: str, values: Tensor | None, needed: bool, spec: AttentionSpec
) -> Tensor | None:
    """Slopes or sinks `[Hq]`, given exactly where the spec has them.

    Raises:
        ContractError: missing, not declared, or of another shape or dtype.
    """
    if needed != (values is not None):
        given = "missing" if values is None else "given"
        raise ContractError(f"{name} is {given}, and the spec says otherwise: {spec}", rule="M3")
    if values is not None and (values.shape != (spec.num_heads,) or not values.is_floating_point()):
        raise ContractError(
            f"{name} is {values.dtype} {list(values.shape)}; it must be floating point "
            f"[{spec.num_heads}]",
            rule="M3",
        )
    return values


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
    error: AttnlibError | None = None
    call = None
    try:
        call = _checked(layer, query, key, value, cache, metadata, output)
    except AttnlibError as found:
        error = found
    if layer.agreement != "never" and not _is_capturing(query):
        agreed = isinstance(metadata, ParallelMetadata) and metadata.agreed
        if layer.agreement == "call" or not agreed:
            layer.group.agree(("call", str(layer.spec), key is None), error)
            if isinstance(metadata, ParallelMetadata):
                metadata.agreed = True
    if error is not None:
        raise error
    assert call is not None
    return call


def _is_capturing(query: Tensor) -> bool:
    return query.is_cuda and torch.cuda.is_current_stream_capturing()


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
    sizes = (spec.num_heads, spec.head_size), (spec.num_kv_heads, spec.head_size)
    tokens = metadata.num_actual_tokens
    query = _per_head("query", query, *sizes[0], spec.dtype, query.device, tokens)
    if (key is None) != (value is None) or (key is None and metadata.new is not None):
        raise ContractError(
            "key and value are needed: this batch attends to its new tokens directly, or only one "
            "of the two is given",
            rule="X7",
        )
    if key is not None and value is not None:
        key = _per_head("key", key, *sizes[1], spec.dtype, query.device, tokens)
        size_v = spec.head_size_v
        value = _per_head(
            "value", value, spec.num_kv_heads, size_v, spec.dtype, query.device, tokens
        )
    call = LayerCall(query, key, value, cache, metadata.cached or metadata.new)  # type: ignore[arg-type]
    if not isinstance(cache, PagedKVCache):
        raise ContractError(f"cache is a {type(cache).__name__}; it must be a PagedKVCache")
    check_cache(layer.cached, cache, call._replace(key=None, value=None))
    shape = (query.shape[0], spec.num_heads, spec.head_size_v)
    if output is None:
        output = torch.empty(shape, dtype=query.dtype, device=query.device)
    elif output.numel() != shape[0] * shape[1] * shape[2] or output.dtype != query.dtype:
        raise ContractError(
            f"output is {output.dtype} {list(output.shape)}; it must be {query.dtype} "
            f"{list(shape)}",
            rule="P9",
        )
    return ParallelCall(query, key, value, output.view(shape))


def _per_head(
    name: str,
    tensor: Tensor,
    heads: int,
    size: int,
    dtype: torch.dtype,
    device: torch.device,
    tokens: int,
) -> Tensor:
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
    return tensor
