"""The attention function that transformers calls, and what it refuses.

attnlib_step=...            a paged step of attnlib's own, passed through `model.forward`
cache=PagedAttentionCache   continuous batching (`generate_batch`)
otherwise                   plain forwards and `generate`
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from attnlib.errors import UnsupportedConfigError
from attnlib.integrations.transformers.continuous import attend_continuous
from attnlib.integrations.transformers.dense import dense_weights
from attnlib.integrations.transformers.layers import Call, layer_name
from attnlib.integrations.transformers.masks import read_mask
from attnlib.integrations.transformers.plain import attend_plain, mask_of

__all__ = ["attnlib_attention"]

_SELECTIONS = ("indices", "block_indices")
"""Arguments by which sparse models say which keys each query may see; ignoring one would silently attend to all."""


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
        module: the model's attention module; the layer's attnlib state is kept with it.
        query: `[B, Hq, T, D]`.
        key: `[B, Hkv, S, D]`, history and new tokens (continuous batching: the new tokens).
        value: `[B, Hkv, S, Dv]`.
        attention_mask: see `plain.attend_plain`; continuous batching has none.
        dropout: must be 0.
        scaling: softmax scale; None means 1/sqrt(D).
        kwargs: what the model passes on: `sliding_window`, `softcap`, `s_aux`, `is_causal`, `position_bias`, `output_attentions`, and the step's
            arguments of continuous batching.

    Returns:
        `[B, T, Hq, Dv]`, and the weights `[B, Hq, T, S]` when `output_attentions=True` was passed (else None).

    Raises:
        UnsupportedConfigError: training, a sparse selection of keys, or what no backend accepts.
        ContractError: a mask that does not fit.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    _refuse(module, (query, key, value), dropout, kwargs)
    if kwargs.get("attnlib_step") is not None:
        from attnlib.integrations.transformers.paged_model import attend

        step = kwargs.pop("attnlib_step")
        result: tuple[torch.Tensor, torch.Tensor | None] = attend(
            module, query, key, value, step, attention_mask=attention_mask, scaling=scale, **kwargs
        )
        return result
    with torch.no_grad():
        call = _call(module, query, key, value, scale, kwargs)
        if kwargs.get("cache") is not None and kwargs.get("write_index") is not None:
            return attend_continuous(call, kwargs["cache"], kwargs), None
        bias = kwargs.get("position_bias")
        out = attend_plain(call, attention_mask, bias, kwargs)
        weights = _weights(call, attention_mask, bias) if kwargs.get("output_attentions") else None
    if torch.is_grad_enabled() and any(states.requires_grad for states in (query, key, value)):
        out = _InferenceOnly.apply(out, query, key, value)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return out, weights


def _call(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    kwargs: dict[str, Any],
) -> Call:
    causal, sinks = kwargs.get("is_causal"), kwargs.get("s_aux")
    return Call(
        module,
        query,
        key,
        value,
        scale=scale,
        soft_cap=kwargs.get("softcap"),
        sinks=kwargs.get("sinks") if sinks is None else sinks,
        sliding_window=kwargs.get("sliding_window"),
        causal=bool(getattr(module, "is_causal", True) if causal is None else causal),
    )


def _refuse(
    module: nn.Module, states: tuple[torch.Tensor, ...], dropout: float, kwargs: dict[str, Any]
) -> None:
    name = layer_name(module)
    if dropout:
        raise UnsupportedConfigError(
            f"{name}: dropout={dropout} in attention: attnlib computes inference only; call model.eval(), or train with attn_implementation='sdpa'"
        )
    if (
        module.training
        and torch.is_grad_enabled()
        and any(tensor.requires_grad for tensor in states)
    ):
        raise UnsupportedConfigError(
            f"{name}: gradients are wanted in training mode: attnlib computes inference only; use model.eval() under torch.no_grad(), or train with "
            f"attn_implementation='sdpa'"
        )
    for argument in _SELECTIONS:
        if kwargs.get(argument) is not None:
            raise UnsupportedConfigError(
                f"{name}: {argument}= selects keys per query, which attnlib has no mask for; use attn_implementation='eager'"
            )


def _weights(call: Call, mask: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    """The weights, by torch and beside the backend's own computation: no kernel keeps them."""
    step = read_mask(mask)
    if step is None and (mask is None or mask.dim() != 4):
        step = mask_of(call, mask)
    return dense_weights(call, mask if step is None else step.dense(), bias)


class _InferenceOnly(torch.autograd.Function):
    """Passes the output on, and refuses to be differentiated instead of silently leaving attention out of the gradient."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, *states: torch.Tensor) -> torch.Tensor:
        """The output as it is."""
        return out.view(out.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Always raises."""
        raise UnsupportedConfigError(
            "attnlib's attention has no gradient: it computes inference only; train with attn_implementation='sdpa'"
        )
