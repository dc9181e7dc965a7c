"""Planning: compilation errors and log messages."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from attnlib.backends.flashinfer import wrappers
from attnlib.errors import BackendUnavailableError
from tests.backends import fake_flashinfer as fakes
from tests.backends.flashinfer.adapter import builder_for, spec_of
from tests.backends.steps import make_step

NINJA = """Ninja build failed. Ninja output:
ninja: Entering directory `/cache/module'
[1/10] nvcc --generate-dependencies-with-compile -MF error.d -c paged_mask_0.cu
FAILED: paged_mask_0.cuda.o
/include/prefill.cuh(12): error: identifier "cuda" is undefined
nvcc fatal   : Unsupported gpu architecture 'compute_90a' (error)
ninja: build stopped: subcommand failed."""


def test_compiler_errors(monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder) -> None:
    """J4: the error lines and the next action instead of all of ninja's output."""
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


def test_other_errors_are_not_changed(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder
) -> None:
    """A full workspace is not a failed build."""
    spec = spec_of()
    builder = builder_for(monkeypatch, spec)

    def fail(self: Any, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("Buffer overflow when allocating memory for batch_prefill_tmp_v")

    monkeypatch.setattr(sys.modules["flashinfer"].BatchDecodeWithPagedKVCacheWrapper, "plan", fail)
    with pytest.raises(RuntimeError, match="^Buffer overflow"):
        builder.build(0, make_step(spec, [1], [5]).common)


def test_compilation_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, record: fakes.Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    """J4: before it starts; another window uses the same kernel."""
    monkeypatch.setattr(wrappers, "_logged_plans", set())
    caplog.set_level("INFO", logger="attnlib")
    for window in (4, 9, None):
        spec = spec_of(sliding_window=window)
        builder = builder_for(monkeypatch, spec)
        for _ in range(2):
            builder.build(0, make_step(spec, [1], [5]).common)
    lines = [
        record.getMessage() for record in caplog.records if "first plan for" in record.getMessage()
    ]
    assert len(lines) == 2 and all(
        "head_size=64" in line and "compiled now" in line and "cache" in line for line in lines
    )
