"""FlashInfer's wrappers as one builder uses them: which kinds there are, what they share, and a plan that fails with the compiler's own words.

A kind's kernels are compiled at its first plan unless they are there already, which takes about a minute: the log says so before, and a failed
build is reduced from ninja's pages of output to the lines that name an error (J4).
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

__all__ = ["Wrappers"]

logger = logging.getLogger("attnlib")

_MIB = 1024 * 1024
_ERROR_LINES = 6

_announced: set[tuple[Any, ...]] = set()


class Wrappers:
    """The wrappers of one spec on one device, over one workspace.

    Args:
        api: FlashInfer's classes.
        spec: of the layers that the plans serve.
        device: where they run.
        config: the backend's settings.
        hopper: whether the device is a Hopper GPU, which the fa3 kernels need.
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
        self._workspace.reserve(0).zero_()  # the decode wrapper counts on zeros in its first use
        self._pools: dict[str, WrapperPool] = {}

    @property
    def workspace_bytes(self) -> int:
        """Bytes of scratch memory on the device that all wrappers share."""
        return self._workspace.num_bytes

    def plan(self, lease: Lease, key: PlanKey, **arguments: Any) -> None:
        """Plan a leased wrapper for layers of `key`.

        Raises:
            BackendUnavailableError: its kernels could not be compiled; with the compiler's error lines.
        """
        self._announce(lease, key)
        try:
            lease.wrapper.plan(**arguments, **self._arguments(key))
        except Exception as error:
            lines = _compiler_errors(error)
            if lines is None:
                raise
            raise BackendUnavailableError(
                f"flashinfer's kernels for {self._named(lease, key)} could not be compiled: {lines}. Check that nvcc (CUDA_HOME) fits torch's CUDA "
                f"{torch.version.cuda}, delete the folder of the failed build, or choose another backend"
            ) from error
        lease.planned()

    def _announce(self, lease: Lease, key: PlanKey) -> None:
        """Say once for each set of kernels that they may be compiled now; kernels know whether there is a window or cap, not how large."""
        spec = self.spec
        known = (
            _kind(lease),
            spec.dtype,
            spec.kv_dtype,
            spec.head_size,
            key.window_left >= 0,
            bool(key.logits_soft_cap),
        )
        if known not in _announced:
            _announced.add(known)
            logger.info(
                "flashinfer: first plan for %s; compiled now (about a minute) unless it is in %s",
                self._named(lease, key),
                _cache_folder(),
            )

    def _named(self, lease: Lease, key: PlanKey) -> str:
        return f"{_kind(lease)}, {self.spec.dtype}, cache {self.spec.kv_dtype}, head_size={self.spec.head_size}, {key}"

    def _arguments(self, key: PlanKey) -> dict[str, Any]:
        """What both wrappers' plans take. The scale is 1 here and given at the call, so layers of different scales share a plan."""
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
        """fa3 is faster on Hopper; it gives rows that see no key a weight, takes no float8 cache with a 16-bit query, and is left out for windows."""
        wish = self.config.get("prefill_backend", "auto")
        fits = self._hopper and every_row_sees_a_key and not self.spec.is_kv_quantized
        if wish == "fa3":
            return "fa3" if fits else "fa2"
        return "fa3" if wish == "auto" and fits and key.window_left < 0 else "fa2"

    def pool(self, kind: str) -> WrapperPool:
        """Wrappers of a kind: "decode", or the kernels of a prefill, "fa2" or "fa3"."""
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
        """Decode wrappers over buffers of their own, for one captured batch size."""
        assert common.block_table_tensor is not None  # single-token decodes are paged
        reqs, most = common.num_reqs, common.block_table_tensor.shape[1]

        def make() -> Any:
            def empty(size: int) -> torch.Tensor:
                return torch.zeros(size, dtype=torch.int32, device=self.device)

            return self._api.decode(
                float_workspace_buffer=self._workspace.reserve(0),
                kv_layout="NHD",
                use_cuda_graph=True,
                use_tensor_cores=self._tensor_cores(),
                paged_kv_indptr_buffer=empty(reqs + 1),
                paged_kv_indices_buffer=empty(max(reqs * most, 1)),
                paged_kv_last_page_len_buffer=empty(reqs),
                backend="fa2",
            )

        return WrapperPool(make, self.device)

    def _tensor_cores(self) -> bool:
        return bool(self.config.get("tensor_cores", True))

    def _declared_bytes(self, limits: BatchLimits | None) -> int:
        """Partial results of split keys: two programs per multiprocessor, or two tiles per request of a captured batch, each of a whole tile."""
        given = self.config.get("workspace_bytes")
        if given is not None:
            return int(given)
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
    return f"{type(wrapper).__name__} {getattr(wrapper, '_backend', None) or getattr(wrapper, 'backend', '')}".strip()


def _cache_folder() -> str:
    """Where FlashInfer keeps what it compiles, as far as it says."""
    try:
        from flashinfer.jit import env
    except Exception:  # another release, or a stand-in
        return "its cache"
    return str(getattr(env, "FLASHINFER_JIT_DIR", "its cache"))


def _compiler_errors(error: BaseException) -> str | None:
    """The last lines of a failed build that name an error; None when it was no build."""
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
