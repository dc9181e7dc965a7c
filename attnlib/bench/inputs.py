"""The tensors of one case: blocks in random order, and as many copies of the cache as exceed the L2
cache.

The cache already holds the keys and values of the current step at their slots, so writing them
changes nothing and the order of cache writes and attention calls does not matter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from attnlib.bench.case import BenchCase
from attnlib.bench.entries import random_entries
from attnlib.bench.key_lists import random_lists
from attnlib.bench.work import kv_bytes
from attnlib.cache.storage import PagedKVCache
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.metadata.compressed import CompressedKeys
from attnlib.ops.torch.cache_write import write_kv
from attnlib.sparse.key_selection import SelectedKeys
from attnlib.spec import AttentionSpec
from attnlib.testing.layouts import read_slots
from attnlib.testing.oracle import OracleParams
from attnlib.testing.score_functions import make_score_tensors, oracle_score

__all__ = ["CaseInputs", "cold_copies", "make_inputs"]

_L2_FACTOR = 4
_MOST_COPIES = 128
_MOST_BYTES = 24 * 2**30
_FILLED_SLOTS = 1 << 15
"""Slots that are filled at a time, whose tokens take a few hundred MB in float32."""


@dataclass(frozen=True)
class CaseInputs:
    """The tensors of one case on one device.

    Attributes:
        case: the case.
        spec: its layer.
        device: where the tensors are.
        common: the batch, with a block table in random order.
        caches: copies of the cache with equal contents, to be used in turn.
        query: `[T, Hq, D]`, packed.
        key: `[T, Hkv, D]`, packed.
        value: `[T, Hkv, Dv]`, packed.
        output: `[T, Hq, Dv]`, filled with NaN.
        params: the parameters of attention for the oracle.
        score_tensors: layer tensors of the score function by name.
        compressed_keys: random compressed entries for each copy of the cache; empty without.
        selected_keys: random lists of selected keys for each copy of the cache; empty without.
    """

    case: BenchCase
    spec: AttentionSpec
    device: torch.device
    common: CommonAttentionMetadata
    caches: tuple[PagedKVCache, ...]
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    output: torch.Tensor
    params: OracleParams
    score_tensors: dict[str, torch.Tensor]
    selected_keys: tuple[SelectedKeys, ...] = ()
    compressed_keys: tuple[CompressedKeys, ...] = ()

    @property
    def slots(self) -> torch.Tensor:
        """`[T]` int64: the slots of the keys of this step."""
        assert self.common.slot_mapping is not None  # every case is paged
        return self.common.slot_mapping


def cold_copies(case: BenchCase, cache_bytes: int, l2_bytes: int, free_bytes: int) -> int:
    """The number of copies of the cache to use in turn.

    A decode reads each key once, and would be too fast with keys that the previous call left in the
    L2 cache. The copies together are therefore four times as large as the L2 cache. A prefill reads
    each key many times, so one copy is enough.

    Args:
        case: the case.
        cache_bytes: size of one copy.
        l2_bytes: size of the L2 cache; 0 if unknown.
        free_bytes: free memory of the device.
    """
    if case.kind == "prefill" or l2_bytes == 0:
        return 1
    wanted = max(-(-_L2_FACTOR * l2_bytes // max(kv_bytes(case), 1)), 2)
    fitting = min(free_bytes // 2, _MOST_BYTES) // max(cache_bytes, 1)
    return int(max(min(wanted, fitting, _MOST_COPIES), 1))


def make_inputs(case: BenchCase, device: torch.device, seed: int = 0) -> CaseInputs:
    """Make the tensors of a case.

    Raises:
        torch.OutOfMemoryError: the device has no memory for one copy of the cache.
    """
    spec = case.spec
    # Without a cache, the keys of the step are all keys; the correctness check reads this copy.
    cached = replace(case, unpaged=False).spec
    placement = case.place(seed)
    function = spec.score_function
    tensors: dict[str, torch.Tensor] = {}
    if function is not None:
        made = make_score_tensors(function, spec.num_heads, case.batch.seq_lens)
        tensors = {name: tensor.to(device) for name, tensor in made.items()}
    layer_names = () if function is None else function.layer_tensors
    common = CommonAttentionMetadata.from_lengths(
        case.batch.query_lens,
        case.batch.seq_lens,
        placement.block_table,
        case.block_size,
        device,
        score_tensors={n: t for n, t in tensors.items() if n not in layer_names} or None,
    )
    draw = torch.Generator(device=device).manual_seed(seed)
    first = PagedKVCache.allocate(cached, placement.num_blocks, device, _layout(cached))
    if first.page_format is None:
        for view in _stored(first):
            _fill(view, spec.dtype, draw)
    else:
        _fill_pages(first, spec, draw)
    tokens = case.batch.num_actual_tokens
    query = torch.randn(tokens, spec.num_heads, spec.head_size, generator=draw, device=device).to(
        spec.dtype
    )
    case.fill(first, query, placement)
    if first.page_format is not None:
        # Elements of a page are not the numbers that were written: keep those.
        assert common.slot_mapping is not None  # a block table was given
        new_tokens = _random_tokens(tokens, spec, draw)
        _write(first, *new_tokens, common.slot_mapping)
    copies = cold_copies(case, first.nbytes, *_memory(device))
    caches = [first, *(_copy(first, cached, device) for _ in range(copies - 1))]
    assert common.slot_mapping is not None  # a block table was given
    slots: Any = common.slot_mapping  # a tensor is a valid sequence of slots
    if first.page_format is None:
        key, value = (
            read_slots(view, slots).to(spec.dtype) for view in (first.key_cache, first.value_cache)
        )
    else:
        key, value = new_tokens
    output = torch.full(
        (tokens, spec.num_heads, spec.head_size_v), float("nan"), dtype=spec.dtype, device=device
    )
    lists: list[SelectedKeys] = []
    if case.key_selection is not None:
        # With lists of its own, each copy reads other keys also where the copies are few.
        lists = [
            random_lists(case.key_selection, case.batch, case.num_heads, case.num_kv_heads, device)
            for _ in caches
        ]
    return CaseInputs(
        case,
        spec,
        device,
        common,
        tuple(caches),
        query,
        key,
        value,
        output,
        _params(case, device, draw, tensors),
        {name: tensors[name] for name in layer_names},
        tuple(lists),
        tuple(random_entries(spec, common, len(caches), draw) if case.entries else ()),
    )


def _layout(spec: AttentionSpec) -> str | None:
    """The layout of the caches; None is the default of pages that hold their scales."""
    return None if spec.kv_format.scales_in_page else "NHD"


def _stored(cache: PagedKVCache) -> tuple[torch.Tensor, ...]:
    """The views that hold the contents: of latents, the keys."""
    return cache.block_views[:1] if cache.values_alias_keys else cache.block_views


def _random_tokens(
    count: int, spec: AttentionSpec, draw: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random keys `[count, Hkv, D]` and values `[count, Hkv, Dv]`."""
    heads = spec.num_kv_heads
    key, value = (
        torch.randn(count, heads, size, generator=draw, device=draw.device).to(spec.dtype)
        for size in (spec.head_size, spec.head_size_v)
    )
    return key, value


