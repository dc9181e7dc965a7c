"""Norm, rotation and cache write in one launch: direct launches, graphs, and what is compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import attnlib
from attnlib.ops.rotary import HeadNorm
from attnlib.ops.torch import rotary_write as reference
from attnlib.testing.compilations import compiled_kernels
from tests.gpu.devices import needs_gpu, spec_of

pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu, needs_gpu]


class Model:
    """Layers of one group with their caches, norms and tensors of one step."""

    def __init__(self, tokens: int, layers: int = 3, **changes: Any) -> None:
        torch.manual_seed(tokens)
        self.spec = spec_of(**changes)
        self.layers = [
            attnlib.Attention(self.spec, backend="triton", device="cuda") for _ in range(layers)
        ]
        scales: dict[str, Any] = {"k_scale": 0.5} if self.spec.is_kv_quantized else {}
        self.caches = [
            attnlib.PagedKVCache.allocate(self.spec, 2 * tokens, "cuda", **scales)
            for _ in range(layers)
        ]
        lengths = [17] * tokens
        table = torch.arange(2 * tokens, dtype=torch.int32).view(tokens, 2)
        common = attnlib.CommonAttentionMetadata.from_lengths(
            [1] * tokens, lengths, table, self.spec.block_size, "cuda"
        )
        builder = self.layers[0].backend.make_builder(self.spec, "cuda")
        self.metadata: Any = builder.build(0, common)
        size = self.spec.head_size
        self.norms = [
            HeadNorm(torch.randn(size, device="cuda").to(self.spec.dtype), 1e-6 * (n + 1))
            for n in range(layers)
        ]
        self.rows = [torch.empty(tokens, n, size, device="cuda").bfloat16() for n in (8, 2, 2)]
        self.angles = [torch.empty(tokens, size // 2, device="cuda").bfloat16() for _ in range(2)]
        self.fill()

    def fill(self) -> None:
        """New values in the same memory."""
        for x in (*self.rows, *self.angles):
            x.normal_()

    def step(self) -> list[torch.Tensor]:
        """The rotated queries of every layer."""
        return [
            layer.rotate_and_write_kv(
                *self.rows, cache, self.metadata, *self.angles, q_norm=norm, k_norm=self.norms[0]
            )
            for layer, cache, norm in zip(self.layers, self.caches, self.norms, strict=True)
        ]

    def check(self, outs: list[torch.Tensor]) -> None:
        """P11: queries and caches have the bits of the torch operation."""
        for out, cache, norm in zip(outs, self.caches, self.norms, strict=True):
            stored = [x.clone() for x in (cache.key_cache, cache.value_cache)]
            wanted = reference.rotate_and_write(
                *self.rows, *stored, self.metadata.slot_mapping, *self.angles, q_norm=norm,
                k_norm=self.norms[0], k_scale=cache.k_scale,
            )  # fmt: skip
            assert torch.equal(out, wanted)
            for new, old in zip(stored, (cache.key_cache, cache.value_cache), strict=True):
                assert torch.equal(new.view(torch.uint8), old.view(torch.uint8))
            assert stored[0].float().any()


@pytest.mark.parametrize("stored", ["auto", "fp8_e4m3"])
def test_every_layer_of_every_step(stored: str) -> None:
    """The first layer goes through Triton, the others and later steps through direct launches."""
    model = Model(33, kv_cache_dtype=stored)
    for _ in range(3):
        model.check(model.step())
        model.fill()


def test_unaligned_tensors() -> None:
    """Addresses that are no multiples of 16 go through Triton."""
    model = Model(5)
    model.check(model.step())
    flat = torch.randn(5 * 8 * 128 + 1, device="cuda").bfloat16()
    model.rows[0] = flat[1:].view(5, 8, 128)
    model.check(model.step())


def test_a_graph_replays_other_values_and_slots() -> None:
    """A captured step writes where the slot mapping says at the replay; -1 writes nothing."""
    model = Model(16)
    model.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = model.step()
    for cache in model.caches:
        cache.zero_blocks(list(range(cache.num_blocks)))
    model.fill()
    slots = torch.randperm(16 * 32, device="cuda")[:16]
    slots[::5] = -1
    model.metadata.slot_mapping.copy_(slots)
    graph.replay()
    torch.cuda.synchronize()
    model.check(outs)
    written = (model.caches[0].key_cache != 0).flatten(0, 1).flatten(1).any(1).nonzero().flatten()
    assert set(written.tolist()) == set(slots[slots >= 0].tolist())


def test_numbers_of_tokens_do_not_compile() -> None:
    """One kernel serves every number of tokens."""
    Model(2).step()
    with compiled_kernels() as compiled:
        for tokens in (1, 3, 16, 64, 200):
            model = Model(tokens, layers=1)
            model.check(model.step())
    assert not compiled
