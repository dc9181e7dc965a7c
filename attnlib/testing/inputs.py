"""Seeded input tensors for one step. Memory that must not be read holds poison.

The tensors use the less common forms that the contract allows: q, k and v are views of one fused
QKV tensor, `out` is strided (P9), the block table is as narrow as possible (P3), and the cache has
any layout (P1). Random numbers are drawn on the CPU, so that a case is identical on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from attnlib.testing.batch_spec import BatchSpec
from attnlib.testing.block_placement import BlockPlacement
from attnlib.testing.kv_rotation import rotate_reference
from attnlib.testing.layouts import (
    CacheViews,
    Dimensions,
    allocate_views,
    poison_value,
    write_slots,
)
from attnlib.testing.oracle import OracleParams, OracleResult, paged_attention
from attnlib.testing.page_formats import dequantize_tokens

__all__ = ["StepInputs", "make_inputs", "make_oracle_params", "stored_heads"]

Scale = float | torch.Tensor


@dataclass(frozen=True, kw_only=True)
class StepInputs:
    """The tensors of one step of one layer, on one device.

    Attributes:
        batch: the request lengths.
        dims: sizes and dtypes.
        placement: the physical blocks.
        seed: seed of the random numbers.
        kv_written: the cache holds this step's keys and values.
        query, key, value: [T, Hq, D], [T, Hkv, D] and [T, Hkv, Dv] views of one fused tensor.
        out: [T, Hq, Dv] strided, filled with poison.
        cache: the context; with `kv_written`, this step's tokens too.
        block_table: [R, M] int32.
        query_start_loc: [R+1] int32.
        seq_lens: [R] int32.
        slot_mapping: [T] int64.
    """

    batch: BatchSpec
    dims: Dimensions
    placement: BlockPlacement
    seed: int
    kv_written: bool
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    out: torch.Tensor
    cache: CacheViews
    block_table: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    slot_mapping: torch.Tensor

    def oracle(self, params: OracleParams, precision: torch.dtype = torch.float64) -> OracleResult:
        """The expected result, computed in `precision`.

        Raises:
            RuntimeError: the cache does not hold this step's tokens.
        """
        if not self.kv_written:
            raise RuntimeError(
                "the oracle reads the cache: create the inputs with kv_written=True (a seed gives "
                "the same numbers again)"
            )
        key, value = self.cache.key, self.cache.value
        if self.cache.scales is not None:
            key, value = (
                dequantize_tokens(elements, scales, name)
                if isinstance(scales, torch.Tensor)
                else elements
                for elements, scales, name in zip(
                    (key, value), self.cache.scales, self.dims.side_formats, strict=True
                )
            )
            params = replace(params, k_scale=1.0, v_scale=1.0)
        rotation = self.dims.kv_rotation  # scores are those of rotated queries over rotated keys
        result = paged_attention(
            rotate_reference(self.query, rotation, "keys"),
            key,
            value,
            self.block_table,
            self.query_start_loc,
            self.seq_lens,
            params,
            precision,
        )
        out = rotate_reference(result.out, rotation, "values", inverse=True)
        return replace(result, out=out)

    def written_slots(self) -> list[int]:
        """The slots of this step's tokens, in token order."""
        return [slot for slot in self.slot_mapping.tolist() if slot >= 0]


