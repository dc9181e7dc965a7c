"""The arguments of each call, and its outputs compared with plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnlib.backends.flash_attn import FlashAttnBackend
from attnlib.backends.flash_attn import metadata as metadata_module
from attnlib.backends.flash_attn.impl import FlashAttnImpl
from attnlib.backends.flash_attn.probe import find_kernels
from attnlib.backends.flash_attn.support import choose_kernel
from attnlib.cache.storage import PagedKVCache
from attnlib.device import DeviceInfo
from attnlib.errors import ContractError
from attnlib.metadata.state import AttentionState
from attnlib.spec import MaskKind, Window
from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.checks.latent import CHECKS
from attnlib.workspace import BatchLimits
from tests.backends import fake_flash_attn as fakes
from tests.backends.cpu_backend import on_cpu
from tests.backends.flash_attn.adapter import (
    B200,
    H200,
    builder_for,
    install,
    install_fa3,
    install_fa4,
    install_vllm,
    run,
    spec_of,
)
from tests.backends.steps import make_step

BATCHES = {
    "prefill": ([7, 33], [7, 33]),
    "chunk": ([5, 9], [40, 25]),
    "decode": ([1, 1, 1], [40, 1, 17]),
    "mixed": ([1, 1, 12], [40, 3, 30]),
    "empty rows": ([1, 0, 3, 1], [5, 9, 0, 12]),
    "query beyond sequence": ([6], [4]),
}


@pytest.mark.parametrize("build", ["fa2", "fa3", "vllm", "sglang", "fa4"])
@pytest.mark.parametrize("batch", BATCHES)
def test_matches_torch(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder, build: str, batch: str
) -> None:
    """M1 to M7: outputs and natural LSE, empty rows, rows past the batch."""
    install(monkeypatch, record, build)
    queries, sequences = BATCHES[batch]
    if batch == "query beyond sequence":  # from_lengths refuses it; a running batch may hold it
        step = make_step(spec_of(block_size=256 if build == "fa2" else 16), [4], [4])
        step.common = step.common.replace(
            query_start_loc=torch.tensor([0, 6], dtype=torch.int32),
            query_start_loc_cpu=torch.tensor([0, 6], dtype=torch.int32), num_actual_tokens=6,
            max_query_len=6, slot_mapping=None,
        )  # fmt: skip
        step.query = torch.randn(6, 4, 16).to(torch.bfloat16)
    elif batch == "empty rows":
        step = make_step(spec_of(block_size=256 if build == "fa2" else 16), [1, 0, 0, 1], sequences)
        step.common = step.common.replace(
            query_start_loc=torch.tensor([0, 1, 1, 4, 5], dtype=torch.int32),
            query_start_loc_cpu=torch.tensor([0, 1, 1, 4, 5], dtype=torch.int32),
            num_actual_tokens=5, max_query_len=3, slot_mapping=None,
        )  # fmt: skip
        step.query = torch.randn(5, 4, 16).to(torch.bfloat16)
    else:
        step = make_step(spec_of(block_size=256 if build == "fa2" else 16), queries, sequences)
    out, lse = run(monkeypatch, step, padding=3, scale=0.3)
    expected, expected_lse = step.expected(scale=0.3)
    tokens = step.common.num_actual_tokens
    torch.testing.assert_close(out[:tokens], expected)
    torch.testing.assert_close(lse[:tokens], expected_lse)
    assert (out[tokens:] == 0).all() and torch.isneginf(lse[tokens:]).all()
    assert lse.is_contiguous() and record.calls


@pytest.mark.parametrize("release", fakes.VLLM)
@pytest.mark.parametrize("version", [2, 3, 4])
def test_each_generation_of_each_release_of_vllm(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder, release: str, version: int
) -> None:
    """A call fits the recorded signature of its release, and writes output in place."""
    install_vllm(monkeypatch, record, release)
    step = make_step(spec_of(sliding_window=5), [1, 6], [30, 20])
    out, lse = run(monkeypatch, step, config={"fa_version": version})
    expected, expected_lse = step.expected()
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    assert record.last["fa_version"] == version and record.last["out"] is not None
    assert record.last["out"].data_ptr() == out.data_ptr()
    assert record.last["window_size"] == (4, 0) and record.last["num_splits"] == 0
    assert bool(record.scheduled) is (version == 3)


@pytest.mark.parametrize(
    ("build", "window"), [("fa2", (4, 0)), ("fa3", (4, 0)), ("vllm", (4, 0)), ("fa4", (4, 0))]
)
def test_window_and_soft_cap(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder, build: str, window: tuple[int, int]
) -> None:
    """W1, M2: a window of W keys is (W - 1, 0)."""
    install(monkeypatch, record, build)
    step = make_step(
        spec_of(block_size=256 if build == "fa2" else 16, sliding_window=5, logits_soft_cap=2.0),
        [1, 9],
        [30, 20],
    )
    out, _ = run(monkeypatch, step)
    assert record.last["window_size"] == window and record.last["softcap"] == 2.0
    torch.testing.assert_close(out, step.expected()[0])


def test_unbounded_window_sides(monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder) -> None:
    """M2: None for FlashAttention 4, -1 for the others."""
    install_fa4(monkeypatch, record)
    step = make_step(spec_of(mask_kind=MaskKind.BIDIRECTIONAL, window=Window(None, 3)), [4], [20])
    run(monkeypatch, step)
    assert record.last["window_size"] == (None, 3) and record.last["causal"] is False
    install_fa3(monkeypatch, record)
    find_kernels.cache_clear()
    run(monkeypatch, step)
    assert record.last["window_size"] == (-1, 3)


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({}, (-1, -1)),
        ({"sliding_window": 5}, (4, 0)),
        ({"mask_kind": MaskKind.BIDIRECTIONAL, "window": Window(None, 3)}, (-1, 3)),
    ],
)
def test_fa4_inside_vllm(
    monkeypatch: pytest.MonkeyPatch,
    record: fakes.Recorder,
    changes: dict[str, Any],
    window: tuple[int, int],
) -> None:
    """M1 to M7: vLLM's function compares the sides of the window with 0."""
    install_vllm(monkeypatch, record)
    step = make_step(spec_of(**changes), [1, 4], [30, 20])
    out, lse = run(monkeypatch, step, B200)
    expected, expected_lse = step.expected()
    assert record.last["fa_version"] == 4 and record.last["window_size"] == window
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("build", ["vllm", "fa4"])
def test_sinks_on_fa4(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder, build: str, exact: bool
) -> None:
    """M4: vLLM's build takes bfloat16 only, so other values are applied from the LSE."""
    if build == "fa4":
        install_fa4(monkeypatch, record, hopper=False)
    else:
        install_vllm(monkeypatch, record)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.25]) + (0.0 if exact else 1e-4)
    step = make_step(spec_of(has_sink=True), [1, 4], [30, 20])
    out, lse = run(monkeypatch, step, B200, sinks=sinks)
    expected, expected_lse = step.expected(sinks=sinks)
    passed = record.last["learnable_sink" if build == "fa4" else "s_aux"]
    assert (passed is not None) is exact and (passed is None or passed.dtype == torch.bfloat16)
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=1e-2)
    torch.testing.assert_close(lse, expected_lse)


