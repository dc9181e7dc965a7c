"""The tensors of one draw, and the call of the layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import attnlib
from attnlib.spec import AttentionType
from tests.properties.draw import Draw
from tests.properties.memory import (
    CacheMemory,
    cache_views,
    int_form,
    move,
    poison_of,
    raw_bytes,
    strided_form,
)

__all__ = ["LayerTensors", "Placement", "place", "tensors_of"]

Tensor = torch.Tensor


@dataclass(frozen=True)
class Placement:
    """The blocks of a batch and its metadata on the host.

    Attributes:
        num_blocks: blocks in the pool.
        rows: blocks of each request.
        slots: slot of each given key; -1 for skipped ones.
        common: the batch on the device.
        ints: the metadata tensors that the batch was made of, by name, for comparison.
    """

    num_blocks: int
    rows: list[list[int]]
    slots: list[int]
    common: attnlib.CommonAttentionMetadata
    ints: dict[str, Tensor]


def place(draw: Draw, device: str) -> Placement:
    """Distribute random blocks and make the batch."""
    spec, batch, forms = draw.spec, draw.batch, draw.forms
    rng = torch.Generator().manual_seed(forms.values)
    size = spec.block_size
    counts = [-(-length // size) for length in batch.seq_lens] if spec.is_paged else []
    own = [max(count - batch.shared_blocks, 0) for count in counts]
    num_blocks = sum(own) + batch.shared_blocks + 2
    free = torch.randperm(num_blocks, generator=rng).tolist()
    prefix = [free.pop() for _ in range(batch.shared_blocks)]
    rows = [[*prefix[:count], *(free.pop() for _ in range(mine))]
            for count, mine in zip(counts, own, strict=True)]  # fmt: skip
    width = max((len(row) for row in rows), default=0) + forms.extra_columns
    unread = {"other": free[0], "minus_one": -1, "huge": 2**30}[forms.garbage]
    table = torch.tensor(
        [[*row, *[unread] * (width - len(row))] for row in rows], dtype=torch.int32
    ).reshape(len(rows), width)
    starts = [0]
    for query in batch.query_lens:
        starts.append(starts[-1] + query)
    slots = []
    cross = spec.attn_type is AttentionType.ENCODER_DECODER
    for request, (new, length) in enumerate(zip(batch.new_keys, batch.seq_lens, strict=True)):
        for p in range(length - new, length) if spec.is_paged else ():
            slots.append(rows[request][p // size] * size + p % size)
    for token in batch.skipped:
        slots[token] = -1
    has_slots = any(batch.new_keys) if cross else spec.is_paged
    bias = _query_bias(draw, rng)
    # Slots past the last token belong to nobody: they must not be written (P4).
    tail = [] if cross else [free[-1] * size] * batch.num_padding_rows
    ints = {
        "query_start_loc": torch.tensor(starts, dtype=torch.int32),
        "seq_lens": torch.tensor(batch.seq_lens, dtype=torch.int32),
        "block_table_tensor": table,
        "slot_mapping": torch.tensor([*slots, *tail], dtype=torch.int64),
    }
    on_device = {name: move(int_form(values, forms.metadata, 2**30), device)
                 for name, values in ints.items()}  # fmt: skip
    causal: Any = batch.causal
    if isinstance(causal, tuple):
        causal = torch.tensor(causal, dtype=torch.bool, device=device)
    common = attnlib.CommonAttentionMetadata(
        query_start_loc=on_device["query_start_loc"],
        query_start_loc_cpu=ints["query_start_loc"].clone() if forms.host_lengths else None,
        seq_lens=on_device["seq_lens"],
        seq_lens_cpu=ints["seq_lens"].clone() if forms.host_lengths else None,
        num_computed_tokens_cpu=torch.tensor(
            [max(s - q, 0) for q, s in zip(batch.query_lens, batch.seq_lens, strict=True)],
            dtype=torch.int32,
        ),
        num_reqs=len(batch.query_lens),
        num_actual_tokens=batch.num_tokens,
        max_query_len=max(batch.query_lens, default=0) + batch.extra_max[0],
        max_seq_len=max(batch.seq_lens, default=0) + batch.extra_max[1],
        block_table_tensor=on_device["block_table_tensor"] if spec.is_paged else None,
        slot_mapping=on_device["slot_mapping"] if has_slots else None,
        causal=causal,
        query_bias=None if bias is None else move(bias, device),
        is_cross_attention=cross,
    )
    if bias is not None:
        ints["query_bias"] = bias.clone()
    return Placement(num_blocks, rows, slots, common, ints)


def _query_bias(draw: Draw, rng: torch.Generator) -> Tensor | None:
    """[T, W] float32; -inf hides tokens. Columns that no token of the request has hold NaN."""
    batch = draw.batch
    if draw.spec.mask_kind.value != "query_bias":
        return None
    width = max(batch.query_lens, default=0) + batch.extra_max[0] + draw.forms.extra_columns
    bias = torch.randn(batch.num_tokens, width, generator=rng)
    hidden = torch.rand(batch.num_tokens, width, generator=rng) < 0.3
    hidden |= torch.rand(batch.num_tokens, 1, generator=rng) < 0.1  # nothing but the context
    bias[hidden] = -float("inf")
    row = 0
    for query in batch.query_lens:
        bias[row : row + query, query:] = float("nan")
        row += query
    if draw.forms.metadata == "contiguous":
        return bias
    buffer = torch.full((batch.num_tokens, width + 3), float("nan"))
    buffer[:, :width] = bias
    return buffer[:, :width]


@dataclass(frozen=True)
class LayerTensors:
    """The tensors of one layer of a draw.

    Attributes:
        query, key, value: as passed to the layer; key and value may be None.
        given: q, k, v on the CPU, [rows, H, D].
        cache: the cache, or None.
        memory: strides of the cache.
        before: bytes of the cache before the call.
        output: where to write, or None.
        slopes, sinks: per head, on the CPU, or None.
    """

    query: Tensor
    key: Tensor | None
    value: Tensor | None
    given: tuple[Tensor, Tensor, Tensor]
    cache: attnlib.PagedKVCache | None
    memory: CacheMemory | None
    before: Tensor | None
    output: Tensor | None
    slopes: Tensor | None
    sinks: Tensor | None

    def cache_on_cpu(self, raw: Tensor) -> tuple[Tensor, Tensor]:
        """The views of the cache over a copy of its bytes."""
        assert self.cache is not None
        found = []
        for view in (self.cache.key_cache, self.cache.value_cache):
            flat = raw.view(view.dtype)
            found.append(flat.as_strided(view.shape, view.stride(), view.storage_offset()))
        return found[0], found[1]


def tensors_of(draw: Draw, placement: Placement, device: str, layer: int) -> LayerTensors:
    """The tensors of layer 0 or 1."""
    spec, batch, forms = draw.spec, draw.batch, draw.forms
    rng = torch.Generator().manual_seed(forms.values + 1 + layer)

    def normal(rows: int, heads: int, size: int, factor: float = 1.0) -> Tensor:
        return (torch.randn(rows, heads, size, generator=rng) * factor).to(spec.dtype)

    tokens, keys = batch.num_tokens, sum(batch.new_keys)
    sizes = (
        (tokens, spec.num_heads, spec.head_size, forms.amplitude),
        (keys, spec.num_kv_heads, spec.head_size, forms.amplitude),
        (keys, spec.num_kv_heads, spec.head_size_v, 1.0),
    )
    nan = torch.full((), float("nan"), dtype=spec.dtype)
    given = []
    for rows, heads, size, factor in sizes:
        padding = nan.expand(batch.num_padding_rows, heads, size)
        given.append(torch.cat([normal(rows, heads, size, factor), padding]))
    if spec.use_mla:
        given[2] = given[1][..., : spec.head_size_v].clone()  # values are a prefix of the keys
    passed = [move(tensor, device) for tensor in _input_forms(given, forms.inputs)]
    cache = memory = before = None
    if spec.is_paged:
        cache, memory = _cache(draw, placement, device)
        _fill(draw, placement, cache, normal)
        before = raw_bytes(cache.key_cache)
    slopes = sinks = None
    if spec.has_alibi:
        slopes = torch.rand(spec.num_heads, generator=rng) * forms.values % 1.0
    if spec.has_sink:
        sinks = torch.randn(spec.num_heads, generator=rng) * 3
        sinks[torch.rand(spec.num_heads, generator=rng) < 0.1] = -float("inf")
    given_none = forms.written == "cached" and spec.is_paged
    return LayerTensors(
        query=passed[0],
        key=None if given_none else passed[1],
        value=None if given_none else passed[2],
        given=(given[0], given[1], given[2]),
        cache=cache,
        memory=memory,
        before=before,
        output=_output(draw, tokens + batch.num_padding_rows, device),
        slopes=slopes,
        sinks=sinks,
    )


def _input_forms(given: list[Tensor], form: str) -> list[Tensor]:
    if len(given[0]) != len(given[1]):  # cross-attention: q and k have no common projection
        flat = form == "flat"
        return [tensor.flatten(1) if flat else strided_form(tensor, form, float("nan"))
                for tensor in given]  # fmt: skip
    if form in ("fused", "flat"):
        fused = torch.cat([tensor.flatten(1) for tensor in given], dim=1)
        parts = fused.split([tensor.shape[1] * tensor.shape[2] for tensor in given], dim=1)
        if form == "flat":
            return list(parts)
        return [
            part.unflatten(1, tensor.shape[1:]) for part, tensor in zip(parts, given, strict=True)
        ]
    return [strided_form(tensor, form, float("nan")) for tensor in given]


def _output(draw: Draw, rows: int, device: str) -> Tensor | None:
    form, spec = draw.forms.output, draw.spec
    if form == "none":
        return None
    unset = torch.full((rows, spec.num_heads, spec.head_size_v), float("nan"), dtype=spec.dtype)
    if form == "flat":
        flat = draw.forms.inputs == "flat"
        return (unset.flatten(1) if flat else unset).to(device)
    return move(strided_form(unset, form, float("nan")), device)


def _cache(
    draw: Draw, placement: Placement, device: str
) -> tuple[attnlib.PagedKVCache, CacheMemory]:
    """A cache whose every element holds poison."""
    spec, forms = draw.spec, draw.forms
    memory = cache_views(
        forms.cache, placement.num_blocks, spec.block_size, spec.num_kv_heads,
        spec.head_size, spec.head_size_v, spec.use_mla,
    )  # fmt: skip
    unset = poison_of(spec.kv_dtype, forms.poison)
    if forms.from_views:
        allocation = unset.expand(memory.num_elements).contiguous().to(device)
        cache = attnlib.PagedKVCache.from_views(*memory.views(allocation))
    else:
        cache = attnlib.PagedKVCache.allocate(
            spec, placement.num_blocks, device, layout=forms.cache
        )
        flat = torch.empty(0, dtype=spec.kv_dtype, device=device)
        flat.set_(cache.key_cache.untyped_storage())  # type: ignore[call-overload]
        flat.copy_(unset.expand(flat.numel()))
    return cache, memory


def _fill(draw: Draw, placement: Placement, cache: attnlib.PagedKVCache, normal: Any) -> None:
    """Store keys and values of every position that the call does not write."""
    spec, batch = draw.spec, draw.batch
    skipped = set(batch.skipped)
    everything = draw.forms.written != "given"
    raw = raw_bytes(cache.key_cache)
    token = 0
    views = []
    for view in (cache.key_cache, cache.value_cache):
        flat = raw.view(view.dtype)
        strides = view.stride(), view.storage_offset()
        cpu = flat.as_strided(view.shape, *strides)
        views.append(cpu.view(torch.uint8) if view.element_size() == 1 else cpu)
    for request, (new_keys, length) in enumerate(zip(batch.new_keys, batch.seq_lens, strict=True)):
        known = list(range(length)) if everything else list(range(length - new_keys))
        if not everything:
            known += [length - new_keys + i for i in range(new_keys) if token + i in skipped]
        token += new_keys
        if not known:
            continue
        position = torch.tensor(known)
        blocks = torch.tensor(placement.rows[request])[position // spec.block_size]
        offsets = position % spec.block_size
        factors = (draw.forms.amplitude, 1.0)
        per_head = (draw.k_scales, draw.v_scales)
        for view, factor, scales in zip(views, factors, per_head, strict=True):
            new = normal(len(known), spec.num_kv_heads, view.shape[3], factor)
            view[blocks, offsets] = _stored(new, spec, scales)
            if spec.use_mla:
                break
    flat = torch.empty(0, dtype=torch.uint8, device=cache.device)
    flat.set_(cache.key_cache.untyped_storage())  # type: ignore[call-overload]
    flat.copy_(raw)


def _stored(new: Tensor, spec: attnlib.AttentionSpec, scales: tuple[float, ...]) -> Tensor:
    if not spec.is_kv_quantized:
        return new.to(spec.kv_dtype)
    largest = torch.finfo(spec.kv_dtype).max
    scaled = new.double() / torch.tensor(scales, dtype=torch.float64)[:, None]
    return scaled.clamp(-largest, largest).to(spec.kv_dtype).view(torch.uint8)
