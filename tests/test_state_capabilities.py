"""Every field of a state spec is checked against what a backend declares, and fails closed."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import attnlib
from attnlib.backends.torch import TorchBackend
from attnlib.capabilities import (
    NOT_STATED,
    STATE_CHECKS,
    Sizes,
    StateCapabilities,
    unsupported_reasons,
)
from attnlib.device import DeviceInfo
from attnlib.errors import RegistrationError, UnsupportedConfigError
from attnlib.selection import register_backend, select_for_groups, unregister_backend
from attnlib.spec import CudaGraphSupport, StateSpec
from attnlib.testing.states.kinds import KINDS

CPU = DeviceInfo("cpu")
EVERYTHING = dataclasses.replace(
    TorchBackend.state_capabilities, cudagraph=CudaGraphSupport.ALWAYS, max_rollback=8
)
BASE: dict[str, Any] = {
    "num_heads": 8, "num_key_heads": 2, "key_size": 64, "value_size": 32, "conv_channels": 48,
    "conv_width": 4, "dtype": torch.bfloat16,
}  # fmt: skip

CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "num_key_heads": (
        {}, {"group_sizes": Sizes(1, 2)},
        "num_heads/num_key_heads=4 not supported (supported: from 1 to 2)",
    ),
    "key_size": (
        {}, {"key_sizes": Sizes(exactly=(128,))}, "key_size=64 not supported (supported: 128)"
    ),
    "value_size": (
        {}, {"value_sizes": Sizes(64)}, "value_size=32 not supported (supported: from 64 up)"
    ),
    "update": ({}, {"updates": ("add",)}, "update=delta not supported (supported: add)"),
    "decay": (
        {"decay": "channel"}, {"decays": ("head", "constant")},
        "decay=channel not supported (supported: head, constant)",
    ),
    "has_beta": ({}, {"beta": False}, "a beta per token: not supported"),
    "has_skip": ({"has_skip": True}, {"skip": False}, "skip * v: not supported"),
    "qk_norm": ({"qk_norm": True}, {"qk_norm": False}, "qk_norm=True: not supported"),
    "conv_width": (
        {}, {"conv_widths": Sizes(2, 3)}, "conv_width=4 not supported (supported: from 2 to 3)"
    ),
    "conv_activation": (
        {"conv_activation": None}, {"conv_activations": ("silu",)},
        "conv_activation=none not supported (supported: silu)",
    ),
    "has_conv_bias": (
        {"has_conv_bias": True}, {"conv_bias": False}, "a convolution with a bias: not supported"
    ),
    "dtype": (
        {}, {"dtypes": (torch.float16,)}, "dtype=bfloat16 not supported (supported: float16)"
    ),
    "state_dtype": (
        {}, {"state_dtypes": (torch.bfloat16,)},
        "state_dtype=float32 not supported (supported: bfloat16)",
    ),
    "max_rollback": (
        {"max_rollback": 7}, {"max_rollback": 3}, "max_rollback=7 not supported (up to 3)"
    ),
    "batch_invariant": (
        {"batch_invariant": True}, {"batch_invariant": False},
        "batch_invariant=True: not supported",
    ),
    "chunk_size": (
        {"chunk_size": 64, "form": "tail"}, {"chunk_sizes": Sizes(16, 32)},
        "chunk_size=64 not supported (supported: from 16 to 32)",
    ),
    "form": (
        {"form": "snapshots"}, {"forms": ("plain", "tail")},
        "form=snapshots not supported (supported: plain, tail)",
    ),
    "cudagraph": (
        {"cudagraph": CudaGraphSupport.ALWAYS}, {"cudagraph": CudaGraphSupport.UNIFORM_BATCH},
        "cudagraph=ALWAYS not supported (up to UNIFORM_BATCH)",
    ),
}  # fmt: skip


def test_every_field_has_exactly_one_check() -> None:
    assert list(STATE_CHECKS) == [
        name
        for name in STATE_CHECKS
        if name in {field.name for field in dataclasses.fields(StateSpec)}
    ]
    assert set(STATE_CHECKS) == {field.name for field in dataclasses.fields(StateSpec)}
    assert set(CASES) == set(STATE_CHECKS) - {"num_heads", "conv_channels"}


@pytest.mark.parametrize("field", CASES)
def test_a_reason_names_the_value_and_the_limit(field: str) -> None:
    needed, limit, message = CASES[field]
    spec = StateSpec(**{**BASE, **needed})
    assert unsupported_reasons(spec, CPU, EVERYTHING) == []
    (reason,) = unsupported_reasons(spec, CPU, dataclasses.replace(EVERYTHING, **limit))
    assert (reason, reason.field) == (message, field)


@pytest.mark.parametrize("field", CASES)
def test_what_is_not_stated_is_unsupported(field: str) -> None:
    needed, limit, _ = CASES[field]
    silent = dataclasses.replace(EVERYTHING, **dict.fromkeys(limit, NOT_STATED))
    reasons = unsupported_reasons(StateSpec(**{**BASE, **needed}), CPU, silent)
    assert any("not stated" in reason for reason in reasons)


def test_what_no_form_can_do() -> None:
    plain = dataclasses.replace(EVERYTHING, forms=("plain",))
    (reason,) = unsupported_reasons(StateSpec(**BASE, max_rollback=2), CPU, plain)
    assert reason.field == "max_rollback" and "needs another form than plain" in reason
    (reason,) = unsupported_reasons(StateSpec(**BASE, batch_invariant=True), CPU, plain)
    assert reason.field == "batch_invariant" and "needs form='tail'" in reason


def test_a_convolution_alone_needs_no_recurrence() -> None:
    caps = StateCapabilities(
        devices=("cpu",), dtypes=(torch.float32,), conv_widths=Sizes(2),
        conv_activations=("none",), conv_bias=False, forms=("plain",), max_rollback=0,
    )  # fmt: skip
    assert unsupported_reasons(KINDS["short convolution"], CPU, caps) == []


def test_devices() -> None:
    caps = dataclasses.replace(EVERYTHING, devices=("cuda",), min_capability=(9, 0))
    spec = StateSpec(**BASE)
    assert unsupported_reasons(spec, CPU, caps) == ["device cpu not supported (supported: cuda)"]
    assert unsupported_reasons(spec, CPU, StateCapabilities()) == ["serves no state layers"]


def test_wrong_types() -> None:
    with pytest.raises(RegistrationError, match="capability forms='tail' must be a tuple of str"):
        StateCapabilities(forms="tail")


class _OnlyStates(attnlib.AttentionBackend):
    """Serves no attention layer."""

    state_capabilities = TorchBackend.state_capabilities

    @staticmethod
    def get_name() -> str:
        return "only_states"

    get_state_impl_cls = TorchBackend.get_state_impl_cls


def test_a_backend_of_state_layers_alone() -> None:
    """It is registered, selected and explained as others are."""
    spec = KINDS["gla"]
    register_backend("only_states", _OnlyStates, priority=500)
    try:
        assert attnlib.get_attn_backend(spec, device="cpu").get_name() == "only_states"
        report = attnlib.explain(spec, "cpu")
        assert report.chosen == "only_states"
        assert "only_states     chosen       slots:   plain" in str(report)
        attention = attnlib.AttentionSpec(num_heads=2, head_size=16, dtype=torch.float32)
        assert attnlib.get_attn_backend(attention, device="cpu").get_name() == "torch"
        with pytest.raises(UnsupportedConfigError, match="serves no attention layers"):
            attnlib.get_attn_backend(attention, "only_states", "cpu")
    finally:
        unregister_backend("only_states")
    with attnlib.use_backend(_OnlyStates):
        assert attnlib.get_attn_backend(spec, device="cpu") is _OnlyStates


def test_refused_backends() -> None:
    class NoImpl(_OnlyStates):
        get_state_impl_cls = attnlib.AttentionBackend.get_state_impl_cls

    class Wrong(_OnlyStates):
        get_state_impl_cls = staticmethod(lambda: attnlib.StateImpl)

    class NoDeclaration(_OnlyStates):
        state_capabilities = {}

    for backend, message in (
        (NoImpl, "define get_state_impl_cls"),
        (Wrong, "it must return a subclass of attnlib.StateImpl"),
        (NoDeclaration, "it must be an attnlib.StateCapabilities"),
    ):
        with pytest.raises(RegistrationError, match=message):
            register_backend("wrong", backend)


def test_groups_of_both_kinds() -> None:
    """A hybrid model: state groups get their form, attention groups the layout."""
    attention = attnlib.AttentionSpec(num_heads=2, head_size=16, dtype=torch.float32)
    groups = {"linear": KINDS["gated delta"].replace(max_rollback=3), "full": attention}
    selected = select_for_groups(groups, device="cpu")
    assert selected.specs["linear"].form == "tail" and selected.specs["linear"].chunk_size == 16
    assert selected.specs["full"].kv_cache_layout == selected.layout == "NHD"
    alone = select_for_groups({"linear": groups["linear"]}, device="cpu")
    assert alone.layout is None and alone.specs["linear"].form == "tail"
