"""The flash_attn adapter on a CPU, over fakes that have the signatures of the real builds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnlib.backends.flash_attn import metadata as metadata_module
from attnlib.backends.flash_attn.impl import FlashAttnImpl
from attnlib.backends.flash_attn.metadata import FlashAttnMetadataBuilder
from attnlib.device import DeviceInfo
from attnlib.spec import AttentionSpec
from tests.backends import fake_flash_attn as fakes
from tests.backends.steps import Step

H200 = DeviceInfo("cuda", 0, (9, 0), name="NVIDIA H200")
A100 = DeviceInfo("cuda", 0, (8, 0), name="NVIDIA A100")
B200 = DeviceInfo("cuda", 0, (10, 0), name="NVIDIA B200")
T4 = DeviceInfo("cuda", 0, (7, 5), name="Tesla T4")


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


def install_vllm(
    monkeypatch: pytest.MonkeyPatch,
    record: fakes.Recorder,
    release: str = fakes.VLLM[0],
    **flags: Any,
) -> None:
    """vLLM's build, with all three generations; the flags of 4 are in the defining module only."""
    varlen, scheduler = fakes.fake_vllm(record, release)
    built = {"FA2_AVAILABLE": True, "FA3_AVAILABLE": True, **flags}
    package = fakes.install(
        monkeypatch,
        "vllm.vllm_flash_attn",
        flash_attn_varlen_func=varlen,
        get_scheduler_metadata=scheduler,
        **built,
    )
    defining = f"{package.__name__}.flash_attn_interface"
    fakes.install(monkeypatch, defining, **{"FA4_AVAILABLE": True, **built})
    varlen.__module__ = defining
    fakes.install(monkeypatch, "cutlass")


def install_fa4(
    monkeypatch: pytest.MonkeyPatch,
    record: fakes.Recorder,
    hopper: bool = True,
    **attributes: Any,
) -> None:
    """flash-attn-4; on a Hopper GPU it refuses splits."""
    varlen = fakes.fake_fa4(record, hopper)
    fakes.install(monkeypatch, "flash_attn.cute", flash_attn_varlen_func=varlen, **attributes)


def install(monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder, name: str) -> None:
    if name == "sglang":
        fakes.install(
            monkeypatch, "sgl_kernel.flash_attn", flash_attn_with_kvcache=fakes.fake_sglang(record)
        )
        return
    {"fa2": install_fa2, "fa3": install_fa3, "vllm": install_vllm, "fa4": install_fa4}[name](
        monkeypatch, record
    )


def builder_for(
    monkeypatch: pytest.MonkeyPatch, spec: AttentionSpec, device: DeviceInfo = H200, **kwargs: Any
) -> FlashAttnMetadataBuilder:
    """A builder on the CPU that takes its device for `device`."""
    monkeypatch.setattr(metadata_module, "resolve_device", lambda _: device)
    return FlashAttnMetadataBuilder(spec, "cpu", **kwargs)


def run(
    monkeypatch: pytest.MonkeyPatch,
    step: Step,
    device: DeviceInfo = H200,
    padding: int = 0,
    **impl: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE of one call, with `padding` rows past the batch."""
    config = impl.pop("config", {})
    built = builder_for(monkeypatch, step.spec, device, config=config).build(0, step.common)
    out, lse = step.outputs(padding)
    query = torch.cat(
        [step.query, torch.full_like(out[: out.shape[0] - step.query.shape[0]], float("nan"))]
    )
    FlashAttnImpl(step.spec, config=config, **impl).forward(query, step.cache, built, out, lse)
    return out, lse
