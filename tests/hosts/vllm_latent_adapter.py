"""The adapter for latent attention inside an importable vLLM, without an engine; run by
`test_vllm_adapter.py`.

Batches are vLLM's own `CommonAttentionMetadata`. The reference is torch's attention over keys and
values of every head, computed from the latents that the cache holds.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata

from attnlib.errors import UnsupportedConfigError
from attnlib.integrations.vllm import context_parallel, registered
from attnlib.integrations.vllm.backend import AttnlibBackend
from attnlib.integrations.vllm.mla_backend import AttnlibMLABackend
from attnlib.integrations.vllm.mla_builder import AttnlibMLAMetadataBuilder
from attnlib.integrations.vllm.mla_impl import AttnlibMLAImpl
from attnlib.integrations.vllm.mla_sparse import (
    AttnlibSparseMLABackend,
    AttnlibSparseMLAImpl,
    AttnlibSparseMLAMetadataBuilder,
)
from attnlib.mla import latent_attention
from attnlib.mla.latent_attention import EXPAND_FROM

HEADS, LATENT, ROTARY, KEY, VALUE, BLOCK, COLUMNS = 4, 32, 16, 24, 20, 16, 60
SCALE = (KEY + ROTARY) ** -0.5


@pytest.fixture(autouse=True)
def _config() -> Any:
    with set_current_vllm_config(VllmConfig()):
        torch.set_default_dtype(torch.float32)
        torch.manual_seed(0)
        yield


class Layer:
    """One layer with its cache and builder, over vLLM's memory; `prompts` is the number of ranks
    that have parts of prompts."""

    impl_class: Any = AttnlibMLAImpl
    builder_class: Any = AttnlibMLAMetadataBuilder
    ahead = 0
    """By how much lengths of decodes on the host exceed the lengths."""

    def __init__(self, kv_cache_dtype: str = "auto", prompts: int = 1, **arguments: Any) -> None:
        weight = torch.randn(HEADS * (KEY + VALUE), LATENT) / LATENT**0.5
        self.projection = weight.view(HEADS, KEY + VALUE, LATENT)
        sizes: dict[str, Any] = dict(
            num_heads=HEADS, head_size=LATENT + ROTARY, scale=SCALE, num_kv_heads=1,
            kv_lora_rank=LATENT, qk_nope_head_dim=KEY, qk_rope_head_dim=ROTARY,
            qk_head_dim=KEY + ROTARY, v_head_dim=VALUE, q_lora_rank=None,
            kv_b_proj=SimpleNamespace(weight=weight, quant_method=None),
            alibi_slopes=None, sliding_window=None, logits_soft_cap=None, attn_type="decoder",
            kv_sharing_target_layer_name=None, indexer=None,
        )  # fmt: skip
        self.impl = self.impl_class(**{**sizes, "kv_cache_dtype": kv_cache_dtype, **arguments})
        dtype = torch.float32 if kv_cache_dtype == "auto" else torch.uint8
        self.kv_cache = torch.zeros(2 * COLUMNS + 1, BLOCK, LATENT + ROTARY, dtype=dtype)
        self.layer = SimpleNamespace(impl=self.impl, _k_scale=torch.tensor([0.5]))
        self.config = SimpleNamespace(
            compilation_config=SimpleNamespace(static_forward_context={"layer": self.layer}),
            scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=1024),
            model_config=SimpleNamespace(max_model_len=1024, enforce_eager=True),
            parallel_config=SimpleNamespace(
                decode_context_parallel_size=1, prefill_context_parallel_size=prompts
            ),
            speculative_config=None,
        )
        self.builder = self.builder_class(
            SimpleNamespace(block_size=BLOCK), ["layer"], self.config, torch.device("cpu")
        )

    def step(
        self, query_lens: list[int], seq_lens: list[int], padding: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a batch as vLLM's `MLAAttention` does. Returns queries before absorption and output;
        `padding` requests without tokens follow, and as many tokens."""
        requests, tokens = len(query_lens) + padding, sum(query_lens) + padding
        starts = torch.tensor([0, *query_lens, *[0] * padding]).cumsum(0).int()
        lengths = torch.tensor([*seq_lens, *[0] * padding], dtype=torch.int32)
        table = torch.zeros(requests, COLUMNS, dtype=torch.int32)
        slots = torch.full((tokens,), -1)
        for request, (new, total) in enumerate(zip(query_lens, seq_lens, strict=True)):
            table[request] = torch.arange(COLUMNS) + 1 + COLUMNS * request
            position = torch.arange(total - new, total)
            first = starts[request]
            slots[first : first + new] = (
                table[request][position // BLOCK] * BLOCK + position % BLOCK
            )
        bounds = lengths + self.ahead * (starts.diff() <= self.builder.reorder_batch_threshold)
        batch = CommonAttentionMetadata(
            query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lengths,
            num_reqs=requests, num_actual_tokens=tokens, max_query_len=max(query_lens),
            max_seq_len=int(bounds.max()), block_table_tensor=table, slot_mapping=slots,
            causal=True, seq_lens_cpu_upper_bound=bounds,
        )  # fmt: skip
        metadata = self.builder.build(0, batch)
        self.before_attention(query_lens, seq_lens)
        query = torch.randn(tokens, HEADS, KEY + ROTARY)
        latents, rotary = torch.randn(tokens, LATENT), torch.randn(tokens, 1, ROTARY)
        scale, decodes = self.layer._k_scale, metadata.num_decode_tokens
        self.impl.do_kv_cache_update(
            latents, rotary, self.kv_cache, slots, self.impl.kv_cache_dtype, scale
        )
        output = torch.full((tokens, HEADS * VALUE), 7.0)
        if decodes < tokens:
            self.impl.forward_mha(
                query[decodes:], latents[decodes:], rotary[decodes:], self.kv_cache, metadata,
                scale, output=output[decodes:],
            )  # fmt: skip
        if decodes:
            heads = query[:decodes].transpose(0, 1)
            absorbed = torch.bmm(heads[..., :KEY], self.projection[:, :KEY]).transpose(0, 1)
            parts = absorbed, query[:decodes, :, KEY:]
            found, lse = self.impl.forward_mqa(parts, self.kv_cache, metadata, self.layer)
            assert lse is None
            values = torch.bmm(found.transpose(0, 1), self.projection[:, KEY:].transpose(1, 2))
            output[:decodes] = values.transpose(0, 1).reshape(decodes, -1)
        self.metadata, self.table = metadata, table
        return query, output.view(tokens, HEADS, VALUE)

    def expected(
        self, query: torch.Tensor, query_lens: list[int], seq_lens: list[int]
    ) -> torch.Tensor:
        memory = self.kv_cache
        if memory.dtype == torch.uint8:
            memory = memory.view(torch.float8_e4m3fn).float() * 0.5
        rows, start = [], 0
        for request, (new, total) in enumerate(zip(query_lens, seq_lens, strict=True)):
            position = torch.arange(total)
            held = memory[self.table[request].long()[position // BLOCK], position % BLOCK]
            both = torch.einsum("tl,hol->hto", held[:, :LATENT], self.projection)
            rotary = held[:, LATENT:].expand(HEADS, -1, -1)
            attended = torch.nn.functional.scaled_dot_product_attention(
                query[start : start + new].transpose(0, 1),
                torch.cat((both[..., :KEY], rotary), -1), both[..., KEY:],
                attn_mask=self.visible(start, new, total), scale=SCALE,
            )  # fmt: skip
            rows.append(attended.transpose(0, 1))
            start += new
        return torch.cat(rows)

    def before_attention(self, query_lens: list[int], seq_lens: list[int]) -> None:
        """What the model computes for the batch."""

    def visible(self, start: int, new: int, total: int) -> torch.Tensor:
        """Whether each of the new tokens from `start` on sees each key, `[new, total]`."""
        return torch.ones(new, total).tril(total - new).bool()


class SparseLayer(Layer):
    """A layer over keys that an indexer selects at random."""

    impl_class, builder_class = AttnlibSparseMLAImpl, AttnlibSparseMLAMetadataBuilder

    def __init__(self, kv_cache_dtype: str = "auto") -> None:
        self.indexer = SimpleNamespace(topk_indices_buffer=torch.zeros(0, TOPK).int())
        super().__init__(kv_cache_dtype, indexer=self.indexer)
        # vLLM gives the indexers of drafts the buffer of the target after the layers exist.
        self.indexer.topk_indices_buffer = torch.full((1024, TOPK), 77, dtype=torch.int32)

    def before_attention(self, query_lens: list[int], seq_lens: list[int]) -> None:
        rows = self.indexer.topk_indices_buffer
        rows[: sum(query_lens)] = -1
        row = 0
        for new, total in zip(query_lens, seq_lens, strict=True):
            for position in range(total - new, total):
                found = torch.randperm(position + 1)[:TOPK]
                rows[row, : len(found)] = found.int()
                row += 1

    def visible(self, start: int, new: int, total: int) -> torch.Tensor:
        rows = self.indexer.topk_indices_buffer[start : start + new].long()
        seen = torch.zeros(new, total + 1, dtype=torch.bool)
        return seen.scatter_(1, rows.where(rows >= 0, total), True)[:, :total]


TOPK = 12
LONG = EXPAND_FROM + 20
STEPS = [
    ([40, 9], [40, 9], (0, 2)),
    ([1, 1], [41, 10], (2, 0)),
    ([4, 4], [45, 14], (2, 0)),
    ([1, 20], [46, 34], (1, 1)),
    ([1, LONG], [47, 34 + LONG], (1, 1)),
    ([LONG, LONG], [47 + LONG, 34 + 2 * LONG], (0, 2)),
]
"""Prefill, decodes, several tokens per request (speculation), a mixed batch, and prefills that are
expanded over a context. With the number of decodes and prefills."""


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_steps(kv_cache_dtype: str) -> None:
    layer = Layer(kv_cache_dtype)
    for query_lens, seq_lens, parts in STEPS:
        query, output = layer.step(query_lens, seq_lens)
        assert (layer.metadata.num_decodes, layer.metadata.num_prefills) == parts
        expected = layer.expected(query, query_lens, seq_lens)
        torch.testing.assert_close(output, expected, atol=2e-5, rtol=2e-5)


def test_parts_of_prompts_are_no_decodes() -> None:
    """Ranks have the same decodes and other parts of prompts: a decode, the last token of a prompt,
    and a part without tokens."""
    layer = Layer(prompts=2)
    is_prefilling = torch.tensor([False, True, True])
    lengths = torch.tensor([20, 9, 4], dtype=torch.int32)
    starts = torch.tensor([0, 1, 2, 2], dtype=torch.int32)
    batch = CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lengths, num_reqs=3,
        num_actual_tokens=2, max_query_len=1, max_seq_len=20, causal=True,
        block_table_tensor=torch.zeros(3, COLUMNS, dtype=torch.int32),
        slot_mapping=torch.full((2,), -1), seq_lens_cpu_upper_bound=lengths,
        is_prefilling=is_prefilling,
    )  # fmt: skip
    found = layer.builder.build(0, batch)
    assert (found.num_decodes, found.num_decode_tokens, found.num_prefills) == (1, 1, 2)


def test_ranks_divide_prompts_or_the_cache() -> None:
    config = SimpleNamespace(parallel_config=SimpleNamespace(prefill_context_parallel_size=2))
    with (
        mock.patch.object(context_parallel, "get_current_vllm_config", lambda: config),
        pytest.raises(UnsupportedConfigError, match="set one of the two to 1"),
    ):
        context_parallel.refuse_prefill_groups()


def test_padded_batch() -> None:
    """Padding rows have no tokens and length 0: nothing is written, and their output is 0."""
    layer = Layer()
    layer.step([30, 9], [30, 9])
    held = layer.kv_cache.clone()
    query, output = layer.step([1, 1], [31, 10], padding=3)
    expected = layer.expected(query, [1, 1], [31, 10])
    torch.testing.assert_close(output[:2], expected, atol=2e-5, rtol=2e-5)
    assert not output[2:].any()
    assert (layer.kv_cache != held).any(-1).sum() == 2


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_selected_keys(kv_cache_dtype: str) -> None:
    layer = SparseLayer(kv_cache_dtype)
    for query_lens, seq_lens, _ in STEPS:
        query, output = layer.step(query_lens, seq_lens)
        assert layer.metadata.num_decode_tokens == sum(query_lens)
        expected = layer.expected(query, query_lens, seq_lens)
        torch.testing.assert_close(output, expected, atol=2e-5, rtol=2e-5)
    assert layer.impl.is_sparse and not layer.impl.supports_dense_mha_prefill


def test_a_layer_without_an_indexer_attends_to_the_keys_of_an_earlier_one() -> None:
    first = SparseLayer()
    sizes = {"indexer": None, "topk_indices_buffer": torch.zeros(0, TOPK).int()}
    later = Layer.__new__(SparseLayer)
    Layer.__init__(later, **sizes)
    later.indexer, later.impl.topk_indices_buffer = first.indexer, first.impl.topk_indices_buffer
    query, output = later.step([40, 9], [40, 9])
    torch.testing.assert_close(output, later.expected(query, [40, 9], [40, 9]))
    with pytest.raises(UnsupportedConfigError, match="neither an indexer"):
        Layer.__init__(later, indexer=None)


def test_long_prefills_are_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, calls = Layer(), []
    layer.step([40, 9], [40, 9])
    monkeypatch.setattr(latent_attention, "attend_expanded", lambda *args: calls.append(args))
    layer.step([40, 9], [80, 18])
    assert not calls
    layer.step([1, LONG], [81, 18 + LONG])
    assert len(calls) == 1


@pytest.mark.parametrize("query_lens", [[40, 9], [LONG, 9]], ids=["absorbed", "expanded"])
def test_prefills_write_the_output_of_vllm(
    query_lens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A result of their own would be copied in every layer."""
    layer, found = Layer(), []
    kind = latent_attention.LatentAttention
    forward = kind.forward

    def keep(self: Any, *args: Any, output: torch.Tensor) -> torch.Tensor:
        found.append(output)
        return forward(self, *args, output=output)

    monkeypatch.setattr(kind, "forward", keep)
    _, output = layer.step(query_lens, query_lens)
    assert [one.data_ptr() for one in found] == [output.data_ptr()]


def test_both_parts_of_a_batch_keep_their_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    """A builder may use the same memory for each batch, so that no builder makes both parts."""
    layer, made = Layer(), []
    layer.step([40, 9], [40, 9])
    kind = type(layer.builder.decodes)
    build = kind.build
    monkeypatch.setattr(
        kind, "build", lambda self, *args: (made.append(self), build(self, *args))[1]
    )
    layer.step([1, 20], [41, 29])
    assert len(made) == 2
    assert made[0] is not made[1]


def test_weights_are_not_copied() -> None:
    layer = Layer()
    layer.step([40], [40])
    assert layer.impl._prefills.projection.data_ptr() == layer.projection.data_ptr()


def test_arguments_without_implementation_are_refused() -> None:
    for name in ("indexer", "topk_indices_buffer", "q_pad_num_heads", "sliding_window"):
        with pytest.raises(UnsupportedConfigError, match=name):
            Layer(**{name: 3})


def test_the_class_follows_the_model() -> None:
    config = VllmConfig()
    assert registered.Backend is AttnlibBackend
    sizes = SimpleNamespace(qk_rope_head_dim=ROTARY)
    config.model_config = SimpleNamespace(use_mla=True, hf_text_config=sizes)
    with set_current_vllm_config(config):
        assert registered.Backend is AttnlibMLABackend
        sizes.index_topk = 2048
        assert registered.Backend is AttnlibSparseMLABackend
    with pytest.raises(AttributeError):
        registered.Other  # noqa: B018


def ask(parallel: int = 1, **changes: Any) -> list[str]:
    """The reasons for a configuration that is supported but for the changes."""
    backend = changes.pop("backend", AttnlibMLABackend)
    question = dict(
        head_size=LATENT + ROTARY, dtype=torch.float32, kv_cache_dtype="auto", block_size=None,
        use_mla=True, has_sink=False, use_sparse=False, use_mm_prefix=False,
        use_per_head_quant_scales=False, device_capability=None, attn_type="decoder",
    )  # fmt: skip
    config = VllmConfig()
    sizes = SimpleNamespace(qk_rope_head_dim=ROTARY, index_topk=2048)
    config.model_config = SimpleNamespace(use_mla=True, hf_text_config=sizes)
    config.parallel_config.decode_context_parallel_size = parallel
    with set_current_vllm_config(config):
        return backend.validate_configuration(**{**question, **changes})


def test_refusals() -> None:
    assert ask() == []
    assert ask(kv_cache_dtype="fp8") == []
    assert ask(use_mla=False)[0] == "non-MLA not supported"
    assert "sparse not supported" in ask(use_sparse=True)
    assert ask(use_sparse=True, backend=AttnlibSparseMLABackend) == []
    assert "non-sparse not supported" in ask(backend=AttnlibSparseMLABackend)
    assert "kv_cache_dtype not supported" in ask(kv_cache_dtype="fp8_ds_mla")
    assert ask(parallel=2) == []
    assert AttnlibMLABackend.supports_dcp() and AttnlibMLABackend.supports_pcp()
    assert not AttnlibSparseMLABackend.supports_pcp()
    assert ask(use_kv_connector=True) == []
    saved = ask(use_kv_connector=True, use_sparse=True, backend=AttnlibSparseMLABackend)
    assert saved == ["KV connector not supported"]
    sparse = ask(parallel=2, use_sparse=True, backend=AttnlibSparseMLABackend)
    assert sparse == ["attnlib: no decode context parallelism over selected keys"]


def test_prefills_are_not_captured() -> None:
    layer = Layer()
    level = AttnlibMLAMetadataBuilder.get_cudagraph_support(layer.config, None)
    assert level is AttentionCGSupport.NEVER  # of the torch backend
