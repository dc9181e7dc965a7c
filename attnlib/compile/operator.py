"""Attention under torch.compile: one opaque operator, so that a model compiles as a whole (`fullgraph=True`) with any backend.

Traced, a layer is nothing but `attnlib::attend(query, key, value, out, lse, layer, cache, metadata)`, which writes `out` and `lse`. The last three
are handles (see `attnlib.compile.objects`): the layer's is a constant of the graph, those of cache and metadata are tensors read from the objects at every
call, so another batch, or another cache, compiles nothing. Everything else (checks, writing the new keys, the kernels) happens inside, exactly as
without torch.compile, and so does a backend's own control flow. The fake implementation has nothing to do: the outputs exist already.

The cache changes inside too, where the compiler does not see it. That is safe because only attention touches a cache, and the operator of a later
layer takes a query that depends on the output of the earlier one. Inference only: there is no backward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from attnlib.compile.objects import object_behind

if TYPE_CHECKING:
    from attnlib.layer import Attention

__all__ = ["attend", "attend_opaquely"]


@torch.library.custom_op("attnlib::attend", mutates_args=("out", "lse"))
def attend(
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    layer: int,
    cache: torch.Tensor | None,
    metadata: torch.Tensor,
) -> None:
    """Attention of one layer: `query` `[T, Hq, D]`, `key` `[T, Hkv, D]`, `value` `[T, Hkv, Dv]` or None, `out` `[T, Hq, Dv]`, `lse` `[T, Hq]`.

    Raises:
        ContractError: as `Attention.forward`, or an object behind a handle is gone.
    """
    found: Attention = object_behind(layer, "layer")
    kept = None if cache is None else object_behind(cache, "cache")
    found.attend(query, key, value, kept, object_behind(metadata, "metadata"), out, lse)


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
) -> None:
    return None


def attend_opaquely(
    layer: Attention,
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    cache: Any,
    metadata: Any,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """What a layer does while it is traced: hand everything to the operator."""
    attend(
        query,
        key,
        value,
        out,
        lse,
        layer.handle,
        None if cache is None else cache.handle,
        metadata.handle,
    )
