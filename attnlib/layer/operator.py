"""Attention under torch.compile: one opaque operator, so that a model compiles as a whole
(`fullgraph=True`) with any backend.

A traced layer is one call of `attnlib::attend(query, key, value, out, lse, layer, cache,
metadata)`. The last three are ids (see `attnlib.compile.objects`): the layer's is a constant of the
graph, those of cache and metadata are tensors that are read from the objects at every call, so that
another batch or another cache does not recompile. Everything else (checks, cache writes, kernels)
happens inside the operator. The fake implementation does nothing: the outputs already exist.

The operator declares that it mutates the cache's id tensor. It stands for the cache write, which
the compiler does not see: without the declaration, a layer whose output is unused would be removed
together with its write. There is no backward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from attnlib.cache.storage import PagedKVCache
from attnlib.compile.objects import lookup
from attnlib.layer.call import LayerCall, new_lse
from attnlib.layer.checks import check_output, refuse_gradients
from attnlib.layer.plans import find_plan, run_plan
from attnlib.metadata.base import AttentionMetadata
from attnlib.metadata.compressed import CompressedKeys
from attnlib.ops.rotary import HeadNorm
from attnlib.score_functions.query_tensors import QueryTensors
from attnlib.sparse.key_selection import SelectedKeys

if TYPE_CHECKING:
    from attnlib.layer import Attention

__all__ = ["attend", "attend_opaquely", "rotate_and_write_kv", "rotate_opaquely"]


@torch.library.custom_op("attnlib::attend", mutates_args=("out", "lse", "cache"))
def attend(
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    layer: int,
    cache: torch.Tensor | None,
    metadata: torch.Tensor,
    indices: torch.Tensor | None = None,
    list_start_loc: torch.Tensor | None = None,
) -> None:
    """Attention of one layer.

    Args:
        query, key, value: `[T, Hq, D]`, `[T, Hkv, D]`, `[T, Hkv, Dv]`.
        out, lse: `[T, Hq, Dv]` and `[T, Hq]` float32 or None, written.
        layer, cache, metadata: ids.
        indices, list_start_loc: the tensors of `SelectedKeys`; None without selected keys.

    Raises:
        ContractError: as `Attention.forward`, or the object of an id no longer exists.
    """
    kept = None if cache is None else lookup(cache, PagedKVCache, "cache")
    batch = lookup(metadata, AttentionMetadata, "metadata")
    selected = None if indices is None else SelectedKeys(indices, list_start_loc)
    call = LayerCall(query, key, value, kept, batch, out, lse is not None, selected)
    module = _layer(layer)
    run_plan(module, find_plan(module, call)[0], call, out, lse)


def _layer(handle: int) -> Attention:
    module: Any = lookup(handle, torch.nn.Module, "layer")
    return cast("Attention", module)


@attend.register_fake
def _(
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    layer: int,
    cache: torch.Tensor | None,
    metadata: torch.Tensor,
    indices: torch.Tensor | None = None,
    list_start_loc: torch.Tensor | None = None,
) -> None:
    return None


def attend_opaquely(layer: Attention, call: LayerCall) -> Any:
    """`Attention.forward` while torch.compile traces it: one call of the operator.

    Raises:
        ContractError: a tensor of another width, or one that requires a gradient.
    """
    spec = layer.spec
    refuse_gradients(call.query, call.key, call.value)
    query, key, value, cache, metadata, output, return_lse, extra = call.per_head(spec)
    assert not isinstance(extra, (CompressedKeys, QueryTensors))  # `extra_keys` refuses them
    check_output(spec, call)
    if output is None:
        output = torch.empty(call.output_shape(spec), dtype=query.dtype, device=query.device)
    lse = new_lse(spec, query) if return_lse else None
    attend(
        query,
        key,
        value,
        output.view(query.shape[0], spec.num_heads, spec.head_size_v),
        lse,
        layer.handle,
        None if cache is None else cache.handle,
        metadata.handle,
        None if extra is None else extra.indices,
        None if extra is None else extra.list_start_loc,
    )
    return (output, lse) if return_lse else output


@torch.library.custom_op("attnlib::rotate_and_write_kv", mutates_args=("cache",))
def rotate_and_write_kv(
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    norms: list[float],
    interleaved: bool,
    layer: int,
    cache: torch.Tensor,
    metadata: torch.Tensor,
) -> torch.Tensor:
    """`Attention.rotate_and_write_kv` of one layer.

    Args:
        query, key, value, cos, sin, interleaved: of the call.
        q_weight, k_weight: weights of the norms, or None.
        norms: eps, weight offset and whether the weight is multiplied in float32, of both norms.
        layer, cache, metadata: ids.

    Returns:
        The rotated queries, contiguous.

    Raises:
        ContractError: as the method, or the object of an id no longer exists.
    """
    q_norm, k_norm = (
        None if weight is None else HeadNorm(weight, norms[n], norms[n + 1], bool(norms[n + 2]))
        for n, weight in ((0, q_weight), (3, k_weight))
    )
    kept = lookup(cache, PagedKVCache, "cache")
    batch = lookup(metadata, AttentionMetadata, "metadata")
    out: torch.Tensor = _layer(layer).rotate_and_write_kv(
        query,
        key,
        value,
        kept,
        batch,
        cos,
        sin,
        interleaved=interleaved,
        q_norm=q_norm,
        k_norm=k_norm,
    )
    return out


@rotate_and_write_kv.register_fake
def _(
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    norms: list[float],
    interleaved: bool,
    layer: int,
    cache: torch.Tensor,
    metadata: torch.Tensor,
) -> torch.Tensor:
    return torch.empty(query.shape, dtype=query.dtype, device=query.device)


def rotate_opaquely(
    layer: Attention,
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    cache: Any,
    metadata: AttentionMetadata,
    rotation: tuple[torch.Tensor | None, torch.Tensor | None, bool],
    q_norm: HeadNorm | None,
    k_norm: HeadNorm | None,
) -> torch.Tensor:
    """Call the operator in place of `Attention.rotate_and_write_kv`, while torch.compile traces
    it."""
    refuse_gradients(query, key, value)
    cos, sin, interleaved = rotation
    norms: list[float] = []
    for norm in (q_norm, k_norm):
        eps, offset, in_float32 = (
            (0.0, 0.0, False)
            if norm is None
            else (norm.eps, norm.weight_offset, norm.multiply_in_float32)
        )
        norms += [float(eps), float(offset), float(in_float32)]
    weights = (None if norm is None else norm.weight for norm in (q_norm, k_norm))
    out: torch.Tensor = rotate_and_write_kv(
        query,
        key,
        value,
        cos,
        sin,
        *weights,
        norms,
        interleaved,
        layer.handle,
        cache.handle,
        metadata.handle,
    )
    return out
