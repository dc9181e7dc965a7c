"""The FlashInfer wrappers of one builder: their kinds, their shared workspace, and planning.

FlashInfer compiles the kernels of a wrapper at its first plan unless they are cached, which takes
about a minute. A log message precedes it. If a build fails, the error contains only the lines of
ninja's output that name an error (J4).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from attnlib.backends.flashinfer.plans import Lease, PlanKey, WrapperPool
from attnlib.backends.flashinfer.probe import FlashInferApi
from attnlib.errors import BackendUnavailableError
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.spec import AttentionSpec
from attnlib.workspace import BatchLimits, Workspace

__all__ = ["Wrappers", "compiler_errors"]

logger = logging.getLogger("attnlib")

_MIB = 1024 * 1024
_ERROR_LINES = 6

_MAX_LOGGED = 256
_logged_plans: set[tuple[Any, ...]] = set()
"""Kinds of plans that were logged; cleared when it is full, so that later ones are logged again."""


class Wrappers:
    """The wrappers of one spec on one device, over one workspace.

    Args:
        api: FlashInfer's classes.
        spec: of the layers that the plans serve.
        device: the device of the plans.
        config: the settings of the backend.
        hopper: whether the device is a Hopper GPU, which fa3 requires.
        limits: the largest batch, if known.
    """

    def __init__(
        self,
        api: FlashInferApi,
        spec: AttentionSpec,
        device: torch.device,
        config: Mapping[str, Any],
        hopper: bool,
        limits: BatchLimits | None,
    ) -> None:
        self.spec = spec
        self.device = device
        self.config = config
        self._api = api
        self._hopper = hopper
        self._workspace = Workspace(device, self._declared_bytes(limits), fixed=True)
        self._workspace.reserve(0).zero_()  # the decode wrapper requires zeros at its first use
        self._pools: dict[str, WrapperPool] = {}

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the workspace on the device, which all wrappers share."""
        return self._workspace.num_bytes

    def plan(self, lease: Lease, key: PlanKey, **arguments: Any) -> None:
        """Plan a leased wrapper for layers of `key`.

        Raises:
            BackendUnavailableError: the kernels cannot be compiled; has the compiler's error lines.
        """
        self._log_first_plan(lease, key)
        try:
            lease.wrapper.plan(**arguments, **self._arguments(key))
        except Exception as error:
            lines = compiler_errors(error)
            if lines is None:
                raise
            raise BackendUnavailableError(
                f"flashinfer's kernels for {self._describe(lease, key)} could not be compiled: "
                f"{lines}. Check that nvcc (CUDA_HOME) matches torch's CUDA {torch.version.cuda}, "
                "delete the folder of the failed build, or choose another backend"
            ) from error
        lease.planned()

    def _log_first_plan(self, lease: Lease, key: PlanKey) -> None:
        """Log once per set of kernels that it may be compiled now.

        Kernels are specialized on whether there is a window or soft cap, not on its value.
        """
        spec = self.spec
        known = (
            _kind(lease),
            spec.dtype,
            spec.kv_dtype,
            spec.head_size,
            key.window_left >= 0,
            bool(key.logits_soft_cap),
        )
        if known not in _logged_plans:
            if len(_logged_plans) >= _MAX_LOGGED:
                _logged_plans.clear()
            _logged_plans.add(known)
            logger.info(
                "flashinfer: first plan for %s; compiled now (about a minute) unless it is in %s",
                self._describe(lease, key),
                _cache_folder(),
            )

    def _describe(self, lease: Lease, key: PlanKey) -> str:
        spec = self.spec
        dtypes = f"{spec.dtype}, cache {spec.kv_dtype}"
        return f"{_kind(lease)}, {dtypes}, head_size={spec.head_size}, {key}"

    def _arguments(self, key: PlanKey) -> dict[str, Any]:
        """Arguments of both wrappers' `plan`.

        The scale is 1 here and an argument of `run`, so layers with different scales share a plan.
        """
        return {
            "num_qo_heads": self.spec.num_heads,
            "num_kv_heads": self.spec.num_kv_heads,
            "page_size": self.spec.block_size,
            "window_left": key.window_left,
            "logits_soft_cap": key.logits_soft_cap or 0.0,
            "q_data_type": self.spec.dtype,
            "kv_data_type": self.spec.kv_dtype,
            "sm_scale": 1.0,
            "non_blocking": True,
        }

    def prefill_backend(self, key: PlanKey, every_row_sees_a_key: bool) -> str:
        """The kernels of a prefill: "fa3", which is faster on Hopper, or "fa2".

        fa3 is wrong for rows that see no key and does not support a float8 cache with a 16-bit
        query. "auto" does not use it with a window either.
        """
        requested = self.config.get("prefill_backend", "auto")
        supported = self._hopper and every_row_sees_a_key and not self.spec.is_kv_quantized
        if requested == "fa3":
            return "fa3" if supported else "fa2"
        return "fa3" if requested == "auto" and supported and key.window_left < 0 else "fa2"

    def pool(self, kind: str) -> WrapperPool:
        """The wrappers of a kind: "decode", or "fa2" or "fa3" for prefills."""
        if kind not in self._pools:
            scratch = self._workspace.reserve(0)

            def make() -> Any:
                if kind == "decode":
                    return self._api.decode(
                        float_workspace_buffer=scratch,
                        kv_layout="NHD",
                        use_tensor_cores=self._tensor_cores(),
                        backend="fa2",
                    )
                return self._api.prefill(
                    float_workspace_buffer=scratch, kv_layout="NHD", backend=kind
                )

            self._pools[kind] = WrapperPool(make, self.device)
        return self._pools[kind]

    def graph_pool(self, common: CommonAttentionMetadata) -> WrapperPool:
        """Decode wrappers with separate, fixed buffers, for one captured batch size."""
        assert common.block_table_tensor is not None  # single-token decodes are paged
        reqs, max_blocks = common.num_reqs, common.block_table_tensor.shape[1]

        def make() -> Any:
            def empty(size: int) -> torch.Tensor:
                return torch.zeros(size, dtype=torch.int32, device=self.device)

            return self._api.decode(
                float_workspace_buffer=self._workspace.reserve(0),
                kv_layout="NHD",
                use_cuda_graph=True,
                use_tensor_cores=self._tensor_cores(),
                paged_kv_indptr_buffer=empty(reqs + 1),
                paged_kv_indices_buffer=empty(max(reqs * max_blocks, 1)),
                paged_kv_last_page_len_buffer=empty(reqs),
                backend="fa2",
            )

        return WrapperPool(make, self.device)

    def _tensor_cores(self) -> bool:
        return bool(self.config.get("tensor_cores", True))

    def _declared_bytes(self, limits: BatchLimits | None) -> int:
        """Size of the workspace.

        It holds the partial results of key splits: two CTAs per multiprocessor, or two per request
        of a captured batch, with one tile of query rows each.
        """
        configured = self.config.get("workspace_bytes")
        if configured is not None:
            return int(configured)
        spec, processors = self.spec, 1
        if self.device.type == "cuda":
            processors = torch.cuda.get_device_properties(self.device).multi_processor_count
        per_row = spec.num_heads * (spec.head_size_v + 1) * 4
        split_tiles = -(-2 * processors // spec.num_kv_heads) * 128
        tile = next((rows for rows in (16, 64) if spec.group_size <= rows), 128)
        captured = 2 * (limits.max_num_reqs if limits else 0) * tile
        return max(128 * _MIB, per_row * max(split_tiles, captured) + 16 * _MIB)


def _kind(lease: Lease) -> str:
    wrapper = lease.wrapper
    kernels = getattr(wrapper, "_backend", None) or getattr(wrapper, "backend", "")
    return f"{type(wrapper).__name__} {kernels}".strip()


def _cache_folder() -> str:
    """The folder of FlashInfer's compiled kernels."""
    try:
        from flashinfer.jit import env
    except Exception:  # another release
        return "its cache"
    return str(getattr(env, "FLASHINFER_JIT_DIR", "its cache"))


def compiler_errors(error: BaseException) -> str | None:
    """The last lines of a failed build that name an error; None if no build failed."""
    text = "\n".join(
        str(part)
        for part in (error, getattr(error, "output", None), getattr(error, "stderr", None))
        if part
    )
    if "ninja" not in text.lower() and "nvcc" not in text:
        return None
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if "error" in line.lower() and "-MF" not in line]
    return " | ".join(line[:300] for line in (named or lines)[-_ERROR_LINES:])
