"""The flash_attn adapter against stand-ins with the real signatures: what it finds, what it refuses, what it passes, what it makes of the results."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from attnlib.backends._foreign.imports import Import
from attnlib.backends.flash_attn import FlashAttnBackend, probe
from attnlib.backends.flash_attn import metadata as metadata_module
from attnlib.backends.flash_attn.impl import FlashAttnImpl
from attnlib.backends.flash_attn.metadata import FlashAttnMetadataBuilder
from attnlib.backends.flash_attn.probe import find_kernels
from attnlib.backends.flash_attn.support import choose_kernel
from attnlib.device import DeviceInfo
from attnlib.errors import BackendUnavailableError, ContractError, UnsupportedConfigError
from attnlib.metadata.state import AttentionState
from attnlib.spec import AttentionSpec, CudaGraphSupport, MaskKind, Window
from attnlib.workspace import BatchLimits
from tests.backends import fake_flash_attn as fakes
from tests.backends.steps import Step, make_step

H200 = DeviceInfo("cuda", 0, (9, 0), name="NVIDIA H200")
A100 = DeviceInfo("cuda", 0, (8, 0), name="NVIDIA A100")
B200 = DeviceInfo("cuda", 0, (10, 0), name="NVIDIA B200")
T4 = DeviceInfo("cuda", 0, (7, 5), name="Tesla T4")


@pytest.fixture(autouse=True)
def _bare(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    fakes.nothing_installed(monkeypatch)
    find_kernels.cache_clear()
    yield
    find_kernels.cache_clear()


@pytest.fixture
def record() -> fakes.Recorder:
    return fakes.Recorder()


def spec_of(**changes: Any) -> AttentionSpec:
    fields: dict[str, Any] = {
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_size": 16,
        "dtype": torch.bfloat16,
        "block_size": 16,
        "needs_lse": True,
    }
    return AttentionSpec(**{**fields, **changes})


def install_fa2(monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder) -> None:
    fakes.install(monkeypatch, "flash_attn", flash_attn_varlen_func=fakes.fake_fa2(record))


def install_fa3(monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder, **attributes: Any) -> None:
    kvcache, scheduler = fakes.fake_fa3(record)
    fakes.install(
        monkeypatch,
        "flash_attn_interface",
        flash_attn_with_kvcache=kvcache,
        get_scheduler_metadata=scheduler,
        **attributes,
    )


def install_vllm(monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder, **flags: Any) -> None:
    varlen, scheduler = fakes.fake_vllm(record)
    built = {"FA2_AVAILABLE": True, "FA3_AVAILABLE": True, "FA4_AVAILABLE": False, **flags}
    fakes.install(
        monkeypatch,
        "vllm.vllm_flash_attn",
        flash_attn_varlen_func=varlen,
        get_scheduler_metadata=scheduler,
        **built,
    )


def install_fa4(monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder) -> None:
    fakes.install(monkeypatch, "flash_attn.cute", flash_attn_varlen_func=fakes.fake_fa4(record))


def builder_for(
    monkeypatch: pytest.MonkeyPatch, spec: AttentionSpec, device: DeviceInfo = H200, **kwargs: Any
) -> FlashAttnMetadataBuilder:
    """A builder that works on the CPU and believes to be on `device`."""
    monkeypatch.setattr(metadata_module, "resolve_device", lambda _: device)
    return FlashAttnMetadataBuilder(spec, "cpu", **kwargs)


def run(
    monkeypatch: pytest.MonkeyPatch,
    step: Step,
    device: DeviceInfo = H200,
    padding: int = 0,
    **impl: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    config = impl.pop("config", {})
    built = builder_for(monkeypatch, step.spec, device, config=config).build(0, step.common)
    out, lse = step.outputs(padding)
    query = torch.cat(
        [step.query, torch.full_like(out[: out.shape[0] - step.query.shape[0]], float("nan"))]
    )
    FlashAttnImpl(step.spec, config=config, **impl).forward(query, step.cache, built, out, lse)
    return out, lse


# What is found


def test_nothing_installed_says_what_to_install() -> None:
    """I2: nothing there is a reason, not a crash."""
    (reason,) = FlashAttnBackend.unavailable(H200)
    assert "no FlashAttention is installed" in reason and "pip install" in reason
    assert not any(name in sys.modules and sys.modules[name] is not None for name in fakes.NAMES)


def test_generations_are_told_apart_by_their_signatures(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder
) -> None:
    """I5: four signatures, four generations, whatever the module is called."""
    install_fa4(monkeypatch, record)
    install_fa3(monkeypatch, record)
    install_vllm(monkeypatch, record)
    fakes.install(
        monkeypatch, "sgl_kernel.flash_attn", flash_attn_with_kvcache=fakes.fake_sglang(record)
    )
    found = [(kernel.version, kernel.source) for kernel in find_kernels().kernels]
    assert found == [
        (3, "flash_attn_interface"),
        (3, "vllm.vllm_flash_attn"),
        (2, "vllm.vllm_flash_attn"),
        (3, "sgl_kernel.flash_attn"),
        (4, "flash_attn.cute"),
    ]


def test_a_incomplete_package_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """I2, I3: the Python files without the compiled module."""
    fakes.install(monkeypatch, "flash_attn")
    (reason,) = FlashAttnBackend.unavailable(H200)
    assert (
        "incomplete" in reason
        and "reinstall" in reason
        and f"torch {torch.__version__}" in reason
        and "sm_90" in reason
    )


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            ImportError("flash_attn_2_cuda.so: undefined symbol: _ZN3c105ErrorC2E"),
            "built for another torch",
        ),
        (OSError("libcudart.so.12: cannot open shared object file"), "built for another torch"),
        (RuntimeError("flashinfer-cubin version does not match"), "Reinstall it"),
        (
            ModuleNotFoundError("No module named 'flash_attn_2_cuda'", name="flash_attn_2_cuda"),
            "incomplete",
        ),
    ],
)
def test_an_import_that_raises_is_a_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, error: Exception, words: str
) -> None:
    """I2, I3: undefined symbols, missing libraries, a RuntimeError, a missing compiled module: reason, original error, next action."""
    monkeypatch.delitem(sys.modules, "flash_attn")
    name = f", name={error.name!r}" if isinstance(error, ModuleNotFoundError) else ""
    (tmp_path / "flash_attn.py").write_text(f"raise {type(error).__name__}({str(error)!r}{name})\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (reason,) = FlashAttnBackend.unavailable(H200)
    assert (
        str(error) in reason
        and type(error).__name__ in reason
        and words in reason
        and "cxx11 ABI" in reason
    )
    assert FlashAttnBackend.validate_configuration(spec_of(), H200) == []  # availability aside


def test_a_build_without_paging_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """I5: the signature lacks block_table."""

    def flash_attn_varlen_func(
        q: Any,
        k: Any,
        v: Any,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        max_seqlen_q: int,
        max_seqlen_k: int,
    ) -> None: ...

    fakes.install(monkeypatch, "flash_attn", flash_attn_varlen_func=flash_attn_varlen_func)
    (reason,) = FlashAttnBackend.unavailable(H200)
    assert "does not support a paged cache" in reason and "2.6" in reason


def test_build_flags_are_read(monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder) -> None:
    """I5: what a build left out is refused, naming the build."""
    install_fa3(
        monkeypatch,
        record,
        CONFIG={
            "build_flags": {
                "FLASHATTENTION_DISABLE_SOFTCAP": True,
                "FLASHATTENTION_DISABLE_HDIM256": True,
            }
        },
    )
    reasons = FlashAttnBackend.validate_configuration(
        spec_of(logits_soft_cap=30.0, head_size=256), H200
    )
    assert len(reasons) == 2 and all(
        "FlashAttention 3 (flash_attn_interface" in reason for reason in reasons
    )
    find_kernels.cache_clear()
    install_fa3(
        monkeypatch, record, CONFIG={"build_flags": {"FLASHATTENTION_DISABLE_PAGEDKV": True}}
    )
    (reason,) = FlashAttnBackend.unavailable(H200)
    assert "FLASHATTENTION_DISABLE_PAGEDKV" in reason


def test_a_missing_generation_of_a_build_says_why(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder
) -> None:
    """I3: the build's own reason is passed on."""
    install_vllm(
        monkeypatch,
        record,
        FA2_AVAILABLE=False,
        FA3_AVAILABLE=False,
        FA3_UNAVAILABLE_REASON="undefined symbol: xyz",
    )
    reasons = FlashAttnBackend.unavailable(H200)
    assert any("without FlashAttention 3 (undefined symbol: xyz)" in reason for reason in reasons)


