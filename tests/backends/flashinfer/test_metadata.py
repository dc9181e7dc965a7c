"""Plans of a batch: groups of layers, lifetimes, captured graphs."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from attnlib.device import DeviceInfo
from attnlib.errors import BackendUnavailableError, ContractError, UnsupportedConfigError
from attnlib.metadata.parameters import PerLayerParameters
from attnlib.metadata.state import AttentionState
from attnlib.spec import AttentionSpec
from attnlib.workspace import BatchLimits
from tests.backends import fake_flashinfer as fakes
from tests.backends.flashinfer.adapter import A100, H200, builder_for, run, spec_of
from tests.backends.steps import make_step


def test_builder_without_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The builder raises with an install command."""
    with pytest.raises(BackendUnavailableError, match="pip install flashinfer-python"):
        builder_for(monkeypatch, spec_of())


def test_one_plan_per_group_of_layers(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder
) -> None:
    """F2: layers with equal windows and soft caps share a plan; scales may differ."""
    layers = {
        "layers.0": PerLayerParameters(4, None, 0.125, 0),
        "layers.1": PerLayerParameters(-1, None, 0.125),
        "layers.2": PerLayerParameters(-1, None, 0.5),
        "layers.3": PerLayerParameters(-1, 3.0, 0.125),
    }
    step = make_step(spec_of(), [1, 6], [30, 20])
    built = builder_for(monkeypatch, step.spec, layers=layers).build(0, step.common)
    assert len(built.decode_plans) == len(built.prefill_plans) == 3
    specs = [spec_of(sliding_window=5), spec_of(), spec_of(), spec_of(logits_soft_cap=3.0)]
    for spec, parameters in zip(specs, layers.values(), strict=True):
        out, lse = run(monkeypatch, step, built, spec=spec, scale=parameters.sm_scale)
        expected, expected_lse = step.expected(spec=spec, scale=parameters.sm_scale)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(lse, expected_lse)
    with pytest.raises(
        UnsupportedConfigError, match="layer layers.9 needs a plan for .*window_left=7"
    ):
        run(monkeypatch, step, built, spec=spec_of(sliding_window=8), prefix="layers.9")


def test_window_after_the_query_is_refused(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder
) -> None:
    """The message names the layer."""
    with pytest.raises(UnsupportedConfigError, match="layer layers.7 sees 3 keys after"):
        builder_for(
            monkeypatch,
            spec_of(),
            layers={
                "layers.0": PerLayerParameters(-1, None, 0.1),
                "layers.7": PerLayerParameters(3, None, 0.1, 3),
            },
        )


def test_plans_in_use_are_not_overwritten(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder
) -> None:
    """G4: a second build does not change the first batch; unused wrappers are reused."""
    builder = builder_for(monkeypatch, spec_of())
    first, second = (
        make_step(spec_of(), [1, 4], [30, 20], seed=1),
        make_step(spec_of(), [1, 1], [9, 17], seed=2),
    )
    built_first, built_second = builder.build(0, first.common), builder.build(0, second.common)
    for step, built in ((first, built_first), (second, built_second), (first, built_first)):
        torch.testing.assert_close(run(monkeypatch, step, built)[0], step.expected()[0])
    made = len(record.made)
    del built_first, built_second, built, step
    gc.collect()
    for _ in range(5):
        builder.build(0, first.common)
    assert len(record.made) == made


def test_update_block_table_plans_again(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder
) -> None:
    """Page ids are part of the plan."""
    step = make_step(spec_of(), [1, 4], [30, 20])
    builder = builder_for(monkeypatch, step.spec)
    built = builder.build(0, step.common)
    table, slots = step.common.block_table_tensor, step.common.slot_mapping
    assert table is not None and slots is not None
    step.common = step.common.replace(block_table_tensor=table.flip(0).contiguous())
    updated = builder.update_block_table(built, step.common.block_table_tensor, slots)
    torch.testing.assert_close(run(monkeypatch, step, updated)[0], step.expected()[0])


def test_graph_buffers_are_reused(monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder) -> None:
    """G1, G3, M7: capture with 4 requests and replay with 3: same buffers, padding rows 0."""
    spec = spec_of()
    limits = BatchLimits(max_num_reqs=4, max_num_tokens=4, max_seq_len=64)
    builder = builder_for(monkeypatch, spec, limits=limits)
    state = AttentionState(builder, limits)
    captured = state.graph_capture_get_metadata_for_batch(4)
    (lease,) = captured.decode_plans.values()
    addresses = [buffer.data_ptr() for buffer in lease.wrapper.buffers]
    step = make_step(spec, [1, 1, 1], [40, 1, 17])
    built = builder.build(0, state.begin_forward(step.common, 4))
    (again,) = built.decode_plans.values()
    assert (
        again is lease
        and lease.wrapper.graph
        and [buffer.data_ptr() for buffer in lease.wrapper.buffers] == addresses
    )
    assert lease.wrapper.buffers[0].tolist() == [0, 3, 4, 6, 6] and lease.wrapper.buffers[
        2
    ].tolist() == [8, 1, 1, 1]
    out, lse = run(monkeypatch, step, built, padding=1)
    torch.testing.assert_close(out[:3], step.expected()[0])
    assert (out[3] == 0).all() and torch.isneginf(lse[3]).all()
    eager = builder.build(0, step.common)
    assert next(iter(eager.decode_plans.values())) is not lease


def test_capture_needs_single_tokens(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder
) -> None:
    """Longer queries cannot be captured."""
    limits = BatchLimits(max_num_reqs=4, max_num_tokens=8, max_seq_len=64)
    builder = builder_for(monkeypatch, spec_of(), limits=limits)
    state = AttentionState(builder, limits)
    with pytest.raises(UnsupportedConfigError, match="single-token decodes only"):
        state.graph_capture_get_metadata_for_batch(4, query_len=2)


def test_prefill_kernels(monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder) -> None:
    """fa3 on Hopper, unless there is a window or a float8 cache; settings have precedence."""
    step = make_step(spec_of(), [5], [20])

    def kind(spec: AttentionSpec, device: DeviceInfo, **config: Any) -> str:
        built = builder_for(monkeypatch, spec, device, config=config).build(0, step.common)
        (lease,) = built.prefill_plans.values()
        return str(lease.wrapper.backend)

    assert kind(spec_of(), H200) == "fa3" and kind(spec_of(), A100) == "fa2"
    assert kind(spec_of(), H200, prefill_backend="fa2") == "fa2"
    assert (
        kind(spec_of(sliding_window=8), H200) == "fa2"
        and kind(spec_of(sliding_window=8), H200, prefill_backend="fa3") == "fa3"
    )
    assert kind(spec_of(kv_cache_dtype="fp8"), H200) == "fa2"


def test_causal_per_request_is_refused(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder
) -> None:
    """FlashInfer has one causal flag per plan."""
    step = make_step(spec_of(), [1, 1], [30, 4])
    with pytest.raises(ContractError, match="per_request"):
        builder_for(monkeypatch, step.spec).build(
            0, step.common.replace(causal=torch.tensor([True, False]))
        )


def test_fields_that_were_planned_with_cannot_be_assigned(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder
) -> None:
    """Bounds, schedules and plans would not follow the assignment."""
    step = make_step(spec_of(), [1, 1], [30, 4])
    built = builder_for(monkeypatch, step.spec).build(0, step.common)
    for name in ("block_table", "seq_lens", "causal"):
        with pytest.raises(ContractError, match=f"{name} of a .* cannot be assigned"):
            setattr(built, name, getattr(built, name))
