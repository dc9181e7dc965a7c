"""FlashInfer's wrappers against attention in float64."""

from __future__ import annotations

import itertools
import math
import os
import random
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import attnlib
from attnlib.compat import flashinfer
from attnlib.errors import ContractError, LayoutMismatchError, UnsupportedConfigError
from tests.compat.reference import assert_matches, attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WORKSPACE = torch.zeros(1 << 20, dtype=torch.uint8, device=DEVICE)
SEEDS = [
    *((seed, "torch") for seed in range(20)),
    *((seed, "triton") for seed in range(3)),
    *(pytest.param(seed, "triton", marks=pytest.mark.slow) for seed in range(3, 12)),
]


class Batch:
    """Page lists of random requests and a cache of random numbers."""

    def __init__(self, seed: int, query_lens: list[int], seq_lens: list[int]) -> None:
        torch.manual_seed(seed)
        draw = random.Random(seed)
        self.page_size = draw.choice([1, 4, 16])
        self.layout = draw.choice(["NHD", "HND"])
        self.single = draw.choice([True, False])
        self.query_lens, self.seq_lens = query_lens, seq_lens
        pages = [-(-n // self.page_size) for n in seq_lens]
        total = sum(pages) + 2
        self.indptr = _ints([0, *itertools.accumulate(pages)])
        self.indices = torch.randperm(total)[: sum(pages)].int().to(DEVICE)
        last = [n - (count - 1) * self.page_size if count else 0
                for n, count in zip(seq_lens, pages, strict=True)]  # fmt: skip
        self.last = _ints(last)
        self.qo_indptr = _ints([0, *itertools.accumulate(query_lens)])
        inner = (self.page_size, 2) if self.layout == "NHD" else (2, self.page_size)
        self.cache = torch.randn(total, 2, *inner, 16, device=DEVICE)
        self.q = torch.randn(sum(query_lens), 4, 16, device=DEVICE)

    @property
    def argument(self) -> Any:
        """The cache as the wrapper takes it."""
        return self.cache if self.single else tuple(self.cache.unbind(1))

    def keys(self, request: int) -> list[torch.Tensor]:
        """Keys and values of a request, `[seq_len, 2, 16]`."""
        first, end = self.indptr[request : request + 2].tolist()
        pages = self.cache[self.indices[first:end].long()]
        if self.layout == "HND":
            pages = pages.transpose(2, 3)
        return [pages[:, i].flatten(0, 1)[: self.seq_lens[request]] for i in range(2)]

    def check(self, out: torch.Tensor, lse: torch.Tensor, **options: Any) -> None:
        """Compare outputs, and base-2 log-sum-exps, with the definition."""
        for request, (a, b) in enumerate(itertools.pairwise(self.qo_indptr.tolist())):
            k, v = self.keys(request)
            wanted, natural = attention(self.q[a:b], k, v, **options)
            assert_matches((out[a:b], lse[a:b]), (wanted, natural * math.log2(math.e)))


def _ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def _options(draw: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of `plan`, and the same ones of the reference."""
    left, cap, scale = draw.choice([-1, -1, 5]), draw.choice([0.0, 4.0]), draw.choice([None, 0.5])
    plan = {"window_left": left, "logits_soft_cap": cap, "sm_scale": scale}
    return plan, {"window": (left, -1), "softcap": cap, "scale": scale}


@pytest.mark.parametrize(("seed", "backend"), SEEDS)
def test_decode(seed: int, backend: str) -> None:
    """NHD and HND, one tensor and two, pages of any size; requests without keys."""
    draw = random.Random(seed)
    query_len = draw.choice([1, 1, 3])
    batch = Batch(seed, [query_len] * 4, [draw.choice([0, 3, 17, 40]) + 3 for _ in range(4)])
    plan, reference = _options(draw)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, batch.layout)
    with attnlib.use_backend(backend):
        wrapper.plan(
            batch.indptr, batch.indices, batch.last, 4, 2, 16, batch.page_size,
            q_data_type=torch.float32, q_len_per_req=query_len, **plan,
        )  # fmt: skip
        for _ in range(2):
            batch.cache.normal_()
            out, lse = wrapper.run(batch.q, batch.argument, return_lse=True)
            batch.check(out, lse, causal=True, **reference)
        own_out, own_lse = torch.empty_like(out), torch.empty_like(lse)
        got = wrapper.run(batch.q, batch.argument, out=own_out, lse=own_lse, return_lse=True)
    assert got[0] is own_out and got[1] is own_lse
    assert torch.equal(own_out, out) and torch.equal(own_lse, lse)


@pytest.mark.parametrize(("seed", "backend"), SEEDS)
def test_prefill(seed: int, backend: str) -> None:
    """Prefill and append, causal or not; requests without queries or keys."""
    draw = random.Random(seed)
    seq_lens = [draw.choice([0, 2, 19, 33]) for _ in range(4)]
    batch = Batch(seed, [draw.choice([0, 1, 9, 14]) for _ in range(4)], seq_lens)
    plan, reference = _options(draw)
    causal = draw.choice([True, False])
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, batch.layout)
    with attnlib.use_backend(backend):
        wrapper.plan(
            batch.qo_indptr, batch.indptr, batch.indices, batch.last, 4, 2, 16, batch.page_size,
            causal=causal, q_data_type=torch.float32, **plan,
        )  # fmt: skip
        out, lse = wrapper.run(batch.q, batch.argument, return_lse=True)
        assert torch.equal(out, wrapper.run_return_lse(batch.q, batch.argument)[0])
    batch.check(out, lse, causal=causal, **reference)


def test_a_new_plan_replaces_the_old_one() -> None:
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, "NHD")
    for seed, causal in ((100, True), (101, False), (102, True)):
        batch = Batch(seed, [5, seed % 7], [9, 11])
        batch.layout, batch.single = "NHD", True
        batch.cache = torch.randn(batch.cache.shape[0], 2, batch.page_size, 2, 16, device=DEVICE)
        wrapper.plan(
            batch.qo_indptr, batch.indptr, batch.indices, batch.last, 4, 2, 16, batch.page_size,
            causal=causal, q_data_type="float32",
        )  # fmt: skip
        batch.check(*wrapper.run(batch.q, batch.argument, return_lse=True), causal=causal)


def test_scales_and_float8() -> None:
    """q_scale and k_scale multiply scores, v_scale outputs; a float8 cache stores value / scale."""
    batch = Batch(3, [1, 1], [20, 7])
    batch.layout, batch.single, batch.page_size = batch.layout, True, batch.page_size
    stored = batch.cache.to(torch.float8_e4m3fn)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, batch.layout)
    sizes = (4, 2, 16, batch.page_size)
    lists = (batch.indptr, batch.indices, batch.last)
    wrapper.plan(*lists, *sizes, q_data_type=torch.float32, kv_data_type=torch.float8_e4m3fn)
    scaled = wrapper.run(batch.q, stored, k_scale=0.5, v_scale=2.0, return_lse=True)
    batch.cache = stored.float()
    wrapper.plan(*lists, *sizes, data_type=torch.float32, q_data_type=None)
    for k_scale in (0.5, torch.tensor(0.5, device=DEVICE)):
        plain = wrapper.run(batch.q, batch.cache, k_scale=k_scale, v_scale=2.0, return_lse=True)
        torch.testing.assert_close(plain, scaled, rtol=1e-5, atol=1e-5)
    halves = wrapper.run(batch.q, batch.cache, q_scale=0.5, return_lse=True)
    batch.check(*halves, causal=True, scale=0.125)


def test_deprecated_names() -> None:
    batch = Batch(5, [1, 1], [20, 7])
    batch.single = True
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, batch.layout)
    lists = (batch.indptr, batch.indices, batch.last, 4, 2, 16, batch.page_size)
    with pytest.warns(DeprecationWarning, match="by keyword"):
        wrapper.begin_forward(*lists, "NONE", 3, 0.0, "float32")
    out, lse = wrapper.forward_return_lse(batch.q, batch.cache, window_left=3)
    batch.check(out, lse, causal=True, window=(3, -1))
    batch.check(*wrapper.forward_return_lse(batch.q, batch.cache, sm_scale=0.5), causal=True,
                scale=0.5)  # fmt: skip
    wrapper.end_forward()
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, batch.layout)
    prefill.begin_forward(batch.qo_indptr, *lists, q_data_type="float32")
    assert torch.equal(prefill.forward(batch.q, batch.cache), wrapper_free(batch))
    longer = Batch(6, [5, 3], [9, 11])
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, longer.layout)
    prefill.plan(
        longer.qo_indptr, longer.indptr, longer.indices, longer.last, 4, 2, 16, longer.page_size,
        q_data_type="float32",
    )  # fmt: skip
    for causal in (True, False):
        got = prefill.forward_return_lse(longer.q, longer.argument, causal, logits_soft_cap=2.0)
        longer.check(*got, causal=causal, softcap=2.0)


def wrapper_free(batch: Batch) -> torch.Tensor:
    """The decode of a batch by a new wrapper."""
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, batch.layout)
    wrapper.plan(batch.indptr, batch.indices, batch.last, 4, 2, 16, batch.page_size,
                 q_data_type="float32")  # fmt: skip
    found: torch.Tensor = wrapper.run(batch.q, batch.cache)
    return found


def test_what_is_refused() -> None:
    batch = Batch(7, [1, 1], [20, 7])
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, batch.layout)
    prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, batch.layout)
    lists = (batch.indptr, batch.indices, batch.last, 4, 2, 16, batch.page_size)
    with pytest.raises(RuntimeError, match="run before plan"):
        decode.run(batch.q, batch.argument)
    for options in ({"pos_encoding_mode": "ROPE_LLAMA"}, {"window_right": 2},
                    {"o_data_type": "float16", "q_data_type": "bfloat16"}):  # fmt: skip
        with pytest.raises(UnsupportedConfigError, match=next(iter(options))):
            decode.plan(*lists, **options)
    mask = torch.ones(27, dtype=torch.bool, device=DEVICE)
    for options in ({"custom_mask": mask}, {"packed_custom_mask": mask}, {"prefix_len_ptr": mask}):
        with pytest.raises(UnsupportedConfigError, match=f"{next(iter(options))}=a tensor: "):
            prefill.plan(batch.qo_indptr, *lists, **options)
    decode.plan(*lists, q_data_type="float32")
    for options in ({"sinks": mask}, {"kv_cache_sf": mask}):
        with pytest.raises(UnsupportedConfigError, match=f"{next(iter(options))}=a tensor: "):
            decode.run(batch.q, batch.argument, **options)
    with pytest.raises(UnsupportedConfigError, match="args="):
        decode.run(batch.q, batch.argument, 1.0)
    with pytest.raises(UnsupportedConfigError, match="jit_args"):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, jit_args=["name"])
    for message, call in (
        ("q has 1 rows", lambda: decode.run(batch.q[:1], batch.argument)),
        ("q_len_per_req=2", lambda: decode.run(batch.q, batch.argument, q_len_per_req=2)),
        ("window_left=4", lambda: decode.run(batch.q, batch.argument, window_left=4)),
        ("use_cuda_graph=True needs", lambda: flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            WORKSPACE, use_cuda_graph=True)),
        ("dtype 'float17'", lambda: decode.plan(*lists, q_data_type="float17")),
        ("kv_indptr has shape", lambda: decode.plan(batch.indptr[:2], *lists[1:])),
        ("paged_kv_cache has shape", lambda: decode.run(batch.q, batch.cache[0])),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(LayoutMismatchError, match="kv_layout='NDH'"):
        flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, "NDH")


LISTS = {
    "qo_indptr": [0, 2, 5],
    "paged_kv_indptr": [0, 2, 3],
    "paged_kv_indices": [3, 1, 0],
    "paged_kv_last_page_len": [3, 4],
}


def _plan_prefill(changed: dict[str, Any]) -> flashinfer.BatchPrefillWithPagedKVCacheWrapper:
    lists = {
        name: value if isinstance(value, torch.Tensor) else _ints(value)
        for name, value in {**LISTS, **changed}.items()
    }
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.plan(**lists, num_qo_heads=4, num_kv_heads=2, head_dim_qk=16, page_size=4, causal=True,
                 q_data_type="float32")  # fmt: skip
    return wrapper


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"paged_kv_indices": [3, 1]}, "kv_indptr ends at 3, past the 2 rows"),
        ({"paged_kv_last_page_len": [5, 4]}, r"last_page_len\[0\]=5 must be from 1 to page_size=4"),
        ({"paged_kv_last_page_len": [3, 0]}, r"last_page_len\[1\]=0 must be from 1"),
        ({"paged_kv_indptr": [0, 3, 2]}, "kv_indptr falls from 3 to 2"),
        ({"paged_kv_indptr": [1, 2, 3]}, r"kv_indptr\[0\]=1 must be 0"),
        ({"qo_indptr": [1, 2, 5]}, r"qo_indptr\[0\]=1 must be 0"),
        ({"qo_indptr": [0, 3, 2]}, "qo_indptr falls from 3 to 2"),
        ({"qo_indptr": [0, 3]}, r"qo_indptr has shape \(2,\)"),
        ({"qo_indptr": torch.tensor([0.0, 2.0, 5.0])}, "qo_indptr is torch.float32"),
        ({"paged_kv_indices": torch.zeros(3, 1, dtype=torch.int32)}, "kv_indices is torch.int32"),
        ({"paged_kv_last_page_len": torch.tensor(3)}, "last_page_len is torch.int64"),
    ],
)
def test_page_lists_that_disagree_are_refused(changed: dict[str, Any], message: str) -> None:
    """A plan reads the lists on the host, and a wrong one gives plausible numbers."""
    with pytest.raises(ContractError, match=message):
        _plan_prefill(changed)


def test_a_page_outside_of_the_cache_is_refused() -> None:
    if DEVICE == "cpu":
        with pytest.raises(ContractError, match=r"kv_indices\[1\]=-1 must not be negative"):
            _plan_prefill({"paged_kv_indices": [3, -1, 0]})
        wrapper = _plan_prefill({"paged_kv_indices": [3, 8, 0]})
        with pytest.raises(ContractError, match="name page 8, but the cache has 8 pages"):
            wrapper.run(torch.randn(5, 4, 16), torch.randn(8, 2, 4, 2, 16))


def test_an_lse_or_a_scale_of_another_form_is_refused() -> None:
    wrapper = _plan_prefill({})
    q, cache = torch.randn(5, 4, 16, device=DEVICE), torch.randn(8, 2, 4, 2, 16, device=DEVICE)
    for lse in (
        torch.empty(4, 5, device=DEVICE),
        torch.empty(5, 4, dtype=torch.float16, device=DEVICE),
        torch.empty(5, 4, 1, device=DEVICE),
    ):
        before = lse.clone()
        with pytest.raises(ContractError, match="lse is torch"):
            wrapper.run(q, cache, lse=lse, return_lse=True)
        assert torch.equal(lse, before) or lse.isnan().any()
    with pytest.raises(ContractError, match=r"v_scale has shape \(2,\)"):
        wrapper.run(q, cache, v_scale=torch.ones(2, device=DEVICE))


@pytest.mark.parametrize("way", ["use_backend", "environment"])
def test_a_run_follows_the_backend_that_is_requested_now(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers of a wrapper are kept by backend, not by spec alone."""
    used: list[str] = []
    monkeypatch.setattr(attnlib.Attention, "__call__", _noting(attnlib.Attention.__call__, used))
    wrapper = _plan_prefill({})
    q, cache = torch.randn(5, 4, 16, device=DEVICE), torch.randn(8, 2, 4, 2, 16, device=DEVICE)
    results = []
    for name in ("torch", "triton", "torch"):
        if way == "environment":
            monkeypatch.setenv("ATTNLIB_BACKEND", name)
            results.append(wrapper.run(q, cache))
        else:
            with attnlib.use_backend(name):
                results.append(wrapper.run(q, cache))
    assert used == ["torch", "triton", "torch"]
    torch.testing.assert_close(results[0], results[1])
    assert torch.equal(results[0], results[2])


def _noting(call: Any, used: list[str]) -> Any:
    def noting(self: attnlib.Attention, *args: Any, **options: Any) -> Any:
        used.append(self.backend.get_name())
        return call(self, *args, **options)

    return noting
