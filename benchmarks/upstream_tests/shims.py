"""Modules with the names `flash_attn` and `flashinfer` whose attention is `attnlib.compat`.

Helpers of the tests (padding, rotary embedding, comparisons) come from the downloaded copy. Names
that attnlib does not provide raise `NotProvidedError` when they are used.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch

__all__ = ["NotProvidedError", "install_flash_attn", "install_flashinfer", "pretend_to_be_hopper"]


class NotProvidedError(Exception):
    """A test uses a function that attnlib.compat does not have."""


def _module(name: str, **attributes: Any) -> ModuleType:
    module = ModuleType(name)
    module.__path__ = []  # type: ignore[attr-defined]  # a package
    vars(module).update(attributes)
    vars(module)["__getattr__"] = lambda missing: _missing(f"{name}.{missing}")
    sys.modules[name] = module
    return module


class _Finder(MetaPathFinder):
    """Modules of the two packages that are not replaced: their names raise when they are used."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in ("flash_attn", "flashinfer"):
            return None
        return ModuleSpec(fullname, self)  # type: ignore[arg-type]  # it has the loader's methods

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is left to do."""


def _missing(name: str) -> Any:
    if name.rpartition(".")[2].startswith("__"):
        raise AttributeError(name)

    class Missing:
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            raise NotProvidedError(f"{name} is not part of attnlib.compat")

        def __getattr__(self, attribute: str) -> Any:
            return _missing(f"{name}.{attribute}")

    return Missing()


def _load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def install_flash_attn(source: Path, device: str) -> None:
    """`flash_attn` from `attnlib.compat.flash_attn`."""
    from attnlib.compat import flash_attn

    sys.meta_path.insert(0, _Finder())
    names = {name: getattr(flash_attn, name) for name in flash_attn.__all__}
    _module("flash_attn", **names)
    _load("flash_attn.bert_padding", source / "flash_attn" / "bert_padding.py")
    _module("flash_attn.flash_attn_interface", USE_TRITON_ROCM=False, **names)
    for name in ("flash_attn.ops", "flash_attn.ops.triton", "flash_attn.layers"):
        _module(name)
    if device == "cuda":
        _load(
            "flash_attn.ops.triton.rotary", source / "flash_attn" / "ops" / "triton" / "rotary.py"
        )
    else:
        _module("flash_attn.ops.triton.rotary", apply_rotary=_rotary_by_torch)
    _load("flash_attn.layers.rotary", source / "flash_attn" / "layers" / "rotary.py")


def _rotary_by_torch(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, **options: Any
) -> torch.Tensor:
    """FlashAttention's rotary kernel by its own torch function, in float32, for a CPU."""
    rotary = sys.modules["flash_attn.layers.rotary"]
    offsets = torch.as_tensor(options["seqlen_offsets"])[..., None]
    positions = torch.arange(x.shape[1]) + offsets
    tables = (table.float()[positions.clamp(max=table.shape[0] - 1)] for table in (cos, sin))
    turned: torch.Tensor = rotary.apply_rotary_emb_torch(x.float(), *tables, options["interleaved"])
    return turned.to(x.dtype)


def install_flashinfer(source: Path, device: str) -> None:
    """`flashinfer` from `attnlib.compat.flashinfer`. The attention of one request, which the tests
    compare with, is computed in float32 by torch."""
    from attnlib.compat import flashinfer

    sys.meta_path.insert(0, _Finder())
    names: dict[str, Any] = {name: getattr(flashinfer, name) for name in flashinfer.__all__}
    names |= {
        "single_decode_with_kv_cache": single_decode_with_kv_cache,
        "single_prefill_with_kv_cache": single_prefill_with_kv_cache,
    }
    capability = torch.cuda.get_device_capability() if device == "cuda" else (9, 0)
    jit = _module("flashinfer.jit", build_jit_specs=lambda *args, **kwargs: None)
    utils = _module(
        "flashinfer.utils",
        get_compute_capability=lambda device: capability,
        has_flashinfer_jit_cache=lambda: True,
        GPUArchitectureError=type("GPUArchitectureError", (Exception,), {}),
    )
    parts = {part: _module(f"flashinfer.{part}", **names)
             for part in ("decode", "prefill", "page", "cascade")}  # fmt: skip
    _module("flashinfer", jit=jit, utils=utils, **parts, **names)
    helpers = source / "tests" / "test_helpers"
    _module("tests.test_helpers.jit_utils")
    _module("tests.test_helpers.utils_fp4")
    _load("tests.test_helpers.test_helpers", helpers / "test_helpers.py")


def single_decode_with_kv_cache(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_layout: str = "NHD", **options: Any
) -> Any:
    """Attention of one query `[Hq, D]`."""
    options.pop("use_tensor_cores", None)
    result = single_prefill_with_kv_cache(q[None], k, v, kv_layout=kv_layout, **options)
    if isinstance(result, tuple):
        return tuple(x[0] for x in result)
    return result[0]


def single_prefill_with_kv_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    kv_layout: str = "NHD",
    causal: bool = False,
    pos_encoding_mode: str = "NONE",
    logits_soft_cap: float | None = None,
    window_left: int = -1,
    sm_scale: float | None = None,
    return_lse: bool = False,
    k_scale: Any = None,
    v_scale: Any = None,
    backend: str = "auto",
    **unknown: Any,
) -> Any:
    """Attention of one request `[Sq, Hq, D]` in float32; the LSE is base 2."""
    if pos_encoding_mode != "NONE" or any(value is not None for value in unknown.values()):
        raise NotProvidedError(f"single attention with {pos_encoding_mode} {sorted(unknown)}")
    dtype = q.dtype
    if kv_layout == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    query, key, value = q.float(), k.float(), v.float()
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scale = (q.shape[-1] ** -0.5 if sm_scale is None else sm_scale) * (
        1.0 if k_scale is None else k_scale
    )
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    if logits_soft_cap:
        scores = logits_soft_cap * torch.tanh(scores / logits_soft_cap)
    rows = torch.arange(q.shape[0], device=q.device)[:, None] + key.shape[0] - q.shape[0]
    columns = torch.arange(key.shape[0], device=q.device)
    hidden = (columns > rows) if causal else torch.zeros_like(columns > rows)
    if window_left >= 0:
        hidden = hidden | (columns < rows - window_left)
    scores = scores.masked_fill(hidden, -math.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
    out = torch.einsum("hqk,khd->qhd", weights, value)
    if v_scale is not None:
        out = out * v_scale
    return (out.to(dtype), lse.T / math.log(2)) if return_lse else out.to(dtype)


@contextlib.contextmanager
def pretend_to_be_hopper(device: str) -> Any:
    """On a CPU, the tests' questions about the GPU are answered for a Hopper GPU."""
    if device == "cuda":
        yield
        return
    properties = SimpleNamespace(total_memory=80 * 2**30, multi_processor_count=132)
    with (
        mock.patch("torch.cuda.get_device_capability", lambda *_: (9, 0)),
        mock.patch("torch.cuda.get_device_properties", lambda *_: properties),
        mock.patch("torch.cuda.synchronize", lambda *_: None),
    ):
        yield
