"""The functions that mixers of transformers call, over attnlib's state layers (T2 to T6)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from attnlib.errors import UnsupportedConfigError
from attnlib.integrations.transformers import state_steps
from attnlib.integrations.transformers.layers import layer_name

if TYPE_CHECKING:
    from attnlib.integrations.transformers.paged_step import PagedStep
    from attnlib.integrations.transformers.state_mixers import StateMixers

__all__ = ["FUNCTIONS", "MixerCall"]

_ACTIVATIONS = {"silu": "silu", "swish": "silu", None: None}


@dataclass(frozen=True, eq=False)
class MixerCall:
    """The call of a function by a mixer of a model in a step."""

    mixers: StateMixers
    step: PagedStep
    mixer: nn.Module


def convolve(
    call: MixerCall,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **kwargs: Any,
) -> Tensor:
    """`causal_conv1d_fn`: `[1, C, T]` -> the same."""
    call.step.reached.add(call.mixer)
    fields = {
        "conv_channels": x.shape[1],
        "conv_width": weight.shape[1],
        "conv_activation": _ACTIVATIONS[activation],
        "has_conv_bias": bias is not None,
        "dtype": x.dtype,
    }
    tensors = _given({"conv_weight": weight, "conv_bias": bias})
    if call.mixers.has_recurrence(call.mixer):
        call.mixers.pending = state_steps.PendingConvolution(x[0].mT, fields, tensors)
        return x
    if (found := call.mixers.layers.layer_of(call, "convolution", fields, tensors)) is None:
        return torch.zeros_like(x)
    layer, cache, metadata = found
    return layer.convolve(x[0].mT.contiguous(), cache, metadata).mT[None]


def delta_rule(
    call: MixerCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """`torch_chunk_gated_delta_rule` and `chunk_kimi_delta_attention`."""
    _refuse_states(call.mixer, kwargs)
    decay = "head" if g.dim() == 3 else "channel"
    fields = {"decay": decay, "qk_norm": use_qk_l2norm_in_kernel}
    gates = g[0].float(), beta[0].float()
    return _step(call, (query, key, value), gates, {}, fields, {}), None


def mamba2(
    call: MixerCall,
    x: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803  # names of transformers
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    D: Tensor | None = None,  # noqa: N803
    dt_bias: Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    dt_softplus: bool = False,
    **kwargs: Any,
) -> Tensor:
    """`mamba2_chunk_scan`."""
    _refuse_states(call.mixer, kwargs)
    if not dt_softplus:
        raise UnsupportedConfigError(f"{layer_name(call.mixer)}: step sizes without softplus")
    fields = {"update": "add", "has_skip": D is not None}
    skip = None if D is None else D.detach().float()
    bias = torch.zeros_like(A) if dt_bias is None else dt_bias.detach()
    form = {"gates": "mamba2", "rate": -A.float(), "bias": bias.float(), "bounds": dt_limit}
    gates = (dt[0], None)
    return _step(call, (C, B, x), gates, form, fields, _given({"skip": skip}), scale=1.0)


def _step(
    call: MixerCall,
    parts: tuple[Tensor, Tensor, Tensor],
    gates: tuple[Tensor, Tensor | None],
    form: dict[str, Any],
    fields: dict[str, Any],
    tensors: dict[str, Tensor],
    scale: float | None = None,
) -> Tensor:
    """The recurrence of a mixer together with its convolution: at once, or by its norm.

    Args:
        call: of the recurrence.
        parts: queries, keys and values, `[1, T, heads, size]`.
        gates: of `StateLayer.step`.
        form: fields of its form.
        fields: of the spec of the recurrence, besides sizes and dtype.
        tensors, scale: of the recurrence, as in `MixerLayers.layer_of`.
    """
    convolution, call.mixers.pending = call.mixers.pending, None
    assert isinstance(convolution, state_steps.PendingConvolution)  # mixers convolve first
    x = convolution.x
    form["order"] = state_steps.channel_order(x, parts, call.mixer)
    (_, key, value), tensors = parts, tensors | convolution.tensors
    sizes = {"num_heads": value.shape[2], "num_key_heads": key.shape[2]}
    sizes |= {"key_size": key.shape[3], "value_size": value.shape[3]}
    fields = {"dtype": value.dtype} | sizes | fields | convolution.fields
    if (found := call.mixers.layers.layer_of(call, "step", fields, tensors, scale)) is None:
        return torch.zeros_like(value)
    out = x.new_empty(x.shape[0], value[0, 0].numel())
    step = state_steps.PendingStep(*found, x, gates, form, out)
    if state_steps.norm_of(call.mixer) is None:
        step.run()
    else:
        call.mixers.pending = step
    return out.view(value.shape)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": convolve,
    "torch_chunk_gated_delta_rule": delta_rule,
    "chunk_kimi_delta_attention": delta_rule,
    "mamba2_chunk_scan": mamba2,
}
"""Name in the modules of transformers -> function."""


def _given(tensors: dict[str, Tensor | None]) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in tensors.items() if tensor is not None}


def _refuse_states(mixer: nn.Module, kwargs: dict[str, Any]) -> None:
    """Refuse states of transformers, which a step has not."""
    names = ("initial_state", "initial_states", "output_final_state", "return_final_states")
    if any(kwargs.get(name) is not None and kwargs.get(name) is not False for name in names):
        raise UnsupportedConfigError(
            f"{layer_name(mixer)} is called with a cache of transformers: a step of a PagedModel "
            "holds its states in slots, so run it with use_cache=False"
        )
