"""Bytes and views of slots."""

from __future__ import annotations

import pytest
import torch

from attnlib.errors import ContractError
from attnlib.ops.states import StateLayout, StateTensors

QWEN3_NEXT = {
    "num_heads": 32, "num_key_heads": 16, "key_size": 128, "value_size": 128, "decay": "head",
    "has_beta": True, "conv_channels": 8192, "conv_width": 4, "dtype": torch.bfloat16,
    "state_dtype": torch.float32, "chunk_size": 16,
}  # fmt: skip


def layout(form: str, rollback: int = 0, **changes: object) -> StateLayout:
    return StateLayout(form=form, max_rollback=rollback, **{**QWEN3_NEXT, **changes})


@pytest.mark.parametrize(
    ("form", "rollback", "mib"), [("plain", 0, 2.06), ("snapshots", 3, 8.11), ("tail", 3, 2.40)]
)
def test_bytes(form: str, rollback: int, mib: float) -> None:
    """A state of 2 MiB, its window, positions, and what a form adds."""
    assert layout(form, rollback).bytes_per_slot / 2**20 == pytest.approx(mib, abs=0.01)


def test_fields_are_aligned_and_disjoint() -> None:
    for form in ("plain", "snapshots", "tail"):
        end = 0
        for field in layout(form, 5, key_size=10, value_size=6, conv_channels=9).fields:
            assert field.offset % 16 == 0 and field.offset >= end
            end = field.offset + field.num_bytes


def test_absent_fields() -> None:
    none = {"num_heads": 0, "num_key_heads": 0, "key_size": 0, "value_size": 0}
    names = [field.name for field in layout("plain", **none, has_beta=False).fields]
    assert names == ["window_positions", "window"]
    constant = layout("tail", decay="constant", has_beta=False, conv_channels=0, conv_width=0)
    assert [f.name for f in constant.fields] == ["positions", "state", "tail_key", "tail_value"]


def test_views_of_strided_slots() -> None:
    """Slots may be far apart, as the blocks of a pool are; views share the memory."""
    of = layout("tail", 3, conv_channels=8)
    pool = torch.zeros(5, of.bytes_per_slot + 512, dtype=torch.uint8)
    slots = StateTensors.from_bytes(of, pool[:, : of.bytes_per_slot])
    assert slots.num_slots == 5 and slots.device == pool.device
    assert slots.state.shape == (5, 1, 32, 128, 128)
    assert slots.tail_key.shape == (5, 16 + 8, 16, 128)
    assert slots.window.shape == (5, 4 + 3, 8)
    for field in of.fields:
        getattr(slots, field.name)[3].fill_(1)
    assert pool[3].any() and not pool[[0, 1, 2, 4]].any()
    assert not pool[3, of.bytes_per_slot :].any()


@pytest.mark.parametrize(
    "slots",
    [
        torch.zeros(2, 1 << 20, dtype=torch.uint8),
        torch.zeros(2, 1 << 22, dtype=torch.int8),
        torch.zeros(1 << 22, 2, dtype=torch.uint8).T,
        torch.zeros(2, (1 << 22) + 8, dtype=torch.uint8),
    ],
)
def test_refused_memory(slots: torch.Tensor) -> None:
    with pytest.raises(ContractError, match="they must be") as error:
        StateTensors.from_bytes(layout("plain"), slots)
    assert error.value.rule == "T15"
