"""The convolution of Inkling 2 whose taps differ between tokens, over attnlib's state layers (T4).

A state layer has fixed taps, so that it convolves each channel once per tap with a tap of 1, which
gives the states of the tokens before each token. They are weighted as in transformers.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from attnlib.integrations.transformers.state_calls import MixerCall

__all__ = ["dynamic_convolution_forward"]


def dynamic_convolution_forward(
    call: MixerCall, hidden_states: torch.Tensor, dynamic_input: torch.Tensor, **kwargs: Any
) -> torch.Tensor:
    """The forward of a convolution in a step.

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
    out: torch.Tensor = (mixed + states) / math.sqrt(2 * width + 1)
    return out.to(hidden_states.dtype)[None]


def _states_before(call: MixerCall, states: torch.Tensor, width: int) -> torch.Tensor:
    """`[T, C, width]`: the states of each token and of those before it in its request, the token's
    own first."""
    channels = states.shape[1] * width
    fields = {
        "conv_channels": channels,
        "conv_width": width,
        "conv_activation": None,
        "dtype": states.dtype,
    }
    # The last tap of a state layer is that of the token itself.
    one_each = torch.eye(width, device=states.device).flip(0).repeat(states.shape[1], 1)
    repeated = states.repeat_interleave(width, dim=1)
    if (found := call.layer("convolution", fields, {"conv_weight": one_each})) is None:
        return torch.zeros_like(repeated).view(*states.shape, width)
    out = found.layer.convolve(repeated, found.cache, found.metadata)
    return out.view(*states.shape, width)