@pytest.mark.parametrize(
    ("build", "device", "config", "splits"),
    [
        ("fa4", B200, {}, 0),
        ("fa4", B200, {"num_splits": 3}, 3),
        ("fa4", H200, {}, 1),
        ("vllm", B200, {}, 0),
        ("vllm", H200, {"fa_version": 4}, 0),
        ("vllm", H200, {"fa_version": 4, "num_splits": 3}, 3),
    ],
)
def test_splits_of_fa4(
    monkeypatch: pytest.MonkeyPatch,
    record: fakes.Recorder,
    build: str,
    device: DeviceInfo,
    config: dict[str, Any],
    splits: int,
) -> None:
    """0 lets the kernel choose; flash-attn-4 splits on Blackwell only, and not by default."""
    if build == "fa4":
        install_fa4(monkeypatch, record, hopper=device is H200)
    else:
        install_vllm(monkeypatch, record)
    step = make_step(spec_of(), [1, 1], [30, 20])
    out, _ = run(monkeypatch, step, device, config=config)
    assert record.last["num_splits"] == splits
    torch.testing.assert_close(out, step.expected()[0])


def test_alibi(monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder) -> None:
    """F1: slopes are passed to FlashAttention 2."""
    install_vllm(monkeypatch, record)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    step = make_step(spec_of(has_alibi=True, needs_lse=False), [1, 6], [30, 20])
    out, _ = run(monkeypatch, step, alibi_slopes=slopes)
    assert record.last["fa_version"] == 2 and record.last["num_splits"] == 0
    torch.testing.assert_close(out, step.expected(alibi_slopes=slopes)[0])


