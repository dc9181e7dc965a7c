"""A backend in vLLM's style, captured in CUDA graphs, in layers of attnlib and in vLLM's layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import attnlib
from attnlib.compat import vllm
from attnlib.ops.minivllm import paged_attention_decode, store_kvcache
from tests.compat.vllm import styles
from tests.gpu.devices import needs_gpu

pytestmark = [pytest.mark.gpu, needs_gpu]

LIMITS = attnlib.BatchLimits(max_num_reqs=4, max_num_tokens=4, max_seq_len=32)
SPEC = styles.SPEC.replace(dtype=torch.float16)


class DecodeImpl(styles.Impl):
    """Decodes with kernels, which a graph can hold."""

    def forward(
        self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: Any,
        output: Any,
    ) -> Any:  # fmt: skip
        common = attn_metadata.common
        assert layer._k_scale.device == query.device
        store_kvcache(key, value, *kv_cache, common.slot_mapping, styles.BLOCK)
        found = paged_attention_decode(
            query, *kv_cache, common.block_table_tensor, common.seq_lens, self.scale,
            *self.sizes, styles.BLOCK,
        )  # fmt: skip
        return output.copy_(found)


class DecodeBackend(styles.Backend):
    impl = DecodeImpl


def tokens(count: int) -> tuple[torch.Tensor, ...]:
    return tuple(x.half().cuda() for x in styles.tokens(count))


def batch(lengths: list[int]) -> attnlib.CommonAttentionMetadata:
    ones = [1] * len(lengths)
    tables = [[3, 1], [6, 0], [2, 4]][: len(lengths)]
    return attnlib.CommonAttentionMetadata.from_lengths(ones, lengths, tables, 16, "cuda")


def replayed(run: Any, inputs: tuple[torch.Tensor, ...]) -> Any:
    """A function that copies tensors into `inputs` and replays `run` on them."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(*inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run(*inputs)

    def replay(*given: torch.Tensor) -> torch.Tensor:
        for persistent, tensor in zip(inputs, given, strict=True):
            persistent.copy_(tensor)
        graph.replay()
        return output.clone()

    return replay


@pytest.mark.parametrize("layer_of", ["attnlib", "vllm"])
def test_decodes_are_captured(layer_of: str) -> None:
    backend = vllm.adapt_backend(DecodeBackend)
    state = attnlib.AttentionState(backend.make_builder(SPEC, "cuda", limits=LIMITS), LIMITS)
    captured = state.graph_capture_get_metadata_for_batch(4)
    cache = attnlib.PagedKVCache.allocate(SPEC, 8, "cuda", layout="NHD")
    cache.key_cache.normal_()
    cache.value_cache.normal_()
    if layer_of == "attnlib":
        layer = attnlib.Attention(SPEC, backend=backend, device="cuda")

        def run(q: Any, k: Any, v: Any, metadata: Any = captured) -> torch.Tensor:
            return layer(q, k, v, cache, metadata)
    else:
        styled = vllm.Attention(4, 32, 32**-0.5, 2, attn_backend=DecodeBackend).cuda()
        styled.kv_cache = [torch.stack([cache.key_cache, cache.value_cache])]

        def run(q: Any, k: Any, v: Any, metadata: Any = captured) -> torch.Tensor:
            with vllm.set_forward_context(metadata.built):
                return styled(q, k, v).view(q.shape)

    replay = replayed(run, tokens(4))
    reference = attnlib.Attention(SPEC, backend="torch", device="cuda")
    own = attnlib.PagedKVCache.allocate(SPEC, 8, "cuda", layout="NHD")
    own.key_cache.copy_(cache.key_cache)
    own.value_cache.copy_(cache.value_cache)
    for lengths in ([6, 8], [7, 9, 17], [1, 30]):
        q, k, v = tokens(4)
        state.begin_forward(batch(lengths), 4)
        out = replay(q, k, v)
        count = len(lengths)
        metadata = reference.backend.make_builder(SPEC, "cuda").build(0, batch(lengths))
        wanted = reference(q[:count], k[:count], v[:count], own, metadata)
        torch.testing.assert_close(out[:count], wanted, rtol=2e-3, atol=2e-3)
