"""`generate_batch` with backends that plan with host lengths, as on a GPU.

On a CPU lengths are always available on the host. These tests disable that, so that the declaration
of the builder decides.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import attnlib
from attnlib.backends.composite import make_composite
from attnlib.backends.flash_attn import FlashAttnBackend
from attnlib.backends.flashinfer import FlashInferBackend
from attnlib.backends.flashinfer import metadata as flashinfer_metadata
from attnlib.backends.flashinfer.probe import find_api
from attnlib.backends.torch import TorchBackend
from attnlib.backends.triton import TritonBackend
from attnlib.capabilities import Sizes
from attnlib.device import DeviceInfo
from attnlib.integrations.transformers import continuous, continuous_batch
from attnlib.selection import unregister_backend
from tests.backends import fake_flashinfer
from tests.integrations.tiny_models import decoder, prompts
from tests.integrations.transformers.test_continuous import (
    batch_tokens,
    eager_tokens,
)  # noqa: F401  # also skips here

H200 = DeviceInfo("cuda", 0, (9, 0), name="NVIDIA H200")


pytestmark = pytest.mark.slow


class _Layer:
    def __init__(self, backend: Any) -> None:
        self.backend = backend


def _as_on_a_gpu(layer: Any, starts: torch.Tensor) -> bool:
    return bool(layer.backend.get_builder_cls().needs_host_lengths)


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_flashinfer.Recorder]:
    """A fake FlashInfer, registered under another name for the CPU and tiny float32 heads."""
    record = fake_flashinfer.Recorder()
    fake_flashinfer.install(monkeypatch, record)
    monkeypatch.setattr(flashinfer_metadata, "resolve_device", lambda _: H200)
    find_api.cache_clear()
    capabilities = dataclasses.replace(
        FlashInferBackend.capabilities,
        devices=("cpu", "cuda"),
        min_capability=None,
        dtypes=(torch.float32,),
        head_sizes=Sizes(1),
    )
    body = {"capabilities": capabilities, "unavailable": classmethod(lambda cls, device: [])}
    backend = type(
        "OnCpu",
        (FlashInferBackend,),
        {**body, "get_name": staticmethod(lambda: "flashinfer_on_cpu")},
    )
    attnlib.register_backend("flashinfer_on_cpu", backend, config={"workspace_bytes": 64})
    monkeypatch.setenv("ATTNLIB_BACKEND", "flashinfer_on_cpu")
    monkeypatch.setenv("ATTNLIB_VALIDATE", "0")
    yield record
    unregister_backend("flashinfer_on_cpu")
    find_api.cache_clear()


def test_builders_that_need_lengths_on_the_host() -> None:
    """All but those that declare otherwise; a pair needs them if one of the two does."""
    on_device = torch.empty(3, device="meta")
    pairs = [make_composite(x, TritonBackend) for x in (FlashInferBackend, FlashAttnBackend)]
    needs = {
        backend: continuous_batch._needs_host_lengths(_Layer(backend), on_device)  # type: ignore[arg-type]
        for backend in (FlashInferBackend, TorchBackend, FlashAttnBackend, TritonBackend, *pairs)
    }
    assert list(needs.values()) == [True, True, False, False, True, False]


def test_flashinfer_plans_with_true_lengths(
    monkeypatch: pytest.MonkeyPatch, record: fake_flashinfer.Recorder
) -> None:
    """Mixed batches: tokens equal eager, decodes use the decode wrapper, and no plan is empty."""
    monkeypatch.setattr(continuous_batch, "_needs_host_lengths", _as_on_a_gpu)
    model, inputs = decoder("llama"), prompts(5, 9, 33, 18)
    assert batch_tokens(model, inputs, 10) == eager_tokens(model, inputs, 10)
    assert {run["kind"] for run in record.runs} >= {"decode", "fa3"}
    assert all(int(plan["indptr"][-1]) > 0 for plan in record.plans)


def test_one_copy_for_each_batch(
    monkeypatch: pytest.MonkeyPatch, record: fake_flashinfer.Recorder
) -> None:
    """Offsets and lengths are copied to the host together, once for all layers of a step."""
    monkeypatch.setattr(continuous_batch, "_needs_host_lengths", _as_on_a_gpu)
    copies: list[int] = []
    to_host = torch.Tensor.cpu

    def counting(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        copies.append(self.numel())
        return to_host(self, *args, **kwargs)

    common = continuous.common_of_step
    built: list[int] = []

    def watching(*args: Any) -> Any:
        before = len(copies)
        result = common(*args)
        built.append(len(copies) - before)
        return result

    monkeypatch.setattr(torch.Tensor, "cpu", counting)
    monkeypatch.setattr(continuous, "common_of_step", watching)
    batch_tokens(decoder("llama"), prompts(5, 9), 4)
    assert built and set(built) == {1}


def test_without_them_a_cpu_reads_the_tensors_of_the_batch(
    monkeypatch: pytest.MonkeyPatch, record: fake_flashinfer.Recorder
) -> None:
    """The builder takes the lengths from the batch, which is on the host already."""
    monkeypatch.setattr(continuous_batch, "_needs_host_lengths", lambda layer, starts: False)
    model, inputs = decoder("llama"), prompts(5, 9)
    assert batch_tokens(model, inputs, 6) == eager_tokens(model, inputs, 6)
    assert record.plans
