"""Calls of the operations on states, for `cross_compile`."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch

from attnlib.ops.states import (
    RecurrenceParams,
    StateBatch,
    StateInputs,
    StateLayout,
    StateTensors,
    Taps,
)
from attnlib.ops.states.step_form import FusedInputs, StepForm
from attnlib.ops.triton.heuristics import state_tiles
from attnlib.ops.triton.states import state_step
from attnlib.ops.triton.states.fused_step import PreparedFusedStep
from attnlib.ops.triton.states.short_convolution import short_convolution
from attnlib.ops.triton.states.step_parts import gated_norm, state_gates

__all__ = ["STATE_CASES", "run_convolution", "run_fused", "run_state"]

FORMS: dict[str, dict[str, Any]] = {
    "delta": {"gates": "softplus", "norm_size": 128, "output_gate": "silu"},
    "kimi": {
        "gates": "bounded", "bounds": (-5.0, 0.0), "norm_size": 128, "output_gate": "sigmoid",
    },
    "mamba2": {
        "order": "vkq", "gates": "mamba2", "norm_size": 1024, "output_gate": "silu",
        "gate_first": True,
    },
}  # fmt: skip

_MAMBA2 = {"value_size": 64, "num_heads": 128, "num_key_heads": 8, "update": "add"}
_CHANNELS = {"decay": "channel", "num_key_heads": 32}
_SMALL = {"key_size": 64, "value_size": 64}
_COPIED = {"num_reqs": 32, "row_decodes": True, "copied_decodes": True}
_ROWS = {"num_reqs": 32, "row_decodes": True}
_INVARIANT = {"long_chunk": 32, "is_invariant": True}

STATE_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "convolution": ("convolution", {}),
    "convolution-bias": ("convolution", {"bias": True, "activation": None, "max_rollback": 3}),
    "state-64": ("state", _SMALL),
    "state-64-channels": ("state", {**_SMALL, "decay": "channel"}),
    "state-64-add": ("state", {**_SMALL, "update": "add", "decay": "constant", "skip": True}),
    "state-64-f32": ("state", {**_SMALL, "dtype": torch.float32}),
    "state-128": ("state", {"max_rollback": 3}),
    "state-64-whole": ("state", {**_SMALL, "num_reqs": 32}),
    "state-128-whole": ("state", {"num_reqs": 32}),
    "state-128-channels-whole": ("state", {**_CHANNELS, "num_reqs": 32}),
    "state-128-channels": ("state", _CHANNELS),
    "state-128-c32": ("state", {"chunk_size": 32, "state_dtype": torch.bfloat16}),
    "state-granite": (
        "state",
        {
            "key_size": 256,
            "value_size": 64,
            "num_heads": 128,
            "num_key_heads": 1,
            "update": "add",
            "skip": True,
        },
    ),
    "state-mamba2": ("state", {**_MAMBA2, "skip": True}),
    "fused-64": ("fused", {**_SMALL, "form": "delta"}),
    "fused-128-whole": ("fused", {"num_reqs": 32, "form": "delta"}),
    "fused-128": ("fused", {"max_rollback": 3, "form": "delta"}),
    "fused-128-channels": ("fused", {**_CHANNELS, "form": "kimi"}),
    "fused-mamba2": ("fused", {**_MAMBA2, "skip": True, "conv_channels": 10240, "form": "mamba2"}),
    "state-128-long": ("state", {"long_chunk": 32}),
    "state-128-long-channels": ("state", {**_CHANNELS, "long_chunk": 32}),
    "state-64-long": (
        "state",
        {
            "key_size": 64,
            "value_size": 192,
            "update": "add",
            "decay": "constant",
            "skip": True,
            "long_chunk": 32,
        },
    ),
    "state-64-long-channels": (
        "state",
        {**_CHANNELS, **_SMALL, "state_dtype": torch.bfloat16, "max_rollback": 3, "long_chunk": 32},
    ),
    "state-mamba2-long": ("state", {**_MAMBA2, "long_chunk": 32}),
    "state-128-chunks": ("state", _INVARIANT),
    "state-128-chunks-channels": ("state", {**_CHANNELS, **_INVARIANT}),
    "state-64-chunks": (
        "state",
        {**_INVARIANT, "key_size": 64, "value_size": 192, "chunk_size": 32},
    ),
    "state-mamba2-chunks": (
        "state",
        {**_MAMBA2, **_INVARIANT, "skip": True, "state_dtype": torch.bfloat16},
    ),
    "state-64-rows": ("state", {**_SMALL, **_ROWS}),
    "state-128-rows": ("state", _ROWS),
    "state-128-channels-rows": ("state", {**_CHANNELS, **_ROWS}),
    "state-mamba2-rows": ("state", {**_MAMBA2, **_ROWS, "skip": True}),
    "fused-128-rows": ("fused", {**_ROWS, "form": "delta"}),
    "state-128-copied": ("state", _COPIED),
    "state-64-copied": ("state", {**_SMALL, **_COPIED, "dtype": torch.float16}),
    "state-128-few-copied": ("state", {"row_decodes": True, "copied_decodes": True}),
    "state-128-channels-copied": ("state", {**_CHANNELS, **_COPIED}),
    "state-mamba2-copied": ("state", {**_MAMBA2, **_COPIED, "skip": True}),
    "fused-128-copied": ("fused", {**_COPIED, "form": "delta"}),
    "fused-128-channels-copied": (
        "fused",
        {**_CHANNELS, **_COPIED, "conv_channels": 12288, "form": "kimi"},
    ),
    "fused-mamba2-copied": (
        "fused",
        {**_MAMBA2, **_COPIED, "skip": True, "conv_channels": 10240, "form": "mamba2"},
    ),
    "state-128-copied-drafts": ("state", {**_COPIED, "max_rollback": 3, "tokens": 4}),
    "fused-128-channels-copied-drafts": (
        "fused",
        {
            **_CHANNELS,
            **_COPIED,
            "conv_channels": 12288,
            "form": "kimi",
            "max_rollback": 3,
            "tokens": 4,
        },
    ),
    "state-256": ("state", {"key_size": 256, "value_size": 256, "dtype": torch.float16}),
}
"""Name -> (operation, options) of one decode and one prefill; of a decode with `fused`. With
"whole", the heads of the requests fill a chip; with "long_chunk", prefills on Hopper compute so
many tokens at a time and, with "is_invariant", a chunk of the slots, decodes too; with
"row_decodes", decodes have this form, and there is no prefill; with "copied_decodes", they copy
states to shared memory on Hopper."""


def _slots(options: dict[str, Any]) -> tuple[StateTensors, StateBatch, StateBatch]:
    """Slots, and a batch of decodes and one of prefills."""
    options = dict(options)
    num_reqs, tokens = options.pop("num_reqs", 2), options.pop("tokens", 1)
    layout = StateLayout(
        **{
            "form": "tail", "num_heads": 32, "num_key_heads": 16, "key_size": 128,
            "value_size": 128, "decay": "head", "has_beta": True, "conv_channels": 8192,
            "conv_width": 4, "dtype": torch.bfloat16, "state_dtype": torch.float32,
            "max_rollback": 0, "chunk_size": 16, **options,
        }
    )  # fmt: skip
    slots = StateTensors.from_bytes(layout, torch.empty(1, layout.bytes_per_slot).byte())
    zeros = torch.zeros(num_reqs + 1, dtype=torch.int32)
    decode, prefill = (
        StateBatch(query_start_loc=zeros, seq_lens=zeros[1:], slots=zeros[1:], max_query_len=n)
        for n in (tokens, 4096)
    )
    return slots, decode, prefill


def _never(*facts: Any) -> bool:
    return False


def run_convolution(options: dict[str, Any]) -> None:
    """A decode and a prefill."""
    options = dict(options)
    has_bias, activation = options.pop("bias", False), options.pop("activation", "silu")
    slots, *batches = _slots(options)
    x = torch.empty(64, slots.layout.conv_channels, dtype=slots.layout.dtype)
    weight = torch.empty(x.shape[1], slots.layout.conv_width, dtype=x.dtype)
    bias = weight[:, 0].contiguous() if has_bias else None
    for batch in batches:
        taps = Taps(weight, bias, activation)
        short_convolution(x, taps, slots, batch, out=torch.empty_like(x))


def run_state(options: dict[str, Any]) -> None:
    """A decode and a prefill."""
    options = dict(options)
    update, has_skip = options.pop("update", "delta"), options.pop("skip", False)
    chunk, is_row = options.pop("long_chunk", 0), options.pop("row_decodes", False)
    is_invariant = options.pop("is_invariant", not (chunk or is_row))
    can_copy = state_tiles.can_copy if options.pop("copied_decodes", False) else _never
    slots, decode, prefill = _slots(options)
    layout = slots.layout
    query = torch.empty(64, layout.num_key_heads, layout.key_size, dtype=layout.dtype)
    value = torch.empty(64, layout.num_heads, layout.value_size, dtype=layout.dtype)
    shapes = {"constant": value.shape[1:2], "channel": (*value.shape[:2], layout.key_size)}
    decay, beta = torch.empty(shapes.get(layout.decay, value.shape[:2])), torch.empty(64, 1)
    params = RecurrenceParams(
        scale=0.1, update=update, qk_norm=update == "delta", skip=decay if has_skip else None,
        is_invariant=is_invariant,
    )  # fmt: skip
    chunks = patch.object(state_tiles, "LONG_CHUNK", chunk)
    copies = patch.object(state_tiles, "can_copy", can_copy)
    with chunks, copies:
        for batch in (decode,) if is_row else (decode, prefill):
            given = StateInputs(query, query.clone(), value, decay, beta.expand(value.shape[:2]))
            state_step.state_step(given, slots, batch, params, out=torch.empty_like(value))


def run_fused(options: dict[str, Any]) -> None:
    """A decode in one launch, and the launches of gates and norm."""
    options = dict(options)
    kind, update = options.pop("form"), options.pop("update", "delta")
    has_skip, is_row = options.pop("skip", False), options.pop("row_decodes", False)
    can_copy = state_tiles.can_copy if options.pop("copied_decodes", False) else _never
    slots, batch, _ = _slots(options)
    layout = slots.layout
    heads, dtype = layout.num_heads, layout.dtype
    decays = (heads, layout.key_size) if layout.decay == "channel" else (heads,)
    weight = torch.empty(layout.conv_channels, layout.conv_width, dtype=dtype)
    form = StepForm(
        rate=torch.empty(heads), bias=torch.empty(decays),
        norm_weight=torch.empty(FORMS[kind]["norm_size"], dtype=dtype), **FORMS[kind],
    )  # fmt: skip
    x = torch.empty(64, layout.conv_channels, dtype=dtype)
    a = torch.empty(64, *decays, dtype=dtype)
    b = None if kind == "mamba2" else torch.empty(64, heads, dtype=dtype)
    out = torch.empty(64, heads, layout.value_size, dtype=dtype)
    inputs = FusedInputs(x, a, b, out.flatten(1).clone(), form)
    params = RecurrenceParams(
        scale=0.1,
        update=update,
        qk_norm=update == "delta",
        skip=form.rate if has_skip else None,
        is_invariant=not is_row,
    )
    given = (inputs, Taps(weight, None, "silu"), slots, batch)
    with patch.object(state_tiles, "can_copy", can_copy):
        PreparedFusedStep(*given, params, out).run(*given, params.skip, out)
    state_gates(a, b, form)
    gated_norm(out, inputs.z, form)
