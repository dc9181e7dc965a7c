"""Declaration of the `triton` backend: attnlib's own kernels, written in Triton.

Importable without triton, so that selection can report why the backend is unavailable.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from attnlib.backends.base import AttentionBackend, AttentionImpl, StateImpl
from attnlib.backends.triton.availability import interpreter_reasons, toolchain_reasons
from attnlib.backends.triton.explain import kernel_lines
from attnlib.capabilities import Capabilities, Sizes, StateCapabilities
from attnlib.device import DeviceInfo
from attnlib.kv_dtype import KV_FORMAT_PAIRS, PAGE_FORMATS
from attnlib.metadata.base import AttentionMetadata, AttentionMetadataBuilder
from attnlib.ops.dispatch import named_operation
from attnlib.spec import AttentionSpec, AttentionType, CudaGraphSupport, MaskKind, StateSpec
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
        kv_format_pairs=tuple(pair for pair in KV_FORMAT_PAIRS if "plain" not in pair),
        open_kv_formats=True,
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
        query_tensors=True,
        token_sinks=True,
        key_selection=True,
        compressed_entries=True,
        mla=True,
        lse=True,
        kv_sharing=True,
        batch_invariant=True,
        cudagraph=CudaGraphSupport.ALWAYS,
    )

    state_capabilities = StateCapabilities(
        devices=("cuda", "cpu"),
        min_capability=(8, 0),
        rocm=True,
        dtypes=(torch.float16, torch.bfloat16, torch.float32),
        state_dtypes=(torch.float32, torch.bfloat16),
        key_sizes=Sizes(1, 256),
        value_sizes=Sizes(1, 256),
        group_sizes=Sizes(1),
        updates=("delta", "add"),
        decays=("head", "channel", "constant"),
        beta=True,
        skip=True,
        qk_norm=True,
        conv_widths=Sizes(2),
        conv_activations=("silu", "none"),
        conv_bias=True,
        forms=("tail",),
        chunk_sizes=Sizes(exactly=(16, 32)),
        max_rollback=64,
        batch_invariant=True,
        cudagraph=CudaGraphSupport.ALWAYS,
        needs_host_lengths=False,
        fused_step=True,
    )

    @staticmethod
    def get_name() -> str:
        return "triton"

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        from attnlib.backends.triton.impl import TritonImpl

        return TritonImpl

    @staticmethod
    def get_state_impl_cls() -> type[StateImpl]:
        from attnlib.backends.triton.states import TritonStateImpl

        return TritonStateImpl

    @classmethod
    def explain_state_lines(cls, spec: StateSpec, device: DeviceInfo) -> list[str]:
        slots, *step = super().explain_state_lines(spec, device)
        if step and spec.batch_invariant and device.capability is not None:
            from attnlib.cache.states import state_layout
            from attnlib.ops.triton.heuristics.state_tiles import long_chunk

            if long_chunk(state_layout(cls.resolve_state_spec(spec)), device.capability, True):
                step = ["step:    separate launches, as for prefills (T18)"]
        return [slots, *step]

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
            toolchain_reasons()
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
        reasons = _unread_formats(spec)
        if spec.key_selection is not None:
            if spec.score_function is not None:
                reasons.append("key_selection with a score function: not supported")
            if spec.mask_kind is MaskKind.QUERY_BIAS:
                reasons.append("key_selection with mask_kind=query_bias: not supported")
            if spec.batch_invariant:
                reasons.append("key_selection with batch_invariant=True: not supported")
            if spec.scales_in_page:
                reasons.append(
                    f"key_selection with kv_cache_dtype={spec.kv_format.name}: not supported"
                )
        if spec.compressed_entries is not None:
            reasons += _unsupported_entries(spec)
        if spec.batch_invariant and spec.scales_in_page:
            reasons.append(
                f"batch_invariant=True with kv_cache_dtype={spec.kv_format.name}: not supported"
            )
        if device.type == "cpu" and torch.bfloat16 in (spec.dtype, spec.kv_dtype):
            reasons.append(
                "bfloat16 on a CPU: Triton's interpreter computes wrong products; use float32 or "
                "float16"
            )
        return reasons


def _unread_formats(spec: AttentionSpec) -> list[str]:
    """Open formats that no device function converts (P16)."""
    if not spec.has_open_format:
        return []
    sides = {one.name: one for one in (spec.kv_format, spec.value_format)}
    reasons = [
        f"open KV format {name}: no device function (KVFormat.number; backend='torch' reads it)"
        for name, one in sides.items()
        if one.is_open and one.number is None
    ]
    if not all(one.scales_in_page for one in sides.values()):
        reasons.append(
            "open KV format with keys or values in the dtype of the model: not supported"
        )
    if "mxfp4" in sides:
        reasons.append("open KV format with mxfp4: not supported")  # no 16-bit products hold both
    return reasons


def _unsupported_entries(spec: AttentionSpec) -> list[str]:
    """Features that the kernels over compressed entries have not."""
    reasons = []
    if spec.batch_invariant:
        reasons.append("compressed_entries with batch_invariant=True: not supported")
    if spec.scales_in_page:
        reasons.append(
            f"compressed_entries with kv_cache_dtype={spec.kv_format.name}: not supported"
        )
    return reasons
