"""Fakes of FlashInfer: the signatures of its wrappers, base-2 LSE, computed by plain torch."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from attnlib.ops.params import AttentionParams
from attnlib.ops.torch.paged_prefill import paged_prefill
from tests.backends.real_signatures import RECORDED, like, signature_of

RELEASES = tuple(
    release.split()[1] for release in RECORDED if release.startswith("flashinfer-python ")
)
LOG_2 = 0.6931471805599453


class Recorder:
    """The created wrappers, plans and runs, in order."""

    def __init__(self) -> None:
        self.made: list[Any] = []
        self.plans: list[dict[str, Any]] = []
        self.runs: list[dict[str, Any]] = []


def _attend(
    self: Any,
    q: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    scale: float,
    out: torch.Tensor,
    lse: Any,
    starts: Any,
) -> None:
    plan = self.planned
    indptr, indices, last = plan["indptr"], plan["indices"], plan["last_page_len"]
    assert indices.dtype == torch.int32 and ((last >= 1) & (last <= plan["page_size"])).all()
    pages = (indptr[1:] - indptr[:-1]).clamp(min=0)
    lengths = torch.where(pages > 0, (pages - 1) * plan["page_size"] + last, 0).to(torch.int32)
    table = torch.full((len(lengths), max(int(pages.max()), 1)), -1, dtype=torch.int32)
    for request, count in enumerate(pages.tolist()):
        table[request, :count] = indices[int(indptr[request]) : int(indptr[request]) + count]
    assert out.is_contiguous(), "FlashInfer's fa2 kernels ignore the strides of the output"
    natural = torch.empty(q.shape[:2])
    params = AttentionParams(
        scale=plan["sm_scale"] * scale,
        causal=plan["causal"],
        window=(plan["window_left"], -1),
        logits_soft_cap=plan["logits_soft_cap"],
    )
    paged_prefill(
        q,
        *caches,
        table,
        starts,
        lengths,
        params,
        max_query_len=int((starts[1:] - starts[:-1]).max()),
        max_seq_len=int(lengths.max()),
        out=out,
        lse=natural,
    )
    if lse is not None:
        lse.copy_(torch.where(torch.isneginf(natural), torch.tensor(-5e4), natural / LOG_2))


def make_module(record: Recorder, release: str) -> ModuleType:
    """The module of a release."""
    module = ModuleType("flashinfer")
    module.__version__ = release
    module.BatchDecodeWithPagedKVCacheWrapper = _decode(record, f"flashinfer-python {release}")
    module.BatchPrefillWithPagedKVCacheWrapper = _prefill(record, f"flashinfer-python {release}")
    return module


def _decode(record: Recorder, release: str) -> type:
    name = "BatchDecodeWithPagedKVCacheWrapper"

    class BatchDecodeWithPagedKVCacheWrapper:
        @like(release, f"{name}.__init__")
        def __init__(
            self, float_workspace_buffer, use_cuda_graph, paged_kv_indptr_buffer,
            paged_kv_indices_buffer, paged_kv_last_page_len_buffer, backend,
        ):  # fmt: skip
            assert (float_workspace_buffer == 0).all(), "the workspace was not zeroed"
            self.backend, self.graph = backend, use_cuda_graph
            self.buffers = (
                paged_kv_indptr_buffer,
                paged_kv_indices_buffer,
                paged_kv_last_page_len_buffer,
            )
            record.made.append(self)

        def _plan(
            self, indptr, indices, last_page_len, page_size, window_left, logits_soft_cap,
            q_data_type, kv_data_type, sm_scale, seq_lens, head_dim,
        ):  # fmt: skip
            assert indptr.device.type == last_page_len.device.type == "cpu"
            self.planned = {
                name: value for name, value in locals().items() if name not in ("record", "self")
            } | {"causal": False}
            if self.graph:
                assert len(last_page_len) == len(self.buffers[2])
                self.buffers[0].copy_(indptr)
                self.buffers[1][: len(indices)].copy_(indices)
                self.buffers[2].copy_(last_page_len)
            record.plans.append(self.planned | {"wrapper": self})

        if f"{name}._plan_impl" in RECORDED[release]:
            _plan_impl = like(release, f"{name}._plan_impl")(_plan)

            def plan(self, *args, **kwargs):
                signature_of(release, f"{name}.plan").bind(self, *args, **kwargs)
                assert len(args) <= 7, "arguments behind page_size by position are deprecated"
                return self._plan_impl(*args, **kwargs)

            plan.__signature__ = signature_of(release, f"{name}.plan")
        else:
            plan = like(release, f"{name}.plan")(_plan)

        @like(release, f"{name}.run")
        def run(self, q, paged_kv_cache, q_scale, k_scale, v_scale, out, lse, return_lse):
            record.runs.append({"wrapper": self, "q": q, "out": out, "lse": lse, "kind": "decode"})
            batch = len(self.planned["last_page_len"])
            if q.shape[0] != batch:
                raise ValueError(f"q.shape[0] ({q.shape[0]}) does not match batch_size ({batch})")
            starts = torch.arange(batch + 1, dtype=torch.int32)
            scale = q_scale * (k_scale or 1.0)
            _attend(self, q, paged_kv_cache, scale, out, lse if return_lse else None, starts)
            if v_scale is not None:
                out *= v_scale
            return (out, lse) if return_lse else out

    return BatchDecodeWithPagedKVCacheWrapper


def _prefill(record: Recorder, release: str) -> type:
    name = "BatchPrefillWithPagedKVCacheWrapper"

    class BatchPrefillWithPagedKVCacheWrapper:
        @like(release, f"{name}.__init__")
        def __init__(self, backend):
            self.backend = backend
            record.made.append(self)

        @like(release, f"{name}.plan")
        def plan(
            self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size,
            causal, sm_scale, window_left, logits_soft_cap, seq_lens,
        ):  # fmt: skip
            assert (
                qo_indptr.device.type == paged_kv_indptr.device.type == "cpu"
                and int(qo_indptr[0]) == 0
            )
            self.planned = {
                "qo_indptr": qo_indptr,
                "indptr": paged_kv_indptr,
                "indices": paged_kv_indices,
                "last_page_len": paged_kv_last_page_len,
                "page_size": page_size,
                "causal": causal,
                "window_left": window_left,
                "logits_soft_cap": logits_soft_cap,
                "sm_scale": sm_scale,
                "seq_lens": seq_lens,
            }
            record.plans.append(self.planned | {"wrapper": self})

        @like(release, f"{name}.run")
        def run(self, q, paged_kv_cache, q_scale, k_scale, v_scale, out, lse, return_lse):
            record.runs.append(
                {"wrapper": self, "q": q, "out": out, "lse": lse, "kind": self.backend}
            )
            scale, starts = q_scale * (k_scale or 1.0), self.planned["qo_indptr"]
            _attend(self, q, paged_kv_cache, scale, out, lse if return_lse else None, starts)
            if v_scale is not None:
                out *= v_scale
            return (out, lse) if return_lse else out

    return BatchPrefillWithPagedKVCacheWrapper


def install(
    monkeypatch: pytest.MonkeyPatch, record: Recorder, release: str = RELEASES[0]
) -> ModuleType:
    """Add the fake of a release to `sys.modules`."""
    module = make_module(record, release)
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    return module
