"""Fakes of the FlashAttention builds: their signatures and pitfalls, computed by plain torch."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from attnlib.ops.params import AttentionParams
from attnlib.ops.torch.paged_prefill import paged_prefill
from tests.backends.real_signatures import RECORDED, like

NAMES = (
    "flash_attn",
    "flash_attn_3",
    "flash_attn_interface",
    "flash_attn_config",
    "vllm",
    "sgl_kernel",
    "cutlass",
)


class Recorder:
    """The arguments of every call of a fake."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.scheduled: list[dict[str, Any]] = []

    @property
    def last(self) -> dict[str, Any]:
        return self.calls[-1]


def attend(
    q: Any,
    k: Any,
    v: Any,
    starts: Any,
    lengths: Any,
    table: Any,
    *,
    scale: Any,
    causal: bool,
    window: Any,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    sinks: Any = None,
    empty: float = float("-inf"),
    qv: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output `[T, Hq, Dv]` and LSE `[Hq, T]`; `empty` for empty rows, NaN past the batch."""
    left, right = (-1 if side is None else side for side in window)
    out = torch.full((*q.shape[:2], v.shape[-1]), float("nan"), dtype=q.dtype)
    lse = torch.full(q.shape[:2], float("nan"))
    end = int(starts[-1])
    if qv is not None:  # absorbed: scores are q @ k + qv @ v
        assert qv.shape[-1] == v.shape[-1] >= 256 and q.shape[-1] <= 64
        q, k = torch.cat((qv, q), -1), torch.cat((v, k), -1)
    params = AttentionParams(
        scale=scale,
        causal=causal,
        window=(left, right),
        logits_soft_cap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=None if sinks is None else sinks.float(),
    )
    paged_prefill(
        q[:end],
        k,
        v,
        table,
        starts,
        lengths,
        params,
        max_query_len=int((starts[1:] - starts[:-1]).max()),
        max_seq_len=int(lengths.max()),
        out=out[:end],
        lse=lse[:end],
    )
    lse[:end] = torch.where(torch.isneginf(lse[:end]), torch.tensor(empty), lse[:end])
    return out, lse.t().contiguous()


def as_fa2(
    lse: torch.Tensor, starts: Any, lengths: Any, *, causal: bool, window: Any, alibi_slopes: Any
) -> None:
    """Change an LSE `[Hq, T]` to that of FlashAttention 2 on a GPU, in place.

    Requests without keys leave it unwritten. With a causal mask and no window, ALiBi adds
    `slope * key position` instead of `slope * (key position - query position)`.
    """
    counts = starts[1:] - starts[:-1]
    end = int(starts[-1])
    lse[:, :end].masked_fill_((lengths == 0).repeat_interleave(counts), 0.25)
    if alibi_slopes is not None and causal and window[0] < 0:
        pairs = zip(lengths, counts, strict=True)
        places = torch.cat([torch.arange(int(n) - int(q), int(n)) for n, q in pairs])
        lse[:, :end] += alibi_slopes[:, None] * places


def install(monkeypatch: pytest.MonkeyPatch, path: str, **attributes: Any) -> ModuleType:
    """Add a module and its parents to `sys.modules`."""
    parts = path.split(".")
    for depth in range(1, len(parts) + 1):
        name = ".".join(parts[:depth])
        if sys.modules.get(name) is None or depth == len(parts):
            module = ModuleType(name)
            # Parents are namespace packages, as FlashAttention 4 leaves `flash_attn`.
            module.__file__ = (
                f"/fake/{name.replace('.', '/')}/__init__.py" if depth == len(parts) else None
            )
            module.__path__ = []
            monkeypatch.setitem(sys.modules, name, module)
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make all of the packages appear as not installed."""
    for name in NAMES:
        for loaded in [
            module for module in sys.modules if module == name or module.startswith(name + ".")
        ]:
            monkeypatch.delitem(sys.modules, loaded)
        monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]  # None makes the import fail


FA2, FA4 = "flash-attn 2.8.3", "flash-attn-4 4.0.0b36"
VLLM = tuple(release for release in RECORDED if release.startswith("vllm "))
"""Recorded releases; the source archive of 2.8.3 has FlashAttention 3 too."""


def fake_fa2(record: Recorder) -> Any:
    """flash_attn 2.8: cumulative lengths, no `out`, +inf for empty rows; see `query_bound`."""

    @like(FA2, "flash_attn_varlen_func", record.calls)
    def fake(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, softmax_scale, causal, window_size,
        softcap, alibi_slopes, return_attn_probs, block_table,
    ):  # fmt: skip
        if k.shape[1] % 256:
            raise RuntimeError("Paged KV cache block size must be divisible by 256")
        if max_seqlen_q == 1 and q.shape[0] != cu_seqlens_q.shape[0] - 1:
            raise RuntimeError("shape '[batch_size, ngroups, ...]' is invalid for input")
        lengths = (cu_seqlens_k[1:] - cu_seqlens_k[:-1]).to(torch.int32)
        out, lse = attend(
            q, k, v, cu_seqlens_q, lengths, block_table, scale=softmax_scale, causal=causal,
            window=window_size, softcap=softcap, alibi_slopes=alibi_slopes, empty=float("inf"),
        )  # fmt: skip
        as_fa2(
            lse, cu_seqlens_q, lengths, causal=causal, window=window_size, alibi_slopes=alibi_slopes
        )
        return (out, lse, None) if return_attn_probs else out

    return fake