def make_inputs(
    batch: BatchSpec,
    dims: Dimensions,
    placement: BlockPlacement,
    *,
    seed: int = 0,
    layout: str = "NHD",
    device: torch.device | str = "cpu",
    poison: str = "zero",
    kv_written: bool = True,
    k_scale: Scale = 1.0,
    v_scale: Scale = 1.0,
    contiguous: bool = False,
) -> StepInputs:
    """Create the tensors of one step.

    Two calls that differ only in `poison`, `kv_written`, `layout`, `contiguous` or `device` hold
    the same numbers in all memory that may be read.

    Args:
        batch: the request lengths.
        dims: sizes and dtypes.
        placement: the physical blocks.
        seed: seed of the random numbers.
        layout: cache layout, a name of `layouts.CACHE_LAYOUTS` or "ALIASED".
        device: where to allocate the tensors.
        poison: fill value of cache elements outside all sequences, of padding rows and of `out`.
        kv_written: the cache holds this step's keys and values.
        k_scale, v_scale: divisor of the tokens stored in an fp8 cache, a number or [Hkv].
        contiguous: contiguous q, k, v and out instead of strided views.
    """
    generator = torch.Generator().manual_seed(seed)
    query, key, value = _fused_qkv(batch, dims, generator, poison)
    if layout == "ALIASED":
        value = key[..., : dims.head_size_v]
    cache = allocate_views(dims, placement.num_blocks, layout, "cpu", poison)
    scales = cache.scales or (_cpu(k_scale), _cpu(v_scale))
    _fill_context(cache, batch, dims, placement, generator, *scales)
    slots = _slot_mapping(batch, placement, dims.block_size)
    if kv_written:
        _write_new(cache, dims, slots, key, value, *scales)
    starts, out = [0, *accumulate(batch.query_lens)], _strided_out(batch, dims, poison)
    if contiguous:
        query, key, value, out = (x.contiguous() for x in (query, key, value, out))
    return StepInputs(
        batch=batch,
        dims=dims,
        placement=placement,
        seed=seed,
        kv_written=kv_written,
        query=_move(query, device),
        key=_move(key, device),
        value=_move(value, device),
        out=_move(out, device),
        cache=_move_cache(cache, dims, placement.num_blocks, device),
        block_table=_move(placement.block_table, device),
        query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(batch.seq_lens, dtype=torch.int32, device=device),
        slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
    )


def make_oracle_params(
    dims: Dimensions,
    batch: BatchSpec,
    features: Mapping[str, object],
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> OracleParams:
    """The oracle's parameters for a case.

    Args:
        dims: sizes and dtypes.
        batch: the request lengths.
        features: fields of `OracleParams`. True creates a tensor: `alibi_slopes` powers of two,
            `sinks` random logits, `token_sinks` sinks of query tokens, `query_bias` a random tree
            mask over the query tokens (each token sees itself) with random finite biases.
        seed: seed of the random numbers.
        device: where to allocate the tensors.
    """
    generator = torch.Generator().manual_seed(seed + 1)
    drawn: dict[str, object] = {"scale": dims.head_size**-0.5, **features}
    if drawn.get("alibi_slopes") is True:
        drawn["alibi_slopes"] = torch.tensor(
            [2.0 ** (-8.0 * (h + 1) / dims.num_heads) for h in range(dims.num_heads)]
        )
    if drawn.get("sinks") is True:
        drawn["sinks"] = torch.randn(dims.num_heads, generator=generator) + 1.0
    if drawn.pop("token_sinks", False):
        sinks = torch.randn(batch.num_tokens, dims.num_heads, generator=generator) + 1.0
        sinks[batch.num_actual_tokens :] = math.nan
        drawn["sinks"] = sinks
    if drawn.get("query_bias") is True:
        drawn["query_bias"] = _tree_bias(batch, generator)
    moved = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in drawn.items()
    }
    return OracleParams(**moved)  # type: ignore[arg-type]


