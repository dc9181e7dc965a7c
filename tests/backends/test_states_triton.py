"""State layers that the `triton` backend declares to support."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from attnlib.backends.triton import TritonBackend
from attnlib.device import DeviceInfo
from attnlib.spec import CudaGraphSupport, StateSpec
from attnlib.testing.states.kinds import KINDS

H200 = DeviceInfo("cuda", 0, (9, 0), name="NVIDIA H200")
MODELS = {
    "Qwen3-Next": StateSpec(
        num_heads=32, num_key_heads=16, key_size=128, value_size=128, qk_norm=True,
        conv_channels=8192, conv_width=4, dtype=torch.bfloat16, max_rollback=3,
        batch_invariant=True, cudagraph=CudaGraphSupport.ALWAYS,
    ),
    "Kimi Linear": StateSpec(
        num_heads=32, key_size=128, value_size=128, decay="channel", qk_norm=True,
        conv_channels=12288, conv_width=4, dtype=torch.bfloat16,
    ),
    "Nemotron-H": StateSpec(
        num_heads=128, num_key_heads=8, key_size=128, value_size=64, update="add", has_skip=True,
        conv_channels=10240, conv_width=4, has_conv_bias=True, dtype=torch.bfloat16,
        state_dtype=torch.bfloat16,
    ),
    "Granite 4": StateSpec(
        num_heads=128, num_key_heads=1, key_size=256, value_size=64, update="add", has_skip=True,
        conv_channels=8448, conv_width=4, has_conv_bias=True, dtype=torch.bfloat16,
    ),
    "LFM2": StateSpec(
        conv_channels=2048, conv_width=3, conv_activation=None, dtype=torch.bfloat16
    ),
}  # fmt: skip


@pytest.mark.parametrize("model", MODELS)
def test_models_are_supported(model: str) -> None:
    spec = MODELS[model]
    assert TritonBackend.state_reasons(spec, H200) == []
    chosen = TritonBackend.resolve_state_spec(spec)
    assert (chosen.form, chosen.chunk_size) == ("tail", 16)


def test_explain_names_the_launches_of_a_step() -> None:
    lines = TritonBackend.explain_state_lines(MODELS["Kimi Linear"], H200)
    assert "step:    one launch for decodes, with convolution, gates and norm" in lines
    assert len(TritonBackend.explain_state_lines(MODELS["LFM2"], H200)) == 1
    invariant = MODELS["Kimi Linear"].replace(batch_invariant=True)
    lines = TritonBackend.explain_state_lines(invariant, H200)
    assert "step:    separate launches, as for prefills (T18)" in lines
    a100 = TritonBackend.explain_state_lines(
        invariant, dataclasses.replace(H200, capability=(8, 0))
    )
    assert "step:    one launch for decodes, with convolution, gates and norm" in a100


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"key_size": 320}, "key_size=320 not supported"),
        ({"form": "plain"}, "form=plain"),
        ({"chunk_size": 64}, "chunk_size=64"),
        ({"max_rollback": 65}, "max_rollback=65"),
        ({"dtype": torch.float64}, "float64"),
    ],
    ids=str,
)
def test_reasons(changes: dict[str, object], reason: str) -> None:
    spec = KINDS["gated delta"].replace(**changes)
    assert any(reason in text for text in TritonBackend.state_reasons(spec, H200))
