"""Kernel choice, bounds and schedules of a batch."""

from __future__ import annotations

import pytest
import torch

from attnlib.backends.flash_attn.impl import FlashAttnImpl
from attnlib.backends.flash_attn.probe import find_kernels
from attnlib.errors import BackendUnavailableError, ContractError, UnsupportedConfigError
from attnlib.workspace import BatchLimits
from tests.backends import fake_flash_attn as fakes
from tests.backends.flash_attn.adapter import (
    builder_for,
    install,
    install_fa2,
    install_fa3,
    install_vllm,
    run,
    spec_of,
)
from tests.backends.steps import make_step


def test_builder_refuses_unsupported_specs(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder
) -> None:
    """The builder refuses with the reasons of selection."""
    with pytest.raises(BackendUnavailableError, match="pip install"):
        builder_for(monkeypatch, spec_of())
    install_fa2(monkeypatch, record)
    find_kernels.cache_clear()
    with pytest.raises(UnsupportedConfigError, match="multiples of 256"):
        builder_for(monkeypatch, spec_of())


def test_fa2_query_bound(monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder) -> None:
    """M7: with a bound of 1 FlashAttention 2 takes row r for request r."""
    install_fa2(monkeypatch, record)
    spec = spec_of(block_size=256, needs_lse=False)
    step = make_step(spec, [1, 0, 1], [30, 4, 9])
    run(monkeypatch, step)
    assert record.last["max_seqlen_q"] == 2
    uniform = make_step(spec, [1, 1, 1], [30, 4, 9])
    assert builder_for(monkeypatch, spec).build(0, uniform.common).query_bound == 1
    unknown = uniform.common.replace(query_start_loc_cpu=None, seq_lens_cpu=None)
    assert builder_for(monkeypatch, spec).build(0, unknown).query_bound == 2
    assert (
        builder_for(monkeypatch, spec).build_for_cudagraph_capture(uniform.common).query_bound == 2
    )


@pytest.mark.parametrize("build", ["fa2", "fa3"])
def test_the_bounds_are_enough(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder, build: str
) -> None:
    """A batch without lengths on the host gives the rows of one with them."""
    install(monkeypatch, record, build)
    step = make_step(spec_of(block_size=256 if build == "fa2" else 16), [1, 1, 12], [40, 3, 30])
    step.common = step.common.replace(
        query_start_loc_cpu=None, seq_lens_cpu=None, num_computed_tokens_cpu=None
    )
    out, lse = run(monkeypatch, step, padding=3, scale=0.3)
    expected, expected_lse = step.expected(scale=0.3)
    torch.testing.assert_close(out[:14], expected)
    torch.testing.assert_close(lse[:14], expected_lse)
    assert (out[14:] == 0).all()


def test_schedule_is_made_once_per_batch(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder
) -> None:
    """G3: at a fixed address with limits; its arguments are those of the call."""
    install_vllm(monkeypatch, record)
    spec = spec_of(sliding_window=8, logits_soft_cap=5.0)
    builder = builder_for(
        monkeypatch, spec, limits=BatchLimits(max_num_reqs=8, max_num_tokens=64, max_seq_len=64)
    )
    step = make_step(spec, [1, 1], [30, 4])
    first, second = builder.build(0, step.common), builder.build(0, step.common)
    assert first.scheduler_metadata is not None and second.scheduler_metadata is not None
    assert first.scheduler_metadata.data_ptr() == second.scheduler_metadata.data_ptr()
    out, lse = step.outputs()
    impl = FlashAttnImpl(spec)
    impl.forward(step.query, step.cache, second, out, lse)
    impl.forward(step.query, step.cache, second, out, lse)
    scheduled, call = record.scheduled[-1], record.last
    assert len(record.scheduled) == 2
    assert call["scheduler_metadata"] is second.scheduler_metadata
    assert (
        scheduled["window_size"] == call["window_size"] == (7, 0)
        and scheduled["has_softcap"] is True
        and scheduled["page_size"] == 16
    )
    assert (
        scheduled["max_seqlen_q"] == call["max_seqlen_q"]
        and scheduled["max_seqlen_k"] == call["max_seqlen_k"] == 30
    )
    assert builder.build(0, step.common, fast_build=True).scheduler_metadata is None


