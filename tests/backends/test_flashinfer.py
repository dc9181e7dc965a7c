"""The flashinfer adapter against a stand-in with the real signatures: availability, plans, page lists, results, leases."""

from __future__ import annotations

import gc
import os
import socket
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from attnlib.backends.flashinfer import FlashInferBackend, probe
from attnlib.backends.flashinfer import metadata as metadata_module
from attnlib.backends.flashinfer.impl import FlashInferImpl
from attnlib.backends.flashinfer.metadata import FlashInferMetadata, FlashInferMetadataBuilder
from attnlib.backends.flashinfer.plans import WrapperPool, list_pages
from attnlib.backends.flashinfer.probe import find_api, toolchain_problems
from attnlib.device import DeviceInfo
from attnlib.errors import BackendUnavailableError, ContractError, UnsupportedConfigError
from attnlib.metadata.parameters import PerLayerParameters
from attnlib.metadata.state import AttentionState
from attnlib.spec import AttentionSpec, CudaGraphSupport, MaskKind, Window
from attnlib.workspace import BatchLimits
from tests.backends import fake_flashinfer as fakes
from tests.backends.steps import Step, make_step

H200 = DeviceInfo("cuda", 0, (9, 0), name="NVIDIA H200")
A100 = DeviceInfo("cuda", 0, (8, 0), name="NVIDIA A100")


@pytest.fixture(autouse=True)
def _bare(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for loaded in [
        name for name in sys.modules if name == "flashinfer" or name.startswith("flashinfer.")
    ]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, "flashinfer", None)  # type: ignore[arg-type]  # the documented way to forbid an import
    for variable in (
        "CUDA_HOME",
        "CUDA_PATH",
        "FLASHINFER_NVCC",
        "FLASHINFER_DISABLE_JIT",
        "FLASHINFER_CUDA_ARCH_LIST",
    ):
        monkeypatch.delenv(variable, raising=False)
    find_api.cache_clear()
    yield
    find_api.cache_clear()


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> fakes.Recorder:
    record = fakes.Recorder()
    fakes.install(monkeypatch, record)
    return record


def spec_of(**changes: Any) -> AttentionSpec:
    fields: dict[str, Any] = {
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_size": 64,
        "dtype": torch.bfloat16,
        "block_size": 16,
        "needs_lse": True,
    }
    return AttentionSpec(**{**fields, **changes})


def builder_for(
    monkeypatch: pytest.MonkeyPatch, spec: AttentionSpec, device: DeviceInfo = H200, **kwargs: Any
) -> FlashInferMetadataBuilder:
    """A builder that works on the CPU and believes to be on `device`, with a small workspace."""
    monkeypatch.setattr(metadata_module, "resolve_device", lambda _: device)
    config = {"workspace_bytes": 64, **kwargs.pop("config", {})}
    return FlashInferMetadataBuilder(spec, "cpu", config=config, **kwargs)


