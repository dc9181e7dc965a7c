"""What is replaced in continuous batching: when CUDA graphs are on, and unknown versions."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers.generation.continuous_batching import initialization

import attnlib.integrations.transformers as integration
from attnlib.errors import UnsupportedConfigError
from attnlib.integrations.transformers import continuous_seams
from attnlib.spec import AttentionSpec, CudaGraphSupport


def _can_be_captured(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype | None,
    accepted: set[torch.dtype],
    host_lengths: bool,
) -> bool:
    """The result for a config that declares `dtype` and a backend that supports `accepted`."""
    builder = SimpleNamespace(
        cudagraph_support=CudaGraphSupport.ALWAYS, needs_host_lengths=host_lengths
    )

    def choose(spec: AttentionSpec, backend: Any, device: Any) -> Any:
        if spec.dtype not in accepted:
            raise UnsupportedConfigError(f"dtype {spec.dtype}", backend="fake", reasons=[])
        return SimpleNamespace(get_builder_cls=lambda: builder)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(continuous_seams, "get_attn_backend", choose)
    config = SimpleNamespace(
        num_attention_heads=8, num_key_value_heads=2, hidden_size=512, dtype=dtype
    )
    return continuous_seams.can_be_captured(config)


@pytest.mark.parametrize("stated", [torch.bfloat16, torch.float32, None])
def test_a_backend_that_reads_lengths_on_the_host_is_not_captured(
    monkeypatch: pytest.MonkeyPatch, stated: torch.dtype | None
) -> None:
    """A config may declare float32 or no dtype for a model that was loaded in 16 bits."""
    assert _can_be_captured(monkeypatch, stated, {torch.bfloat16}, True) is False


@pytest.mark.parametrize("stated", [torch.bfloat16, torch.float32, None])
def test_a_backend_that_reads_no_lengths_on_the_host_is_captured(
    monkeypatch: pytest.MonkeyPatch, stated: torch.dtype | None
) -> None:
    assert _can_be_captured(monkeypatch, stated, {torch.bfloat16, torch.float32}, False) is True


def test_without_a_known_backend_steps_are_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _can_be_captured(monkeypatch, torch.float64, set(), False) is False


@pytest.mark.parametrize("change", ["missing", "other parameters"])
def test_an_unknown_version_is_named(
    change: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing of continuous batching is replaced then, and `generate_batch` refuses the name."""
    integration.unregister()
    if change == "missing":
        monkeypatch.delattr(initialization, "ensure_decode_fast_path_is_available")
    else:
        monkeypatch.setattr(
            initialization, "ensure_decode_fast_path_is_available", lambda config, other: None
        )
    before = initialization.is_flash_attention_requested
    with caplog.at_level(logging.WARNING, logger="attnlib"):
        integration.register()
    assert initialization.is_flash_attention_requested is before
    assert continuous_seams.KNOWN_VERSIONS in caplog.text
    assert "ensure_decode_fast_path_is_available" in caplog.text


@pytest.mark.parametrize(
    ("name", "device", "waits"),
    [
        ("attnlib", "cuda", 1),
        ("paged|attnlib", "cuda", 1),
        ("sdpa", "cuda", 0),
        ("attnlib", "cpu", 0),
    ],
)
def test_inputs_are_filled_before_other_streams_use_them(
    name: str, device: str, waits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When they are made and at the beginning of a generation loop, not in every step."""
    found: list[str] = []
    stream = SimpleNamespace(synchronize=lambda: found.append("wait"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    fill = continuous_seams._filled_inputs(lambda self, full_reset: found.append("fill"))
    config = SimpleNamespace(_attn_implementation=name)
    inputs = SimpleNamespace(device=torch.device(device), config=config)
    fill(inputs, full_reset=True)
    assert found == ["fill", *["wait"] * waits]
    found.clear()
    fill(inputs)
    assert found == ["fill"]


@pytest.mark.parametrize("overlapping", [False, True])
@pytest.mark.parametrize("name", ["attnlib", "sdpa"])
def test_a_step_waits_for_the_stream_that_prepares_its_batch(
    name: str, overlapping: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Overlapping batches are prepared on the host, and have an event for their copy."""
    waited: list[object] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"current of {device}")
    monkeypatch.setattr(continuous_seams, "check_layers", lambda *_: nullcontext())
    stream = SimpleNamespace(wait_stream=waited.append)
    inputs = SimpleNamespace(compute_stream=stream, device="cuda:1")
    if overlapping:
        inputs.h2d_stream = None
    runner = SimpleNamespace(inputs_and_outputs=inputs, cache=None)
    model = SimpleNamespace(config=SimpleNamespace(_attn_implementation=name))
    step = continuous_seams._checked_step(lambda self, model, data: "computed")
    assert step(runner, model, {}) == "computed"
    assert waited == (["current of cuda:1"] if name == "attnlib" and not overlapping else [])