def test_batches_of_a_captured_size_keep_its_bound(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder
) -> None:
    """G1: the captured kernel and the schedule of a replay have equally many splits, which follow
    from the bound."""
    install_vllm(monkeypatch, record)
    spec = spec_of()
    builder = builder_for(
        monkeypatch, spec, limits=BatchLimits(max_num_reqs=8, max_num_tokens=64, max_seq_len=512)
    )
    pair = make_step(spec, [1, 1], [30, 4]).common
    assert builder.build(0, pair).key_bound == 30
    builder.build_for_cudagraph_capture(pair.replace(max_seq_len=512))
    assert builder.build(0, pair).key_bound == record.scheduled[-1]["max_seqlen_k"] == 512
    others = make_step(spec, [1, 1, 1], [30, 4, 6]).common, make_step(spec, [2, 1], [30, 4]).common
    for other in others:
        assert builder.build(0, other).key_bound == record.scheduled[-1]["max_seqlen_k"] == 30


def test_cumulative_lengths_have_a_fixed_address(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder
) -> None:
    """G3: graphs read the cumulative sum of lengths that FlashAttention 2 takes."""
    install_fa2(monkeypatch, record)
    spec = spec_of(block_size=256)
    builder = builder_for(
        monkeypatch, spec, limits=BatchLimits(max_num_reqs=8, max_num_tokens=64, max_seq_len=512)
    )
    first = builder.build(0, make_step(spec, [1, 1], [30, 4]).common).key_start_loc
    second = builder.build(0, make_step(spec, [1, 1, 1], [7, 4, 300]).common).key_start_loc
    assert first is not None and second is not None and first.data_ptr() == second.data_ptr()
    assert second.tolist() == [0, 7, 11, 311]


def test_schedule_depends_on_table_width(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder
) -> None:
    """Without an argument for the longest sequence the table width is the bound of both calls."""
    install_fa3(monkeypatch, record)
    step = make_step(spec_of(), [1, 1], [40, 4])
    builder = builder_for(monkeypatch, step.spec)
    built = builder.build(0, step.common)
    assert record.scheduled[-1]["max_seqlen_k"] == 3 * 16
    table = step.common.block_table_tensor
    assert table is not None and step.common.slot_mapping is not None
    same = builder.update_block_table(built, table.clone(), step.common.slot_mapping)
    wider = builder.update_block_table(
        built, torch.cat([table, table], 1), step.common.slot_mapping
    )
    assert (
        same.scheduler_metadata is not None
        and wider.scheduler_metadata is None
        and wider.key_bound == 6 * 16
    )


def test_causal_per_request_is_refused(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder
) -> None:
    """FlashAttention has one causal flag per call."""
    install_fa3(monkeypatch, record)
    step = make_step(spec_of(), [1, 1], [30, 4])
    with pytest.raises(ContractError, match="per_request"):
        builder_for(monkeypatch, step.spec).build(
            0, step.common.replace(causal=torch.tensor([True, False]))
        )


def test_fields_that_were_planned_with_cannot_be_assigned(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder
) -> None:
    """Bounds, schedules and plans would not follow the assignment."""
    install_fa3(monkeypatch, record)
    step = make_step(spec_of(), [1, 1], [30, 4])
    built = builder_for(monkeypatch, step.spec).build(0, step.common)
    for name in ("block_table", "seq_lens", "causal"):
        with pytest.raises(ContractError, match=f"{name} of a .* cannot be assigned"):
            setattr(built, name, getattr(built, name))