def test_probing_needs_no_network_and_starts_no_device(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder
) -> None:
    """J3, H2."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    install_vllm(monkeypatch, record)
    assert FlashAttnBackend.unavailable(H200) == []
    assert FlashAttnBackend.validate_configuration(spec_of(), H200) == []
    assert not torch.cuda.is_initialized()


def test_a_cpu_device_imports_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """I6: a device that cannot fit is refused without touching the package."""
    monkeypatch.delitem(sys.modules, "flash_attn")
    (tmp_path / "flash_attn.py").write_text("raise AssertionError('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert FlashAttnBackend.unavailable(DeviceInfo("cpu")) == []
    assert FlashAttnBackend.validate_configuration(spec_of(), DeviceInfo("cpu")) == [
        "device cpu not supported (supported: cuda)"
    ]
    assert "flash_attn" not in sys.modules


# What is refused


def test_the_best_generation_for_chip_and_spec(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder
) -> None:
    install_vllm(monkeypatch, record)
    fakes.install(monkeypatch, "flash_attn.cute", flash_attn_varlen_func=fakes.fake_fa4(record))
    versions = {
        device.name: getattr(choose_kernel(spec_of(), device, {})[0], "version", None)
        for device in (H200, A100, B200, T4)
    }
    assert versions == {"NVIDIA H200": 3, "NVIDIA A100": 2, "NVIDIA B200": 4, "Tesla T4": None}
    alibi = choose_kernel(spec_of(has_alibi=True), H200, {})[0]
    assert alibi is not None and alibi.version == 2
    insisted = choose_kernel(spec_of(), H200, {"fa_version": 4})[0]
    assert insisted is not None and insisted.version == 4


def test_insisting_never_falls_back(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder
) -> None:
    """S2: fa_version is granted or refused."""
    install_vllm(monkeypatch, record)
    kernel, reasons = choose_kernel(spec_of(has_alibi=True), H200, {"fa_version": 3})
    assert kernel is None and reasons == [
        "FlashAttention 3 (vllm.vllm_flash_attn): ALiBi slopes: not supported"
    ]
    kernel, reasons = choose_kernel(spec_of(), H200, {"fa_version": 4})
    assert kernel is None and "fa_version=4 is not installed (found: FlashAttention 3" in reasons[0]


@pytest.mark.parametrize(
    ("changes", "version", "words"),
    [
        ({"block_size": 16}, 2, "block_size=16 not supported (supported: multiples of 256"),
        ({"block_size": 256, "has_sink": True}, 2, "attention sinks: not supported"),
        (
            {"block_size": 256, "kv_cache_dtype": "fp8"},
            2,
            "kv_cache_dtype=float8_e4m3fn not supported",
        ),
        ({"block_size": 256, "head_size_v": 8}, 2, "head_size_v=8 must equal head_size=16"),
        ({"has_alibi": True}, 4, "ALiBi slopes: not supported"),
        ({"kv_cache_dtype": "fp8"}, 4, "kv_cache_dtype=float8_e4m3fn not supported"),
        ({"head_size": 264}, 4, "head_size=264 not supported"),
        (
            {"head_size": 72},
            4,
            "paged keys with head_size=72, head_size_v=72 not supported (supported: multiples of 16)",
        ),
        ({"head_size": 64, "head_size_v": 40}, 4, "paged keys with head_size_v=40 not supported"),
        (
            {"head_size": 128, "head_size_v": 64},
            3,
            "head_size=128 with head_size_v=64 not supported",
        ),
        ({"kv_cache_dtype": "fp8"}, 3, "needs a float8 query"),
        ({"kv_cache_dtype": "fp8_e5m2"}, 3, "kv_cache_dtype=float8_e5m2 not supported"),
        ({"has_sink": True}, 3, "attention sinks: not supported"),
        ({"dtype": torch.float32}, 3, "dtype=float32 not supported"),
        ({"mask_kind": MaskKind.QUERY_BIAS}, 3, "mask_kind=query_bias not supported"),
        ({"attention_chunk_size": 64}, 3, "attention_chunk_size=64: not supported"),
        ({"batch_invariant": True}, 3, "batch_invariant=True: not supported"),
        ({"cudagraph": CudaGraphSupport.ALWAYS}, 3, "cudagraph=ALWAYS not supported"),
    ],
)
def test_each_generation_refuses_with_its_limit(
    monkeypatch: pytest.MonkeyPatch,
    record: fakes.Recorder,
    changes: dict[str, Any],
    version: int,
    words: str,
) -> None:
    """S5: every refusal names the generation, the value and the limit."""
    {2: install_fa2, 3: install_fa3, 4: install_fa4}[version](monkeypatch, record)
    reasons = FlashAttnBackend.validate_configuration(spec_of(**changes), H200)
    assert any(
        words in reason and reason.startswith(f"FlashAttention {version} (") for reason in reasons
    ), reasons


@pytest.mark.parametrize(
    ("device", "refused_by"),
    [
        (T4, ["compute capability 7.5 is below 8.0"]),
        (
            DeviceInfo("cuda", 0, (12, 0), name="RTX 5090"),
            ["FlashAttention 3 (flash_attn_interface)", "FlashAttention 4 (flash_attn.cute)"],
        ),
    ],
)
def test_a_card_without_a_kernel_is_refused_before_any_kernel(
    monkeypatch: pytest.MonkeyPatch,
    record: fakes.Recorder,
    device: DeviceInfo,
    refused_by: list[str],
) -> None:
    """I4: "only supports Ampere" and "no kernel image" are reasons at selection, for every generation."""
    install_fa3(monkeypatch, record)
    install_fa4(monkeypatch, record)
    reasons = FlashAttnBackend.validate_configuration(spec_of(), device)
    assert all(any(reason.startswith(words) for reason in reasons) for words in refused_by), reasons
    assert all(
        f"{device.capability[0]}.{device.capability[1]}" in reason
        for reason in reasons
        if device.capability
    ), reasons


def test_an_argument_that_an_older_release_lacks_is_a_feature_less(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder
) -> None:
    """I5, vllm#20556: 2.5 had no softcap and 2.3 no alibi_slopes; a spec that needs one is refused, others are served without naming it."""

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1),
        return_attn_probs=False, block_table=None,
    ):  # fmt: skip
        record.calls.append({"softmax_scale": softmax_scale})
        out = torch.zeros_like(q)
        return (out, torch.zeros(q.shape[1], q.shape[0]), None) if return_attn_probs else out

    fakes.install(monkeypatch, "flash_attn", flash_attn_varlen_func=flash_attn_varlen_func)
    for changes, words in (
        ({"logits_soft_cap": 30.0}, "logits_soft_cap=30.0: not supported"),
        ({"has_alibi": True}, "ALiBi"),
    ):
        reasons = FlashAttnBackend.validate_configuration(spec_of(block_size=256, **changes), H200)
        assert any(words in reason for reason in reasons), reasons
    run(monkeypatch, make_step(spec_of(block_size=256), [1, 3], [9, 30]))
    assert len(record.calls) == 1, "called without a TypeError"


