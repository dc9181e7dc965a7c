"""Masks that depend on the batch, inside an importable vLLM; run by `test_vllm_adapter.py`."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import VllmConfig, get_current_vllm_config, set_current_vllm_config
from vllm.model_executor.layers.attention.cross_attention import create_cross_attention_backend
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport
from vllm_adapter import BLOCK, HEADS, KV_HEADS, SIZE, Layer, ask, vllm_batch

from attnlib.errors import UnsupportedConfigError
from attnlib.integrations.vllm.backend import AttnlibBackend
from attnlib.integrations.vllm.builder import AttnlibMetadataBuilder
from attnlib.integrations.vllm.masks import Mask
from attnlib.integrations.vllm.mla_backend import AttnlibMLABackend
from attnlib.integrations.vllm.page_backend import backend_of

IMAGES: dict[str, Any] = {"model": {"is_mm_prefix_lm": True}}
WINDOW = 11
RANGES = {0: [(3, 20), (30, 36)], 1: []}
"""First and last positions of the images of request 0, as vLLM gives them."""


@pytest.fixture(autouse=True)
def _config() -> Any:
    with set_current_vllm_config(VllmConfig()):
        torch.set_default_dtype(torch.float32)
        torch.manual_seed(0)
        yield


def in_image(request: int, p: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    seen = torch.zeros(p.shape[0], k.shape[1]).bool()
    for first, last in RANGES[request]:
        seen |= (p >= first) & (p <= last) & (k >= first) & (k <= last)
    return seen


def plain(request: int, p: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return (k <= p) | in_image(request, p, k)


def windowed(request: int, p: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return (k <= p) & (k > p - WINDOW) | in_image(request, p, k)


def clamped(request: int, p: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return plain(request, p, k) & (k > p - WINDOW)


@pytest.mark.parametrize(
    ("arguments", "visible"),
    [({}, plain), ({"sliding_window": WINDOW}, windowed),
     ({"sliding_window": WINDOW, "clamped": True}, clamped)],
    ids=["plain", "window", "clamped"],
)  # fmt: skip
def test_the_tokens_of_an_image_see_each_other(arguments: dict[str, Any], visible: Any) -> None:
    layer = Layer(**IMAGES, **arguments)
    for query_lens, seq_lens in (([40, 9], [40, 9]), ([17, 20], [57, 29])):
        q, _, _, output = layer.step(query_lens, seq_lens, mm_req_doc_ranges=RANGES)
        torch.testing.assert_close(output, layer.expected(q, query_lens, seq_lens, None, visible))
        touched = seq_lens[0] == 40
        assert layer.metadata.mask is (Mask.SPANS if touched else Mask.OWN)


def test_layers_whose_images_the_model_clears_are_causal() -> None:
    layer = Layer(**IMAGES)
    build = layer.builder.build

    def cleared(*batch: Any) -> Any:
        metadata = build(*batch)
        assert metadata.mm_prefix_range_tensor is not None
        metadata.mm_prefix_range_tensor = None
        return metadata

    layer.builder.build = cleared
    q, _, _, output = layer.step([40, 9], [40, 9], mm_req_doc_ranges=RANGES)
    torch.testing.assert_close(output, layer.expected(q, [40, 9], [40, 9]))


@pytest.mark.parametrize("window", [None, WINDOW])
def test_drafts_that_see_each_other(window: int | None) -> None:
    def both_sides(request: int, p: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (p - k).abs() < (window or 1000)

    layer = Layer(non_causal=True, sliding_window=window)
    layer.step([30, 9], [30, 9])
    q, _, _, output = layer.step([5, 5], [35, 14], causal=False)
    expected = layer.expected(q, [5, 5], [35, 14], None, both_sides)
    torch.testing.assert_close(output, expected)


def test_drafts_and_other_requests_in_one_batch() -> None:
    """The flags are where a graph reads them: in the same memory for every batch."""

    def mixed(request: int, p: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (k <= p) | (torch.ones_like(k) * (1 - flags[request])).bool()

    layer, memory = Layer(non_causal=True), set()
    layer.step([30, 9], [30, 9])
    for step, flags in enumerate(([1, 0], [0, 1])):
        lengths = [35 + 5 * step, 14 + 5 * step]
        causal = torch.tensor(flags, dtype=torch.int32)
        q, _, _, output = layer.step([5, 5], lengths, causal=causal)
        torch.testing.assert_close(output, layer.expected(q, [5, 5], lengths, None, mixed))
        (batch,) = layer.metadata.batches.values()
        memory.add(batch.causal.data_ptr())
    assert len(memory) == 1


@pytest.mark.parametrize("window", [None, 30])
def test_retained_windows(window: int | None) -> None:
    prompts = torch.tensor([40, 9])

    def retained(request: int, p: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (k <= p) & ((k < prompts[request]) | (p - k < 4))

    layer = Layer(model={"rswa_window": 4}, sliding_window=window)
    for query_lens, seq_lens in (([40, 9], [40, 9]), ([12, 12], [52, 21]), ([1, 1], [53, 22])):
        q, _, _, output = layer.step(query_lens, seq_lens, rswa_prefix_lens=prompts)
        torch.testing.assert_close(output, layer.expected(q, query_lens, seq_lens, None, retained))


def test_alibi_by_the_root_of_the_distance() -> None:
    """A bias of -slope * sqrt(distance), added to the scores."""
    slopes = [2.0 ** -(head + 1) for head in range(HEADS)]
    layer = Layer(alibi_slopes=slopes, use_alibi_sqrt=True)
    q, k, v, output = layer.step([20], [20])
    distance = torch.arange(20)[:, None] - torch.arange(20)
    bias = -torch.tensor(slopes).view(-1, 1, 1) * distance.clamp(min=0).sqrt()
    bias = bias.masked_fill(distance < 0, -torch.inf)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(part.transpose(0, 1) for part in (q, k, v)), attn_mask=bias, enable_gqa=True
    )
    torch.testing.assert_close(output, expected.transpose(0, 1))
    assert AttnlibBackend.supports_alibi_sqrt() and not AttnlibMLABackend.supports_alibi_sqrt()


def test_scales_per_head() -> None:
    scheme = {"strategy": "attn_head"}
    get_current_vllm_config().quant_config = SimpleNamespace(kv_cache_scheme=scheme)
    layer = Layer("fp8")
    layer.layer._k_scale = torch.tensor([0.5, 0.125])
    layer.layer._v_scale = torch.tensor([0.25, 0.0625])
    for query_lens, seq_lens in (([40, 9], [40, 9]), ([1, 1], [41, 10])):
        q, _, _, output = layer.step(query_lens, seq_lens)
        torch.testing.assert_close(output, layer.expected(q, query_lens, seq_lens))


def test_cross_attention() -> None:
    """Through vLLM's own wrapper: encoder keys are written in the first step of a request."""
    backend = create_cross_attention_backend(AttnlibBackend)
    layer = Layer(attn_type="encoder_decoder")
    layer.layer.impl = backend.get_impl_cls()(
        HEADS, SIZE, SIZE**-0.5, KV_HEADS, attn_type="encoder_decoder"
    )
    layer.layer.kv_sharing_target_layer_name = None
    spec, device = SimpleNamespace(block_size=BLOCK), torch.device("cpu")
    builder = backend.get_builder_cls()(spec, ["layer"], layer.config, device)
    table = torch.arange(1, 21, dtype=torch.int32).view(2, 10)
    encoder = [torch.randn(n, 2, KV_HEADS, SIZE) for n in (50, 7)]
    lengths = torch.tensor([50, 7], dtype=torch.int32)
    steps = (([4, 2], [4, 2]), ([1, 1], [5, 3]))
    for step, (query_lens, seq_lens) in enumerate(steps):
        starts = torch.tensor([0, *query_lens]).cumsum(0).int()
        tokens, decoded = sum(query_lens), torch.tensor(seq_lens, dtype=torch.int32)
        batch = vllm_batch(
            starts, decoded, tokens, max(query_lens), 50, table, None,
            encoder_seq_lens=lengths, encoder_seq_lens_cpu=np.array([50, 7]),
        )  # fmt: skip
        metadata = builder.build(0, batch)
        new = torch.cat(encoder) if step == 0 else None
        key, value = (None, None) if new is None else (new[:, 0], new[:, 1])
        query, output = torch.randn(tokens, HEADS, SIZE), torch.zeros(tokens, HEADS, SIZE)
        layer.layer.impl.forward(layer.layer, query, key, value, layer.kv_cache, metadata, output)
        for request, held in enumerate(encoder):
            rows = slice(starts[request], starts[request + 1])
            expected = torch.nn.functional.scaled_dot_product_attention(
                query[rows].transpose(0, 1), held[:, 0].transpose(0, 1),
                held[:, 1].transpose(0, 1), enable_gqa=True,
            )  # fmt: skip
            torch.testing.assert_close(output[rows], expected.transpose(0, 1))


