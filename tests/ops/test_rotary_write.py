"""Normalizing, rotating and writing in one operation, against separate ones and transformers."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from attnlib.errors import ContractError
from attnlib.ops.rotary import HeadNorm
from attnlib.ops.torch.cache_write import write_kv
from attnlib.ops.torch.rotary_write import rotate
from tests.ops.triton.paged_inputs import LAYOUTS, make_cache

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
HALF_TYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float16
"""The interpreter rounds to bfloat16 otherwise than a GPU."""


def _norm(size: int, dtype: torch.dtype, kind: str) -> HeadNorm | None:
    if kind == "none":
        return None
    weight = torch.randn(size, device=DEVICE).to(dtype)
    return HeadNorm(weight, 1e-5, float(kind == "gemma"), kind != "llama")


def _call(module: str, **changes: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rotated queries, key cache and value cache after one call, from the same random tensors."""
    torch.manual_seed(0)
    size, dtype = changes.get("size", 16), changes.get("dtype", torch.float32)
    half, kind = changes.get("half", size // 2), changes.get("norm", "llama")
    size_v = changes.get("size_v", size)
    fused = torch.randn(6, 3 * size + 2 * size + 2 * size_v, device=DEVICE).to(dtype)  # P9: views
    q, k, v = fused.split([3 * size, 2 * size, 2 * size_v], dim=1)
    new = (q.view(6, 3, size), k.view(6, 2, size), v.view(6, 2, size_v))
    angles = torch.randn(7, half, device=DEVICE)
    cos, sin = (x.to(changes.get("angles", dtype)) for x in (angles.cos(), angles.sin()))
    tables = (cos, sin) if half else (None, None)
    norms = [_norm(size, dtype, kind) for _ in range(2)]
    stored = changes.get("stored", dtype)
    caches = make_cache(changes.get("layout", "nhd"), 3, 4, 2, size, size_v, stored, DEVICE)
    slots = torch.tensor(changes.get("slots", [7, -1, 0, 3, -4]), device=DEVICE)
    scales = {"k_scale": changes.get("k_scale", 0.5), "v_scale": 2.0}
    interleaved = changes.get("interleaved", False)
    if module == "separate":
        out, key = (
            rotate(x, *tables, interleaved=interleaved, norm=norm)
            for x, norm in zip(new, norms, strict=False)
        )
        write_kv(key, new[2], *caches, slots, **scales)
    else:
        operation = import_module(f"attnlib.ops.{module}.rotary_write").rotate_and_write
        out = operation(
            *new, *caches, slots, *tables, interleaved=interleaved, q_norm=norms[0],
            k_norm=norms[1], **scales,
        )  # fmt: skip
    return out, *caches


CALLS: dict[str, dict[str, Any]] = {
    "rotation": {"norm": "none"},
    "llama": {"dtype": HALF_TYPE},
    "gemma": {"dtype": HALF_TYPE, "norm": "gemma"},
    "gemma-3n": {"dtype": HALF_TYPE, "norm": "float32"},
    "interleaved": {"interleaved": True},
    "interleaved-partial": {"interleaved": True, "half": 3, "size": 20, "dtype": HALF_TYPE},
    "partial": {"half": 4, "dtype": HALF_TYPE},
    "norm-only": {"half": 0, "dtype": HALF_TYPE},
    "float32-angles": {"dtype": HALF_TYPE, "angles": torch.float32},
    "odd-sizes": {"size": 24, "size_v": 12},
    "wide-cache": {"dtype": HALF_TYPE, "stored": torch.float32},
    "no-slots": {"slots": [-1, -1]},
    "per-head-scale": {"stored": FP8[0], "k_scale": torch.tensor([0.25, 3.0], device=DEVICE)},
    **{f"fp8-{dtype}": {"stored": dtype, "dtype": HALF_TYPE} for dtype in FP8},
    **{f"layout-{layout}": {"layout": layout} for layout in LAYOUTS},
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("module", ["torch", "triton"])
def test_has_the_bits_of_separate_operations(module: str, call: str) -> None:
    """P4, P11: and no other element of the cache changes."""
    wanted, actual = _call("separate", **CALLS[call]), _call(module, **CALLS[call])
    for want, got in zip(wanted, actual, strict=True):
        assert torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))
    assert bool(wanted[1].float().isfinite().any()) == (call != "no-slots")


