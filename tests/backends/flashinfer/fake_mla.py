"""Fakes of FlashInfer's MLA wrapper: its signatures and pitfalls, computed by plain torch.

Deprecated forms of call fail: arguments by position, and from 0.7 on a batch or tensors in parts
and an LSE that the plan does not declare.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from attnlib.ops.params import AttentionParams
from attnlib.ops.torch.paged_prefill import paged_prefill
from tests.backends import fake_flashinfer
from tests.backends.fake_flashinfer import RELEASES
from tests.backends.real_signatures import like

__all__ = ["FLAT", "RELEASES", "Calls", "install", "make_module"]

_NAME = "BatchMLAPagedAttentionWrapper"
FLAT = tuple(release for release in RELEASES if release.startswith("0.6."))
"""Releases that take the batch and the tensors in parts."""


class Calls:
    """The wrappers made, and the plans and runs, in order."""

    def __init__(self) -> None:
        self.kernels: list[str] = []
        self.plans: list[dict[str, Any]] = []
        self.runs: list[dict[str, Any]] = []


def by_keyword(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method with its signature; arguments by position fail."""

    @functools.wraps(method)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        assert not args, "arguments by position are deprecated"
        return method(self, **kwargs)

    return checked


def make_module(calls: Calls, release: str) -> ModuleType:
    """The module `flashinfer.mla` of a release."""
    module: Any = ModuleType("flashinfer.mla")
    recorded = f"flashinfer-python {release}"
    if release in FLAT:
        module.BatchMLAPagedAttentionWrapper = _flat(calls, recorded)
    else:
        module.BatchMLAPagedAttentionWrapper = _structured(calls, recorded)
        module.MLAPlanMetadata = _plan_metadata(recorded)
    return module


def install(monkeypatch: pytest.MonkeyPatch, release: str = "0.7.2") -> Calls:
    """Install the fake as `flashinfer.mla` for one test."""
    calls = Calls()
    fake_flashinfer.install(monkeypatch, fake_flashinfer.Recorder(), release)
    monkeypatch.setitem(sys.modules, "flashinfer.mla", make_module(calls, release))
    return calls


def _plan_metadata(release: str) -> type:
    """The batch of a plan."""

    class MLAPlanMetadata(SimpleNamespace):
        @classmethod
        @like(release, "MLAPlanMetadata.csr")
        def csr(cls, qo_indptr, kv_indptr, kv_indices, kv_len_arr):
            return cls(
                qo_indptr=qo_indptr, kv_indptr=kv_indptr, kv_indices=kv_indices,
                kv_len_arr=kv_len_arr,
            )  # fmt: skip

    return MLAPlanMetadata


def _flat(calls: Calls, release: str) -> type:
    """Up to 0.6: the parts of the batch and of the tensors as arguments of their own."""

    class BatchMLAPagedAttentionWrapper:
        __init__ = _made(calls, release)

        @by_keyword
        @like(release, f"{_NAME}.plan")
        def plan(
            self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv,
            head_dim_kpe, page_size, causal, sm_scale, q_data_type, kv_data_type,
        ):  # fmt: skip
            batch = SimpleNamespace(
                qo_indptr=qo_indptr, kv_indptr=kv_indptr, kv_indices=kv_indices,
                kv_len_arr=kv_len_arr,
            )  # fmt: skip
            assert (head_dim_ckv, head_dim_kpe) == (512, 64)
            self.planned = _planned(
                batch, num_heads, page_size, causal, sm_scale, (q_data_type, kv_data_type)
            )
            calls.plans.append(self.planned)

        @by_keyword
        @like(release, f"{_NAME}.run")
        def run(
            self, q_nope, q_pe, ckv_cache, kpe_cache, out, lse, return_lse, return_lse_base_on_e,
        ):  # fmt: skip
            natural = _attend(self.planned, (q_nope, q_pe), (ckv_cache, kpe_cache), out)
            calls.runs.append({"out": out, "lse": lse, "return_lse": return_lse})
            return _returned(natural, out, lse, return_lse, return_lse_base_on_e)

    return BatchMLAPagedAttentionWrapper


