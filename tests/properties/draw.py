"""Random calls of a layer, over every axis of the contract: spec, batch, layout and strides.

A seed gives one `Draw`, on every machine. With `draws_per_spec` above 1, that many consecutive
seeds share a spec and differ in everything else, so that a GPU compiles fewer kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from random import Random
from typing import Any

import torch

from attnlib.spec import AttentionSpec, AttentionType, MaskKind, Window

__all__ = ["Batch", "Draw", "Forms", "Limits", "draw_of"]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the backend and the machine can run.

    Attributes:
        dtypes: dtypes of q, k and v.
        longest: largest context length.
        longest_query: largest number of new tokens of a request.
        most_heads: largest number of query heads.
        most_requests: largest number of requests, padding excluded.
        repeated: probability that the call is repeated, to compare the bits.
        rare: probability of specs that few backends support (MLA, batch invariance).
        forms_per_spec: number of combinations of layouts and scales for each spec, so that a GPU
            compiles fewer kernels; 0 draws them for each call.
    """

    dtypes: tuple[str, ...] = ("float32", "float16", "bfloat16", "float64")
    longest: int = 300
    longest_query: int = 40
    most_heads: int = 64
    most_requests: int = 6
    repeated: float = 1.0
    rare: float = 0.06
    forms_per_spec: int = 0


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The lengths of one batch.

    Attributes:
        query_lens, seq_lens: of each request; padding requests at the end have 0 and 0.
        num_padding_rows: rows of q, k and v after the last token.
        extra_max: added to `max_query_len` and `max_seq_len`.
        causal: `CommonAttentionMetadata.causal`.
        shared_blocks: leading blocks that all requests share.
        skipped: rows of k and v with slot -1, which are in the cache already.
        new_keys: for each request, the number of its last keys that the call gives. For
            cross-attention any number, for other layers `query_lens`.
    """

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    num_padding_rows: int
    extra_max: tuple[int, int]
    causal: bool | tuple[bool, ...] | None
    shared_blocks: int
    skipped: tuple[int, ...]
    new_keys: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """New tokens of all requests."""
        return sum(self.query_lens)


@dataclass(frozen=True, kw_only=True)
class Forms:
    """Memory layouts of the tensors.

    Attributes:
        inputs: q, k, v: "contiguous", "fused", "gaps", "transposed", "misaligned" or "flat".
        output: "none" (allocated by the layer), "contiguous", "gaps", "misaligned" or "flat".
        cache: a layout name, or "padded" or "misaligned" (strides without a name).
        from_views: wrap views instead of `PagedKVCache.allocate`.
        metadata: "contiguous", "offset" or "strided" lengths, starts, slots and table.
        extra_columns: columns of the block table past the longest request.
        garbage: block ids of entries that must not be read: "other", "minus_one" or "huge".
        poison: cache elements that must not be read: "nan", "inf", "huge" or "zero".
        written: keys and values: "given", "cached" (None in the call) or "unused" (given, but a
            layer that shares its cache must not write them).
        host_lengths: the batch has `query_start_loc_cpu` and `seq_lens_cpu`.
        scales_on: "cache" or "layer".
        scales: "number" or "tensor".
        amplitude: standard deviation of q and k.
        second_layer: another layer uses the same metadata.
        repeated: the call is made twice.
        values: seed of the elements.
    """

    inputs: str
    output: str
    cache: str
    from_views: bool
    metadata: str
    extra_columns: int
    garbage: str
    poison: str
    written: str
    host_lengths: bool
    scales_on: str
    scales: str
    amplitude: float
    second_layer: bool
    repeated: bool
    values: int


@dataclass(frozen=True, kw_only=True)
class Draw:
    """One call: the layer, the batch and the memory layouts.

    Attributes:
        scale: softmax scale of the layer, or None.
        k_scales, v_scales: one factor per KV head; equal factors for scales per tensor.
    """

    seed: int
    spec: AttentionSpec
    scale: float | None
    k_scales: tuple[float, ...]
    v_scales: tuple[float, ...]
    batch: Batch
    forms: Forms

    def __str__(self) -> str:
        changed = []
        for field in fields(self.spec):
            value = getattr(self.spec, field.name)
            if value not in (None, False) and value != field.default:
                changed.append(f"{field.name}={value}")
        return (
            f"{', '.join(changed)}, scale={self.scale}, k_scales={self.k_scales}, "
            f"v_scales={self.v_scales}, {self.batch}, {self.forms}"
        )


def draw_of(seed: int, limits: Limits, draws_per_spec: int = 1) -> Draw:
    """The draw of a seed."""
    of_spec, rng = Random(f"spec {seed // draws_per_spec}"), Random(f"batch {seed}")
    spec = _spec(of_spec, limits)
    scale = of_spec.choice([None, None, 0.05, 1.0, 0.3])
    batch = _batch(rng, spec, limits)
    k_scales = _scales(rng, spec)
    v_scales = k_scales if spec.use_mla else _scales(rng, spec)  # MLA: one memory, one scale
    forms = _forms(rng, spec, batch, limits)
    if limits.forms_per_spec:
        number = rng.randrange(limits.forms_per_spec)
        of_spec = Random(f"forms {seed // draws_per_spec} {number}")
        forms = replace(forms, **_layouts(of_spec, spec))
    return Draw(
        seed=seed,
        spec=spec,
        scale=scale,
        k_scales=k_scales,
        v_scales=v_scales,
        batch=batch,
        forms=forms,
    )


def _spec(rng: Random, limits: Limits) -> AttentionSpec:
    kv_heads = rng.choice([1, 1, 2, 3, 4])
    size = rng.choice([8, 16, 16, 24, 32, 32, 40, 64, 64, 72, 80, 96, 128, 128])
    if rng.random() < 0.03:
        size = rng.choice([1, 5, 20, 192, 256])
    size_v = size if rng.random() < 0.7 else rng.choice([8, 16, 32, 48, 64, 128])
    dtype = rng.choice(limits.dtypes)
    kinds = ["decoder"] * 8 + ["encoder_decoder", "encoder", "encoder_only"]
    kind = AttentionType(rng.choice(kinds))
    masks = ["causal", "bidirectional", "per_request", "query_bias"]
    weights = [6, 1, 1, 2]
    if kind is AttentionType.ENCODER_DECODER:
        weights = [1, 6, 1, 0]  # a bias is over new tokens, which are not among the keys
    elif kind is not AttentionType.DECODER:
        weights = [1, 6, 1, 1]
    mask = MaskKind(rng.choices(masks, weights)[0])
    cache_dtype: str = "auto"
    if kind in (AttentionType.DECODER, AttentionType.ENCODER_DECODER) and rng.random() < 0.35:
        cache_dtype = rng.choice(["fp8", "fp8_e4m3", "fp8_e5m2", "float16", "bfloat16"])
        if cache_dtype == "bfloat16" and "bfloat16" not in limits.dtypes:
            cache_dtype = "fp8_e4m3"
    window: dict[str, Any] = {}
    form = rng.choice(["none", "none", "none", "sliding", "general"])
    if form == "sliding":
        window["sliding_window"] = rng.choice([1, 2, 5, 16, 33, 100])
    elif form == "general":
        side = [None, 0, 1, 7, 16, 40]
        window["window"] = Window(rng.choice(side), rng.choice(side))
    groups = [1, 1, 2, 3, 4, 5, 7, 8, 16]
    fields: dict[str, Any] = {
        "num_heads": kv_heads
        * rng.choice([n for n in groups if n * kv_heads <= limits.most_heads]),
        "num_kv_heads": kv_heads,
        "head_size": size,
        "head_size_v": size_v,
        "dtype": getattr(torch, dtype),
        "kv_cache_dtype": cache_dtype,
        "kv_scale_kind": rng.choice(["tensor", "head"])
        if cache_dtype.startswith("fp8")
        else "tensor",
        "block_size": rng.choice([1, 2, 3, 8, 16, 16, 16, 17, 32, 64, 128]),
        "attn_type": kind,
        "mask_kind": mask,
        "attention_chunk_size": rng.choice([1, 4, 16, 33, 64]) if rng.random() < 0.12 else None,
        "logits_soft_cap": rng.choice([0.5, 20.0, 50.0, 8192.0]) if rng.random() < 0.25 else None,
        "has_alibi": rng.random() < 0.2,
        "has_sink": rng.random() < 0.25,
        "needs_lse": rng.random() < 0.5,
        "kv_sharing": kind is AttentionType.DECODER and rng.random() < 0.1,
        **window,
    }
    if mask is MaskKind.QUERY_BIAS:  # with nothing that counts positions (M3)
        fields |= {"attention_chunk_size": None, "has_alibi": False}
        fields |= dict.fromkeys(window)
    if rng.random() < limits.rare:
        if rng.random() < 0.5 and kind is AttentionType.DECODER:
            heads = fields["num_heads"] // kv_heads
            fields.update(use_mla=True, num_kv_heads=1, num_heads=heads)
            fields["head_size_v"] = min(size, size_v)
            fields["kv_scale_kind"] = "tensor"
        else:
            fields["batch_invariant"] = True
    return AttentionSpec(**fields)


def _batch(rng: Random, spec: AttentionSpec, limits: Limits) -> Batch:
    cross = spec.attn_type is AttentionType.ENCODER_DECODER
    requests = min(rng.choice([1, 1, 2, 3, 4, 6]), limits.most_requests)
    kind = rng.choice(["decode", "uniform", "prefill", "extend", "mixed", "mixed", "zeros"])
    pairs: list[tuple[int, int]] = []
    uniform = rng.randint(2, 8)
    context = _lengths(rng, limits.longest)
    for _ in range(requests):
        one = rng.choice(["decode", "extend", "zero"]) if kind in ("mixed", "zeros") else kind
        if kind == "zeros" and rng.random() < 0.6:
            one = "zero"
        query = {"decode": 1, "uniform": uniform, "zero": 0}.get(one) or (
            0 if one == "zero" else rng.randint(1, rng.choice([12, limits.longest_query]))
        )
        before = 0 if one == "prefill" else context(rng)
        if one == "zero" and rng.random() < 0.5:
            before = 0
        pairs.append((query, before if cross else query + before))
    if rng.random() < 0.03:
        pairs = []
    if rng.random() < 0.2:
        pairs += [(0, 0)] * rng.randint(1, 3)  # padding requests of a CUDA graph (M7)
    if not spec.is_paged:
        pairs = [(query, query) for query, _ in pairs]
    queries, lengths = tuple(q for q, _ in pairs), tuple(s for _, s in pairs)
    causal: bool | tuple[bool, ...] | None = None
    if spec.mask_kind is MaskKind.PER_REQUEST:
        causal = tuple(rng.random() < 0.5 for _ in pairs)
    elif spec.mask_kind is not MaskKind.QUERY_BIAS and rng.random() < 0.15:
        # A batch may override the spec. A sliding window depends on the spec's own causality.
        causal = spec.is_causal if spec.sliding_window else rng.random() < 0.5
    shared = 0
    if spec.is_paged and not cross and len(pairs) > 1 and rng.random() < 0.2:
        shared = min((s - q) // spec.block_size for q, s in pairs)
    new_keys = queries
    if cross:
        first = rng.random() < 0.5  # a first step writes encoder output; later steps write nothing
        new_keys = tuple(rng.choice([0, s, rng.randint(0, s)]) if first else 0 for s in lengths)
    skipped: tuple[int, ...] = ()
    if spec.is_paged and rng.random() < 0.2:
        skipped = tuple(token for token in range(sum(new_keys)) if rng.random() < 0.4)
    return Batch(
        query_lens=queries,
        seq_lens=lengths,
        num_padding_rows=rng.choice([0, 0, 0, 1, 5]),
        extra_max=rng.choice([(0, 0), (0, 0), (3, 0), (0, 50), (5, 70)]),
        causal=causal,
        shared_blocks=shared,
        skipped=skipped,
        new_keys=new_keys,
    )


def _lengths(rng: Random, longest: int) -> Any:
    """A function that draws context lengths: mostly short, sometimes up to `longest`."""
    typical = rng.choice([8, 40, 40, 100, longest])
    return lambda rng: rng.choice([0, rng.randint(0, typical), rng.randint(0, typical)])


def _scales(rng: Random, spec: AttentionSpec) -> tuple[float, ...]:
    """Powers of two are frequent in checkpoints; other values expose a wrong order of roundings.
    All are float32 numbers, as elements of scale tensors are."""
    if not spec.is_kv_quantized:
        return (1.0,) * spec.num_kv_heads
    values = [1.0, 0.125, 0.0078125, *torch.tensor([0.037, 0.51]).tolist(), 2.0]
    if spec.kv_scale_kind == "tensor":
        return (rng.choice(values),) * spec.num_kv_heads
    return tuple(rng.choice(values) for _ in range(spec.num_kv_heads))


_LAYOUTS = ["NHD", "HND", "NHD_INTERLEAVED", "HND_INTERLEAVED", "NHD_PACKED", "HND_PACKED"]
_INPUTS = ["contiguous", "fused", "fused", "gaps", "transposed", "misaligned", "flat"]
_OUTPUTS = ["none", "none", "contiguous", "gaps", "misaligned", "flat"]


def _layouts(rng: Random, spec: AttentionSpec) -> dict[str, Any]:
    """The forms that select kernels."""
    cache = rng.choice([*_LAYOUTS, "padded", "misaligned"])
    per_head = spec.is_kv_quantized and spec.kv_scale_kind == "head"
    return {
        "cache": cache,
        "from_views": cache not in _LAYOUTS or rng.random() < 0.5,
        "inputs": rng.choice(_INPUTS),
        "output": rng.choice(_OUTPUTS),
        "scales_on": rng.choice(["cache", "layer"]),
        "scales": "tensor" if per_head else rng.choice(["number", "tensor"]),
    }


def _forms(rng: Random, spec: AttentionSpec, batch: Batch, limits: Limits) -> Forms:
    cache = rng.choice([*_LAYOUTS, "padded", "misaligned"])
    written = "given"
    if spec.kv_sharing:
        written = rng.choice(["cached", "unused"])
    elif spec.attn_type is AttentionType.ENCODER_DECODER:
        written = "given" if any(batch.new_keys) else "cached"
    elif spec.attn_type is AttentionType.DECODER and rng.random() < 0.12:
        written = "cached"
    per_head = spec.is_kv_quantized and spec.kv_scale_kind == "head"
    return Forms(
        inputs=rng.choice(_INPUTS),
        output=rng.choice(_OUTPUTS),
        cache=cache,
        from_views=cache not in _LAYOUTS or rng.random() < 0.5,
        metadata=rng.choice(["contiguous", "contiguous", "offset", "strided"]),
        extra_columns=rng.choice([0, 0, 1, 3]),
        garbage=rng.choice(["other", "minus_one", "huge"]),
        poison=rng.choice(["nan", "inf", "huge", "zero"]),
        written=written,
        host_lengths=rng.random() > 0.1,
        scales_on=rng.choice(["cache", "layer"]),
        scales="tensor" if per_head else rng.choice(["number", "tensor"]),
        amplitude=rng.choice([1.0, 1.0, 0.1, 4.0]),
        second_layer=rng.random() < 0.3,
        repeated=rng.random() < limits.repeated,
        values=rng.randrange(2**31),
    )