def run(
    monkeypatch: pytest.MonkeyPatch,
    step: Step,
    built: FlashInferMetadata,
    padding: int = 0,
    **impl: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = step.outputs(padding)
    query = torch.cat(
        [step.query, torch.full_like(step.query[:1], float("nan")).expand(padding, -1, -1)]
    )
    FlashInferImpl(impl.pop("spec", step.spec), **impl).forward(query, step.cache, built, out, lse)
    return out, lse


# Availability


def test_not_installed_says_what_to_install() -> None:
    assert FlashInferBackend.unavailable(H200) == [
        "flashinfer is not installed: pip install flashinfer-python"
    ]


def test_a_runtime_error_at_import_is_a_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """I2, section 2: mismatched cubin packages raise RuntimeError, not ImportError."""
    monkeypatch.delitem(sys.modules, "flashinfer")
    (tmp_path / "flashinfer.py").write_text(
        "raise RuntimeError('flashinfer-cubin version (0.6.13) does not match flashinfer version (0.6.12)')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    (reason,) = FlashInferBackend.unavailable(H200)
    assert (
        "RuntimeError: flashinfer-cubin version (0.6.13) does not match" in reason
        and f"torch {torch.__version__}" in reason
    )


def test_a_hollow_package_and_an_old_signature_are_reasons(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder
) -> None:
    """I5: a class or an argument that is missing is named."""
    module = sys.modules["flashinfer"]
    monkeypatch.setattr(
        module.BatchPrefillWithPagedKVCacheWrapper, "run", lambda self, q, paged_kv_cache: None
    )
    (reason,) = FlashInferBackend.unavailable(H200)
    assert (
        "BatchPrefillWithPagedKVCacheWrapper.run(q_scale=)" in reason and "pip install -U" in reason
    )
    find_api.cache_clear()
    monkeypatch.delattr(module, "BatchDecodeWithPagedKVCacheWrapper")
    (reason,) = FlashInferBackend.unavailable(H200)
    assert "no BatchDecodeWithPagedKVCacheWrapper" in reason


def test_without_compiler_or_prebuilt_kernels_it_is_not_available(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder, tmp_path: Any
) -> None:
    """J2: nvcc and ninja, or matching prebuilt kernels; else reasons that say what to install."""
    monkeypatch.setattr(probe, "_has_prebuilt_files", lambda: False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    reasons = FlashInferBackend.unavailable(H200)
    assert (
        len(reasons) == 2 and str(tmp_path / "bin" / "nvcc") in reasons[0] and "ninja" in reasons[1]
    )
    monkeypatch.setattr(probe, "package_version", lambda *names: "0.6.11+cu130")
    assert (
        "0.6.11+cu130 does not match flashinfer 0.6.12" in FlashInferBackend.unavailable(H200)[-1]
    )
    monkeypatch.setattr(probe, "package_version", lambda *names: "0.6.12+cu130")
    assert FlashInferBackend.unavailable(H200) == []
    monkeypatch.setattr(probe, "package_version", lambda *names: "")
    for tool in ("bin/nvcc", "ninja"):
        (tmp_path / tool).parent.mkdir(exist_ok=True)
        (tmp_path / tool).write_text("#!/bin/sh\n")
        (tmp_path / tool).chmod(0o755)
    assert FlashInferBackend.unavailable(H200) == []
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    assert "FLASHINFER_DISABLE_JIT" in FlashInferBackend.unavailable(H200)[0]


def test_probing_uses_no_network_starts_no_device_and_leaves_no_variable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """J2, J3, H2: FlashInfer asks CUDA for its architectures at import unless they are named; the name does not stay behind."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.delitem(sys.modules, "flashinfer")
    (tmp_path / "flashinfer.py").write_text(
        "import os\nseen = os.environ['FLASHINFER_CUDA_ARCH_LIST']\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    FlashInferBackend.unavailable(H200)
    assert sys.modules["flashinfer"].seen == "9.0"
    assert "FLASHINFER_CUDA_ARCH_LIST" not in os.environ and not torch.cuda.is_initialized()


def test_a_cpu_device_imports_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """I6."""
    monkeypatch.delitem(sys.modules, "flashinfer")
    (tmp_path / "flashinfer.py").write_text("raise AssertionError('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert FlashInferBackend.unavailable(DeviceInfo("cpu")) == []
    assert "flashinfer" not in sys.modules


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"head_size": 96}, "head_size=96 not supported (supported: 64, 128, 256)"),
        ({"has_alibi": True}, "ALiBi slopes: not supported"),
        ({"kv_cache_dtype": "fp8", "kv_scale_kind": "head"}, "kv_scale_kind=head not supported"),
        (
            {"mask_kind": MaskKind.BIDIRECTIONAL, "window": Window(4, 4)},
            "a bound of 4 keys after the query's own",
        ),
        (
            {"mask_kind": MaskKind.BIDIRECTIONAL, "sliding_window": 4},
            "a bound of 3 keys after the query's own",
        ),
        ({"cudagraph": CudaGraphSupport.UNIFORM_BATCH}, "cudagraph=UNIFORM_BATCH not supported"),
        ({"batch_invariant": True}, "batch_invariant=True: not supported"),
    ],
)
def test_refusals_name_value_and_limit(changes: dict[str, Any], words: str) -> None:
    """S5."""
    assert any(
        words in reason
        for reason in FlashInferBackend.validate_configuration(spec_of(**changes), H200)
    )


def test_the_builder_needs_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendUnavailableError, match="pip install flashinfer-python"):
        builder_for(monkeypatch, spec_of())


# Page lists


def test_page_lists_hold_just_the_pages_in_use() -> None:
    """P3, B.3: last_page_len lies in 1..page_size even for empty rows; garbage entries are not read into the list."""
    table = torch.tensor([[7, 8, -1], [-1, 2**30, -1], [3, 4, 5]], dtype=torch.int32)
    pages = list_pages(np.array([17, 0, 48], dtype=np.int32), table, 16)
    assert pages.indptr.tolist() == [0, 2, 2, 5] and pages.indices.tolist() == [7, 8, 3, 4, 5]
    assert pages.last_page_len.tolist() == [1, 1, 16] and pages.seq_lens.tolist() == [17, 0, 48]
    assert pages.indices.dtype == pages.indptr.dtype == torch.int32
    nothing = list_pages(np.array([0, 0], dtype=np.int32), table[:2], 16)
    assert nothing.indptr.tolist() == [0, 0, 0] and nothing.indices.shape == (1,)


def test_page_lists_of_a_sliced_table() -> None:
    """P9: the table may be a view of a wider one."""
    wide = torch.arange(24, dtype=torch.int32).view(3, 8)
    assert list_pages(np.array([20, 5], dtype=np.int32), wide[1:, 2:5], 16).indices.tolist() == [
        10,
        11,
        18,
    ]


# Results

BATCHES = {
    "prefill": ([7, 33], [7, 33]),
    "chunk": ([5, 9], [40, 25]),
    "decode": ([1, 1, 1], [40, 1, 17]),
    "mixed": ([1, 1, 12], [40, 3, 30]),
    "decode behind": ([1, 12, 1], [40, 30, 3]),
    "zero rows": ([1, 0, 1], [5, 9, 12]),
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("open_plan", [False, True])
def test_every_batch_gives_what_torch_gives(
    monkeypatch: pytest.MonkeyPatch, batch: str, open_plan: bool
) -> None:
    """M1 to M7, L1: outputs, natural-log LSE, rows past the batch; both generations of decode's plan."""
    record = fakes.Recorder()
    fakes.install(monkeypatch, record, open_plan=open_plan)
    step = make_step(spec_of(), *BATCHES[batch])
    built = builder_for(monkeypatch, step.spec).build(0, step.common)
    out, lse = run(monkeypatch, step, built, padding=3, scale=0.3)
    expected, expected_lse = step.expected(scale=0.3)
    tokens = step.common.num_actual_tokens
    torch.testing.assert_close(out[:tokens], expected)
    torch.testing.assert_close(lse[:tokens], expected_lse)
    assert (out[tokens:] == 0).all() and torch.isneginf(lse[tokens:]).all()
    kinds = [call["kind"] for call in record.runs]
    assert ("decode" in kinds) == (step.common.query_lens_cpu[0].item() == 1)


def test_rows_without_keys(monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder) -> None:
    """N2: kv_len 0 beside ordinary rows; -5e4 is not a number of the contract. fa3 would give such rows a weight."""
    step = make_step(spec_of(), [1, 1, 4, 3], [9, 1, 30, 3])
    for lengths in (step.common.seq_lens, step.common.seq_lens_cpu):
        lengths[1] = lengths[3] = 0
    built = builder_for(monkeypatch, step.spec).build(0, step.common)
    out, lse = run(monkeypatch, step, built)
    expected, expected_lse = step.expected()
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    assert (out[1] == 0).all() and torch.isneginf(lse[1]).all()
    assert [call["kind"] for call in record.runs] == ["decode", "fa2"]


def test_fa3_prefill_where_it_fits(monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder) -> None:
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


def test_window_soft_cap_and_sinks(monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder) -> None:
    """F1, W1, M4: all three in one layer, decode and prefill."""
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.3])
    step = make_step(
        spec_of(sliding_window=5, logits_soft_cap=2.0, has_sink=True), [1, 9], [30, 20]
    )
    built = builder_for(monkeypatch, step.spec).build(0, step.common)
    out, lse = run(monkeypatch, step, built, sinks=sinks)
    expected, expected_lse = step.expected(sinks=sinks)
    assert {plan["window_left"] for plan in record.plans} == {4}
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=1e-2)
    torch.testing.assert_close(lse, expected_lse)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_scales_of_a_quantised_cache(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder, as_tensor: bool
) -> None:
    """M9: floats go to the kernel, tensors are applied without reading them back."""
    step = make_step(spec_of(kv_cache_dtype="fp8"), [1, 9], [30, 20])
    k_scale, v_scale = 0.5, 0.25
    step.cache.k_scale = torch.tensor(k_scale) if as_tensor else k_scale
    step.cache.v_scale = torch.tensor(v_scale) if as_tensor else v_scale
    out, lse = run(monkeypatch, step, builder_for(monkeypatch, step.spec).build(0, step.common))
    expected, expected_lse = step.expected()
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=1e-2)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=1e-3)


