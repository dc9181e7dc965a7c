"""What each generation supports, and which one is chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from attnlib.backends.flash_attn import FlashAttnBackend
from attnlib.backends.flash_attn.support import choose_kernel
from attnlib.device import DeviceInfo
from attnlib.spec import CudaGraphSupport, MaskKind
from tests.backends import fake_flash_attn as fakes
from tests.backends.flash_attn.adapter import (
    A100,
    B200,
    H200,
    T4,
    install_fa2,
    install_fa3,
    install_fa4,
    install_vllm,
    run,
    spec_of,
)
from tests.backends.steps import make_step


def test_best_generation_for_device_and_spec(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder
) -> None:
    """The best generation that supports the device and the spec."""
    install_vllm(monkeypatch, record, FA4_AVAILABLE=False)
    fakes.install(monkeypatch, "flash_attn.cute", flash_attn_varlen_func=fakes.fake_fa4(record))
    versions = {
        device.name: getattr(choose_kernel(spec_of(), device, {})[0], "version", None)
        for device in (H200, A100, B200, T4)
    }
    assert versions == {"NVIDIA H200": 3, "NVIDIA A100": 2, "NVIDIA B200": 4, "Tesla T4": None}
    alibi = choose_kernel(spec_of(has_alibi=True, needs_lse=False), H200, {})[0]
    assert alibi is not None and alibi.version == 2
    requested = choose_kernel(spec_of(), H200, {"fa_version": 4})[0]
    assert requested is not None and requested.version == 4


def test_fa_version_has_no_fallback(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder
) -> None:
    """S2: `fa_version` is used or refused."""
    install_vllm(monkeypatch, record, FA4_AVAILABLE=False)
    spec = spec_of(has_alibi=True, needs_lse=False)
    kernel, reasons = choose_kernel(spec, H200, {"fa_version": 3})
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
        ({"block_size": 256, "has_alibi": True}, 2, "ALiBi slopes with needs_lse=True not"),
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
            "paged keys with head_size=72, head_size_v=72 not supported "
            "(supported: multiples of 16)",
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
def test_unsupported_reasons(
    monkeypatch: pytest.MonkeyPatch,
    record: fakes.Recorder,
    changes: dict[str, Any],
    version: int,
    words: str,
) -> None:
    """S5: every reason names the generation, the value and the limit."""
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
def test_unsupported_compute_capability(
    monkeypatch: pytest.MonkeyPatch,
    record: fakes.Recorder,
    device: DeviceInfo,
    refused_by: list[str],
) -> None:
    """I4: reported at selection for every generation, not as an error of a kernel."""
    install_fa3(monkeypatch, record)
    install_fa4(monkeypatch, record)
    reasons = FlashAttnBackend.validate_configuration(spec_of(), device)
    assert all(any(reason.startswith(words) for reason in reasons) for words in refused_by), reasons
    assert all(
        f"{device.capability[0]}.{device.capability[1]}" in reason
        for reason in reasons
        if device.capability
    ), reasons


@pytest.mark.parametrize("build", ["vllm", "fa4"])
@pytest.mark.parametrize("separate", [True, False])
def test_head_size_256_of_fa4_on_blackwell(
    monkeypatch: pytest.MonkeyPatch,
    record: fakes.Recorder,
    tmp_path: Path,
    build: str,
    separate: bool,
) -> None:
    """I5: a build with a kernel for this head size alone takes no sequence lengths with it."""
    folder = tmp_path / "cute" if build == "vllm" else tmp_path
    folder.mkdir(exist_ok=True)
    if separate:
        (folder / "sm100_hd256_2cta_fmha_forward.py").touch()
    where = {"__file__": str(tmp_path / "__init__.py")}
    if build == "vllm":
        install_vllm(monkeypatch, record, FA2_AVAILABLE=False, **where)
    else:
        install_fa4(monkeypatch, record, hopper=False, **where)
    found = [
        reason
        for reason in FlashAttnBackend.validate_configuration(spec_of(head_size=256), B200)
        if reason.startswith("FlashAttention 4")
    ]
    assert bool(found) is separate
    assert all("head_size=256 with head_size_v=256 not supported" in reason for reason in found)
    assert choose_kernel(spec_of(head_size=128), B200, {})[1] == []


def test_splits_that_flash_attn_4_refuses(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder
) -> None:
    """A configured number of splits is used or refused."""
    install_fa4(monkeypatch, record)
    kernel, (reason,) = choose_kernel(spec_of(), H200, {"num_splits": 3})
    assert kernel is None and "num_splits=3 not supported on this device" in reason
    assert choose_kernel(spec_of(), B200, {"num_splits": 3})[1] == []


def test_older_signatures(monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder) -> None:
    """I5: 2.5 had no softcap and 2.3 no alibi_slopes; other specs do not pass the argument."""

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
        softmax_scale=None, causal=False, window_size=(-1, -1), return_attn_probs=False,
        block_table=None,
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