@pytest.mark.parametrize("exact", [True, False])
def test_sinks_on_fa3(monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder, exact: bool) -> None:
    """M4: sinks are passed if bfloat16 represents them, else applied from the LSE."""
    install_vllm(monkeypatch, record)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.25]) + (0.0 if exact else 1e-4)
    step = make_step(spec_of(has_sink=True), [1, 4], [30, 4])
    step.common.seq_lens[1] = 0
    step.common.seq_lens_cpu[1] = 0
    out, lse = run(monkeypatch, step, sinks=sinks)
    expected, expected_lse = step.expected(sinks=sinks)
    assert (record.last["s_aux"] is not None) is exact
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=1e-2)
    torch.testing.assert_close(lse, expected_lse)
    assert torch.equal(lse[1:], sinks.expand(4, 4))


@pytest.mark.parametrize("build", ["vllm", "fa4"])
def test_sinks_of_minus_infinity(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder, build: str
) -> None:
    """M4: a head without a sink beside others that follow from the LSE, also in an empty row."""
    install(monkeypatch, record, build)
    sinks = torch.tensor([0.1, -torch.inf, 0.3, -torch.inf])
    step = make_step(spec_of(has_sink=True), [1, 4], [30, 4])
    for lengths in (step.common.seq_lens, step.common.seq_lens_cpu):
        lengths[1] = 0
    out, lse = run(monkeypatch, step, sinks=sinks)
    expected, expected_lse = step.expected(sinks=sinks)
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=1e-2)
    torch.testing.assert_close(lse, expected_lse)
    assert (out[1:] == 0).all()


@pytest.mark.parametrize(("build", "keyword"), [("sglang", "sinks"), ("fa4", "learnable_sink")])
def test_names_of_the_sink_argument(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder, build: str, keyword: str
) -> None:
    """The sink argument has a different name in each build."""
    install(monkeypatch, record, build)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.25])
    step = make_step(spec_of(has_sink=True), [1, 4], [30, 4])
    out, lse = run(monkeypatch, step, sinks=sinks)
    expected, expected_lse = step.expected(sinks=sinks)
    assert record.last[keyword] is not None and record.last[keyword].dtype == torch.bfloat16
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)


def test_no_launch_without_work(monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder) -> None:
    """N2: no requests, no tokens, no keys."""
    install_fa3(monkeypatch, record)
    for queries, sequences in (([], []), ([0, 0], [4, 0])):
        out, lse = run(monkeypatch, make_step(spec_of(), queries, sequences), padding=2)
        assert (out == 0).all() and torch.isneginf(lse).all()
    assert record.calls == [] and record.scheduled == []