def test_the_builder_refuses_as_selection_does(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder
) -> None:
    with pytest.raises(BackendUnavailableError, match="pip install"):
        builder_for(monkeypatch, spec_of())
    install_fa2(monkeypatch, record)
    find_kernels.cache_clear()
    with pytest.raises(UnsupportedConfigError, match="multiples of 256"):
        builder_for(monkeypatch, spec_of())


# What is passed and what comes back

BATCHES = {
    "prefill": ([7, 33], [7, 33]),
    "chunk": ([5, 9], [40, 25]),
    "decode": ([1, 1, 1], [40, 1, 17]),
    "mixed": ([1, 1, 12], [40, 3, 30]),
    "empty rows": ([1, 0, 3, 1], [5, 9, 0, 12]),
    "query beyond sequence": ([6], [4]),
}


def _installed(monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder, name: str) -> None:
    if name == "sglang":
        fakes.install(
            monkeypatch, "sgl_kernel.flash_attn", flash_attn_with_kvcache=fakes.fake_sglang(record)
        )
        return
    {"fa2": install_fa2, "fa3": install_fa3, "vllm": install_vllm, "fa4": install_fa4}[name](
        monkeypatch, record
    )


@pytest.mark.parametrize("build", ["fa2", "fa3", "vllm", "sglang", "fa4"])
@pytest.mark.parametrize("batch", BATCHES)
def test_every_build_gives_what_torch_gives(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder, build: str, batch: str
) -> None:
    """M1 to M7: outputs and LSE in the contract's form, empty rows, rows past the batch."""
    _installed(monkeypatch, record, build)
    queries, sequences = BATCHES[batch]
    if batch == "query beyond sequence":  # from_lengths refuses it; a running batch may hold it
        step = make_step(spec_of(block_size=256 if build == "fa2" else 16), [4], [4])
        step.common = step.common.replace(
            query_start_loc=torch.tensor([0, 6], dtype=torch.int32), query_start_loc_cpu=torch.tensor([0, 6], dtype=torch.int32),
            num_actual_tokens=6, max_query_len=6, slot_mapping=None,
        )  # fmt: skip
        step.query = torch.randn(6, 4, 16).to(torch.bfloat16)
    elif batch == "empty rows":
        step = make_step(spec_of(block_size=256 if build == "fa2" else 16), [1, 0, 0, 1], sequences)
        step.common = step.common.replace(
            query_start_loc=torch.tensor([0, 1, 1, 4, 5], dtype=torch.int32), query_start_loc_cpu=torch.tensor([0, 1, 1, 4, 5], dtype=torch.int32),
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


@pytest.mark.parametrize(
    ("build", "window"), [("fa2", (4, 0)), ("fa3", (4, 0)), ("vllm", (4, 0)), ("fa4", (4, 0))]
)
def test_a_window_of_five_keys_is_four_before_the_query(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder, build: str, window: tuple[int, int]
) -> None:
    """W1, M2: W keys become (W-1, 0)."""
    _installed(monkeypatch, record, build)
    step = make_step(
        spec_of(block_size=256 if build == "fa2" else 16, sliding_window=5, logits_soft_cap=2.0),
        [1, 9],
        [30, 20],
    )
    out, _ = run(monkeypatch, step)
    assert record.last["window_size"] == window and record.last["softcap"] == 2.0
    torch.testing.assert_close(out, step.expected()[0])


def test_open_sides_are_none_for_fa4_and_minus_one_elsewhere(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder
) -> None:
    """M2: Window(None, 3) of a bidirectional layer."""
    install_fa4(monkeypatch, record)
    step = make_step(spec_of(mask_kind=MaskKind.BIDIRECTIONAL, window=Window(None, 3)), [4], [20])
    run(monkeypatch, step)
    assert record.last["window_size"] == (None, 3) and record.last["causal"] is False
    install_fa3(monkeypatch, record)
    find_kernels.cache_clear()
    run(monkeypatch, step)
    assert record.last["window_size"] == (-1, 3)


def test_alibi_reaches_fa2(monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder) -> None:
    """F1."""
    install_vllm(monkeypatch, record)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    step = make_step(spec_of(has_alibi=True), [1, 6], [30, 20])
    out, _ = run(monkeypatch, step, alibi_slopes=slopes)
    assert record.last["fa_version"] == 2 and record.last["num_splits"] == 0
    torch.testing.assert_close(out, step.expected(alibi_slopes=slopes)[0])


@pytest.mark.parametrize("exact", [True, False])
def test_sinks_on_fa3_in_bfloat16_or_from_the_lse(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder, exact: bool
) -> None:
    """M4: sinks that bfloat16 holds go into the kernel, others are applied from the LSE; an empty row's LSE is the sink."""
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


@pytest.mark.parametrize(("build", "keyword"), [("sglang", "sinks"), ("fa4", "learnable_sink")])
def test_sinks_under_every_name(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder, build: str, keyword: str
) -> None:
    """Section 19: four names for one thing."""
    _installed(monkeypatch, record, build)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.25])
    step = make_step(spec_of(has_sink=True), [1, 4], [30, 4])
    out, lse = run(monkeypatch, step, sinks=sinks)
    expected, expected_lse = step.expected(sinks=sinks)
    assert record.last[keyword] is not None and record.last[keyword].dtype == (
        torch.float32 if build == "fa4" else torch.bfloat16
    )
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)


