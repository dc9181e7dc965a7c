"""Fakes of flash-linear-attention: the recorded signatures, computed by plain torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from attnlib.backends.fla.probe import MODULES, find_functions
from tests.backends.packed_recurrence import packed_recurrence
from tests.backends.real_signatures import signature_of

__all__ = ["RELEASE", "Calls", "install"]

RELEASE = "fla-core 0.6.0"
Calls = list[tuple[str, dict[str, Any]]]
"""The functions that were called, and all their arguments."""


def install(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Install the fakes as `fla` for one test."""
    calls: Calls = []
    find_functions.cache_clear()
    for path in ("fla", "fla.ops", *(f"fla.ops.{module}" for module in MODULES)):
        monkeypatch.setitem(sys.modules, path, ModuleType(path))
    for module in MODULES:
        for form in ("chunk", "fused_recurrent"):
            name = f"{form}_{module}"
            setattr(sys.modules[f"fla.ops.{module}"], name, _fake(name, calls))
    return calls


def _fake(name: str, calls: Calls) -> Callable[..., Any]:
    signature = signature_of(RELEASE, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        values = dict(bound.arguments)
        assert not values.pop("kwargs", None), "an argument that the function ignores"
        calls.append((name, values))
        return _compute(name, **values)

    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


def _compute(
    name: str, q: Any, k: Any, v: Any, scale: float, initial_state: torch.Tensor,
    cu_seqlens: torch.Tensor, state_v_first: bool, output_final_state: bool, g: Any = None,
    gk: Any = None, g_gamma: Any = None, beta: Any = None, use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens_cpu: Any = None, **unused: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    delta = "delta" in name or "kda" in name
    assert all(x.shape[0] == 1 and x.is_contiguous() for x in (q, k, v))
    assert q.dtype == k.dtype == v.dtype and initial_state.dtype == torch.float32
    assert cu_seqlens.dtype == torch.int64 and (cu_seqlens[1:] > cu_seqlens[:-1]).all()
    assert cu_seqlens_cpu is None or torch.equal(cu_seqlens_cpu, cu_seqlens)
    assert len(initial_state) == len(cu_seqlens) - 1 and output_final_state
    assert delta or q.shape[2] == v.shape[2], "no key heads of their own"
    count, heads = v.shape[1:3]
    decay = next(x for x in (g, gk, g_gamma) if x is not None)
    channels = "gla" in name.replace("simple_gla", "") or "kda" in name
    if decay is not g_gamma:
        assert decay.shape == (1, count, heads, *([q.shape[3]] if channels else []))
        decay = decay[0]
    decay = decay.expand(count, heads) if decay.dim() == 1 else decay
    if use_qk_l2norm_in_kernel:
        q, k = (
            x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + 1e-6) for x in (q, k)
        )
        q, k = q.to(v.dtype), k.to(v.dtype)
    states = initial_state.mT if state_v_first else initial_state
    beta = None if beta is None else beta[0]
    out, final = packed_recurrence(
        q[0], k[0], v[0], decay.exp(), beta, scale, states, cu_seqlens, delta
    )
    return out[None], final.mT.contiguous() if state_v_first else final
