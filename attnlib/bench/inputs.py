"""The tensors of one case: blocks in random order, and as many copies of the cache as exceed the L2
cache.

The cache already holds the keys and values of the current step at their slots, so writing them
changes nothing and the order of cache writes and attention calls does not matter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from attnlib.bench.cache_contents import copy_of, random_cache, random_tokens, write
from attnlib.bench.case import BenchCase
from attnlib.bench.entries import random_entries
from attnlib.bench.key_lists import random_lists
from attnlib.bench.work import kv_bytes
from attnlib.cache.storage import PagedKVCache
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.metadata.compressed import CompressedKeys
from attnlib.score_functions import QueryTensors
from attnlib.sparse.key_selection import SelectedKeys
from attnlib.spec import AttentionSpec
from attnlib.testing.layouts import read_slots
from attnlib.testing.oracle import OracleParams
from attnlib.testing.score_functions import make_score_tensors, oracle_score

__all__ = ["CaseInputs", "cold_copies", "make_inputs"]

_L2_FACTOR = 4
_MOST_COPIES = 128
_MOST_BYTES = 24 * 2**30


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
        query_tensors: those of the score function; None without any.
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
    query_tensors: QueryTensors | None = None
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
    tensors, function = _score_tensors(case, device), spec.score_function
    layer_names = () if function is None else function.layer_tensors
    query_names = () if function is None else function.query_tensors
    own = {*layer_names, *query_names}
    common = CommonAttentionMetadata.from_lengths(
        case.batch.query_lens,
        case.batch.seq_lens,
        placement.block_table,
        case.block_size,
        device,
        score_tensors={n: t for n, t in tensors.items() if n not in own} or None,
    )
    assert common.slot_mapping is not None  # a block table was given
    draw = torch.Generator(device=device).manual_seed(seed)
    first = random_cache(cached, placement.num_blocks, draw)
    shape = (case.batch.num_actual_tokens, spec.num_heads)
    query = torch.randn(*shape, spec.head_size, generator=draw, device=device).to(spec.dtype)
    case.fill(first, query, placement)
    key, value = _new_tokens(first, spec, common.slot_mapping, draw)
    copies = cold_copies(case, first.nbytes, *_memory(device))
    caches = (first, *(copy_of(first, cached, device) for _ in range(copies - 1)))
    params = _params(case, device, draw, tensors)
    return CaseInputs(
        case=case,
        spec=spec,
        device=device,
        common=common,
        caches=caches,
        query=query,
        key=key,
        value=value,
        output=query.new_full((*shape, spec.head_size_v), float("nan")),
        params=params,
        score_tensors={name: tensors[name] for name in layer_names},
        query_tensors=QueryTensors({n: tensors[n] for n in query_names}) if query_names else None,
        selected_keys=_lists(case, copies, device),
        compressed_keys=tuple(random_entries(spec, common, copies, draw) if case.entries else ()),
    )


def _score_tensors(case: BenchCase, device: torch.device) -> dict[str, torch.Tensor]:
    """The tensors of the score function by name."""
    function = case.spec.score_function
    if function is None:
        return {}
    batch = case.batch
    made = make_score_tensors(function, case.spec.num_heads, batch.seq_lens, batch.query_lens)
    return {name: tensor.to(device) for name, tensor in made.items()}


def _new_tokens(
    cache: PagedKVCache, spec: AttentionSpec, slots: torch.Tensor, draw: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and values of this step, which the cache holds at `slots`."""
    if cache.page_format is not None or cache.rotation is not None:
        # Stored elements are not the numbers that were written: write those that are returned.
        key, value = random_tokens(len(slots), spec, draw)
        write(cache, key, value, slots)
        return key, value
    places: Any = slots  # a tensor is a valid sequence of slots
    key, value = (
        read_slots(view, places).to(spec.dtype) for view in (cache.key_cache, cache.value_cache)
    )
    return key, value


def _lists(case: BenchCase, copies: int, device: torch.device) -> tuple[SelectedKeys, ...]:
    """Lists of selected keys for each copy of the cache, so that each reads other keys also where
    the copies are few."""
    if case.key_selection is None:
        return ()
    return tuple(
        random_lists(case.key_selection, case.batch, case.num_heads, case.num_kv_heads, device)
        for _ in range(copies)
    )


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