def test_a_strided_output_is_written_through_a_packed_one(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder
) -> None:
    """P9: FlashInfer's fa2 kernels ignore the strides of the output."""
    step = make_step(spec_of(), [1, 4], [30, 20])
    built = builder_for(monkeypatch, step.spec).build(0, step.common)
    buffer = torch.full((5, 5, 72), 7.0, dtype=torch.bfloat16)
    FlashInferImpl(step.spec).forward(step.query, step.cache, built, buffer[:, :4, :64], None)
    torch.testing.assert_close(buffer[:, :4, :64], step.expected()[0])
    assert (buffer[:, 4] == 7).all() and (buffer[..., 64:] == 7).all()


# Plans


def test_layers_that_differ_are_planned_in_groups(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder
) -> None:
    """F2: window, full, soft cap and scales through one builder, one build per step; like layers share a plan."""
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


def test_a_layer_that_looks_ahead_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder
) -> None:
    with pytest.raises(UnsupportedConfigError, match="layer layers.7 sees 3 keys after"):
        builder_for(
            monkeypatch,
            spec_of(),
            layers={
                "layers.0": PerLayerParameters(-1, None, 0.1),
                "layers.7": PerLayerParameters(3, None, 0.1, 3),
            },
        )


def test_a_batch_keeps_its_plan_until_it_is_gone(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder
) -> None:
    """G4: building b does not change a; a wrapper is planned again only when nobody holds its plan."""
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


