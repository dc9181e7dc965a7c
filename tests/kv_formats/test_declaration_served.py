"""Open formats in caches and layers (P16)."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest
import torch

import attnlib
from attnlib.errors import ContractError, UnsupportedConfigError
from attnlib.kv_formats import KVFormat, register_kv_format, unregister_kv_format
from attnlib.ops.torch.hadamard import rotate_heads
from tests.testing.toy_backend import ToyBackend

HEADS, KV_HEADS, SIZE = 4, 2, 32


def _spec(**changes: object) -> attnlib.AttentionSpec:
    fields = {
        "num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_size": SIZE, "dtype": torch.float32,
        "block_size": 4, "kv_cache_dtype": "example:rotated4", **changes,
    }  # fmt: skip
    return attnlib.AttentionSpec(**fields)  # type: ignore[arg-type]  # fields of a spec


def _stored(x: torch.Tensor, stored: KVFormat, rotated: bool) -> torch.Tensor:
    """Heads as the cache holds them, in plain space."""
    y = rotate_heads(x, 0) if rotated else x
    y = stored.load(*stored.store(y))
    return rotate_heads(y, 0, inverse=True) if rotated else y


@pytest.mark.parametrize("rotation", [None, "hadamard"])
def test_a_layer_attends_to_the_decoded_heads(rotated4: KVFormat, rotation: str | None) -> None:
    """Two steps of two requests, against dense attention over what the format stores."""
    spec = _spec(kv_rotation=rotation)
    layer = attnlib.Attention(spec, backend="torch", device="cpu")
    cache = attnlib.PagedKVCache.allocate(spec, 8, "cpu")
    assert cache.page_formats == (rotated4, rotated4)
    assert "example:rotated4" in repr(cache)
    torch.manual_seed(0)
    lengths = (9, 6)
    rows = [[torch.randn(n, h, SIZE) for h in (HEADS, KV_HEADS, KV_HEADS)] for n in lengths]
    table, builder = [[5, 0, 3], [1, 7, 2]], layer.backend.make_builder(spec, "cpu")
    out: list[list[torch.Tensor]] = [[], []]
    for start, stop in ((0, 5), (5, None)):
        parts = [[x[start:stop] for x in row] for row in rows]
        new = [len(part[0]) for part in parts]
        seen = [start + n for n in new]
        batch = attnlib.CommonAttentionMetadata.from_lengths(new, seen, table, 4, "cpu")
        q, k, v = (torch.cat(x) for x in zip(*parts, strict=True))
        found = layer(q, k, v, cache, builder.build(0, batch)).view(-1, HEADS, SIZE)
        for request, part in enumerate(found.split(new)):
            out[request].append(part)
    for (q, k, v), found in zip(rows, out, strict=True):
        k, v = (_stored(x, rotated4, rotation is not None) for x in (k, v))
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1).transpose(0, 1) for x in (k, v))
        wanted = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1), k, v, is_causal=True
        )
        torch.testing.assert_close(torch.cat(found), wanted.transpose(0, 1), rtol=1e-4, atol=1e-5)


def test_bytes_that_a_format_of_the_library_could_have(rotated4: KVFormat) -> None:
    """Nothing follows from dtypes: four float16 scales beside bytes are `int4_per_group`, too."""
    encode, decode = rotated4.encode, rotated4.decode
    assert encode is not None and decode is not None
    four = register_kv_format(
        replace(
            rotated4, name="example:four", groups_per_head=4, head_size_multiple=8, number=None,
            encode=lambda x: (encode(x)[0], encode(x)[1].expand(-1, 4)),
            decode=lambda codes, scale: decode(codes, scale[:, :1]),
        )
    )  # fmt: skip
    try:
        outputs = []
        for name in ("example:four", "example:rotated4"):
            spec = _spec(kv_cache_dtype=name)
            layer = attnlib.Attention(spec, backend="torch", device="cpu")
            cache = attnlib.PagedKVCache.allocate(spec, 2, "cpu")
            batch = attnlib.CommonAttentionMetadata.from_lengths([5], [5], [[1, 0]], 4, "cpu")
            torch.manual_seed(1)
            q, k, v = (torch.randn(5, h, SIZE) for h in (HEADS, KV_HEADS, KV_HEADS))
            metadata = layer.backend.make_builder(spec, "cpu").build(0, batch)
            outputs.append(layer(q, k, v, cache, metadata))
            assert cache.page_formats[0] is spec.kv_format
        assert torch.equal(*outputs)
        wrong = attnlib.PagedKVCache.allocate(_spec(kv_cache_dtype="int4_per_group"), 2, "cpu")
        layer = attnlib.Attention(
            _spec(kv_cache_dtype="example:four"), backend="torch", device="cpu"
        )
        with pytest.raises(ContractError, match="stores int4_per_group, the spec says example:f"):
            layer(q, k, v, wrong, metadata)
    finally:
        unregister_kv_format(four.name)


def test_other_backends_refuse_an_open_format(rotated4: KVFormat) -> None:
    reason = "open KV format example:rotated4: not supported .backend='torch' reads all of them"
    for changes in ({}, {"value_cache_dtype": "auto"}):
        with pytest.raises(UnsupportedConfigError, match=reason):
            attnlib.get_attn_backend(_spec(**changes), backend=ToyBackend, device="cpu")
    assert attnlib.get_attn_backend(_spec(), device="cpu").get_name() == "torch"


def test_caches_are_pickled_and_compared_with_their_format(rotated4: KVFormat) -> None:
    cache = attnlib.PagedKVCache.allocate(_spec(), 3, "cpu")
    assert cache.pages is not None
    cache.pages.copy_(torch.arange(cache.pages.numel()).view(cache.pages.shape) % 251)
    for again in (pickle.loads(pickle.dumps(cache)), copy.deepcopy(cache)):
        assert again.page_formats == (rotated4, rotated4)
        assert torch.equal(again.pages, cache.pages) and again.signature == cache.signature
    unregister_kv_format(rotated4.name)
    other = register_kv_format(replace(rotated4, version=2))
    try:
        newer = attnlib.PagedKVCache.allocate(_spec(), 3, "cpu")
        assert newer.signature != cache.signature
        kinds = r"page_formats is .*rotated4', version=1\)\) in the source and .* version=2"
        with pytest.raises(ContractError, match=kinds):
            cache.swap_blocks(newer, [(0, 1)])
        layer, query = attnlib.Attention(_spec(), device="cpu"), torch.zeros(1, HEADS, SIZE)
        batch = attnlib.CommonAttentionMetadata.from_lengths([1], [1], [[1]], 4, "cpu")
        metadata = layer.backend.make_builder(layer.spec, "cpu").build(0, batch)
        with pytest.raises(ContractError, match="of another version or registration"):
            layer(query, query[:, :KV_HEADS], query[:, :KV_HEADS], cache, metadata)
        with pytest.raises(ContractError, match="version 1 of example:rotated4.* has version 2"):
            pickle.loads(pickle.dumps(cache))
    finally:
        unregister_kv_format(other.name)
        register_kv_format(rotated4)