@pytest.mark.parametrize("call", ["llama", "gemma", "interleaved-partial", "norm-only"])
def test_triton_rotates_single_tensors_with_the_same_bits(call: str) -> None:
    """P11: the operation without a cache."""
    triton_rotate = import_module("attnlib.ops.triton.rotary_write").rotate
    options = CALLS[call]
    torch.manual_seed(1)
    size, dtype = options.get("size", 16), options.get("dtype", torch.float32)
    half = options.get("half", size // 2)
    heads, angles = torch.randn(3, 5, size, device=DEVICE), torch.randn(3, half, device=DEVICE)
    tables = (angles.cos().to(dtype), angles.sin().to(dtype)) if half else (None, None)
    norm = _norm(size, dtype, options.get("norm", "llama"))
    kind = {"interleaved": options.get("interleaved", False), "norm": norm}
    wanted = rotate(heads.to(dtype), *tables, **kind)
    assert torch.equal(triton_rotate(heads.to(dtype), *tables, **kind), wanted)
    out = torch.empty(3, 5, size + 4, dtype=dtype, device=DEVICE)[..., :size]
    assert triton_rotate(heads.to(dtype), *tables, **kind, out=out) is out
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rotation_has_the_bits_of_transformers(dtype: torch.dtype) -> None:
    """P11: Llama's halves and Cohere's neighbors, cos and sin in the dtype of the heads."""
    pytest.importorskip("transformers")
    from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as neighbors
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as halves

    torch.manual_seed(0)
    q, k = torch.randn(1, 4, 33, 64).to(dtype), torch.randn(1, 2, 33, 64).to(dtype)
    angles = torch.randn(33, 32)
    cos, sin = (torch.cat([x, x], -1).to(dtype)[None] for x in (angles.cos(), angles.sin()))
    for interleaved, function in ((False, halves), (True, neighbors)):
        for heads, wanted in zip((q, k), function(q, k, cos, sin), strict=True):
            tables = (cos[0, :, :32], sin[0, :, :32])
            actual = rotate(heads[0].transpose(0, 1), *tables, interleaved=interleaved)
            assert torch.equal(actual, wanted[0].transpose(0, 1)), (interleaved, dtype)


@pytest.mark.parametrize("kind", ["llama", "gemma", "gemma-3n"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_norm_is_that_of_transformers_but_for_the_order_of_the_sum(
    kind: str, dtype: torch.dtype
) -> None:
    """P11: the sum of squares differs by roundings, so few elements differ, and by one rounding."""
    pytest.importorskip("transformers")
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
    from transformers.models.gemma3n.modeling_gemma3n import Gemma3nRMSNorm
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    torch.manual_seed(0)
    cls = {"llama": Qwen3RMSNorm, "gemma": Gemma3RMSNorm, "gemma-3n": Gemma3nRMSNorm}[kind]
    module: Any = cls(96, eps=1e-5).to(dtype)
    module.weight.data.normal_()
    norm = HeadNorm(module.weight.detach(), 1e-5, float(kind == "gemma"), kind != "llama")
    heads = torch.randn(64, 8, 96).to(dtype)
    actual, wanted = rotate(heads, None, None, norm=norm), module(heads).detach()
    step = torch.finfo(dtype).eps * (2 if dtype == torch.bfloat16 else 8)
    assert bool(((actual - wanted).abs() <= step * wanted.abs()).all())
    if dtype == torch.bfloat16:
        assert (actual != wanted).float().mean() < 1e-3


@pytest.mark.parametrize("module", ["torch", "triton"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sin": None}, "sin is None and the other is not"),
        ({"cos": torch.zeros(2, 8)}, "with a row for each of the 3 rows of query"),
        ({"cos": torch.zeros(3, 9)}, "1 to 8 columns"),
        ({"cos": torch.zeros(3, 8, dtype=torch.float16)}, "it must be torch.float32 on cpu"),
        ({"sin": torch.zeros(3, 4)}, "they must agree"),
        ({"key": torch.zeros(2, 2, 16), "value": torch.zeros(2, 2, 16)}, "each token has one row"),
        ({"key": torch.zeros(3, 3, 16)}, "key is \\(3, 3, 16\\)"),
        ({"value": torch.zeros(3, 2, 16, dtype=torch.float16)}, "value is torch.float16"),
        ({"slot_mapping": torch.zeros(4, dtype=torch.int64)}, "slot_mapping has 4"),
        ({"slot_mapping": torch.zeros(3, dtype=torch.int32)}, "convert it to torch.int64"),
        ({"q_norm": HeadNorm(torch.ones(8, device=DEVICE))}, "must be \\[16\\]"),
        ({"k_norm": HeadNorm(torch.ones(16, device=DEVICE).half())}, "multiply_in_float32=True"),
        ({"k_scale": -1.0}, "k_scale=-1.0"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_written(
    module: str, change: dict[str, Any], message: str
) -> None:
    """P4, P11, M9"""
    operation = import_module(f"attnlib.ops.{module}.rotary_write").rotate_and_write
    caches = torch.zeros(2, 4, 2, 16, device=DEVICE), torch.zeros(2, 4, 2, 16, device=DEVICE)
    arguments: dict[str, Any] = {
        "query": torch.ones(3, 4, 16), "key": torch.ones(3, 2, 16), "value": torch.ones(3, 2, 16),
        "slot_mapping": torch.arange(3), "cos": torch.ones(3, 8), "sin": torch.ones(3, 8),
    }  # fmt: skip
    given = {
        name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x
        for name, x in (arguments | change).items()
    }
    with pytest.raises(ContractError, match=message):
        operation(key_cache=caches[0], value_cache=caches[1], **given)
    assert not caches[0].any() and not caches[1].any()


@pytest.mark.parametrize("module", ["torch", "triton"])
def test_latents_are_refused(module: str) -> None:
    """P10, P11: a rotated key of a latent cache would rotate its value too."""
    operation = import_module(f"attnlib.ops.{module}.rotary_write").rotate_and_write
    cache, x = torch.zeros(2, 4, 1, 16, device=DEVICE), torch.ones(1, 1, 16, device=DEVICE)
    with pytest.raises(ContractError, match="latents"):
        operation(
            x, x, x[..., :8], cache, cache[..., :8], torch.zeros(1, dtype=torch.int64).to(DEVICE),
            x[0, :, :8], x[0, :, :8],
        )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.ones(2, 2),), "contiguous, \\[D\\]"),
        ((torch.ones(4, dtype=torch.int64),), "floating-point"),
        ((torch.ones(4), -1.0), "eps=-1.0"),
        ((torch.ones(4), 1e-6, 1.0), "multiply_in_float32=True"),
    ],
)
def test_norms_check_themselves(arguments: tuple[Any, ...], message: str) -> None:
    """P11"""
    with pytest.raises(ContractError, match=message):
        HeadNorm(*arguments)
