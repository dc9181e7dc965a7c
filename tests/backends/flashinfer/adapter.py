"""The flashinfer adapter on a CPU, over a fake that has the signatures of the real package."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnlib.backends.flashinfer import metadata as metadata_module
from attnlib.backends.flashinfer.impl import FlashInferImpl
from attnlib.backends.flashinfer.metadata import FlashInferMetadata, FlashInferMetadataBuilder
from attnlib.device import DeviceInfo
from attnlib.spec import AttentionSpec
from tests.backends.steps import Step

H200 = DeviceInfo("cuda", 0, (9, 0), name="NVIDIA H200")
A100 = DeviceInfo("cuda", 0, (8, 0), name="NVIDIA A100")


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
    """A builder on the CPU that takes its device for `device`, with a small workspace."""
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
    """Output and LSE of one call, with `padding` rows past the batch."""
    out, lse = step.outputs(padding)
    query = torch.cat(
        [step.query, torch.full_like(step.query[:1], float("nan")).expand(padding, -1, -1)]
    )
    FlashInferImpl(impl.pop("spec", step.spec), **impl).forward(query, step.cache, built, out, lse)
    return out, lse
