"""The parameters of one attention call, as one value that every operation takes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from attnlib.errors import ContractError
from attnlib.kv_formats import KVFormat
from attnlib.kv_rotation import KVRotation
from attnlib.ops.scales import check_scale
from attnlib.score_functions.function import ScoreFunction
from attnlib.sizes import MAX_LOGITS_SOFT_CAP

__all__ = ["AttentionParams"]


@dataclass(frozen=True, eq=False, kw_only=True)
class AttentionParams:
    """How scores are computed and masked (M3, M4), and how a quantized cache is scaled (M9).

    Attributes:
        scale: factor of q . k, finite.
        causal: for all requests, or a bool tensor `[R]`, one flag per request.
        window: keys visible (before, after) the query's own; -1 is unbounded, 0 is none (M2).
        attention_chunk_size: positions per attention chunk; 0 is none.
        logits_soft_cap: c of `c * tanh(score / c)`, at most `MAX_LOGITS_SOFT_CAP`; 0 is none.
        alibi_slopes: `[Hq]` float32; `slope * |p - k|` is subtracted from the score.
        sinks: `[Hq]` float32; one more logit per head, in the denominator only (M4). `[T, Hq]`,
            contiguous: one per query token and head (M22).
        query_bias: `[T, >= max_query_len]` float32, added to the scores of the query span's keys;
            -inf hides a key.
        score_function: changes the scores before the mask is applied (M10).
        allow_fp8_queries: prefills over an e4m3 cache may round queries and weights to e4m3 (M19).
        score_tensors: its layer, query and batch tensors by name; batch tensors have a row per
            request.
        k_scale: real key = stored key * k_scale; a number, or a float32 tensor of 1 or `[Hkv]`
            elements, from 2^-100 to 2^100. An element of a tensor outside these limits counts as
            NaN. For a format with scales in the page, the view of these scales (M16).
        v_scale: the same for values.
        k_format, v_format: the formats with scales in the page; None for the one of the library
            with the dtypes of the views (`kv_dtype.page_format`).
        rotation: of the heads of the cache, where queries and outputs are those of plain heads
            (P15). Only for operations that say so.

    Raises:
        ContractError: a number outside these limits, or tensors that the score function lacks.
    """

    scale: float
    causal: bool | Tensor = True
    window: tuple[int, int] = (-1, -1)
    attention_chunk_size: int = 0
    logits_soft_cap: float = 0.0
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    query_bias: Tensor | None = None
    score_function: ScoreFunction | None = None
    score_tensors: Mapping[str, Tensor] = field(default_factory=dict)
    allow_fp8_queries: bool = False
    k_scale: float | Tensor = 1.0
    v_scale: float | Tensor = 1.0
    k_format: KVFormat | None = None
    v_format: KVFormat | None = None
    rotation: KVRotation | None = None

    def __post_init__(self) -> None:
        if not math.isfinite(self.scale):
            raise ContractError(f"scale={self.scale} must be finite", rule="M3")
        if min(self.window) < -1:
            raise ContractError(
                f"window={self.window} must be two integers of at least 0, or -1 for unbounded",
                rule="M2",
            )
        if self.attention_chunk_size < 0:
            raise ContractError(
                f"attention_chunk_size={self.attention_chunk_size} must be at least 1, or 0 for no "
                "chunks"
            )
        if not 0 <= self.logits_soft_cap <= MAX_LOGITS_SOFT_CAP:
            raise ContractError(
                f"logits_soft_cap={self.logits_soft_cap} must be above 0 and at most "
                f"{MAX_LOGITS_SOFT_CAP:.0f}, or 0 for no soft cap",
                rule="M3",
            )
        check_scale("k_scale", self.k_scale)
        check_scale("v_scale", self.v_scale)
        function = self.score_function
        if function is not None:
            function.check_tensors(self.score_tensors, function.layer_tensors, "layer")
            function.check_tensors(self.score_tensors, function.batch_tensors, "batch")
            function.check_tensors(self.score_tensors, function.query_tensors, "query")

    @property
    def has_token_sinks(self) -> bool:
        """Whether the sinks are those of query tokens (M22)."""
        return self.sinks is not None and self.sinks.dim() == 2

    @property
    def sink_kind(self) -> int:
        """`HAS_SINK` of the plain kernels: whether there are sinks, 2 for those of query tokens."""
        return 2 if self.has_token_sinks else self.sinks is not None

    def of_rows(self, rows: slice) -> AttentionParams:
        """The parameters of some query tokens. Rows of query tensors are those of the whole batch
        (M21)."""
        if self.sinks is None or not self.has_token_sinks:
            return self
        return replace(self, sinks=self.sinks[rows])

    @property
    def scales_in_page(self) -> bool:
        """Whether the pages of the cache hold its scales (M16)."""
        both = (self.k_scale, self.v_scale)
        return any(isinstance(scale, Tensor) and scale.dim() == 4 for scale in both)

    def count_lookups(self) -> int:
        """Lookups of the score function with as many results as scores."""
        function = self.score_function
        return 0 if function is None else function.count_tile_lookups()

    def count_score_tiles(self) -> int:
        """Float32 tiles as large as the scores that a kernel holds besides these."""
        return self.count_lookups() + (self.query_bias is not None)

    def layer_score_tensors(self) -> tuple[Tensor, ...]:
        """The layer tensors of the score function, then its query tensors, in its order."""
        function = self.score_function
        names = () if function is None else function.layer_tensors + function.query_tensors
        return tuple(self.score_tensors[name] for name in names)

    def batch_score_tensors(self) -> tuple[Tensor, ...]:
        """The batch tensors of the score function, in its order."""
        function = self.score_function
        return (
            () if function is None else tuple(self.score_tensors[n] for n in function.batch_tensors)
        )