def fake_fa3(record: Recorder) -> tuple[Any, Any]:
    """FlashAttention 3 upstream: kvcache function, no `out`, no sinks, a scheduler."""

    @like(FA2, "flash_attn_with_kvcache", record.calls)
    def fake(
        q, k_cache, v_cache, qv, cache_seqlens, page_table, cu_seqlens_q, softmax_scale, causal,
        window_size, softcap, return_softmax_lse,
    ):  # fmt: skip
        out, lse = attend(
            q, k_cache, v_cache, cu_seqlens_q, cache_seqlens, page_table, scale=softmax_scale,
            causal=causal, window=window_size, softcap=softcap, qv=qv,
        )  # fmt: skip
        return (out, lse, None, None) if return_softmax_lse else out

    return fake, _scheduler(record, FA2)


def _scheduler(record: Recorder, release: str) -> Any:
    @like(release, "get_scheduler_metadata", record.scheduled)
    def fake(batch_size):
        return torch.arange(batch_size + 1, dtype=torch.int32)

    return fake


def fake_vllm(record: Recorder, release: str = VLLM[0]) -> tuple[Any, Any]:
    """vLLM's build: several generations behind one function, `out`, `s_aux`, a scheduler."""

    @like(release, "flash_attn_varlen_func", record.calls)
    def fake(
        q, k, v, cu_seqlens_q, seqused_k, q_v, softmax_scale, causal, window_size, softcap,
        alibi_slopes, block_table, return_softmax_lse, out, num_splits, fa_version, s_aux,
    ):  # fmt: skip
        left, right = (-1, -1) if window_size is None else window_size
        window = (left if left >= 0 else -1, right if right >= 0 else -1)  # no comparison with None
        assert s_aux is None or (s_aux.dtype == torch.bfloat16 and fa_version in (3, 4))
        assert alibi_slopes is None or fa_version == 2
        assert fa_version != 2 or num_splits <= 1
        result, lse = attend(
            q, k, v, cu_seqlens_q, seqused_k, block_table, scale=softmax_scale, causal=causal,
            window=window, softcap=softcap, alibi_slopes=alibi_slopes, sinks=s_aux, qv=q_v,
        )  # fmt: skip
        if s_aux is not None:  # blocks without keys return early, with -inf
            empty = (seqused_k == 0).repeat_interleave(cu_seqlens_q[1:] - cu_seqlens_q[:-1])
            lse[:, : len(empty)].masked_fill_(empty, float("-inf"))
        if fa_version == 2:
            as_fa2(
                lse, cu_seqlens_q, seqused_k, causal=causal, window=window,
                alibi_slopes=alibi_slopes,
            )  # fmt: skip
        out.copy_(result)
        return (out, lse) if return_softmax_lse else out

    return fake, _scheduler(record, release)


def fake_fa4(record: Recorder, hopper: bool = True) -> Any:
    """flash-attn-4: varlen with `page_table`, None for unbounded windows, one split on Hopper."""

    @like(FA4, "flash_attn_varlen_func", record.calls)
    def fake(
        q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, page_table, softmax_scale, causal,
        window_size, learnable_sink, softcap, num_splits, return_lse,
    ):  # fmt: skip
        assert cu_seqlens_k is None and all(side is None or side >= 0 for side in window_size)
        assert num_splits == 1 or not hopper, "SplitKV not supported on SM 9.0"
        assert q.shape[-1] % 16 == v.shape[-1] % 16 == 0, (
            "Paged KV does not support irregular head dim"
        )
        assert q.dtype == k.dtype == v.dtype and {
            t.dtype for t in (cu_seqlens_q, seqused_k, page_table)
        } == {torch.int32}
        assert (
            page_table.shape[0] == len(cu_seqlens_q) - 1 == len(seqused_k)
            and page_table.stride(-1) == 1
        )
        out, lse = attend(
            q, k, v, cu_seqlens_q, seqused_k, page_table, scale=softmax_scale, causal=causal,
            window=window_size, softcap=softcap, sinks=learnable_sink,
        )  # fmt: skip
        return out, lse if return_lse else None

    return fake


def fake_sglang(record: Recorder) -> Any:
    """SGLang's build: the kvcache function with `sinks` and `ver`; its wheel is not recorded."""

    def flash_attn_with_kvcache(
        q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, page_table=None, cu_seqlens_q=None,
        max_seqlen_q=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
        num_splits=0, return_softmax_lse=False, sinks=None, ver=3,
    ):  # fmt: skip
        record.calls.append({name: value for name, value in locals().items() if name != "record"})
        out, lse = attend(
            q, k_cache, v_cache, cu_seqlens_q, cache_seqlens, page_table, scale=softmax_scale,
            causal=causal, window=window_size, softcap=softcap, sinks=sinks,
        )  # fmt: skip
        return (out, lse) if return_softmax_lse else out

    return flash_attn_with_kvcache
