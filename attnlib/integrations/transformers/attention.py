"""The attention function that is registered with transformers: for steps of a `PagedModel`
(`attnlib_step=`), continuous batching (`cache=`), plain forwards and `generate`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from attnlib.errors import UnsupportedConfigError
from attnlib.integrations.transformers.autocast import as_eager_casts
from attnlib.integrations.transformers.continuous import attend_continuous
from attnlib.integrations.transformers.decode_again import attend_known
from attnlib.integrations.transformers.dense import dense_weights
from attnlib.integrations.transformers.described_mask import known_step, read_mask
from attnlib.integrations.transformers.inference_only import (
    InferenceOnly,
    check_states,
    refuse_transforms,
)
from attnlib.integrations.transformers.layers import Call, layer_name
from attnlib.integrations.transformers.mask_tensor import MaskTensor
from attnlib.integrations.transformers.masks import refuse_export
from attnlib.integrations.transformers.paged_calls import cache_of_step, refuse_plain_call
from attnlib.integrations.transformers.plain import attend_plain, mask_of
from attnlib.integrations.transformers.recorded_weights import weights_are_recorded
from attnlib.integrations.transformers.repeated import attend_again
from attnlib.integrations.transformers.selected import (
    SELECTIONS,
    attend_selected,
    selects_keys,
)
from attnlib.integrations.transformers.token_terms import attend_single_tokens, checked_sinks
from attnlib.integrations.transformers.traced import (
    REASONS,
    is_compiled,
    traced_attention,
    untraced_reason,
)
from attnlib.integrations.transformers.two_streams import EntryMask, attend_two_streams
from attnlib.integrations.transformers.whole import attend_whole_again

__all__ = ["attnlib_attention"]


def attnlib_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention for `transformers.AttentionInterface`.

    Args:
        module: the attention module of the model; its attnlib layer is cached with it.
        query, key, value: `[B, Hq, T, D]`, `[B, Hkv, S, D]`, `[B, Hkv, S, Dv]`; keys and values
            with their history (continuous batching: the new tokens).
        attention_mask: see `plain.attend_plain`; continuous batching has none.
        dropout, scaling: 0, and the softmax scale; None for 1/sqrt(D).
        kwargs: `sliding_window`, `softcap`, `s_aux` or `sinks`, `is_causal`, `position_bias`,
            `output_attentions`, `indices`, `block_indices`, and those of continuous batching.

    Returns:
        `[B, T, Hq, Dv]`, and the weights `[B, Hq, T, S]` if `output_attentions=True`, else None.

    Raises:
        UnsupportedConfigError, ContractError: training, export, transforms of torch, what no
            backend supports, lost arguments of a paged step, or a mask that does not fit.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    known = again = None
    if not (dropout or is_dynamo_compiling() or torch.is_grad_enabled()):
        is_new = type(attention_mask) is MaskTensor and attention_mask._cached is None
        known = attention_mask.step if is_new else known_step(attention_mask)  # type: ignore[union-attr]
        if attention_mask is None:
            again = attend_whole_again(module, query, key, value, scale, kwargs)
    if known is not None and forward_ad._current_level < 0:
        if (earlier := known.again) is not None:
            again = earlier.attend(query, key, value, scale, kwargs)
        elif query.is_cpu:
            again = attend_known(query, key, value, known, scale, kwargs)
        if again is None:
            again = attend_again(module, query, key, value, known, scale, kwargs)
    again = attend_single_tokens(module, query, key, value, scale) if again is None else again
    if again is not None:
        return again, None
    if torch.compiler.is_compiling() and is_compiled():
        return _in_graph(module, query, key, value, attention_mask, dropout, scaling, kwargs)
    refuse_export()
    _refuse(module, (query, key, value), dropout, kwargs)
    if kwargs.get("attnlib_step") is not None:
        query, key, value = as_eager_casts(query, key, value)
        return _paged_step(module, query, key, value, attention_mask, scale, kwargs)
    if (cache := cache_of_step(key, value, kwargs)) is not None:
        with torch.no_grad():
            call = _call(module, (query, key, value), scale, kwargs)
            return attend_continuous(call, cache, kwargs), None
    refuse_plain_call(module)
    call = _call(module, as_eager_casts(query, key, value), scale, kwargs)
    return _attend_alone(call, attention_mask, kwargs)


def _paged_step(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    kwargs: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    from attnlib.integrations.transformers.paged_step import attend

    states, step = (query, key, value), kwargs.pop("attnlib_step")
    result: tuple[torch.Tensor, torch.Tensor | None] = attend(
        module, *states, step, attention_mask=mask, scaling=scale, **kwargs
    )
    return result


def _attend_alone(
    call: Call, attention_mask: torch.Tensor | None, kwargs: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention outside of paged steps, and the weights if the caller wants them."""
    with torch.no_grad():
        bias = kwargs.get("position_bias")
        out = None
        if selects_keys(kwargs):
            out = attend_selected(call, attention_mask, kwargs)
        elif isinstance(attention_mask, EntryMask) and bias is None:
            out = attend_two_streams(call, attention_mask)
        if out is None:
            out = attend_plain(call, attention_mask, bias, kwargs)
        weights = _weights(call, attention_mask, bias) if weights_are_recorded(kwargs) else None
    states = call.query, call.key, call.value
    if torch.is_grad_enabled() and any(each.requires_grad for each in states):
        out = InferenceOnly.apply(out, *states)  # type: ignore[no-untyped-call]  # untyped in torch
    return out, weights