class _Event:
    """An event that has passed only after somebody waited for it."""

    def __init__(self) -> None:
        self.passed = False
        self.waits = 0

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.waits += 1
        self.passed = True

    def record(self) -> None:
        self.passed = False


def test_a_wrapper_is_not_planned_while_its_copy_is_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """G4, mini-sglang#103: a free wrapper whose pinned buffer is still being read is passed over; at the limit it is waited for."""
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    pool = WrapperPool(object, torch.device("cuda"), max_wrappers=2)
    first = pool.take()
    first.planned()
    wrapper, event = first.wrapper, first._copied
    assert isinstance(event, _Event)
    del first
    second = pool.take()
    assert second.wrapper is not wrapper and event.waits == 0
    second.planned()
    third = pool.take()
    assert third.wrapper is wrapper and event.waits == 1
    event.passed = True


def test_other_blocks_mean_another_plan(
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


def test_graphs_are_planned_into_the_buffers_they_captured(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder
) -> None:
    """G1, G3, M7: capture at 4, replay with 3 other requests: the same wrapper, the same buffers, padding rows 0."""
    spec = spec_of()
    builder = builder_for(monkeypatch, spec)
    state = AttentionState(builder, BatchLimits(max_num_reqs=4, max_num_tokens=4, max_seq_len=64))
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


def test_only_single_tokens_are_captured(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder
) -> None:
    builder = builder_for(monkeypatch, spec_of())
    state = AttentionState(builder, BatchLimits(max_num_reqs=4, max_num_tokens=8, max_seq_len=64))
    with pytest.raises(UnsupportedConfigError, match="single-token decodes only"):
        state.graph_capture_get_metadata_for_batch(4, query_len=2)


def test_nothing_is_launched_for_nothing(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder
) -> None:
    """N2."""
    for queries, sequences in (([], []), ([0, 0], [4, 0])):
        step = make_step(spec_of(), queries, sequences)
        out, lse = run(monkeypatch, step, builder_for(monkeypatch, step.spec).build(0, step.common))
        assert (out == 0).all() and torch.isneginf(lse).all()
    assert record.runs == [] and record.plans == []


def test_unlike_strides_of_keys_and_values_are_refused(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder
) -> None:
    """P1: FlashInfer walks keys and values with one set of strides."""
    from attnlib.cache.storage import PagedKVCache

    step = make_step(spec_of(), [1], [4])
    built = builder_for(monkeypatch, step.spec).build(0, step.common)
    wide = torch.zeros(step.cache.num_blocks, 16, 2, 128, dtype=torch.bfloat16)
    step.cache = PagedKVCache.from_views(step.cache.key_cache, wide[..., :64])
    with pytest.raises(ContractError, match="keys of layer model.0 have strides"):
        run(monkeypatch, step, built, prefix="model.0")


def test_per_request_causality_is_refused(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder
) -> None:
    step = make_step(spec_of(), [1, 1], [30, 4])
    with pytest.raises(ContractError, match="per_request"):
        builder_for(monkeypatch, step.spec).build(
            0, step.common.replace(causal=torch.tensor([True, False]))
        )


def test_the_toolchain_is_looked_for_where_flashinfer_looks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """Section 2: CUDA_HOME wins over the PATH, so a wrong CUDA_HOME is a reason even with nvcc on the PATH."""
    monkeypatch.setattr(probe, "_has_prebuilt_files", lambda: False)
    for tool in ("nvcc", "ninja"):
        (tmp_path / tool).write_text("#!/bin/sh\n")
        (tmp_path / tool).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert toolchain_problems("0.6.12") == []
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    assert "/nowhere/bin/nvcc" in toolchain_problems("0.6.12")[0]


def test_a_path_in_place_of_a_folder_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm#36077: CUDA_HOME=":/usr/local/cuda" is taken by FlashInfer as it is; the reason shows where that leads."""
    monkeypatch.setattr(probe, "_has_prebuilt_files", lambda: False)
    monkeypatch.setenv("CUDA_HOME", ":/usr/local/cuda")
    assert (
        "nvcc is not at :/usr/local/cuda/bin/nvcc: set CUDA_HOME" in toolchain_problems("0.6.12")[0]
    )


def test_prebuilt_files_need_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """J2, fi#2093: kernels inside the package serve a box without nvcc; an empty folder for them does not."""
    package = tmp_path / "flashinfer"
    module = package / "data" / "aot" / "batch_prefill" / "batch_prefill.so"
    module.parent.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    monkeypatch.delitem(sys.modules, "flashinfer")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert len(toolchain_problems("0.6.12")) == 2
    module.write_bytes(b"")
    assert toolchain_problems("0.6.12") == []


def test_a_card_that_is_too_old_is_refused_before_any_kernel(record: fakes.Recorder) -> None:
    """I4: no "no kernel image" at the first forward."""
    (reason,) = FlashInferBackend.validate_configuration(
        spec_of(), DeviceInfo("cuda", 0, (7, 0), name="Tesla V100")
    )
    assert "7.0" in reason and "8.0" in reason


NINJA = """Ninja build failed. Ninja output:
ninja: Entering directory `/cache/module'
[1/10] nvcc --generate-dependencies-with-compile -MF error.d -c paged_mask_0.cu
FAILED: paged_mask_0.cuda.o
/include/prefill.cuh(12): error: identifier "cuda" is undefined
nvcc fatal   : Unsupported gpu architecture 'compute_90a' (error)
ninja: build stopped: subcommand failed."""


def test_a_failed_build_shows_the_compilers_words(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder
) -> None:
    """J4, fi#4410: the error lines and the next action instead of ninja's output."""
    spec = spec_of()
    builder = builder_for(monkeypatch, spec)

    def fail(self: Any, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(NINJA)

    monkeypatch.setattr(sys.modules["flashinfer"].BatchDecodeWithPagedKVCacheWrapper, "plan", fail)
    with pytest.raises(BackendUnavailableError) as caught:
        builder.build(0, make_step(spec, [1, 1], [5, 20]).common)
    text = str(caught.value)
    assert (
        'error: identifier "cuda" is undefined | nvcc fatal' in text
        and "CUDA_HOME" in text
        and "head_size=64" in text
    )
    assert "Entering directory" not in text and "-MF" not in text


def test_other_errors_of_a_plan_stay_what_they_are(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder
) -> None:
    """A full workspace is no failed build."""
    spec = spec_of()
    builder = builder_for(monkeypatch, spec)

    def fail(self: Any, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("Buffer overflow when allocating memory for batch_prefill_tmp_v")

    monkeypatch.setattr(sys.modules["flashinfer"].BatchDecodeWithPagedKVCacheWrapper, "plan", fail)
    with pytest.raises(RuntimeError, match="^Buffer overflow"):
        builder.build(0, make_step(spec, [1], [5]).common)


def test_a_possible_build_is_announced_once(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    """J4: before it begins, with what and where; another window is the same kernel."""
    from attnlib.backends.flashinfer import wrappers

    monkeypatch.setattr(wrappers, "_logged_plans", set())
    caplog.set_level("INFO", logger="attnlib")
    for window in (4, 9, None):
        spec = spec_of(sliding_window=window)
        builder = builder_for(monkeypatch, spec)
        for _ in range(2):
            builder.build(0, make_step(spec, [1], [5]).common)
    said = [
        record.getMessage() for record in caplog.records if "first plan for" in record.getMessage()
    ]
    assert len(said) == 2 and all(
        "head_size=64" in line and "compiled now" in line and "cache" in line for line in said
    )