def test_fa2_is_never_told_a_bound_of_one_where_rows_are_not_requests(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder
) -> None:
    """M7: with a bound of 1 FlashAttention 2 ignores the starts; a request without tokens would shift every row behind it."""
    install_fa2(monkeypatch, record)
    spec = spec_of(block_size=256, needs_lse=False)
    step = make_step(spec, [1, 0, 1], [30, 4, 9])
    run(monkeypatch, step)
    assert record.last["max_seqlen_q"] == 2
    uniform = make_step(spec, [1, 1, 1], [30, 4, 9])
    assert builder_for(monkeypatch, spec).build(0, uniform.common).query_bound == 1
    assert (
        builder_for(monkeypatch, spec).build_for_cudagraph_capture(uniform.common).query_bound == 2
    )


def test_nothing_is_launched_for_nothing(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder
) -> None:
    """N2: no requests, no tokens, no keys."""
    install_fa3(monkeypatch, record)
    for queries, sequences in (([], []), ([0, 0], [4, 0])):
        out, lse = run(monkeypatch, make_step(spec_of(), queries, sequences), padding=2)
        assert (out == 0).all() and torch.isneginf(lse).all()
    assert record.calls == [] and record.scheduled == []


def test_a_schedule_is_made_once_a_batch_at_one_address(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder
) -> None:
    """G3: with limits, the schedule lies in a buffer of the builder's; its arguments are those of the call."""
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


