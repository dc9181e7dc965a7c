"""A case: a batch and the shape of a layer."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from attnlib.cache.storage import PagedKVCache
from attnlib.errors import ContractError
from attnlib.kv_rotation import KVRotation
from attnlib.sparse.key_selection import KeySelection, SelectionScope
from attnlib.spec import AttentionSpec, AttentionType, MaskKind
from attnlib.testing.batch_spec import BatchSpec
from attnlib.testing.block_placement import BlockPlacement, place_blocks
from attnlib.testing.compressed_entries import entries_of
from attnlib.testing.score_functions import load_score_function

__all__ = ["DECODE_TOKENS", "BenchCase", "check_case"]

DECODE_TOKENS = 8
"""A request with at most this many new tokens counts as a decode (or a verify step), which is bound
by memory.
"""


@dataclass(frozen=True, kw_only=True)
class BenchCase:
    """A batch and the shape of a layer.

    Attributes:
        name: unique among the cases of a run.
        batch: query and sequence lengths (M1).
        num_heads: Hq.
        num_kv_heads: Hkv.
        head_size: D.
        head_size_v: Dv; None means D.
        block_size: N, tokens per block of the cache.
        dtype: dtype of q, k, v and the output.
        kv_cache_dtype: of the cache, as in `AttentionSpec`; "auto" means `dtype`.
        value_cache_dtype: of the values, where it is another one.
        kv_rotation: text of the rotation of the cache (P15); None for none.
        sliding_window: number of visible keys, including the query's own (M2).
        logits_soft_cap: soft cap of the logits (M3).
        sinks: True for one sink logit per head (M4).
        mla: values are a prefix of the keys, with one KV head (P10).
        scale: softmax scale; None means 1/sqrt(D).
        score: path of a score function (M10), `module:name` or `path/to/file.py:name`.
        select: scope, tokens per block and blocks of the lists of selected keys (M11); None for all
            keys.
        entries: tokens per compressed entry, entries per block and most selected ones, 0 for all
            (M17); None for one key stream.
        causal: False where every query sees every key of its request.
        unpaged: an encoder: keys and values are packed like the queries, without a cache.
        fp8_queries: queries and weights may be rounded to e4m3, with a bound of the error of their
            own. The built-in backends use it in prefills only (`AttentionSpec.allow_fp8_queries`).
        batch_invariant: the bits of a row do not depend on the other rows (M8).
    """

    name: str
    batch: BatchSpec
    num_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128
    head_size_v: int | None = None
    block_size: int = 16
    dtype: str = "bfloat16"
    kv_cache_dtype: str = "auto"
    sliding_window: int | None = None
    logits_soft_cap: float | None = None
    sinks: bool = False
    mla: bool = False
    scale: float | None = None
    score: str | None = None
    select: tuple[str, int, int] | None = None
    entries: tuple[int, int, int] | None = None
    causal: bool = True
    unpaged: bool = False
    fp8_queries: bool = False
    batch_invariant: bool = False
    value_cache_dtype: str | None = None
    kv_rotation: str | None = None

    @property
    def spec(self) -> AttentionSpec:
        """The layer as a spec, with an NHD cache, which every backend can read, with latents, or
        with pages that hold their scales.

        Raises:
            ContractError: invalid sizes or dtype.
        """
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ContractError(
                f"dtype={self.dtype} of case {self.name} is not a torch dtype; write bfloat16, "
                "float16 or float32"
            )
        spec = AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            head_size_v=self.head_size_v or self.head_size,
            dtype=dtype,
            kv_cache_dtype=self.kv_cache_dtype,
            value_cache_dtype=self.value_cache_dtype,
            kv_rotation=KVRotation.of(self.kv_rotation),
            block_size=self.block_size,
            sliding_window=self.sliding_window,
            logits_soft_cap=self.logits_soft_cap,
            has_sink=self.sinks,
            allow_fp8_queries=self.fp8_queries,
            batch_invariant=self.batch_invariant,
            use_mla=self.mla,
            score_function=None if self.score is None else load_score_function(self.score),
            key_selection=self.key_selection,
            compressed_entries=entries_of(self.entries),
            attn_type=AttentionType.ENCODER_ONLY if self.unpaged else AttentionType.DECODER,
            mask_kind=MaskKind.CAUSAL if self.causal else MaskKind.BIDIRECTIONAL,
        )
        has_layout = self.mla or self.unpaged or spec.scales_in_page
        return spec if has_layout else spec.replace(kv_cache_layout="NHD")

    @property
    def key_selection(self) -> KeySelection | None:
        """The form of the lists of selected keys."""
        if self.select is None:
            return None
        scope, block_size, max_blocks = self.select
        return KeySelection(
            scope=SelectionScope(scope), block_size=block_size, max_blocks=max_blocks
        )

    @property
    def kind(self) -> str:
        """decode (every request adds a few tokens), prefill (none does) or mixed."""
        small = [length <= DECODE_TOKENS for length in self.batch.query_lens]
        return "decode" if all(small) else "mixed" if any(small) else "prefill"

    @property
    def shape(self) -> str:
        """Heads, sizes and features, in a few words."""
        words = [f"{self.num_heads}/{self.num_kv_heads} heads of {self.head_size}"]
        if self.head_size_v not in (None, self.head_size):
            words[0] += f" and {self.head_size_v}"
        words += ["latents"] if self.mla else []
        words += [f"window {self.sliding_window}"] if self.sliding_window else []
        words += [f"soft cap {self.logits_soft_cap:g}"] if self.logits_soft_cap else []
        words += ["sinks"] if self.sinks else []
        words += [] if self.causal else ["not causal"]
        words += ["unpaged"] if self.unpaged else []
        words += ["float8 queries"] if self.fp8_queries else []
        words += ["batch-invariant"] if self.batch_invariant else []
        words += [f"score {self.score.rpartition(':')[2]}"] if self.score else []
        words += [f"selected {self.key_selection}"] if self.key_selection else []
        words += [f"and {entries_of(self.entries)}"] if self.entries else []
        words += [f"page {self.block_size}", self.dtype]
        sides = [name for name in (self.kv_cache_dtype, self.value_cache_dtype) if name]
        words += [] if sides == ["auto"] else [f"cache {' and '.join(sides)}"]
        words += [f"rotation {self.kv_rotation}"] if self.kv_rotation else []
        return ", ".join(words)

    def place(self, seed: int) -> BlockPlacement:
        """Blocks of the requests, in random order."""
        return place_blocks(self.batch, self.block_size, seed=seed)

    def fill(self, cache: PagedKVCache, query: torch.Tensor, placement: BlockPlacement) -> None:
        """Replace random contents of the cache and of the query; does nothing by default."""

    def with_block_size(self, block_size: int) -> BenchCase:
        """The case with another block size, which is part of its name.

        Returns the same case if the size is equal.
        """
        if block_size == self.block_size:
            return self
        base = self.name.removesuffix(f"-p{self.block_size}")
        return replace(self, block_size=block_size, name=f"{base}-p{block_size}")

    def to_json(self) -> dict[str, Any]:
        """Field -> plain value; the batch in its grammar."""
        return {**asdict(self), "batch": str(self.batch)}


def check_case(case: BenchCase) -> None:
    """Check that the batch has work and that every query has keys.

    Raises:
        ContractError: an empty batch, padding rows, or a query longer than its sequence.
    """
    _ = case.spec  # checks sizes, dtypes and the score function
    if not case.causal and (case.sliding_window is not None or case.select is not None):
        raise ContractError(
            f"case {case.name!r} is not causal and has a window or selected keys, whose work "
            "attnlib bench counts for causal layers only; leave one of them out"
        )
    if case.batch.padding_tokens or not case.batch.num_actual_tokens:
        raise ContractError(
            f"case {case.name!r} has padding rows or no query tokens; use a batch with query "
            "tokens only"
        )
    if case.unpaged and case.batch.query_lens != case.batch.seq_lens:
        raise ContractError(f"case {case.name!r} is unpaged and has a context; write qN without s")
    for request, (query_len, seq_len) in enumerate(case.batch.lengths):
        if query_len > seq_len:
            raise ContractError(
                f"case {case.name!r}: request {request} has {query_len} query tokens in a sequence "
                f"of {seq_len}; write qQUERYsSEQUENCE with a sequence of at least {query_len}"
            )
