"""Declaration of the `triton` backend: attnlib's own kernels, written in Triton.

Importable without triton, so that selection can report why the backend is unavailable.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.metadata
import importlib.util
import os
import re
import shutil
from collections.abc import Callable
from typing import Any

import torch

from attnlib.backends.base import AttentionBackend, AttentionImpl
from attnlib.backends.triton.explain import kernel_lines
from attnlib.capabilities import Capabilities, Sizes
from attnlib.device import DeviceInfo
from attnlib.kv_dtype import PAGE_FORMATS
from attnlib.metadata.base import AttentionMetadata, AttentionMetadataBuilder
from attnlib.ops.dispatch import named_operation
from attnlib.spec import AttentionSpec, AttentionType, CudaGraphSupport, MaskKind
from attnlib.tuning.tuner import Tuner

__all__ = ["TritonBackend"]


class TritonBackend(AttentionBackend):
    """Triton kernels for NVIDIA GPUs from Ampere on, AMD GPUs, and Triton's CPU interpreter."""

    description = "attnlib's Triton kernels; no CUDA toolkit needed"
    capabilities = Capabilities(
        devices=("cuda", "cpu"),
        min_capability=(8, 0),
        rocm=True,
        rotary_write=True,
        dtypes=(torch.float16, torch.bfloat16, torch.float32),
        kv_cache_dtypes=(
            torch.float16,
            torch.bfloat16,
            torch.float32,
            torch.float8_e4m3fn,
            torch.float8_e5m2,
        ),
        kv_formats=tuple(PAGE_FORMATS),
        kv_scale_kinds=("tensor", "head"),
        head_sizes=Sizes(8, 576, 8),
        head_size_v_may_differ=True,
        block_sizes=Sizes(1),
        kv_cache_layouts=(
            "NHD",
            "HND",
            "NHD_INTERLEAVED",
            "HND_INTERLEAVED",
            "NHD_PACKED",
            "HND_PACKED",
            "ANY",
        ),
        group_sizes=Sizes(1),
        attn_types=tuple(AttentionType),
        mask_kinds=tuple(MaskKind),
        sliding_window=True,
        attention_chunks=True,
        logits_soft_cap=True,
        alibi=True,
        sink=True,
        score_function=True,
        key_selection=True,
        compressed_entries=True,
        mla=True,
        lse=True,
        kv_sharing=True,
        batch_invariant=True,
        cudagraph=CudaGraphSupport.ALWAYS,
    )

    @staticmethod
    def get_name() -> str:
        return "triton"

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        from attnlib.backends.triton.impl import TritonImpl

        return TritonImpl

    @staticmethod
    def get_metadata_cls() -> type[AttentionMetadata]:
        from attnlib.backends.triton.metadata import TritonMetadata

        return TritonMetadata

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder[Any]]:
        from attnlib.backends.triton.metadata import TritonMetadataBuilder

        return TritonMetadataBuilder

    @classmethod
    def get_operation(cls, name: str) -> Callable[..., Any] | None:
        """Those of `attnlib.ops.triton`."""
        return named_operation("triton", name)

    @classmethod
    def unavailable(cls, device: DeviceInfo) -> list[str]:
        """Why it cannot run on `device`.

        Everywhere, triton must be installed. A CPU needs Triton's interpreter and a compatible
        numpy, an NVIDIA GPU a C compiler and the driver library, for Triton's launcher.
        """
        if importlib.util.find_spec("triton") is None:
            return ['triton is not installed: pip install "triton>=3.6"']
        if device.type == "cpu":
            return interpreter_reasons()
        return (
            _toolchain_reasons()
            if device.type == "cuda" and not (device.is_rocm or device.is_hypothetical)
            else []
        )

    @classmethod
    def explain_lines(cls, spec: AttentionSpec, device: DeviceInfo) -> list[str]:
        """The kernels for prefill and for decode, and why a Hopper kernel is not used."""
        return kernel_lines(spec, device, str(cls.config.get("kernels", "auto")))

    @classmethod
    def tuner(cls, device: torch.device) -> Tuner | None:
        """The tuner of its tiles; None on a CPU, where the interpreter's times are meaningless."""
        if device.type != "cuda":
            return None
        from attnlib.backends.triton.tune import TritonTuner

        return TritonTuner(device)

    @classmethod
    def supports_combination(cls, spec: AttentionSpec, device: DeviceInfo) -> list[str]:
        """bfloat16 on a CPU, because Triton's interpreter computes with numpy, which has none; and
        selected keys with features that their kernel has not."""
        reasons = []
        if spec.key_selection is not None:
            if spec.score_function is not None:
                reasons.append("key_selection with a score function: not supported")
            if spec.mask_kind is MaskKind.QUERY_BIAS:
                reasons.append("key_selection with mask_kind=query_bias: not supported")
            if spec.batch_invariant:
                reasons.append("key_selection with batch_invariant=True: not supported")
            if spec.kv_format.scales_in_page:
                reasons.append(
                    f"key_selection with kv_cache_dtype={spec.kv_format.name}: not supported"
                )
        if spec.compressed_entries is not None:
            reasons += _unsupported_entries(spec)
        if spec.batch_invariant and spec.kv_format.scales_in_page:
            reasons.append(
                f"batch_invariant=True with kv_cache_dtype={spec.kv_format.name}: not supported"
            )
        if device.type == "cpu" and torch.bfloat16 in (spec.dtype, spec.kv_dtype):
            reasons.append(
                "bfloat16 on a CPU: Triton's interpreter computes wrong products; use float32 or "
                "float16"
            )
        return reasons