def stored_heads(
    dims: Dimensions, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values as a cache quantizes them: rotated, where it rotates them (P15)."""
    rotated = (rotate_reference(key, dims.kv_rotation, "keys"),)
    return (*rotated, rotate_reference(value, dims.kv_rotation, "values"))


def _tree_bias(batch: BatchSpec, generator: torch.Generator) -> torch.Tensor:
    width = max(batch.max_query_len, 1)
    bias = torch.randn(batch.num_tokens, width, generator=generator)
    hidden = torch.rand(batch.num_tokens, width, generator=generator) < 0.3
    row = 0
    for query_len in batch.query_lens:
        for i in range(query_len):
            hidden[row + i, i] = False
        row += query_len
    return bias.masked_fill(hidden, -math.inf)


def _fused_qkv(
    batch: BatchSpec, dims: Dimensions, generator: torch.Generator, poison: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    sizes = (
        dims.num_heads * dims.head_size,
        dims.num_kv_heads * dims.head_size,
        dims.num_kv_heads * dims.head_size_v,
    )
    fused = torch.randn(batch.num_actual_tokens, sum(sizes), generator=generator).to(dims.dtype)
    padding = torch.full(
        (batch.padding_tokens, sum(sizes)), poison_value(dims.dtype, poison), dtype=dims.dtype
    )
    query, key, value = torch.split(torch.cat([fused, padding]), list(sizes), dim=1)
    return (
        query.view(-1, dims.num_heads, dims.head_size),
        key.view(-1, dims.num_kv_heads, dims.head_size),
        value.view(-1, dims.num_kv_heads, dims.head_size_v),
    )


def _strided_out(batch: BatchSpec, dims: Dimensions, poison: str) -> torch.Tensor:
    """[T, Hq, Dv] view of a larger buffer, so that neither token nor head stride is contiguous."""
    shape = (batch.num_tokens, dims.num_heads + 1, dims.head_size_v + 8)
    buffer = torch.full(shape, poison_value(dims.dtype, poison), dtype=dims.dtype)
    return buffer[:, : dims.num_heads, : dims.head_size_v]


def _fill_context(
    cache: CacheViews,
    batch: BatchSpec,
    dims: Dimensions,
    placement: BlockPlacement,
    generator: torch.Generator,
    k_scale: Scale,
    v_scale: Scale,
) -> None:
    """Fill every request's context with random keys and values; shared blocks are filled once."""
    filled: set[int] = set()
    names = dims.side_formats
    for request, (query_len, seq_len) in enumerate(batch.lengths):
        context = max(seq_len - query_len, 0)
        keys = torch.randn(context, dims.num_kv_heads, dims.head_size, generator=generator).to(
            dims.dtype
        )
        values = torch.randn(context, dims.num_kv_heads, dims.head_size_v, generator=generator).to(
            dims.dtype
        )
        slots = placement.slots(request, 0, context, dims.block_size)
        fresh = [i for i, slot in enumerate(slots) if slot not in filled]
        filled.update(slots)
        write_slots(cache.key, [slots[i] for i in fresh], keys[fresh], k_scale, names[0])
        if cache.layout != "ALIASED":
            write_slots(cache.value, [slots[i] for i in fresh], values[fresh], v_scale, names[1])


def _write_new(
    cache: CacheViews,
    dims: Dimensions,
    slots: Sequence[int],
    key: torch.Tensor,
    value: torch.Tensor,
    k_scale: Scale,
    v_scale: Scale,
) -> None:
    """Write this step's keys and values to their slots; rows with slot -1 write nothing."""
    kept = [row for row, slot in enumerate(slots) if slot >= 0]
    written, names = [slots[row] for row in kept], dims.side_formats
    keys, values = stored_heads(dims, key[kept], value[kept])
    write_slots(cache.key, written, keys, k_scale, names[0])
    if cache.layout != "ALIASED":
        write_slots(cache.value, written, values, v_scale, names[1])


def _slot_mapping(batch: BatchSpec, placement: BlockPlacement, block_size: int) -> list[int]:
    """Slots of the query tokens; -1 at negative positions (query longer than its sequence)."""
    slots: list[int] = []
    for request, (query_len, seq_len) in enumerate(batch.lengths):
        num_negative = max(query_len - seq_len, 0)
        slots += [-1] * num_negative
        start = seq_len - query_len + num_negative
        slots += placement.slots(request, start, seq_len, block_size)
    return slots + [-1] * batch.padding_tokens


def _cpu(scale: Scale) -> Scale:
    return scale.cpu() if isinstance(scale, torch.Tensor) else scale


def _move(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Copy the whole allocation to a device; keeps the strides and the memory around the view."""
    if torch.device(device).type == "cpu":
        return tensor
    base = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).to(device)
    return base.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _move_cache(
    cache: CacheViews, dims: Dimensions, num_blocks: int, device: torch.device | str
) -> CacheViews:
    if torch.device(device).type == "cpu":
        return cache
    moved = allocate_views(dims, num_blocks, cache.layout, device)
    for source, target in zip(cache.storage, moved.storage, strict=True):
        target.copy_(source)
    return moved