def _call(
    module: nn.Module, states: tuple[torch.Tensor, ...], scale: float, kwargs: dict[str, Any]
) -> Call:
    query, key, value = states
    check_states(layer_name(module), query, key, value)
    causal, sinks = kwargs.get("is_causal"), checked_sinks(module, query, kwargs)
    return Call(
        module,
        query,
        key,
        value,
        scale=scale,
        soft_cap=kwargs.get("softcap"),
        sinks=sinks,
        sliding_window=kwargs.get("sliding_window"),
        declared_causal=None if causal is None else bool(causal),
    )


def _refuse(
    module: nn.Module, states: tuple[torch.Tensor, ...], dropout: float, kwargs: dict[str, Any]
) -> None:
    refuse_transforms(layer_name(module), *states)
    if dropout:
        raise UnsupportedConfigError(
            f"{layer_name(module)}: dropout={dropout} in attention: attnlib computes inference "
            f"only; call model.eval(), or train with attn_implementation='eager'"
        )
    if (
        module.training
        and torch.is_grad_enabled()
        and any(tensor.requires_grad for tensor in states)
    ):
        raise UnsupportedConfigError(
            f"{layer_name(module)}: gradients are required in training mode: attnlib computes "
            f"inference only; use model.eval() under torch.no_grad(), or train with "
            f"attn_implementation='eager'"
        )
    if selects_keys(kwargs):
        _refuse_selection(module, kwargs)


def _refuse_selection(module: nn.Module, kwargs: dict[str, Any]) -> None:
    """Refuse what is not computed over selected keys. Ignoring the lists would attend to all."""
    given = next(name for name in SELECTIONS if kwargs.get(name) is not None)
    eager = "use attn_implementation='eager'"
    plain = "use generate with attn_implementation='attnlib'"
    for argument, what, action in (
        ("attnlib_step", "in a paged cache", plain),
        ("write_index", "in continuous batching", plain),
        ("cu_seq_lens_q", "of packed sequences", eager),
        ("position_bias", "with a position bias", eager),
    ):
        if kwargs.get(argument) is not None:
            raise UnsupportedConfigError(
                f"{layer_name(module)}: {given}= selects keys per query, which attnlib does not "
                f"support {what}; {action}"
            )
    if weights_are_recorded(kwargs):
        raise UnsupportedConfigError(
            f"{layer_name(module)}: {given}= selects keys per query, whose weights attnlib does "
            f"not return; {eager}"
        )


def _weights(call: Call, mask: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    """The weights, computed with torch operations in addition: no kernel returns them."""
    found = read_mask(mask)
    if found is None or (isinstance(found, torch.Tensor) and found.dim() != 4):
        found = mask_of(call, found)
    return dense_weights(call, found if isinstance(found, torch.Tensor) else found.dense(), bias)


def _in_graph(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float,
    scaling: float | None,
    kwargs: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The call in a trace of torch.compile: one operator, or a graph break with a reason."""
    reason = untraced_reason(module, query, attention_mask, dropout, kwargs)
    if reason is None:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return traced_attention(module, query, key, value, attention_mask, scale, kwargs), None
    outside: tuple[torch.Tensor, torch.Tensor | None] = _OUTSIDE_OF_GRAPHS[reason](
        module, query, key, value, attention_mask, dropout, scaling, **kwargs
    )
    return outside


_OUTSIDE_OF_GRAPHS = {
    name: torch.compiler.disable(  # type: ignore[no-untyped-call]  # untyped in torch
        attnlib_attention, reason=f"attnlib: {reason}; or compile without fullgraph=True"
    )
    for name, reason in REASONS.items()
}
"""The attention function as a graph break, whose reason torch shows with `fullgraph=True`."""
