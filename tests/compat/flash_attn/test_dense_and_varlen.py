"""`flash_attn_func`, `flash_attn_varlen_func` and their stacked forms against float64."""

from __future__ import annotations

import itertools
import os
import random
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import attnlib
from attnlib.compat import flash_attn as fa
from attnlib.errors import UnsupportedConfigError
from tests.compat.reference import assert_matches, attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SEEDS = [
    *((seed, "torch") for seed in range(25)),
    *((seed, "triton") for seed in range(4)),
    *(pytest.param(seed, "triton", marks=pytest.mark.slow) for seed in range(4, 16)),
]
WINDOWS = [(-1, -1), (-1, -1), (4, 0), (6, 2), (-1, 3), (0, -1), (50, 50)]


def _options(draw: random.Random, batch: int) -> dict[str, Any]:
    slopes = draw.choice([None, None, (4,), (batch, 4)])
    return {
        "softmax_scale": draw.choice([None, 0.4]),
        "causal": draw.choice([True, False]),
        "window_size": draw.choice(WINDOWS),
        "softcap": draw.choice([0.0, 0.0, 2.5]),
        "alibi_slopes": None if slopes is None else torch.rand(slopes, device=DEVICE) * 0.3,
    }


def _reference(q: Any, k: Any, v: Any, options: dict[str, Any], request: int) -> Any:
    slopes = options["alibi_slopes"]
    return attention(
        q, k, v, scale=options["softmax_scale"], causal=options["causal"],
        window=options["window_size"], softcap=options["softcap"],
        slopes=slopes if slopes is None or slopes.dim() == 1 else slopes[request],
    )  # fmt: skip


