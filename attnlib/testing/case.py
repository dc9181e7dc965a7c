"""One case: everything that a run of one step depends on, as one frozen value of plain numbers and words.

A case names its batch in the grammar of `batch_spec`, so it prints in a line and is rebuilt from that line. `Case.spec`
says it in the library's words, `Case.params` in the oracle's; the two are converted here separately and by hand, so a
slip of the library's own conversion (a window off by one, say) is caught and not shared.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from attnlib.spec import AttentionSpec, AttentionType, CudaGraphSupport, MaskKind, Window
from attnlib.testing.batch_spec import BatchSpec, resolve_batch
from attnlib.testing.inputs import make_oracle_params
from attnlib.testing.layouts import Dimensions
from attnlib.testing.oracle import OracleParams

if TYPE_CHECKING:
    from attnlib.testing.materialized_case import MaterializedCase

__all__ = ["Case"]

_STORED = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One step of one layer. Fields are spec fields where the names agree; the others say how the tensors lie.

    Attributes:
        batch: a name or the grammar of `batch_spec`.
        layout: where the cache lies (`layouts.CACHE_LAYOUTS`); "ALIASED" is MLA's.
        placement, garbage, extra_columns, guarded: where its blocks lie (`placements.place`).
        poison: what fills everything that must not be read.
        k_scale, v_scale: scales of a one-byte cache; with kv_scale_kind="head" every second head has half of it.
        contiguous: packed q, k, v, out instead of strided views (P9).
    """

    batch: str = "mixed"
    seed: int = 0
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 32
    head_size_v: int | None = None
    block_size: int = 16
    dtype: str = "float32"
    kv_cache_dtype: str = "auto"
    kv_scale_kind: str = "tensor"
    k_scale: float = 1.0
    v_scale: float = 1.0
    scale: float | None = None
    attn_type: str = "decoder"
    mask: str = "causal"
    sliding_window: int | None = None
    window: tuple[int | None, int | None] | None = None
    attention_chunk_size: int | None = None
    logits_soft_cap: float | None = None
    alibi: bool = False
    sinks: bool = False
    use_mla: bool = False
    needs_lse: bool = False
    kv_sharing: bool = False
    batch_invariant: bool = False
    cudagraph: str = "NEVER"
    layout: str = "NHD"
    placement: str = "shuffled"
    garbage: str = "plausible"
    extra_columns: int = 1
    guarded: bool = False
    poison: str = "nan"
    contiguous: bool = False

    def __str__(self) -> str:
        """The fields that are not at their defaults."""
        told = [
            f"{f.name}={getattr(self, f.name)}"
            for f in fields(self)
            if getattr(self, f.name) != f.default
        ]
        return ", ".join(
            [f"batch={self.batch_spec}", *(text for text in told if not text.startswith("batch="))]
        )

    def replace(self, **changes: Any) -> Case:
        """A copy with some fields changed."""
        return replace(self, **changes)

    @cached_property
    def batch_spec(self) -> BatchSpec:
        """The batch, resolved with this case's block size."""
        return resolve_batch(self.batch, self.block_size)

    @property
    def is_paged(self) -> bool:
        """Whether keys go through the cache."""
        return self.attn_type in ("decoder", "encoder_decoder")

    @property
    def torch_dtype(self) -> torch.dtype:
        """dtype of q, k, v and the output."""
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def dimensions(self) -> Dimensions:
        """The case's sizes for the input makers."""
        stored = _STORED.get(self.kv_cache_dtype) or getattr(
            torch, self.dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype
        )
        return Dimensions(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            head_size_v=self.head_size_v or self.head_size,
            block_size=self.block_size,
            dtype=self.torch_dtype,
            cache_dtype=stored,
        )

    @property
    def spec(self) -> AttentionSpec:
        """The case in the library's words.

        Raises:
            ContractError: a case that no layer can be.
        """
        return AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            head_size_v=self.head_size_v or self.head_size,
            dtype=self.torch_dtype,
            kv_cache_dtype=self.kv_cache_dtype,
            kv_scale_kind=self.kv_scale_kind,
            block_size=self.block_size,
            kv_cache_layout=None if self.layout == "ALIASED" or not self.is_paged else self.layout,
            attn_type=AttentionType(self.attn_type),
            mask_kind=MaskKind(self.mask),
            sliding_window=self.sliding_window,
            window=None if self.window is None else Window(*self.window),
            attention_chunk_size=self.attention_chunk_size,
            logits_soft_cap=self.logits_soft_cap,
            has_alibi=self.alibi,
            has_sink=self.sinks,
            use_mla=self.use_mla,
            needs_lse=self.needs_lse,
            kv_sharing=self.kv_sharing,
            batch_invariant=self.batch_invariant,
            cudagraph=CudaGraphSupport[self.cudagraph],
        )

    def oracle_params(self, device: torch.device | str) -> OracleParams:
        """The case in the oracle's words (M2: W keys, the query's own among them)."""
        left, right = self.window or (None, None)
        if self.sliding_window is not None:
            left = right = self.sliding_window - 1
        causal: bool | torch.Tensor = self.mask in ("causal", "query_bias")
        if self.mask == "per_request":
            causal = torch.tensor(
                [r % 2 == 0 for r in range(self.batch_spec.num_reqs)], device=device
            )
        features: dict[str, object] = {
            "causal": causal,
            "window": (-1 if left is None else left, -1 if right is None else right),
            "attention_chunk_size": self.attention_chunk_size or 0,
            "logits_soft_cap": self.logits_soft_cap or 0.0,
            "k_scale": self._scale_tensor(self.k_scale, device),
            "v_scale": self._scale_tensor(self.v_scale, device),
        }
        if self.scale is not None:
            features["scale"] = self.scale
        for name, wanted in (
            ("alibi_slopes", self.alibi),
            ("sinks", self.sinks),
            ("query_bias", self.mask == "query_bias"),
        ):
            if wanted:
                features[name] = True
        return make_oracle_params(
            self.dimensions, self.batch_spec, features, seed=self.seed, device=device
        )

    def _scale_tensor(self, scale: float, device: torch.device | str) -> float | torch.Tensor:
        if self.kv_scale_kind != "head":
            return scale
        return torch.tensor(
            [scale / (1 + head % 2) for head in range(self.num_kv_heads)], device=device
        )

    def materialize(
        self, device: torch.device | str = "cpu", *, kv_written: bool = True
    ) -> MaterializedCase:
        """The case's tensors; `kv_written` says whether this step's keys are in the cache already."""
        from attnlib.testing.materialized_case import materialize_case

        return materialize_case(self, device, kv_written=kv_written)
