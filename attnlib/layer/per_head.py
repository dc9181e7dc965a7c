"""The impl of a layer, and the tensors that its kernels read in every call: slopes, sinks and those
of score functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from attnlib.backends.base import AttentionImpl, score_attribute
from attnlib.backends.rotated import make_backend_impl
from attnlib.errors import ContractError
from attnlib.ops.addresses import shortened
from attnlib.ops.signature import tensor_signature
from attnlib.spec import AttentionSpec

if TYPE_CHECKING:
    from attnlib.layer.attention import Attention

__all__ = ["make_impl", "own_per_head_tensors", "own_tensors", "per_head_signature"]


def make_impl(
    layer: Attention,
    scale: float | None,
    alibi_slopes: torch.Tensor | Sequence[float] | None,
    sinks: torch.Tensor | None,
    score_tensors: Mapping[str, torch.Tensor] | None,
) -> AttentionImpl:
    """The implementation of the layer's backend; arguments as those of the layer."""
    spec = layer.spec
    AttentionSpec.check_kind(spec, "Attention")
    if alibi_slopes is not None and not isinstance(alibi_slopes, torch.Tensor):
        try:
            alibi_slopes = torch.tensor(alibi_slopes, dtype=torch.float32, device=layer._device)
        except (TypeError, ValueError) as error:
            raise ContractError(
                f"alibi_slopes={shortened(alibi_slopes)} must be numbers, one for each of the "
                f"{spec.num_heads} query heads: {error}",
                rule="M3",
            ) from None
    if score_tensors is not None and not isinstance(score_tensors, Mapping):
        raise ContractError(
            f"score_tensors is a {type(score_tensors).__name__}; it must be a dictionary from name "
            "to tensor",
            rule="M10",
        )
    if score_tensors and spec.score_function is None:
        raise ContractError(
            "score_tensors are given, and the spec has no score_function, which reads them: leave "
            "them out",
            rule="M10",
        )
    extra = {} if spec.score_function is None else {"score_tensors": score_tensors}
    return make_backend_impl(
        layer.backend,
        spec,
        scale=checked_softmax_scale(scale),
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        kv_sharing_target_layer_name=layer.kv_sharing_target_layer_name,
        config=layer.backend.config,
        prefix=layer.prefix,
        **extra,
    )


def checked_softmax_scale(scale: float | None) -> float | None:
    """The softmax scale that a layer is given.

    Raises:
        ContractError: it is not a finite number.
    """
    if scale is None:
        return None
    try:
        number = float(scale)
    except (OverflowError, RuntimeError, TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ContractError(
            f"scale={shortened(scale)} must be a finite number, or None for 1/sqrt(head_size)",
            rule="M3",
        )
    return number


def own_per_head_tensors(layer: Attention) -> None:
    """Register slopes, sinks and score tensors: parameters as parameters, other tensors as
    buffers. The impl reads them from here, so that loaded weights, `.to()` and assignments
    reach every call."""
    slopes, sinks = layer.impl.per_head_tensors
    function = layer.spec.score_function
    names = () if function is None else map(score_attribute, function.layer_tensors)
    scores = dict(zip(names, layer.impl.layer_score_tensors, strict=True))
    layer._has_per_head = slopes is not None or sinks is not None or bool(scores)
    for name, tensor in {"alibi_slopes": slopes, "sinks": sinks, **scores}.items():
        if isinstance(tensor, nn.Parameter):
            layer.register_parameter(name, tensor)
        else:
            layer.register_buffer(name, tensor)
    layer.impl.read_per_head_tensors_from(layer)


def own_tensors(layer: Attention) -> tuple[torch.Tensor | None, ...]:
    """The tensors of the layer that kernels read: slopes and sinks, if the spec has either, then
    score tensors."""
    spec, impl = layer.spec, layer.impl
    heads = impl.per_head_tensors if spec.has_alibi or spec.has_sink else ()
    return (*heads, *impl.layer_score_tensors)


def per_head_signature(layer: Attention) -> tuple[Any, ...]:
    """Signatures of the tensors of the layer that kernels read."""
    return tuple(
        None if tensor is None else tensor_signature(tensor)
        for tensor in (*layer.impl.per_head_tensors, *layer.impl.layer_score_tensors)
    )