def _write(
    cache: PagedKVCache, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
) -> None:
    """Store tokens by the reference operation."""
    scales = {"k_scale": cache.k_scale, "v_scale": cache.v_scale}
    write_kv(key, value, cache.key_cache, cache.value_cache, slots, **scales)


def _fill_pages(cache: PagedKVCache, spec: AttentionSpec, draw: torch.Generator) -> None:
    """Store random tokens in all slots."""
    for first in range(0, cache.num_slots, _FILLED_SLOTS):
        slots = torch.arange(first, min(first + _FILLED_SLOTS, cache.num_slots))
        _write(cache, *_random_tokens(len(slots), spec, draw), slots.to(cache.device))


def _fill(view: torch.Tensor, dtype: torch.dtype, draw: torch.Generator) -> None:
    if view.dtype == dtype:
        view.normal_(generator=draw)
        return
    drawn = torch.randn(view.shape, generator=draw, device=view.device, dtype=torch.float32).to(
        view.dtype
    )
    view.view(torch.uint8).copy_(drawn.view(torch.uint8))


def _copy(cache: PagedKVCache, spec: AttentionSpec, device: torch.device) -> PagedKVCache:
    copy = PagedKVCache.allocate(spec, cache.num_blocks, device, _layout(spec))
    for source, target in zip(_stored(cache), _stored(copy), strict=True):
        if source.element_size() == 1:
            source, target = source.view(torch.uint8), target.view(torch.uint8)
        target.copy_(source)
    return copy


def _memory(device: torch.device) -> tuple[int, int]:
    """(bytes of the L2 cache, free bytes); zeros on a CPU."""
    if device.type != "cuda":
        return 0, 0
    return int(torch.cuda.get_device_properties(device).L2_cache_size), int(
        torch.cuda.mem_get_info(device)[0]
    )


def _params(
    case: BenchCase,
    device: torch.device,
    draw: torch.Generator,
    score_tensors: dict[str, torch.Tensor],
) -> OracleParams:
    function = case.spec.score_function
    sinks = None
    if case.sinks:  # rounded to bfloat16, because some kernels take them in bfloat16
        sinks = (
            torch.randn(case.num_heads, generator=draw, device=device).to(torch.bfloat16).float()
        )
    return OracleParams(
        causal=case.causal,
        scale=case.head_size**-0.5 if case.scale is None else case.scale,
        window=(-1, -1) if case.sliding_window is None else (case.sliding_window - 1, 0),
        logits_soft_cap=case.logits_soft_cap or 0.0,
        sinks=sinks,
        score=None if function is None else oracle_score(function, score_tensors, device),
    )