def test_models_with_images_capture_no_prefills(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph of prefills would have one mask."""
    monkeypatch.setenv("ATTNLIB_BACKEND", "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    level = AttnlibMetadataBuilder.get_cudagraph_support
    assert level(Layer().config, None) is AttentionCGSupport.ALWAYS
    assert level(Layer(**IMAGES).config, None) is AttentionCGSupport.UNIFORM_BATCH


@pytest.mark.parametrize("question", ["use_mm_prefix", "use_rswa", "use_non_causal", ""])
def test_masks_and_pages_with_scales_over_a_distributed_cache_are_refused(question: str) -> None:
    """vLLM 0.26 does not say in its question that the cache is distributed."""
    known = inspect.signature(AttentionBackend.validate_configuration).parameters
    if question and question not in known:
        pytest.skip("this release of vLLM does not ask")
    changes: dict[str, Any] = {question: True} if question else {"backend": backend_of("nvfp4")}
    assert ask(**changes) == []
    get_current_vllm_config().parallel_config.decode_context_parallel_size = 2
    (reason,) = ask(**changes)
    assert "no decode context parallelism with" in reason


def test_alibi_root_and_images_are_refused() -> None:
    with pytest.raises(UnsupportedConfigError, match="ALiBi"):
        Layer(**IMAGES, alibi_slopes=[1.0] * HEADS, use_alibi_sqrt=True)