def test_running_sums_of_lengths_stay_at_one_address(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder
) -> None:
    """G3: what FlashAttention 2 takes instead of lengths is made in the build; a graph would read a buffer that is gone."""
    install_fa2(monkeypatch, record)
    spec = spec_of(block_size=256)
    builder = builder_for(
        monkeypatch, spec, limits=BatchLimits(max_num_reqs=8, max_num_tokens=64, max_seq_len=512)
    )
    first = builder.build(0, make_step(spec, [1, 1], [30, 4]).common).key_start_loc
    second = builder.build(0, make_step(spec, [1, 1, 1], [7, 4, 300]).common).key_start_loc
    assert first is not None and second is not None and first.data_ptr() == second.data_ptr()
    assert second.tolist() == [0, 7, 11, 311]


def test_the_kvcache_entry_is_scheduled_for_the_width_of_its_table(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder
) -> None:
    """It takes no longest sequence, so both calls must go by the table; another width drops the schedule."""
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


def test_a_float8_cache_gets_a_float8_query_only_on_request(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder
) -> None:
    """M9, section 10: FlashAttention 3 has no 16-bit query over a float8 cache; scales come per request and head."""
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


def test_padded_graph_batches_are_cut_by_what_the_host_knows(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder
) -> None:
    """M6, M7: a batch padded to a captured size; rows of padding requests are 0 although the kernel never wrote them."""
    install_vllm(monkeypatch, record)
    step = make_step(spec_of(), [1, 1, 1], [30, 4, 17])
    builder = builder_for(monkeypatch, step.spec)
    state = AttentionState(builder, BatchLimits(max_num_reqs=8, max_num_tokens=8, max_seq_len=64))
    padded = state.begin_forward(step.common, 5)
    built = builder.build(0, padded)
    out, lse = step.outputs(padding=2)
    query = torch.cat([step.query, torch.full_like(out[:2], float("nan"))])
    FlashAttnImpl(step.spec).forward(query, step.cache, built, out, lse)
    torch.testing.assert_close(out[:3], step.expected()[0])
    assert built.num_unpadded_tokens == 3 and (out[3:] == 0).all() and torch.isneginf(lse[3:]).all()


