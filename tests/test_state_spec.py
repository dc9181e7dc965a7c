"""The spec of state layers validates itself and is a hashable value."""

from __future__ import annotations

import pickle
import re
from typing import Any

import pytest
import torch

from attnlib.errors import ContractError
from attnlib.spec import StateSpec

GDN: dict[str, Any] = {
    "num_heads": 32, "num_key_heads": 16, "key_size": 128, "value_size": 128,
    "conv_channels": 8192, "conv_width": 4, "dtype": torch.bfloat16,
}  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_heads": 31}, "num_heads=31 is not a multiple of num_key_heads=16"),
        ({"num_heads": -1}, "num_heads=-1 must be an integer of at least 0"),
        ({"num_heads": 2.0}, "num_heads=2.0 must be an integer"),
        ({"key_size": 0}, "key_size=0 must be at least 1"),
        ({"value_size": True}, "value_size=True must be an integer"),
        ({"num_heads": 0}, "num_key_heads=16 with num_heads=0"),
        ({"update": "replace"}, "update='replace' must be 'delta' or 'add'"),
        ({"decay": "token"}, "decay='token' must be 'head' or 'channel' or 'constant'"),
        ({"has_beta": 1}, "has_beta=1 must be True or False"),
        ({"qk_norm": None}, "qk_norm=None must be"),
        ({"conv_width": 1}, "conv_width=1 with conv_channels=8192 must be at least 2"),
        ({"conv_channels": 0}, "conv_width=4 and has_conv_bias=False with conv_channels=0"),
        ({"conv_activation": "gelu"}, "conv_activation='gelu' must be 'silu' or None"),
        ({"dtype": torch.int32}, "dtype=torch.int32 must be a floating-point"),
        ({"state_dtype": torch.float16}, "state_dtype=torch.float16 must be torch.float32 or"),
        ({"max_rollback": -1}, "max_rollback=-1 must be"),
        ({"chunk_size": 8}, "chunk_size=8 must be a power of two of at least 16"),
        ({"chunk_size": 48}, "chunk_size=48 must be a power of two"),
        ({"form": "ring"}, "form='ring' must be 'plain' or 'snapshots' or 'tail' or None"),
        ({"form": "plain", "max_rollback": 3}, "form='plain' with max_rollback=3"),
        ({"form": "plain", "batch_invariant": True}, "form='plain' with batch_invariant=True"),
        ({"form": "snapshots", "batch_invariant": True}, "needs form='tail'"),
        ({"cudagraph": 9}, "cudagraph=9 is not known"),
    ],
)
def test_refused_values(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ContractError, match=re.escape(message)):
        StateSpec(**{**GDN, **wrong})


def test_nothing_at_all() -> None:
    with pytest.raises(ContractError, match="has a recurrence, a convolution, or both"):
        StateSpec(dtype=torch.float32)


def test_a_value() -> None:
    spec = StateSpec(**GDN)
    assert spec == StateSpec(**GDN) and hash(spec) == hash(StateSpec(**GDN))
    assert spec != spec.replace(max_rollback=1)
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert str(StateSpec(num_heads=2, key_size=8, value_size=8, dtype=torch.float16)) == (
        "StateSpec(num_heads=2, key_size=8, value_size=8, dtype=torch.float16)"
    )
    assert spec.group_size == 2 and spec.default_scale == 128**-0.5


@pytest.mark.parametrize(
    ("changes", "forms"),
    [
        ({}, ["plain", "snapshots", "tail"]),
        ({"max_rollback": 3}, ["snapshots", "tail"]),
        ({"batch_invariant": True}, ["tail"]),
        ({"form": "snapshots"}, ["snapshots"]),
    ],
)
def test_forms(changes: dict[str, Any], forms: list[str]) -> None:
    spec = StateSpec(**GDN, **changes)
    assert [form for form in ("plain", "snapshots", "tail") if spec.fits(form)] == forms


def test_forms_of_a_convolution_alone() -> None:
    """Its window takes tokens back in every form."""
    spec = StateSpec(conv_channels=8, conv_width=3, dtype=torch.float32, max_rollback=2)
    assert not spec.has_recurrence and spec.fits("plain")
    assert not spec.replace(batch_invariant=True).fits("plain")
