"""The package `flashinfer` for machines without it: names that SGLang imports on every GPU.

A dense model with the sampling of PyTorch calls none of them; a call fails. Other names are absent,
so that SGLang takes its own kernels where it can. `sglang_plugins.prepare` installs this file.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

NAMES = {
    "flashinfer": ("bmm_fp8",),
    "flashinfer.sampling": ("min_p_sampling_from_probs", "top_k_top_p_sampling_from_probs"),
}
"""Module -> what SGLang 0.5.17 imports of it."""

__path__: list[str] = []


def _absent(path: str) -> type:
    def refuse(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"FlashInfer is not installed: install it to call {path}")

    return type(path, (), {"__new__": refuse})


for _module, _names in NAMES.items():
    _target = sys.modules.setdefault(_module, ModuleType(_module))
    for _name in _names:
        setattr(_target, _name, _absent(f"{_module}.{_name}"))
