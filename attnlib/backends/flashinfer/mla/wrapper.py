"""FlashInfer's wrapper for latent caches, in the form of call of the installed release.

FlashInfer 0.7 takes the batch as one object, queries and caches as pairs, and needs to know in the
plan whether a call returns the LSE. Older releases take the parts as arguments of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from attnlib.backends._foreign.imports import import_guarded, keywords_of
from attnlib.backends.flashinfer.plans import PageList
from attnlib.backends.flashinfer.probe import find_api, missing_arguments

__all__ = ["MLAWrapper", "find_mla_wrapper"]

_NAME = "BatchMLAPagedAttentionWrapper"
_BATCH = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
_LAYERS = (
    "num_heads",
    "head_dim_ckv",
    "head_dim_kpe",
    "page_size",
    "causal",
    "sm_scale",
    "q_data_type",
    "kv_data_type",
)
_OUTPUTS = ("out", "lse", "return_lse")
_FLAT: Mapping[str, tuple[str, ...]] = {
    "__init__": ("float_workspace_buffer", "backend"),
    "plan": (*_BATCH, *_LAYERS),
    "run": ("q_nope", "q_pe", "ckv_cache", "kpe_cache", *_OUTPUTS),
}
_STRUCTURED: Mapping[str, tuple[str, ...]] = {
    "__init__": ("float_workspace_buffer", "backend"),
    "plan": ("metadata", *_LAYERS, "query_layout", "kv_cache_layout", "lse_mode"),
    "run": ("query", "kv_cache", *_OUTPUTS),
}


@dataclass(frozen=True)
class MLAWrapper:
    """FlashInfer's wrapper for latent caches and its version.

    Attributes:
        wrapper: `flashinfer.mla.BatchMLAPagedAttentionWrapper`.
        release: the version, "" if unknown.
        batch: `flashinfer.mla.MLAPlanMetadata`, or None in releases without it (before 0.7).
    """

    wrapper: type[Any]
    release: str
    batch: type[Any] | None

    def make(self, workspace: torch.Tensor, kernels: str) -> Any:
        """A wrapper over a workspace of bytes; `kernels` is "fa2", "fa3" or "auto"."""
        return self.wrapper(float_workspace_buffer=workspace, backend=kernels)

    @property
    def plans_lse(self) -> bool:
        """Whether a plan serves either calls with an LSE or calls without one."""
        return self.batch is not None

    def plan(
        self, wrapper: Any, starts: torch.Tensor, pages: PageList, lse: bool, **layers: Any
    ) -> None:
        """Plan a wrapper for a batch.

        Args:
            wrapper: made by `make`.
            starts: `[R + 1]` int32 on the CPU, first tokens of the requests.
            pages: the pages of the requests.
            lse: whether the calls return an LSE.
            layers: the other arguments, which layers that share the plan have in common.
        """
        batch = dict(
            zip(
                _BATCH,
                (starts, pages.indptr, pages.indices, pages.seq_lens),
                strict=True,
            )
        )
        if self.batch is None:
            wrapper.plan(**batch, **layers)
            return
        wrapper.plan(
            metadata=self.batch.csr(**batch),
            **layers,
            query_layout="split",
            kv_cache_layout="split",
            lse_mode="base2" if lse else "none",
        )

    def run(
        self,
        wrapper: Any,
        query: torch.Tensor,
        latents: torch.Tensor,
        size: int,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """Run a planned wrapper.

        Args:
            wrapper: planned by `plan`, with an LSE if `lse` is given.
            query: `[T, Hq, size + rotary]`.
            latents: `[blocks, block_size, size + rotary]`.
            size: elements of a value.
            out: `[T, Hq, size]`, contiguous.
            lse: `[T, Hq]` float32, contiguous, gets the LSE to base 2; None without.
        """
        queries = query[..., :size], query[..., size:]
        caches = latents[..., :size], latents[..., size:]
        outputs = {"out": out, "lse": lse, "return_lse": lse is not None}
        if self.batch is None:
            parts = {"q_nope": queries[0], "q_pe": queries[1]}
            parts |= {"ckv_cache": caches[0], "kpe_cache": caches[1]}
            wrapper.run(**parts, **outputs)
        else:
            wrapper.run(query=queries, kv_cache=caches, **outputs)


def find_mla_wrapper(capability: tuple[int, int] | None) -> tuple[MLAWrapper | None, str]:
    """The wrapper for latent caches and "", or None and the reason. Arguments as in `find_api`."""
    api, problem = find_api(capability)
    if api is None:
        return None, problem
    imported = import_guarded("flashinfer.mla")
    wrapper = getattr(imported.module, _NAME, None)
    if wrapper is None:
        return None, (
            imported.problem or f"flashinfer has no mla.{_NAME}: pip install -U flashinfer-python"
        )
    structured = "metadata" in keywords_of(wrapper.plan)
    batch = getattr(imported.module, "MLAPlanMetadata", None) if structured else None
    missing = missing_arguments(wrapper, _FLAT if batch is None else _STRUCTURED)
    if missing:
        return None, (
            f"flashinfer's {_NAME}.{missing} is not an argument of this release: "
            "pip install -U flashinfer-python (0.6.12 or later)"
        )
    return MLAWrapper(wrapper, api.release, batch), ""
