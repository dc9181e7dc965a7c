"""X3: a backend written against version 1 of the interface works unchanged."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import attnlib
from attnlib.selection import unregister_backend
from attnlib.testing.conformance import run_conformance

PATH = "tests.testing.golden_v1_backend:GoldenBackend"
FINGERPRINT = "e89e0f0c3889d4464c7bb6ad17462db5a7f1e99937fae2b97e68c5e174c20e92"
"""SHA-256 of the file. A change of the library that requires a change of the file is breaking."""


@pytest.fixture
def registered() -> Iterator[str]:
    attnlib.register_backend("golden_v1", PATH, config={"tag": "mine"})
    yield "golden_v1"
    unregister_backend("golden_v1")


def test_the_file_is_unchanged() -> None:
    content = (Path(__file__).parent / "golden_v1_backend.py").read_bytes()
    assert hashlib.sha256(content).hexdigest() == FINGERPRINT


def test_it_passes_the_conformance_suite(registered: str) -> None:
    report = run_conformance(registered, device="cpu")
    assert report.passed, str(report)
    assert "sink" in report.coverage.exercised


def test_it_runs_a_layer_selected_by_environment(
    registered: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Selection, builder with config, and layer."""
    monkeypatch.setenv("ATTNLIB_BACKEND", registered)
    spec = attnlib.AttentionSpec(
        num_heads=4, num_kv_heads=2, head_size=16, dtype=torch.float32, needs_lse=True
    )
    backend = attnlib.get_attn_backend(spec, device="cpu")
    assert backend.get_name() == "golden_v1"
    cache = attnlib.PagedKVCache.allocate(spec, 8, "cpu")
    layer = attnlib.Attention(spec, device="cpu")
    common = attnlib.CommonAttentionMetadata.from_lengths([3, 1], [3, 1], [[5], [2]], 16, "cpu")
    step = backend.make_builder(spec, "cpu").build(0, common)
    assert step.tag == "mine"
    q, k, v = torch.randn(4, 64), torch.randn(4, 32), torch.randn(4, 32)
    out, lse = layer(q, k, v, cache, step, return_lse=True)
    torch.testing.assert_close(out[0].view(4, 16), v[0].view(2, 16).repeat_interleave(2, 0))
    assert lse.shape == (4, 4)


def test_it_runs_as_one_half_of_a_composite(registered: str) -> None:
    report = run_conformance(
        attnlib.get_attn_backend(
            attnlib.AttentionSpec(num_heads=4, head_size=32, dtype=torch.float32),
            f"prefill:torch,decode:{registered}",
            "cpu",
        ),
        device="cpu",
        quick=True,
        against=[],
    )
    assert report.passed, str(report)
