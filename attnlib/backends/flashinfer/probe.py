"""Whether FlashInfer can be used: its classes, their signatures, and a source of kernels (J2).

FlashInfer compiles its kernels at first use: without nvcc and ninja, or a matching
`flashinfer-jit-cache`, the first batch fails although the import works. This module only looks for
files; it downloads, builds and configures nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from attnlib.backends._foreign.imports import (
    import_guarded,
    is_installed,
    keywords_of,
    package_version,
)

__all__ = ["FlashInferApi", "find_api", "missing_arguments"]

_ARCH_LIST = "FLASHINFER_CUDA_ARCH_LIST"

_RUN = ("q", "paged_kv_cache", "q_scale", "k_scale", "v_scale", "out", "lse", "return_lse")

_NEEDED: dict[str, dict[str, tuple[str, ...]]] = {
    "BatchDecodeWithPagedKVCacheWrapper": {
        "__init__": (
            "float_workspace_buffer",
            "kv_layout",
            "use_cuda_graph",
            "use_tensor_cores",
            "backend",
        ),
        "plan": (
            "indptr",
            "indices",
            "last_page_len",
            "num_qo_heads",
            "num_kv_heads",
            "head_dim",
            "page_size",
            "window_left",
            "logits_soft_cap",
        ),
        "run": _RUN,
    },
    "BatchPrefillWithPagedKVCacheWrapper": {
        "__init__": ("float_workspace_buffer", "kv_layout", "backend"),
        "plan": (
            "qo_indptr",
            "paged_kv_indptr",
            "paged_kv_indices",
            "paged_kv_last_page_len",
            "causal",
            "window_left",
            "logits_soft_cap",
        ),
        "run": _RUN,
    },
}


@dataclass(frozen=True)
class FlashInferApi:
    """FlashInfer's two wrapper classes and its version.

    Attributes:
        decode: `BatchDecodeWithPagedKVCacheWrapper`.
        prefill: `BatchPrefillWithPagedKVCacheWrapper`.
        release: the version, "" if unknown.
    """

    decode: type[Any]
    prefill: type[Any]
    release: str


@lru_cache(maxsize=4)
def find_api(capability: tuple[int, int] | None) -> tuple[FlashInferApi | None, str]:
    """The wrapper classes and "", or None and the reason.

    Args:
        capability: the device's compute capability, which FlashInfer queries during the import.
    """
    if not is_installed("flashinfer"):
        return None, "flashinfer is not installed: pip install flashinfer-python"
    with _without_cuda(capability):
        imported = import_guarded("flashinfer")
    if imported.module is None:
        return (
            None,
            imported.problem or "flashinfer is not installed: pip install flashinfer-python",
        )
    classes = [getattr(imported.module, name, None) for name in _NEEDED]
    for name, found in zip(_NEEDED, classes, strict=True):
        if found is None:
            return (
                None,
                f"flashinfer has no {name}: the package is incomplete or too old; "
                "pip install -U flashinfer-python",
            )
        missing = missing_arguments(found, _NEEDED[name])
        if missing:
            return (
                None,
                f"flashinfer's {name}.{missing} is not an argument of this release: "
                "pip install -U flashinfer-python (0.6.12 or later)",
            )
    release = str(getattr(imported.module, "__version__", "")) or package_version(
        "flashinfer-python", "flashinfer"
    )
    assert classes[0] is not None and classes[1] is not None  # checked in the loop
    return FlashInferApi(classes[0], classes[1], release), ""


def missing_arguments(wrapper: type[Any], needed: Mapping[str, tuple[str, ...]]) -> str:
    """The first argument of `needed` that a method of `wrapper` does not take, or ""."""
    for method, arguments in needed.items():
        keywords = keywords_of(getattr(wrapper, method))
        for argument in arguments:
            if not keywords.accepts(argument):
                return f"{method}({argument}=)"
    return ""


@contextmanager
def _without_cuda(capability: tuple[int, int] | None) -> Iterator[None]:
    """Answer what FlashInfer asks at import with `capability`, so that CUDA is not initialized:
    FLASHINFER_CUDA_ARCH_LIST and, in 0.7, `torch.cuda.get_device_capability`."""
    if capability is None or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # untyped in torch
        yield
        return
    added = _ARCH_LIST not in os.environ
    os.environ.setdefault(_ARCH_LIST, f"{capability[0]}.{capability[1]}")
    asked = torch.cuda.get_device_capability
    torch.cuda.get_device_capability = lambda device=None: capability
    try:
        yield
    finally:
        torch.cuda.get_device_capability = asked
        if added:
            os.environ.pop(_ARCH_LIST, None)
