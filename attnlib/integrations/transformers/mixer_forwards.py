"""Which modules are mixers, and what replaces the forward of those that call no function between
projections and output."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnlib.integrations.transformers.state_calls import MixerCall

__all__ = ["forward_of", "is_mixer"]


def lightning_forward(
    call: MixerCall, hidden_states: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """The forward of lightning attention of MiniMax in a step (T2).

    Args:
        call: of the mixer.
        hidden_states: `[1, T, hidden size]`.
        args, kwargs: without meaning in a step.

    Returns:
        The same shape, and None for the state, which stays in its slot.
    """
    mixer: Any = call.mixer
    call.step.reached.add(mixer)
    heads, size = mixer.num_attention_heads, mixer.head_dim
    projected = mixer.act_fn(mixer.qkv_proj(hidden_states))[0]
    query, key, value = projected.view(-1, heads, 3 * size).split(size, dim=-1)
    fields = {"num_heads": heads, "key_size": size, "value_size": size, "dtype": projected.dtype}
    fields |= {"update": "add", "decay": "constant", "has_beta": False}
    tensors = {"log_decay": -mixer.slope_rate.detach().flatten().float()}
    if (found := call.mixers.layers.layer_of(call, "recurrence", fields, tensors, 1.0)) is None:
        return torch.zeros_like(hidden_states), None
    layer, cache, metadata = found
    out = layer(query, key, value, None, None, cache, metadata)
    out = mixer.norm(out.reshape(1, -1, heads * size))
    return mixer.out_proj(F.sigmoid(mixer.output_gate(hidden_states)) * out), None


def dynamic_convolution_forward(
    call: MixerCall, hidden_states: Tensor, dynamic_input: Tensor, **kwargs: Any
) -> Tensor:
    """The forward in a step of Inkling 2's convolution, whose taps differ between tokens (T4).

    A state layer has fixed taps, so that it convolves each channel once per tap with a tap of 1,
    which gives the states of the tokens before each token. They are weighted as in transformers.

    Args:
        call: of the convolution.
        hidden_states: `[1, T, C]`.
        dynamic_input: `[1, T, hidden size]`, which the taps are computed from.
        kwargs: without meaning in a step.

    Returns:
        `[1, T, C]`.
    """
    mixer: Any = call.mixer
    call.step.reached.add(mixer)
    width, heads = mixer.conv_kernel_size, mixer.num_heads
    states = hidden_states[0].float()
    dynamic = mixer.weight_proj(dynamic_input)[0].float().view(len(states), heads, 1, width)
    taps = mixer.static_weight.float().T.view(heads, -1, width) + dynamic
    before = _states_before(call, states, width)
    mixed = (before.view(len(states), heads, -1, width) * taps).sum(-1).view_as(states)
    out: Tensor = (mixed + states) / math.sqrt(2 * width + 1)
    return out.to(hidden_states.dtype)[None]


def _states_before(call: MixerCall, states: Tensor, width: int) -> Tensor:
    """`[T, C, width]`: the states of each token and of those before it in its request, the token's
    own first."""
    fields: dict[str, Any] = {"conv_channels": states.shape[1] * width, "conv_width": width}
    fields |= {"conv_activation": None, "dtype": states.dtype}
    # The last tap of a state layer is that of the token itself.
    one = torch.eye(width, dtype=states.dtype, device=states.device).flip(0)
    tensors = {"conv_weight": one.repeat(states.shape[1], 1)}
    repeated = states.repeat_interleave(width, dim=1)
    if (found := call.mixers.layers.layer_of(call, "convolution", fields, tensors)) is None:
        return torch.zeros_like(repeated).view(*states.shape, width)
    layer, cache, metadata = found
    return layer.convolve(repeated, cache, metadata).view(*states.shape, width)


_FORWARDS: dict[str, Callable[..., Any]] = {
    "Inkling2DynamicShortConvolution": dynamic_convolution_forward,
    "MiniMaxLightningAttention": lightning_forward,
}


def forward_of(module: nn.Module) -> Callable[..., Any] | None:
    """What replaces the forward of a mixer in a step; None for one that calls the functions."""
    return _FORWARDS.get(type(module).__name__)


def is_mixer(module: nn.Module) -> bool:
    """Whether a module of a served model has states."""
    convolutions = (getattr(module, name, None) for name in ("conv1d", "conv"))
    has_one = any(isinstance(one, nn.Conv1d) for one in convolutions)
    return has_one or forward_of(module) is not None
