"""Calls whose queries see the same keys, with the torch backend on a CPU: one call of torch's
operator.

These are encoders, and queries over the keys of an encoder. A call without a mask has none to keep
what it has found: its module keeps it for the next one. Larger ones with padding are ordinary calls
of an attnlib layer, which skips the padding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.autograd import forward_ad

from attnlib import env
from attnlib.instrumentation import ENVIRONMENT, OBSERVERS, VALIDATE_KEY
from attnlib.integrations.transformers import devices
from attnlib.integrations.transformers.call_again import ABSENT, SINKS, CallAgain
from attnlib.integrations.transformers.decode_again import keep_in_step
from attnlib.integrations.transformers.growing_cache import LAST_UPDATE, note_served
from attnlib.integrations.transformers.layers import Call, layer_name
from attnlib.integrations.transformers.patterns import Pattern
from attnlib.integrations.transformers.recorded_weights import weights_are_collected
from attnlib.integrations.transformers.step_mask import StepMask
from attnlib.integrations.transformers.torch_operator import attend_fused
from attnlib.ops.params import AttentionParams
from attnlib.ops.signature import tensor_check
from attnlib.ops.torch.fused import can_fuse
from attnlib.selection import get_attn_backend
from attnlib.selection.current import selection_state
from attnlib.spec import AttentionType, MaskKind

__all__ = ["attend_visible", "attend_whole", "attend_whole_again"]

_ABSENT = (*ABSENT, *SINKS, "output_attentions", "softcap")
"""Arguments with which a call is not served here."""

_MAX_SCORES = 1 << 15
"""Scores per head of a call with padding: an ordinary call takes longer than fewer hidden ones."""


@dataclass(frozen=True, eq=False)
class _Whole:
    """The last such call of a module.

    Attributes:
        fits: whether query, key and value have these layouts, with any number of tokens.
        scale: of the call.
        names: of the further arguments.
        absent: those among them with which a call is not served here.
        causal: the argument `is_causal`.
        selection: state of the selection that chose the torch backend.
    """

    fits: Callable[..., bool]
    scale: float
    names: frozenset[str]
    absent: tuple[str, ...]
    causal: Any
    selection: tuple[Any, ...]


_calls: WeakKeyDictionary[nn.Module, _Whole] = WeakKeyDictionary()
_referenced: dict[ref[nn.Module], _Whole] = vars(_calls)["data"]
"""The same by weak references: found without a Python function."""


def attend_whole(call: Call, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Attention of a call without a mask, whose module is not causal, `[B, T, Hq, Dv]`; None for
    calls that need another path.

    Args:
        call, kwargs: the attention call.
    """
    query, key, value = call.query, call.key, call.value
    if not _is_served(call, kwargs):
        return None
    note_served(key, value)
    fits = tensor_check(query, key, value, free=(2, 2, 2))
    if fits is not None and not torch.is_autocast_enabled("cpu"):
        absent, causal = tuple(name for name in _ABSENT if name in kwargs), kwargs.get("is_causal")
        _calls[call.module] = _Whole(
            fits, call.scale, frozenset(kwargs), absent, causal, selection_state()
        )
    return attend_fused(query, key, value, None, call.scale, None, None)


def attend_visible(call: Call, step: StepMask, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The same under a mask that is bidirectional, with padding if there are few scores; queries
    that are padding see the keys of their row.

    Args:
        call, kwargs: the attention call.
        step: its mask.
    """
    pattern, queries = step.pattern, call.query.shape[2]
    if pattern != Pattern(False) or step.q_length != queries or not _is_served(call, kwargs):
        return None
    rows, bias = step.rows(), None
    if rows is not None:
        if step.batch_size * queries * step.kv_length > _MAX_SCORES or not rows.keys.any(1).all():
            return None
        name = ("visible", call.query.dtype)
        if name not in step.plans:
            hidden = torch.from_numpy(~rows.keys)[:, None, None]
            made = torch.zeros(hidden.shape, dtype=call.query.dtype, device="cpu")
            step.plans[name] = made.masked_fill_(hidden, -torch.inf)
        bias = step.plans[name]
    if not step.is_reused:
        keep_in_step(step, CallAgain.of(call, kwargs, pattern, bias, attend_fused))
    return attend_fused(call.query, call.key, call.value, bias, call.scale, None, None)


def _is_served(call: Call, kwargs: dict[str, Any]) -> bool:
    """Whether a call has only what the operator computes, and selection chooses torch."""
    query, key, value = call.query, call.key, call.value
    if devices.kind_of(query.device) != "cpu" or OBSERVERS or env.read("ATTNLIB_VALIDATE"):
        return False
    if call.soft_cap is not None or call.sinks is not None or not call.scale > 0:
        return False
    given = (kwargs.get(name) for name in _ABSENT)
    if weights_are_collected() or any(each is not None and each is not False for each in given):
        return False
    one_size = query.shape[3] == key.shape[3] == value.shape[3]
    params = AttentionParams(scale=call.scale)
    if not one_size or key.dtype != query.dtype or not can_fuse(query.device, query.dtype, params):
        return False
    square = query.shape[2] == key.shape[2]
    spec = call.spec(
        block_size=1,
        attn_type=AttentionType.ENCODER_ONLY if square else AttentionType.ENCODER_DECODER,
        mask_kind=MaskKind.BIDIRECTIONAL if square else None,
    )
    backend = get_attn_backend(spec, None, query.device, layer_name=layer_name(call.module))
    return backend.get_name() == "torch"


def attend_whole_again(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    kwargs: dict[str, Any],
) -> torch.Tensor | None:
    """Attention of a call without a mask that is like the module's last one.

    Args:
        module, query, key, value, kwargs: as in `attnlib_attention`.
        scale: softmax scale.

    Returns:
        `[B, T, Hq, Dv]`, or None for a call that is not known.
    """
    known = _referenced.get(ref(module))
    if known is None or scale != known.scale or kwargs.keys() != known.names or OBSERVERS:
        return None
    if VALIDATE_KEY in ENVIRONMENT or forward_ad._current_level >= 0:
        return None
    if kwargs.get("is_causal") is not known.causal or selection_state() != known.selection:
        return None
    if not known.fits(query, key, value) or key.shape[2] != value.shape[2]:
        return None
    for name in known.absent:
        if kwargs[name] is not None and kwargs[name] is not False:
            return None
    if torch.is_autocast_enabled("cpu") or weights_are_collected():
        return None
    if LAST_UPDATE.layer is not None:
        note_served(key, value)
    return attend_fused(query, key, value, None, scale, None, None)