def test_per_request_causality_is_refused(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder
) -> None:
    install_fa3(monkeypatch, record)
    step = make_step(spec_of(), [1, 1], [30, 4])
    with pytest.raises(ContractError, match="per_request"):
        builder_for(monkeypatch, step.spec).build(
            0, step.common.replace(causal=torch.tensor([True, False]))
        )


def test_an_unaligned_cache_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder
) -> None:
    """P1: foreign views may have any strides; these kernels load 16 bytes."""
    from attnlib.cache.storage import PagedKVCache

    install_fa3(monkeypatch, record)
    step = make_step(spec_of(), [1], [4])
    wide = torch.zeros(4, 16, 2, 17, dtype=torch.bfloat16)
    step.cache = PagedKVCache.from_views(wide[..., :16], wide[..., :16].clone())
    with pytest.raises(
        ContractError,
        match=r"key_cache of layer model.0 has stride \d+ along dimension 1.*16 bytes",
    ):
        run(monkeypatch, step, prefix="model.0")


def test_flash_attention_4_is_told_the_chip_while_it_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """H2: the quack that it imports starts CUDA at import unless QUACK_ARCH says the chip; the user's own value stays."""
    told: list[str | None] = []

    def look(path: str) -> Import:
        told.append(os.environ.get("QUACK_ARCH"))
        return Import(None)

    monkeypatch.delenv("QUACK_ARCH", raising=False)
    monkeypatch.setattr(probe, "import_guarded", look)
    monkeypatch.setattr(
        probe, "resolve_device", lambda device: DeviceInfo("cuda", 0, (9, 0), name="H200")
    )
    probe.find_kernels.cache_clear()
    try:
        probe.find_kernels()
        assert set(told) == {"90"} and "QUACK_ARCH" not in os.environ
        monkeypatch.setenv("QUACK_ARCH", "120")
        probe.find_kernels.cache_clear()
        probe.find_kernels()
        assert told[-1] == "120" and os.environ["QUACK_ARCH"] == "120"
    finally:
        probe.find_kernels.cache_clear()