def _structured(calls: Calls, release: str) -> type:
    """From 0.7 on: the batch as one object, tensors as pairs, the LSE declared by the plan."""

    class BatchMLAPagedAttentionWrapper:
        __init__ = _made(calls, release)

        @by_keyword
        @like(release, f"{_NAME}.plan")
        def plan(
            self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, cum_seq_lens_q, block_tables,
            num_heads, head_dim_ckv, head_dim_kpe, page_size, causal, sm_scale, q_data_type,
            kv_data_type, metadata, query_layout, kv_cache_layout, lse_mode,
        ):  # fmt: skip
            flat = (qo_indptr, kv_indptr, kv_indices, kv_len_arr, cum_seq_lens_q, block_tables)
            assert all(part is None for part in flat), "a batch in parts is deprecated"
            assert metadata is not None and (head_dim_ckv, head_dim_kpe) == (512, 64)
            self.layouts = query_layout or "packed", kv_cache_layout or "packed"
            self.planned = _planned(
                metadata, num_heads, page_size, causal, sm_scale, (q_data_type, kv_data_type)
            ) | {"lse_mode": lse_mode}
            calls.plans.append(self.planned)

        @by_keyword
        @like(release, f"{_NAME}.run")
        def run(
            self, q_nope, q_pe, ckv_cache, kpe_cache, out, lse, return_lse, return_lse_base_on_e,
            query, kv_cache,
        ):  # fmt: skip
            parts = (q_nope, q_pe, ckv_cache, kpe_cache)
            assert all(part is None for part in parts), "tensors in parts are deprecated"
            given = ["split" if isinstance(x, tuple) else "packed" for x in (query, kv_cache)]
            assert tuple(given) == self.layouts, "not as planned"
            mode = "none"
            if return_lse or lse is not None or return_lse_base_on_e:
                mode = "basee" if return_lse_base_on_e else "base2"
            assert mode == self.planned["lse_mode"], "not as planned"
            natural = _attend(self.planned, query, kv_cache, out)
            calls.runs.append({"out": out, "lse": lse, "return_lse": return_lse})
            return _returned(natural, out, lse, return_lse, return_lse_base_on_e)

    return BatchMLAPagedAttentionWrapper


def _made(calls: Calls, release: str) -> Callable[..., None]:
    @like(release, f"{_NAME}.__init__")
    def __init__(self, float_workspace_buffer, backend):
        assert float_workspace_buffer.dtype == torch.uint8
        calls.kernels.append(backend)

    return __init__


def _planned(
    batch: Any, heads: int, page_size: int, causal: bool, scale: float, dtypes: tuple[Any, Any]
) -> dict[str, Any]:
    starts, indptr, indices = batch.qo_indptr, batch.kv_indptr, batch.kv_indices
    lengths = batch.kv_len_arr
    for tensor in (starts, indptr, indices, lengths):
        assert tensor.dtype == torch.int32 and tensor.is_contiguous()
    assert len(starts) == len(indptr) == len(lengths) + 1 and int(starts[0]) == 0
    pages = -(-lengths // page_size)
    assert torch.equal(indptr[1:] - indptr[:-1], pages.int())
    table = torch.full((len(pages), max(pages.tolist(), default=1)), -1).int()
    for request, count in enumerate(pages.tolist()):
        first = int(indptr[request])
        table[request, :count] = indices[first : first + count]
    return {
        "starts": starts, "table": table, "lengths": lengths, "heads": heads, "causal": causal,
        "scale": scale, "dtypes": dtypes, "page_size": page_size,
    }  # fmt: skip


def _attend(plan: dict[str, Any], query: Any, cache: Any, out: torch.Tensor) -> torch.Tensor:
    """Output [T, Hq, 512] in `out`; returns the natural LSE. Loads of 16 bytes."""
    (q_nope, q_pe), (ckv_cache, kpe_cache) = query, cache
    assert q_nope.shape[0] == int(plan["starts"][-1])
    assert q_nope.shape[1:] == (plan["heads"], 512) and q_pe.shape[2] == 64
    assert ckv_cache.shape[1:] == (plan["page_size"], 512) and kpe_cache.shape[2] == 64
    assert plan["dtypes"] == (q_nope.dtype, ckv_cache.dtype)
    for tensor in (q_nope, q_pe, ckv_cache, kpe_cache):
        assert all(stride % 8 == 0 for stride in tensor.stride()[:-1])
    assert out.shape == q_nope.shape and out.dtype == q_nope.dtype
    # Only blocks of the batch are copied: a pool may have more than 2^31 elements.
    blocks, table = plan["table"].clamp(min=0).unique(return_inverse=True)
    whole = torch.cat((ckv_cache[blocks], kpe_cache[blocks]), dim=-1)[:, :, None]
    natural = torch.empty(out.shape[:2])
    counts = plan["starts"][1:] - plan["starts"][:-1]
    paged_prefill(
        torch.cat((q_nope, q_pe), dim=-1), whole, whole[..., :512], table.int(), plan["starts"],
        plan["lengths"], AttentionParams(scale=plan["scale"], causal=plan["causal"]),
        max_query_len=int(counts.max()), max_seq_len=int(plan["lengths"].max()), out=out,
        lse=natural,
    )  # fmt: skip
    return natural


def _returned(
    natural: torch.Tensor, out: torch.Tensor, lse: Any, return_lse: bool, base_e: bool
) -> Any:
    if not return_lse:
        return out
    assert lse.shape == out.shape[:2] and lse.is_contiguous()
    lse.copy_(natural if base_e else natural / fake_flashinfer.LOG_2)
    return out, lse