def _unsupported_entries(spec: AttentionSpec) -> list[str]:
    """Features that the kernels over compressed entries have not."""
    reasons = []
    if spec.batch_invariant:
        reasons.append("compressed_entries with batch_invariant=True: not supported")
    if spec.kv_format.scales_in_page:
        reasons.append(
            f"compressed_entries with kv_cache_dtype={spec.kv_format.name}: not supported"
        )
    return reasons


def interpreter_reasons() -> list[str]:
    """Why Triton's interpreter cannot run: it is switched off, or does not work with this numpy.

    Triton 3.6's interpreter converts one-element arrays to Python scalars, which numpy 2.4 rejects.
    """
    reasons = []
    if os.environ.get("TRITON_INTERPRET", "0") in ("", "0"):
        reasons.append(
            "a CPU needs Triton's interpreter (slow, for tests): set TRITON_INTERPRET=1 before "
            "triton is imported"
        )
    installed = {name: _version(name) for name in ("triton", "numpy")}
    if not installed["numpy"]:
        reasons.append("Triton's interpreter needs numpy: pip install numpy")
    elif (0,) < installed["triton"] < (3, 7) and installed["numpy"] >= (2, 4):
        triton, numpy = (".".join(map(str, version)) for version in installed.values())
        reasons.append(
            f"the interpreter of Triton {triton} fails with numpy {numpy}: "
            f'pip install "triton>=3.7", or pip install "numpy<2.4"'
        )
    return reasons


def _version(package: str) -> tuple[int, ...]:
    """(major, minor) of an installed distribution; empty if there is none. Imports nothing."""
    try:
        found = re.match(r"(\d+)\.(\d+)", importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return ()
    return (int(found[1]), int(found[2])) if found else ()


def _toolchain_reasons() -> list[str]:
    """What Triton's launcher lacks: a C compiler or the driver library (J1)."""
    reasons = []
    compiler = (
        os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")
    )
    if not compiler or not (os.path.isfile(compiler) or shutil.which(compiler)):
        reasons.append(
            "no C compiler for Triton's launcher: install gcc or clang, or set CC to one"
        )
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        if ctypes.util.find_library("cuda") is None:
            reasons.append(
                "libcuda.so.1 is not found: install the NVIDIA driver, or add its directory to "
                "LD_LIBRARY_PATH"
            )
    return reasons
