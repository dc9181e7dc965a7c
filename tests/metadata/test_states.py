"""Metadata of state layers: slots in batches, the builder, buffers of CUDA graphs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import attnlib
from attnlib.capabilities import StateCapabilities
from attnlib.errors import ContractError
from attnlib.metadata import StateMetadata, StateMetadataBuilder
from attnlib.metadata.strides import refuse_strided
from attnlib.testing.states.kinds import KINDS

GDN = KINDS["gated delta"]
Common = attnlib.CommonAttentionMetadata


def batch(**changes: object) -> attnlib.CommonAttentionMetadata:
    given = {"state_slots": [4, 0, 2], "device": "cpu", **changes}
    return Common.from_lengths([3, 1, 0], [3, 9, 5], **given)


def test_fields() -> None:
    common = batch(state_sources=[4, 3, 2])
    assert common.state_slots.dtype == torch.int32 and common.state_slots.tolist() == [4, 0, 2]
    metadata = StateMetadataBuilder(GDN, "cpu").build(0, common)
    assert isinstance(metadata, StateMetadata) and metadata.max_query_len == 3
    requests = [tuple(request) for request in metadata.batch.requests()]
    assert requests == [(0, 0, 0, 3, 4, 4), (1, 3, 8, 9, 3, 0)]


def test_requests_without_tokens_write_nothing() -> None:
    """T11, T12: a fork may read the slot of a request that waits, in lists as in tensors."""
    sources = [9, 2, 2]  # the first request is new and reads no slot
    for kind in (list, torch.tensor):
        common = batch(state_sources=kind(sources))
        assert common.state_sources.tolist() == sources
    assert batch(state_slots=[4, 2, 2]).state_slots.tolist() == [4, 2, 2]


def test_requests_are_those_of_the_device() -> None:
    """Lengths on the host may be upper bounds, or 0."""
    for bound in ([6, 12, 8], [0, 0, 0]):
        common = batch().replace(
            seq_lens_cpu=torch.tensor(bound, dtype=torch.int32),
            num_computed_tokens_cpu=None,
            max_seq_len=12,
        )
        metadata = StateMetadataBuilder(GDN, "cpu", capabilities=_GRAPHS).build(0, common)
        assert [request.end for request in metadata.batch.requests()] == [3, 9]


def test_slots_of_a_part() -> None:
    part = batch(state_sources=[4, 3, 2]).slice_requests(1, 3)
    assert (part.state_slots.tolist(), part.state_sources.tolist()) == ([0, 2], [3, 2])


def test_other_slots_of_the_same_batch() -> None:
    """A layer whose states are in other blocks; plans follow, values derived from slots do not."""
    builder = StateMetadataBuilder(GDN, "cpu")
    metadata = builder.build(0, batch())
    _ = metadata.batch, metadata.plans.update(x=1), metadata.derived.update(x=1)
    other = metadata.with_slots(torch.tensor([7, 8, 9], dtype=torch.int32))
    assert [request.slot for request in other.batch.requests()] == [7, 8]
    assert other.plans is metadata.plans and not other.derived
    assert [request.slot for request in metadata.batch.requests()] == [4, 0]
    table = torch.tensor([[5, 1], [6, 1], [3, 1]], dtype=torch.int32)
    assert builder.update_block_table(metadata, table, None).state_slots.tolist() == [5, 6, 3]
    with pytest.raises(ContractError, match="state_slots is a list; it must be a tensor, int32"):
        metadata.with_slots([7, 8, 9])
    for wrong in (table[:2, 0], table[:, 0].long()):
        with pytest.raises(ContractError, match=r"state_slots is .* must be int32 \[3\]"):
            metadata.with_slots(wrong)
        with pytest.raises(ContractError, match="state_sources is"):
            metadata.with_slots(table[:, 0].contiguous(), wrong)


def test_kernels_read_contiguous_tensors() -> None:
    """Slots are often a column of a block table."""
    table = torch.tensor([[4, 8, 1], [0, 9, 2], [2, 7, 3]], dtype=torch.int32)
    common = replace(batch(), state_slots=table[:, 0], state_sources=table[:, 2])
    tensors = StateMetadataBuilder(GDN, "cpu").build(0, common).batch.tensors
    assert all(tensor.is_contiguous() for tensor in tensors)
    assert tensors[2].tolist() == [4, 0, 2] and tensors[3].tolist() == [1, 2, 3]
    for name in ("state_slots", "state_sources"):  # a replay would not copy them again
        with pytest.raises(ContractError, match=f"{name} has strides"):
            refuse_strided(replace(batch(state_sources=[4, 0, 2]), **{name: table[:, 0]}))


@pytest.mark.parametrize(
    ("changes", "message", "rule"),
    [
        ({"state_slots": [4, 4, 2]}, r"state_slots\[0\] and state_slots\[1\] are both 4", "T7"),
        ({"state_slots": [4, -2, 2]}, r"state_slots\[1\]=-2 is negative: pass a slot", "T7"),
        ({"state_slots": [4, 0.5, 2]}, "state_slots is torch.float32", "T7"),
        ({"state_slots": torch.tensor([4, 0.5, 2])}, "state_slots is torch.float32", "T7"),
        ({"state_slots": torch.tensor([4, 2**32, 2])}, "does not fit int32", "T7"),
        ({"state_slots": [4, 0]}, r"state_slots is int32 \[2\] on cpu; it must be int32", "T7"),
        ({"state_sources": [4, 4, 2]}, r"state_sources\[1\]=4 is the slot that request 0", "T12"),
        ({"state_slots": None, "state_sources": [1, 2, 3]}, "without state_slots", "T12"),
        ({"state_sources": [4, 3]}, r"state_sources is int32 \[2\]", "T7"),
    ],
)  # fmt: skip
def test_refused_slots(changes: dict[str, object], message: str, rule: str) -> None:
    with pytest.raises(ContractError, match=message) as error:
        batch(**changes)
    assert error.value.rule == rule


def test_padding_may_repeat() -> None:
    common = batch(state_slots=[-1, 3, -1])
    assert [
        request.slot
        for request in StateMetadataBuilder(GDN, "cpu").build(0, common).batch.requests()
    ] == [3]


def test_a_batch_without_slots() -> None:
    with pytest.raises(ContractError, match="the batch has no state_slots") as error:
        StateMetadataBuilder(GDN, "cpu").build(0, batch(state_slots=None))
    assert error.value.rule == "T7"


def test_values_of_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNLIB_VALIDATE", "1")
    common = batch()
    common.query_start_loc[1] = 9
    with pytest.raises(ContractError, match="query_start_loc"):
        StateMetadataBuilder(GDN, "cpu", capabilities=_GRAPHS).build(0, common)


_GRAPHS = StateCapabilities(
    cudagraph=attnlib.CudaGraphSupport.ALWAYS, needs_host_lengths=False, devices=("cpu",)
)


def test_graph_buffers() -> None:
    """Slots of a batch are copied, padding is -1, and without sources each slot reads itself."""
    limits = attnlib.BatchLimits(max_num_reqs=5, max_num_tokens=10, max_seq_len=64)
    builder = StateMetadataBuilder(GDN, "cpu", capabilities=_GRAPHS, limits=limits)
    assert builder.cudagraph_support is attnlib.CudaGraphSupport.ALWAYS
    state = attnlib.AttentionState(builder, limits).graph_clone(4)
    captured = state.graph_capture_get_metadata_for_batch(4)
    assert captured.state_slots.tolist() == [-1] * 4
    common = Common.from_lengths([1, 1], [3, 9], device="cpu", state_slots=[4, 0])
    state.begin_forward(common, 4)
    assert captured.state_slots.tolist() == captured.state_sources.tolist() == [4, 0, -1, -1]
    state.begin_forward(common.replace(state_sources=common.state_slots.flip(0) + 2), 4)
    assert captured.state_slots.tolist() == [4, 0, -1, -1]
    assert captured.state_sources.tolist() == [2, 6, -1, -1]
    assert captured.query_start_loc.tolist() == [0, 1, 2, 2, 2]
    buffers = state.get_graph_input_buffers()
    assert buffers["state_slots"].data_ptr() == captured.state_slots.data_ptr()


def test_no_graphs_with_torch() -> None:
    limits = attnlib.BatchLimits(max_num_reqs=5, max_num_tokens=10, max_seq_len=64)
    backend = attnlib.get_attn_backend(GDN, "torch", "cpu")
    state = attnlib.AttentionState(backend.make_builder(GDN, "cpu", limits=limits), limits)
    with pytest.raises(ContractError, match="cudagraph_support=NEVER"):
        state.graph_capture_get_metadata_for_batch(2)


def test_slots_in_lists_are_compared_by_value() -> None:
    """T7, T12: two tensors of one slot are one slot; lists of lists are none."""
    three, eight, nested = torch.tensor(3), torch.tensor(8), [[3], [8]]
    given: dict[str, Any]
    for given, message in (
        ({"state_slots": [three, three.clone()]}, "state_slots.* are both 3"),
        ({"state_slots": [three, eight], "state_sources": [eight.clone(), 5]}, "request 1 writes"),
        ({"state_slots": nested}, "state slot .* is a list; it must be an integer"),
        ({"state_slots": [3, 8], "state_sources": nested}, "state slot .* is a list"),
    ):
        with pytest.raises(ContractError, match=message):
            Common.from_lengths([1, 1], [3, 9], device="cpu", **given)
