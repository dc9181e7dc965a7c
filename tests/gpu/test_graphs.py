"""CUDA graphs with padding: replays with other lengths and blocks equal eager (G1, G3)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnlib.cache.storage import PagedKVCache
from attnlib.errors import ContractError
from attnlib.layer import Attention
from attnlib.metadata.graph_guard import GraphGuard
from attnlib.spec import AttentionSpec, CudaGraphSupport
from attnlib.workspace import BatchLimits
from tests.gpu.devices import ON_GPU, backend_or_skip, batch_of, needs_gpu, spec_of

pytestmark = [pytest.mark.gpu, needs_gpu]

REQUESTS, LONGEST, BLOCKS = 8, 512, 400
LATENTS = {
    "num_heads": 8, "num_kv_heads": 1, "head_size": 576, "head_size_v": 512, "use_mla": True,
}  # fmt: skip


class Captured:
    """One layer, captured for `REQUESTS` requests of `query_len` tokens over static tensors."""

    def __init__(
        self, name: str, spec: AttentionSpec, query_len: int, longest: int = LONGEST
    ) -> None:
        backend = backend_or_skip(name, spec)
        self.spec, self.query_len, tokens = spec, query_len, REQUESTS * query_len
        limits = BatchLimits(max_num_reqs=REQUESTS, max_num_tokens=tokens, max_seq_len=longest)
        self.builder = backend.make_builder(spec, "cuda", limits=limits)
        self.state = backend.get_state_cls()(self.builder, limits)
        self.layer = Attention(spec, backend=backend, device="cuda")
        self.cache = PagedKVCache.allocate(spec, BLOCKS, "cuda")
        self.cache.key_cache.normal_()
        self.cache.value_cache.normal_()
        self.query = torch.zeros(
            tokens, spec.num_heads, spec.head_size, dtype=spec.dtype, device="cuda"
        )
        self.key, self.value = (
            torch.zeros(tokens, spec.num_kv_heads, spec.head_size, dtype=spec.dtype, device="cuda")
            for _ in range(2)
        )
        if spec.use_mla:
            self.value = self.key[..., : spec.head_size_v]
        self.metadata = self.state.graph_capture_get_metadata_for_batch(
            REQUESTS, query_len=query_len
        )
        self.guard = GraphGuard(self.metadata)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self.layer(self.query, self.key, self.value, self.cache, self.metadata, True)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out, self.lse = self.layer(
                self.query, self.key, self.value, self.cache, self.metadata, True
            )

    def replay(
        self, seq_lens: list[int], seed: int, *, exact_bound: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """(output, LSE, eager result) for `query_len` new tokens each; padding is NaN."""
        common = batch_of(self.spec, [self.query_len] * len(seq_lens), seq_lens, BLOCKS, seed)
        rows = common.num_actual_tokens
        for static in (self.query, self.key, self.value):
            static[:rows].normal_()
            static[rows:].fill_(float("nan"))
        eager_cache = PagedKVCache.allocate(self.spec, BLOCKS, "cuda")
        eager_cache.key_cache.copy_(self.cache.key_cache)
        eager_cache.value_cache.copy_(self.cache.value_cache)
        eager = self.layer.backend.make_builder(self.spec, "cuda").build(0, common)
        expected = self.layer(
            self.query[:rows], self.key[:rows], self.value[:rows], eager_cache, eager, True
        )
        padded = self.state.begin_forward(common, REQUESTS, self.query_len)
        if exact_bound:
            padded = padded.replace(max_seq_len=max(seq_lens))
        self.guard.check(self.builder.build(0, padded))
        self.graph.replay()
        torch.cuda.synchronize()
        return self.out, self.lse, expected


LEVELS = [
    (CudaGraphSupport.UNIFORM_SINGLE_TOKEN_DECODE, 1),
    (CudaGraphSupport.UNIFORM_BATCH, 4),
    (CudaGraphSupport.ALWAYS, 24),
]


@pytest.mark.parametrize(
    ("level", "query_len"), LEVELS, ids=lambda value: getattr(value, "name", value)
)
@pytest.mark.parametrize(
    "features", [{}, {"sliding_window": 40, "logits_soft_cap": 20.0}], ids=["plain", "window-cap"]
)
@pytest.mark.parametrize("name", ON_GPU)
@torch.inference_mode()
def test_replays_equal_eager(
    name: str, features: dict[str, Any], level: CudaGraphSupport, query_len: int
) -> None:
    """G1: at every graph level that a backend declares."""
    captured = Captured(name, spec_of(needs_lse=True, cudagraph=level, **features), query_len)
    least = query_len
    for seed, seq_lens in enumerate(
        (
            [400, least, 33, 256, 17 + least, 100, 511, 64],
            [300, 90, 31 + least],
            [LONGEST],
            [least] * REQUESTS,
        )
    ):
        out, lse, (expected, expected_lse) = captured.replay(seq_lens, seed)
        rows = len(seq_lens) * query_len
        torch.testing.assert_close(out[:rows], expected, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(lse[:rows], expected_lse, rtol=1e-3, atol=1e-3)
        assert not out[rows:].any() and torch.isneginf(lse[rows:]).all()


@pytest.mark.parametrize("longest", [LONGEST, 8192])
@pytest.mark.parametrize(
    "features", [{}, {"num_heads": 8, "num_kv_heads": 1}, LATENTS], ids=["gqa", "mqa", "latents"]
)
@pytest.mark.parametrize("name", ON_GPU)
@torch.inference_mode()
def test_replays_with_the_bound_of_their_batch(
    name: str, features: dict[str, Any], longest: int
) -> None:
    """Engines that pad batches themselves build them with their own longest sequence."""
    spec = spec_of(
        needs_lse=True, cudagraph=CudaGraphSupport.UNIFORM_SINGLE_TOKEN_DECODE, **features
    )
    captured = Captured(name, spec, 1, longest)
    for seed, seq_lens in enumerate(
        ([10, 22, 68, 132, 3, 41, 100], [160, 105, 128, 191, 62], [400, 30], [512] * REQUESTS)
    ):
        out, lse, (expected, expected_lse) = captured.replay(seq_lens, seed, exact_bound=True)
        rows = len(seq_lens)
        torch.testing.assert_close(out[:rows], expected, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(lse[:rows], expected_lse, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ON_GPU)
@torch.inference_mode()
def test_the_guard_names_moved_tensors(name: str) -> None:
    """Each tensor of a batch that was not copied into the persistent buffers is named."""
    captured = Captured(
        name, spec_of(needs_lse=True, cudagraph=CudaGraphSupport.UNIFORM_SINGLE_TOKEN_DECODE), 1
    )
    stray = captured.builder.build(
        0, batch_of(captured.spec, [1] * REQUESTS, [40] * REQUESTS, BLOCKS, 3)
    )
    with pytest.raises(ContractError, match="seq_lens was at 0x"):
        captured.guard.check(stray)


MIXED = [
    ([1, 1, 1, 93], [400, 33, 512, 93]),
    ([80, 1, 14, 1], [500, 20, 77, 300]),
    ([24, 24, 24, 24], [24, 100, 60, 511]),
]


@pytest.mark.parametrize("longest", [LONGEST, 8192])
@pytest.mark.parametrize("captured", range(len(MIXED)))
@torch.inference_mode()
def test_a_graph_of_a_mixed_batch_serves_every_order_of_lengths(
    captured: int, longest: int
) -> None:
    """The engine keeps the tensors of its batch; only their values change between replays. With the
    larger bound the keys are divided, and the builder owns the results of splits."""
    spec = spec_of(needs_lse=True, cudagraph=CudaGraphSupport.ALWAYS)
    backend = backend_or_skip("triton", spec)
    limits = BatchLimits(max_num_reqs=4, max_num_tokens=96, max_seq_len=longest)
    builder = backend.make_builder(spec, "cuda", limits=limits)
    layer = Attention(spec, backend=backend, device="cuda")
    cache, eager_cache = (PagedKVCache.allocate(spec, BLOCKS, "cuda") for _ in range(2))
    torch.manual_seed(0)
    for view in (cache.key_cache, cache.value_cache):
        view.normal_()
    q, k, v = (torch.randn(96, heads, 128, device="cuda", dtype=spec.dtype) for heads in (8, 2, 2))

    def batch(number: int) -> Any:
        common = batch_of(spec, *MIXED[number], BLOCKS, seed=0)
        table = torch.zeros(4, 32, dtype=torch.int32, device="cuda")
        table[:, : common.block_table_tensor.shape[1]] = common.block_table_tensor
        return common.replace(max_query_len=96, max_seq_len=longest, block_table_tensor=table)

    static = batch(captured)
    metadata = builder.build_for_cudagraph_capture(static)
    assert (metadata.workspace is not None) == (longest > 2048)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        layer(q, k, v, cache, metadata, True)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = layer(q, k, v, cache, metadata, True)
    for number in range(len(MIXED)):
        now = batch(number)
        for name in ("query_start_loc", "seq_lens", "slot_mapping", "block_table_tensor"):
            getattr(static, name).copy_(getattr(now, name))
        eager_cache.key_cache.copy_(cache.key_cache)
        eager_cache.value_cache.copy_(cache.value_cache)
        eager = backend.make_builder(spec, "cuda").build(0, now)
        assert eager.num_decodes == (3, 0, 0)[number] and metadata.num_decodes == 0
        expected, expected_lse = layer(q, k, v, eager_cache, eager, True)
        GraphGuard(metadata).check(builder.build_for_cudagraph_capture(static))
        graph.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=1e-3)