@pytest.mark.parametrize(("seed", "backend"), SEEDS)
def test_dense(seed: int, backend: str) -> None:
    """M1-M5: queries may be fewer or more than keys; rows without keys are 0 with LSE -inf."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    batch, queries, keys = 2, draw.choice([1, 5, 12]), draw.choice([1, 9, 16, 32])
    q = torch.randn(batch, queries, 4, 16, device=DEVICE)
    k, v = (torch.randn(batch, keys, 2, d, device=DEVICE) for d in (16, 8))
    options = _options(draw, batch)
    with torch.no_grad(), attnlib.use_backend(backend):
        out, lse, empty = fa.flash_attn_func(q, k, v, return_attn_probs=True, **options)
        again = fa.flash_attn_func(q, k, v, **options)
    assert torch.equal(out, again) and empty.numel() == 0
    for request in range(batch):
        wanted = _reference(q[request], k[request], v[request], options, request)
        assert_matches((out[request], lse[request].T), wanted)


@pytest.mark.parametrize(("seed", "backend"), SEEDS)
def test_varlen(seed: int, backend: str) -> None:
    """Packed keys, and keys in blocks with lengths in cu_seqlens_k or seqused_k."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    lengths = [[draw.choice([0, 1, 7, 13]) for _ in range(3)] for _ in range(2)]
    starts = [torch.tensor([0, *itertools.accumulate(x)], dtype=torch.int32, device=DEVICE)
              for x in lengths]  # fmt: skip
    q = torch.randn(sum(lengths[0]) + 2, 4, 16, device=DEVICE)[: sum(lengths[0])]
    k, v = (torch.randn(sum(lengths[1]), 2, d, device=DEVICE) for d in (16, 8))
    options = _options(draw, 3)
    bounds = (max(1, *lengths[0]), max(1, *lengths[1]))
    paged, block_size = draw.choice([False, True]), 4
    keys: tuple[Any, ...] = (k, v)
    extra: dict[str, Any] = {}
    if paged:
        table = torch.randperm(15)[:12].view(3, 4)
        pools = [torch.randn(15, block_size, 2, d, device=DEVICE) for d in (16, 8)]
        for pool, x in zip(pools, (k, v), strict=True):
            for request in range(3):
                first = int(starts[1][request])
                for i in range(lengths[1][request]):
                    pool[table[request, i // block_size], i % block_size] = x[first + i]
        keys, extra = tuple(pools), {"block_table": table.int().to(DEVICE)}
        if draw.choice([False, True]):
            extra["seqused_k"] = starts[1].diff()
    of_keys = None if "seqused_k" in extra else starts[1]
    with torch.no_grad(), attnlib.use_backend(backend):
        for _ in range(2):
            out, lse, _ = fa.flash_attn_varlen_func(
                q, *keys, starts[0], of_keys, *bounds, return_attn_probs=True, **options, **extra
            )
    for request, ((a, b), (c, d)) in enumerate(
        zip(*(itertools.pairwise(x.tolist()) for x in starts), strict=True)
    ):
        assert_matches((out[a:b], lse.T[a:b]), _reference(q[a:b], k[c:d], v[c:d], options, request))


def test_varlen_lengths_change_in_place() -> None:
    """The lengths of a prepared call are read again in every call."""
    torch.manual_seed(0)
    q, pools = torch.randn(9, 4, 16, device=DEVICE), torch.randn(2, 8, 4, 2, 16, device=DEVICE)
    table = torch.arange(8, dtype=torch.int32, device=DEVICE).view(2, 4)
    starts = torch.tensor([0, 3, 9], dtype=torch.int32, device=DEVICE)
    key_starts = torch.tensor([0, 16, 17], dtype=torch.int32, device=DEVICE)
    for backend in ("torch", "triton"):
        for _ in range(3):
            with torch.no_grad(), attnlib.use_backend(backend):
                out = fa.flash_attn_varlen_func(
                    q, pools[0], pools[1], starts, key_starts, 9, 16, causal=True, block_table=table
                )
            lens = key_starts.diff().tolist()
            for request, (a, b) in enumerate(itertools.pairwise(starts.tolist())):
                k, v = (pools[i][table[request].long()].flatten(0, 1)[: lens[request]]
                        for i in range(2))  # fmt: skip
                wanted = attention(q[a:b], k, v, causal=True)[0]
                torch.testing.assert_close(out[a:b].cpu().double(), wanted, rtol=2e-5, atol=2e-5)
            starts[1] = (int(starts[1]) + 2) % 9 + 1
            key_starts[1] = (int(key_starts[1]) + 5) % 16 + 1


def test_stacked_forms_are_the_same_calls() -> None:
    q = torch.randn(2, 6, 4, 16, device=DEVICE)
    kv = torch.randn(2, 6, 2, 4, 16, device=DEVICE)
    qkv = torch.cat((q[:, :, None], kv), 2)
    starts = torch.tensor([0, 6, 12], dtype=torch.int32, device=DEVICE)
    wanted = fa.flash_attn_func(q, kv[:, :, 0], kv[:, :, 1], causal=True)
    packed = (starts, starts, 6, 6)
    for got in (
        fa.flash_attn_kvpacked_func(q, kv, causal=True),
        fa.flash_attn_qkvpacked_func(qkv, causal=True),
        fa.flash_attn_varlen_kvpacked_func(q.flatten(0, 1), kv.flatten(0, 1), *packed, causal=True),
        fa.flash_attn_varlen_qkvpacked_func(qkv.flatten(0, 1), starts, 6, causal=True),
    ):
        torch.testing.assert_close(got.view_as(wanted), wanted, rtol=2e-5, atol=2e-5)


def test_no_keys_and_no_requests() -> None:
    q, k = torch.randn(2, 3, 4, 16, device=DEVICE), torch.randn(2, 0, 2, 16, device=DEVICE)
    out, lse, _ = fa.flash_attn_func(q, k, k, return_attn_probs=True)
    assert out.shape == q.shape and not out.any() and lse.shape == (2, 4, 3)
    assert bool((lse == -torch.inf).all())
    assert fa.flash_attn_func(q[:0], q[:0], q[:0]).shape == (0, 3, 4, 16)


def test_dropout_and_gradients_are_refused() -> None:
    q = torch.randn(2, 3, 4, 16, device=DEVICE)
    starts = torch.tensor([0, 3, 6], dtype=torch.int32, device=DEVICE)
    packed = (q.flatten(0, 1),) * 3
    with pytest.raises(UnsupportedConfigError, match="dropout_p=0.1: dropout is for training"):
        fa.flash_attn_func(q, q, q, 0.1)
    with pytest.raises(UnsupportedConfigError, match="dropout_p=0.1: dropout is for training"):
        fa.flash_attn_varlen_func(*packed, starts, starts, 3, 3, 0.1)
    with pytest.raises(UnsupportedConfigError, match="seqused_q=a tensor"):
        fa.flash_attn_varlen_func(*packed, starts, starts, 3, 3, seqused_q=starts)
    q.requires_grad_()
    with pytest.raises(UnsupportedConfigError, match="forward pass only"):
        fa.flash_attn_func(q, q, q)
    with torch.no_grad():
        assert fa.flash_attn_func(q, q, q, deterministic=True).shape == q.shape


def test_a_backend_without_packed_keys_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from attnlib.backends.torch import TorchBackend

    class Other(TorchBackend):
        @staticmethod
        def get_name() -> str:
            return "other"

    q = torch.randn(6, 4, 16, device=DEVICE)
    starts = torch.tensor([0, 3, 6], dtype=torch.int32, device=DEVICE)
    with attnlib.use_backend(Other), pytest.raises(UnsupportedConfigError, match="backend other"):
        fa.flash_attn_varlen_func(q, q, q, starts, starts, 3, 3)


@pytest.mark.parametrize("function", fa.__all__[1:])
def test_signatures_begin_with_flash_attentions(function: str) -> None:
    """Positional arguments, in this order, with these defaults (FlashAttention 2.8)."""
    import inspect

    options = (
        "dropout_p=0.0 softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 "
        "alibi_slopes=None deterministic=False return_attn_probs=False"
    )
    starts = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
    wanted = {
        "flash_attn_func": f"q k v {options}",
        "flash_attn_kvpacked_func": f"q kv {options}",
        "flash_attn_qkvpacked_func": f"qkv {options}",
        "flash_attn_varlen_func": f"q k v {starts} {options} block_table=None",
        "flash_attn_varlen_kvpacked_func": f"q kv {starts} {options}",
        "flash_attn_varlen_qkvpacked_func": f"qkv cu_seqlens max_seqlen {options}",
        "flash_attn_with_kvcache": "q k_cache v_cache k=None v=None rotary_cos=None "
        "rotary_sin=None cache_seqlens=None cache_batch_idx=None cache_leftpad=None "
        "block_table=None softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 "
        "rotary_interleaved=True alibi_slopes=None num_splits=0 return_softmax_lse=False",
    }[function]
    parameters = inspect.signature(getattr(fa, function)).parameters.values()
    found = [
        x.name if x.default is x.empty else f"{x.name}={str(x.default).replace(' ', '')}"
        for x in parameters
        if x.kind is x.POSITIONAL_OR_KEYWORD
    ]
    assert found == wanted.split()
