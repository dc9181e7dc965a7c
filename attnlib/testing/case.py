"""The configuration of one test case: the batch, the layer and the memory layout of its tensors.

A case holds only numbers and strings, so it prints in one line and can be rebuilt from that line.
The batch uses the grammar of `batch_spec`. `Case.spec` converts a case to an `AttentionSpec`;
`Case.oracle_params` converts it to the parameters of the oracle. The two conversions share no code:
an error in the library's conversion, such as a window that is off by one, changes only one of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch

from attnlib.spec import AttentionSpec, AttentionType, CudaGraphSupport, MaskKind, Window
from attnlib.testing.batch_spec import BatchSpec, resolve_batch
from attnlib.testing.compressed_entries import entries_of
from attnlib.testing.inputs import make_oracle_params
from attnlib.testing.key_selection import KeyLists, make_lists, selected_masks, selection_of
from attnlib.testing.layouts import Dimensions
from attnlib.testing.materialized_case import MaterializedCase, materialize_case
from attnlib.testing.oracle import OracleParams
from attnlib.testing.page_formats import is_page_name
from attnlib.testing.score_functions import (
    load_score_function,
    make_score_tensors,
    oracle_score,
)

__all__ = ["Case"]

_FP8_DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


@dataclass(frozen=True, kw_only=True)
class Case:
    """The configuration of one step of one layer.

    Fields that are not listed here have the meaning of the `AttentionSpec` field with that name.

    Attributes:
        batch: a name of `batch_spec.NAMED_BATCHES` or a batch in its grammar.
        seed: seed of all random numbers.
        k_scale, v_scale: scales of an fp8 cache; with kv_scale_kind="head", odd heads use half of
            the scale.
        scale: softmax scale; None means 1/sqrt(head_size).
        mask: value of a `MaskKind`.
        score: path of a score function (`score_functions.load_score_function`), or None.
        key_selection: (scope, block_size, max_blocks, query_block_size) of a `KeySelection`, or
            None.
        compressed: (compress_rate, block_size, max_selected) of `CompressedEntries`, with 0 for all
            entries; or None.
        selects_everything: the lists select all keys.
        disabled_sinks: the sinks of even heads are -inf (M4), with `sinks`.
        loose_bounds: `max_seq_len` and `max_query_len` of the batch are larger than its lengths.
        layout: cache layout, a name of `layouts.CACHE_LAYOUTS` or "ALIASED" (MLA).
        placement, garbage, extra_columns, guarded, hidden_columns: arguments of
            `block_placement.place_blocks`.
        poison: fill value of all memory that must not be read (`layouts.poison_value`).
        contiguous: contiguous q, k, v and out instead of strided views (P9).
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
    value_cache_dtype: str | None = None
    kv_scale_kind: str = "tensor"
    kv_rotation: str | None = None
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
    disabled_sinks: bool = False
    token_sinks: bool = False
    score: str | None = None
    key_selection: tuple[str, int, int, int] | None = None
    compressed: tuple[int, int, int] | None = None
    allow_fp8_queries: bool = False
    selects_everything: bool = False
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
    hidden_columns: int = 0
    loose_bounds: bool = False
    poison: str = "nan"
    contiguous: bool = False

    def __str__(self) -> str:
        """The batch and the fields that differ from their defaults."""
        changed = [
            f"{f.name}={getattr(self, f.name)}"
            for f in fields(self)
            if getattr(self, f.name) != f.default
        ]
        return ", ".join(
            [
                f"batch={self.batch_spec}",
                *(text for text in changed if not text.startswith("batch=")),
            ]
        )

    def replace(self, **changes: Any) -> Case:
        """A copy with some fields changed."""
        return replace(self, **changes)

    @cached_property
    def batch_spec(self) -> BatchSpec:
        """The request lengths; named batches depend on the block size."""
        return resolve_batch(self.batch, self.block_size)

    @property
    def is_paged(self) -> bool:
        """True if attention reads the keys from the paged cache."""
        return self.attn_type in ("decoder", "encoder_decoder")

    @property
    def torch_dtype(self) -> torch.dtype:
        """dtype of q, k, v and the output."""
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def dimensions(self) -> Dimensions:
        """The sizes and dtypes of the layer."""
        stored = self.kv_cache_dtype
        if stored == "auto" or is_page_name(stored):
            stored = self.dtype
        cache_dtype = _FP8_DTYPES.get(stored) or getattr(torch, stored)
        return Dimensions(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            head_size_v=self.head_size_v or self.head_size,
            block_size=self.block_size,
            dtype=self.torch_dtype,
            cache_dtype=cache_dtype,
            page_formats=self._page_formats,
            kv_rotation=self.kv_rotation,
        )

    @property
    def _page_formats(self) -> tuple[str, str] | None:
        """The formats of keys and values in pages with scales; "plain" for the dtype of the model.
        None for caches without scales in the page."""
        both = (self.kv_cache_dtype, self.value_cache_dtype or self.kv_cache_dtype)
        names = tuple(name if is_page_name(name) else "plain" for name in both)
        return None if names == ("plain", "plain") else (names[0], names[1])

    @property
    def spec(self) -> AttentionSpec:
        """The `AttentionSpec` of the layer.

        Raises:
            ContractError: the fields do not form a valid spec.
        """
        return AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            head_size_v=self.head_size_v or self.head_size,
            dtype=self.torch_dtype,
            kv_cache_dtype=self.kv_cache_dtype,
            value_cache_dtype=self.value_cache_dtype,
            kv_scale_kind=self.kv_scale_kind,
            kv_rotation=self.kv_rotation,  # type: ignore[arg-type]  # its text
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
            token_sinks=self.token_sinks,
            score_function=None if self.score is None else load_score_function(self.score),
            key_selection=selection_of(self.key_selection),
            compressed_entries=entries_of(self.compressed),
            allow_fp8_queries=self.allow_fp8_queries,
            use_mla=self.use_mla,
            needs_lse=self.needs_lse,
            kv_sharing=self.kv_sharing,
            batch_invariant=self.batch_invariant,
            cudagraph=CudaGraphSupport[self.cudagraph],
        )

    def oracle_params(self, device: torch.device | str) -> OracleParams:
        """The oracle's parameters. A sliding window of W includes the query's own key (M2)."""
        left, right = self.window or (None, None)
        if self.sliding_window is not None:
            left = right = self.sliding_window - 1
        causal: bool | torch.Tensor = self.mask in ("causal", "query_bias")
        if self.mask == "per_request":
            flags = [r % 2 == 0 for r in range(self.batch_spec.num_reqs)]
            causal = torch.tensor(flags, dtype=torch.bool, device=device)
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
        for name, enabled in (
            ("alibi_slopes", self.alibi),
            ("sinks", self.sinks),
            ("query_bias", self.mask == "query_bias"),
            ("token_sinks", self.token_sinks),
        ):
            if enabled:
                features[name] = True
        if self.score is not None:
            function = load_score_function(self.score)
            features["score"] = oracle_score(function, self.score_tensors, device)
        selection, lists = selection_of(self.key_selection), self.key_lists
        if selection is not None and lists is not None:
            masks = selected_masks(lists, selection, self.batch_spec, self.num_heads)
            features["selected"] = tuple(mask.to(device) for mask in masks)
        params = make_oracle_params(
            self.dimensions, self.batch_spec, features, seed=self.seed, device=device
        )
        if self.disabled_sinks and params.sinks is not None:
            params.sinks[::2] = -math.inf
        return params

    @cached_property
    def score_tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of the score function, on the CPU; empty without one."""
        if self.score is None:
            return {}
        function = load_score_function(self.score)
        batch = self.batch_spec
        return make_score_tensors(function, self.num_heads, batch.seq_lens, batch.query_lens)

    @cached_property
    def key_lists(self) -> KeyLists | None:
        """The lists of selected keys, on the CPU; None without a key selection."""
        selection = selection_of(self.key_selection)
        if selection is None:
            return None
        return make_lists(
            selection,
            self.batch_spec,
            self.num_heads,
            self.num_kv_heads,
            self.seed,
            self.selects_everything,
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
        """Create the tensors of the case.

        Args:
            device: where to allocate the tensors.
            kv_written: the cache already holds this step's keys and values.
        """
        return materialize_case(self, device, kv_written=kv_written)
