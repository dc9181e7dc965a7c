"""Lightning attention of MiniMax, over attnlib's state layers (T2).

Its mixers call no function between projections and output, so that a step replaces their `forward`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from attnlib.integrations.transformers.state_calls import MixerCall

__all__ = ["lightning_forward"]


def lightning_forward(
    call: MixerCall, hidden_states: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """The forward of a mixer in a step.

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
    fields = {
        "num_heads": heads,
        "key_size": size,
        "value_size": size,
        "update": "add",
        "decay": "constant",
        "has_beta": False,
        "dtype": projected.dtype,
    }
    tensors = {"log_decay": -mixer.slope_rate.detach().flatten().float()}
    if (found := call.layer("recurrence", fields, tensors, scale=1.0)) is None:
        return torch.zeros_like(hidden_states), None
    out = found.layer(query, key, value, None, None, found.cache, found.metadata)
    out = mixer.norm(out.reshape(1, -1, heads * size))
    return mixer.out_proj(F.sigmoid(mixer.output_gate(hidden_states)) * out), None
