"""Whether FlashInfer can run here: its classes and their signatures, and a compiler or prebuilt kernels for them (J2).

FlashInfer compiles its kernels at first use, so an import proves little: without nvcc and ninja, or a matching `flashinfer-jit-cache`, the first
batch would fail. Only files are looked at; nothing is downloaded, built or configured.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from attnlib.backends._foreign.imports import (
    import_guarded,
    is_installed,
    keywords_of,
    package_version,
)

__all__ = ["FlashInferApi", "find_api", "toolchain_gaps"]

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
    """The two wrapper classes that attnlib drives, and the release they come from."""

    decode: type[Any]
    prefill: type[Any]
    release: str


@lru_cache(maxsize=4)
def find_api(capability: tuple[int, int] | None) -> tuple[FlashInferApi | None, str]:
    """The wrapper classes, or None and the reason why not; ("", None) of a package that is not installed at all is "not installed".

    Args:
        capability: the device's compute capability. FlashInfer asks CUDA for it at import, which would start the device while a backend is
            being chosen; naming it in FLASHINFER_CUDA_ARCH_LIST during the import spares that.
    """
    if not is_installed("flashinfer"):
        return None, "flashinfer is not installed: pip install flashinfer-python"
    with _architecture_named(capability):
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
                f"flashinfer has no {name}: a hollow or very old package; pip install -U flashinfer-python",
            )
        missing = _missing_arguments(found, name)
        if missing:
            return (
                None,
                f"flashinfer's {name}.{missing} is not an argument of this release: pip install -U flashinfer-python (0.6.12 or later)",
            )
    release = str(getattr(imported.module, "__version__", "")) or package_version(
        "flashinfer-python", "flashinfer"
    )
    assert classes[0] is not None and classes[1] is not None  # checked just above
    return FlashInferApi(classes[0], classes[1], release), ""


def _missing_arguments(wrapper: type[Any], name: str) -> str:
    for method, arguments in _NEEDED[name].items():
        takes = keywords_of(getattr(wrapper, method))
        for argument in arguments:
            if not takes.takes(argument):
                return f"{method}({argument}=)"
    return ""


@contextmanager
def _architecture_named(capability: tuple[int, int] | None) -> Iterator[None]:
    if capability is None or _ARCH_LIST in os.environ or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch leaves it untyped
        yield
        return
    os.environ[_ARCH_LIST] = f"{capability[0]}.{capability[1]}"
    try:
        yield
    finally:
        os.environ.pop(_ARCH_LIST, None)


def toolchain_gaps(release: str) -> list[str]:
    """Why FlashInfer could not get its kernels: no compiler and nothing prebuilt. Empty when it can."""
    cached = package_version("flashinfer-jit-cache")
    if cached and release and cached.startswith(release):
        return []
    if _has_prebuilt_files():
        return []
    gaps = []
    if os.environ.get("FLASHINFER_DISABLE_JIT"):
        gaps.append(
            "FLASHINFER_DISABLE_JIT is set and no prebuilt kernels are installed: unset it, or install flashinfer-jit-cache"
        )
    nvcc = _nvcc()
    if not nvcc.is_file():
        gaps.append(
            f"flashinfer compiles its kernels and nvcc is not at {nvcc}: set CUDA_HOME to a CUDA toolkit, or install flashinfer-jit-cache"
        )
    if shutil.which("ninja") is None:
        gaps.append(
            "flashinfer compiles its kernels with ninja, which is not on PATH: pip install ninja, or install flashinfer-jit-cache"
        )
    if gaps and cached:
        gaps.append(
            f"flashinfer-jit-cache {cached} does not match flashinfer {release}: install the same release of both"
        )
    return gaps


def _nvcc() -> Path:
    """Where FlashInfer will look: its own variable, CUDA_HOME or CUDA_PATH, the PATH, the usual place."""
    if os.environ.get("FLASHINFER_NVCC"):
        return Path(os.environ["FLASHINFER_NVCC"])
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        return Path(home) / "bin" / "nvcc"
    on_path = shutil.which("nvcc")
    return Path(on_path) if on_path else Path("/usr/local/cuda/bin/nvcc")


def _has_prebuilt_files() -> bool:
    """Kernels that came inside the package itself."""
    try:
        spec = find_spec("flashinfer")
    except (ImportError, ValueError):
        return False
    if spec is None or not spec.origin:
        return False
    return any((Path(spec.origin).parent / "data" / "aot").glob("**/*.so"))
