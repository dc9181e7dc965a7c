"""The `flashinfer_gdn` backend over a fake with the recorded signatures of each release."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

import attnlib
from attnlib.backends.flashinfer import toolchain
from attnlib.backends.flashinfer.gdn import FlashInferGDNBackend, FlashInferGDNImpl
from attnlib.backends.flashinfer.probe import find_api
from attnlib.backends.state_impl import StateInputs
from attnlib.testing.conformance import run_conformance
from tests.backends import fake_flashinfer
from tests.backends.cpu_backend import H200
from tests.backends.packed_recurrence import packed_recurrence
from tests.backends.real_signatures import like

SPEC = attnlib.StateSpec(
    num_heads=4,
    num_key_heads=2,
    key_size=128,
    value_size=128,
    qk_norm=True,
    dtype=torch.bfloat16,
)


def install(monkeypatch: pytest.MonkeyPatch, release: str = "0.7.2") -> list[dict[str, Any]]:
    """Install the fakes of a release for one test; returns the calls of the function."""
    calls: list[dict[str, Any]] = []
    find_api.cache_clear()
    fake_flashinfer.install(monkeypatch, fake_flashinfer.Recorder(), release)
    module: Any = ModuleType("flashinfer.gdn_prefill")
    module.chunk_gated_delta_rule = _fake(f"flashinfer-python {release}", calls)
    monkeypatch.setitem(sys.modules, "flashinfer.gdn_prefill", module)
    return calls


def _fake(release: str, calls: list[dict[str, Any]]) -> Callable[..., Any]:
    @like(release, "chunk_gated_delta_rule", calls)
    def fake(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
        scale: float, initial_state: torch.Tensor, output_final_state: bool,
        cu_seqlens: torch.Tensor, use_qk_l2norm_in_kernel: bool, output: torch.Tensor,
        output_state: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        assert all(x.is_contiguous() for x in (q, k, v, g, beta, output, output_state))
        assert g.dtype == beta.dtype == torch.float32 and q.dtype == v.dtype
        assert g.shape == beta.shape == v.shape[:2] and output_final_state
        assert not use_qk_l2norm_in_kernel and not (g <= 0).any(), "the kernel takes logarithms"
        scale = scale or q.shape[-1] ** -0.5
        out, final = packed_recurrence(
            q, k, v, g.log().exp(), beta, scale, initial_state.mT, cu_seqlens, True
        )
        output.copy_(out)
        output_state.copy_(final.mT)
        return output, output_state

    return fake


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    yield install(monkeypatch)
    find_api.cache_clear()


def on_cpu(impl: type[attnlib.StateImpl] = FlashInferGDNImpl) -> type[attnlib.AttentionBackend]:
    """The backend on a CPU, with heads of 16 elements, which the fake takes too."""
    sizes = attnlib.Sizes(16)
    declared = dataclasses.replace(
        FlashInferGDNBackend.state_capabilities,
        devices=("cpu", "cuda"),
        dtypes=(torch.float32,),
        key_sizes=sizes,
        value_sizes=sizes,
    )
    body = {
        "state_capabilities": declared,
        "unavailable": classmethod(lambda cls, device: []),
        "get_state_impl_cls": staticmethod(lambda: impl),
        "__module__": __name__,
    }
    return type("OnCpu", (FlashInferGDNBackend,), body)


@pytest.mark.slow
def test_it_conforms(calls: list[dict[str, Any]]) -> None:
    report = run_conformance(on_cpu(), device="cpu", quick=True, against=[])
    assert report.passed, str(report)
    assert calls


class _GivesLogarithms(FlashInferGDNImpl):
    """Log decays, as flash-linear-attention takes them."""

    def recur(self, inputs: StateInputs, initial: torch.Tensor, batch: Any) -> Any:
        factor = inputs.log_decay.exp() - 1  # what the kernel would use instead of the decay
        return super().recur(inputs._replace(log_decay=factor), initial, batch)


class _KeysFirst(FlashInferGDNImpl):
    """States as `[Dk, Dv]`."""

    def recur(self, inputs: StateInputs, initial: torch.Tensor, batch: Any) -> Any:
        out, final = super().recur(inputs, initial.mT.contiguous(), batch)
        return out, final.mT


@pytest.mark.parametrize(("impl", "check"), [(_GivesLogarithms, "ST1"), (_KeysFirst, "ST8")])
def test_a_wrong_wrapper_fails_verification(
    impl: type[FlashInferGDNImpl], check: str, calls: list[dict[str, Any]]
) -> None:
    report = run_conformance(on_cpu(impl), device="cpu", quick=True, only=check, against=[])
    assert report.failed_checks() == (check,), str(report)
    assert not any(result.message.startswith("raised ") for result in report.failures), str(report)


@pytest.mark.parametrize("scale", [0.0, 0.25])
def test_fast_decays_and_a_scale_of_zero(scale: float, calls: list[dict[str, Any]]) -> None:
    """A factor of 0 has no logarithm, and a scale of 0 means the default to FlashInfer."""
    spec = SPEC.replace(dtype=torch.float32)
    layer = attnlib.StateLayer(spec, backend=on_cpu(), scale=scale, device="cpu")
    cache = attnlib.StateCache.allocate(layer.spec, 2, device="cpu")
    common = attnlib.CommonAttentionMetadata.from_lengths([3], [3], device="cpu", state_slots=[1])
    metadata = layer.backend.make_builder(layer.spec, "cpu").build(0, common)
    q, k, v = torch.randn(3, 2, 128), torch.randn(3, 2, 128), torch.randn(3, 4, 128)
    out = layer(q, k, v, torch.full((3, 4), -200.0), torch.ones(3, 4), cache, metadata)
    assert out.isfinite().all() and bool(out.any()) is bool(scale)
    (call,) = calls
    assert call["cu_seqlens"].tolist() == [0, 3]


@pytest.mark.parametrize("release", fake_flashinfer.RELEASES)
def test_availability(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, release)
    monkeypatch.setattr(toolchain, "toolchain_problems", lambda release: [])
    assert FlashInferGDNBackend.unavailable(H200) == []
    module: Any = sys.modules["flashinfer.gdn_prefill"]
    module.chunk_gated_delta_rule = lambda q, k, v, g: None
    (reason,) = FlashInferGDNBackend.unavailable(H200)
    assert "chunk_gated_delta_rule has no beta" in reason
    monkeypatch.setitem(sys.modules, "flashinfer", None)  # type: ignore[arg-type]  # forbids the import
    assert "not installed" in FlashInferGDNBackend.unavailable(H200)[0]
    find_api.cache_clear()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"decay": "channel"}, "decay=channel"),
        ({"update": "add"}, "update=add"),
        ({"key_size": 64, "value_size": 64}, "key_size=64"),
        ({"dtype": torch.float32}, "dtype=float32"),
        ({"max_rollback": 17}, "max_rollback=17"),
    ],
)
def test_reasons(changes: dict[str, Any], reason: str) -> None:
    """What FlashInfer's functions of the other kinds cannot compute is a reason."""
    assert FlashInferGDNBackend.state_reasons(SPEC, H200) == []
    found = FlashInferGDNBackend.state_reasons(SPEC.replace(**changes), H200)
    assert any(reason in text for text in found), found