def test_float8_cache_quantizes_the_query(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder
) -> None:
    """M9: FlashAttention 3 has no 16-bit query over a float8 cache; scales per request and head."""
    install_vllm(monkeypatch, record)
    spec = spec_of(kv_cache_dtype="fp8", head_size=32, needs_lse=False)
    kernel, reasons = choose_kernel(spec, H200, {"quantize_query": True})
    assert kernel is not None and reasons == []
    step = make_step(spec, [1, 3], [30, 9])
    step.cache.k_scale, step.cache.v_scale = 0.5, torch.tensor([0.25, 0.75])
    impl = FlashAttnImpl(spec, config={"quantize_query": True})
    built = builder_for(monkeypatch, spec, config={"quantize_query": True}).build(0, step.common)
    call: dict[str, Any] = {}

    def capture(**arguments: Any) -> torch.Tensor:
        call.update(arguments)
        return arguments["out"].zero_()

    object.__setattr__(built.kernel, "function", capture)
    impl.forward(step.query, step.cache, built, step.outputs()[0])
    assert call["q"].dtype == torch.float8_e4m3fn and call["k_descale"].shape == (2, 2)
    torch.testing.assert_close(
        call["q"].float() * call["q_descale"][0, 0], step.query.float(), rtol=0.07, atol=0.01
    )
    assert call["k_descale"].unique().tolist() == [0.5] and call["v_descale"][1].tolist() == [
        0.25,
        0.75,
    ]


def test_padded_graph_batch(monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder) -> None:
    """M6, M7: padding rows are 0 although the kernel does not write them."""
    install_vllm(monkeypatch, record)
    step = make_step(spec_of(), [1, 1, 1], [30, 4, 17])
    limits = BatchLimits(max_num_reqs=8, max_num_tokens=8, max_seq_len=64)
    builder = builder_for(monkeypatch, step.spec, limits=limits)
    state = AttentionState(builder, limits)
    padded = state.begin_forward(step.common, 5)
    built = builder.build(0, padded)
    out, lse = step.outputs(padding=2)
    query = torch.cat([step.query, torch.full_like(out[:2], float("nan"))])
    FlashAttnImpl(step.spec).forward(query, step.cache, built, out, lse)
    torch.testing.assert_close(out[:3], step.expected()[0])
    assert built.num_unpadded_tokens == 3 and (out[3:] == 0).all() and torch.isneginf(lse[3:]).all()


def test_unaligned_cache_is_refused(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder
) -> None:
    """P1: views may have any strides; these kernels load 16 bytes."""
    install_fa3(monkeypatch, record)
    step = make_step(spec_of(), [1], [4])
    wide = torch.zeros(4, 16, 2, 17, dtype=torch.bfloat16)
    step.cache = PagedKVCache.from_views(wide[..., :16], wide[..., :16].clone())
    with pytest.raises(
        ContractError,
        match=r"key_cache of layer model.0 has stride \d+ along dimension 1.*16 bytes",
    ):
        run(monkeypatch, step, prefix="model.0")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sinks_changed_in_place(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder, dtype: torch.dtype
) -> None:
    """M4: weights that are loaded into the sinks after construction reach the kernel."""
    install_vllm(monkeypatch, record)
    sinks = torch.zeros(4, dtype=dtype)
    step = make_step(spec_of(has_sink=True), [1, 4], [30, 4])
    built = builder_for(monkeypatch, step.spec).build(0, step.common)
    impl = FlashAttnImpl(step.spec, sinks=sinks)
    for values in ([0.0] * 4, [0.5, -1.0, 2.0, 0.25], [0.1, 0.2, 0.3, 0.4]):
        with torch.no_grad():
            sinks.copy_(torch.tensor(values))
        out, lse = step.outputs()
        impl.forward(step.query, step.cache, built, out, lse)
        expected, expected_lse = step.expected(sinks=sinks.float())
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=1e-2)
        torch.testing.assert_close(lse, expected_lse)


def test_absorbed_queries_over_latents(monkeypatch: pytest.MonkeyPatch) -> None:
    """M12 on FlashAttention 3: rotary parts as queries and keys, the rest of the queries as qv."""
    record = fakes.Recorder()
    install_vllm(monkeypatch, record, FA2_AVAILABLE=False)
    backend = on_cpu(monkeypatch, FlashAttnBackend, metadata_module, {})
    target = BackendUnderTest(backend, "fa3", torch.device("cpu"), quick=True)
    passed = 0
    for check in CHECKS:
        for case in check.cases(target):
            assert case.case is not None
            if target.supports(case.case):
                assert case.run() == "", case.id
                passed += 1
    sizes = {(call["q"].shape[-1], call["q_v"].shape[-1]) for call in record.calls}
    assert passed and sizes == {(64, 512)}
