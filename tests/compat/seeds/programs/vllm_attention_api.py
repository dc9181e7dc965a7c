"""Seed 2: a v0 backend with metadata, builder, state and impl of its own runs two layers.

The program prefills two prompts, decodes two tokens of each, and compares with dense attention.
"""

from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from attnlib.compat.vllm import (
    Attention,
    AttentionBackend,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionState,
    AttentionType,
    get_attn_backend,
    get_forward_context,
    set_forward_context,
)

HEADS, KV_HEADS, SIZE, BLOCK, BLOCKS = 4, 2, 16, 4, 16
SCALE = SIZE**-0.5


@dataclass
class PagedBatch(AttentionMetadata):
    """One batch; fields without defaults follow those of the base class."""

    seq_lens: list[int]
    query_lens: list[int]
    block_tables: torch.Tensor

    @property
    def prefill_metadata(self):
        return self if self.num_prefills else None

    @property
    def decode_metadata(self):
        return None if self.num_prefills else self


class PagedImpl:
    """Writes keys and values to its part of the cache, then gathers and attends."""

    def __init__(
        self, num_heads, head_size, scale, num_kv_heads=None, alibi_slopes=None,
        sliding_window=None, kv_cache_dtype="auto", logits_soft_cap=None,
        attn_type=AttentionType.DECODER, kv_sharing_target_layer_name=None, tag="",
    ):  # fmt: skip
        assert alibi_slopes is sliding_window is logits_soft_cap is None
        assert (kv_cache_dtype, f"{attn_type}") == ("auto", "decoder")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads, self.tag = num_kv_heads, tag

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output):
        batch = get_forward_context().attn_metadata
        assert attn_metadata is batch and type(batch) is PagedBackend.get_metadata_cls()
        assert (batch.prefill_metadata is None) != (batch.decode_metadata is None)
        keys, values = (x.view(BLOCKS * BLOCK, self.num_kv_heads, -1) for x in kv_cache)
        keys[batch.slot_mapping] = key.view(-1, self.num_kv_heads, self.head_size)
        values[batch.slot_mapping] = value.view(-1, self.num_kv_heads, self.head_size)
        outputs = []
        queries = query.view(-1, self.num_heads, self.head_size).split(batch.query_lens)
        for q, length, table in zip(queries, batch.seq_lens, batch.block_tables, strict=True):
            slots = (table[:, None] * BLOCK + torch.arange(BLOCK)).flatten()[:length]
            outputs.append(causal(q, keys[slots], values[slots], self.scale))
        return output.copy_(torch.cat(outputs))


def causal(q, k, v, scale):
    """Attention of one sequence whose last tokens are those of `q`, `[tokens, heads, size]`."""
    mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
    heads = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = scaled_dot_product_attention(*heads, attn_mask=mask, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


class PagedBuilder(AttentionMetadataBuilder[PagedBatch]):
    def __init__(self, input_builder):
        self.input_builder = input_builder

    def prepare(self):
        self.tables = []

    def build(self, seq_lens, query_lens, cuda_graph_pad_size, batch_size):
        for data in self.input_builder.inter_data_list:
            self.tables += data.block_tables.values()
        tables, slots = torch.tensor(self.tables), []
        for table, length, new in zip(tables, seq_lens, query_lens, strict=True):
            positions = torch.arange(length - new, length)
            slots.append(table[positions // BLOCK] * BLOCK + positions % BLOCK)
        decodes = max(query_lens) == 1
        counts = (0, 0, len(seq_lens)) if decodes else (len(seq_lens), sum(query_lens), 0)
        return self.input_builder.runner.attn_backend.make_metadata(
            *counts, torch.cat(slots), None, False, seq_lens, query_lens, tables
        )


class PagedState(AttentionState[PagedBatch]):
    """Counts the batches that it has seen."""

    def __init__(self, runner):
        self.runner, self.begun = runner, 0

    def begin_forward(self, model_input):
        self.begun += 1

    def get_graph_input_buffers(self, attn_metadata, is_encoder_decoder_model=False):
        return attn_metadata.asdict_zerocopy({"multi_modal_placeholder_index_maps"})

    def graph_capture_get_metadata_for_batch(self, batch_size, is_encoder_decoder_model=False):
        zeros = torch.zeros(batch_size, dtype=torch.long)
        lens, tables = [1] * batch_size, zeros[:, None]
        return PagedBatch(0, 0, batch_size, zeros, None, False, lens, lens, tables)

    def graph_clone(self, batch_size):
        return type(self)(self.runner)


class PagedBackend(AttentionBackend):
    @staticmethod
    def get_name():
        return "PAGED"

    @staticmethod
    def get_impl_cls():
        return PagedImpl

    @staticmethod
    def get_metadata_cls():
        return PagedBatch

    @staticmethod
    def get_builder_cls():
        return PagedBuilder

    @staticmethod
    def get_state_cls():
        return PagedState

    @staticmethod
    def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size):
        return (2, num_blocks, block_size * num_kv_heads * head_size)

    @staticmethod
    def swap_blocks(src_kv_cache, dst_kv_cache, src_to_dst):
        dst_kv_cache[:, src_to_dst[:, 1]] = src_kv_cache[:, src_to_dst[:, 0]]

    @staticmethod
    def copy_blocks(kv_caches, src_to_dists):
        for cache in kv_caches:
            cache[:, src_to_dists[:, 1]] = cache[:, src_to_dists[:, 0]]


class Model(torch.nn.Module):
    """Two layers of attention over projections of the tokens."""

    def __init__(self):
        super().__init__()
        width = (HEADS + 2 * KV_HEADS) * SIZE
        self.projections = torch.nn.ModuleList(
            torch.nn.Linear(HEADS * SIZE, width, bias=False) for _ in range(2)
        )
        self.layers = torch.nn.ModuleList(
            Attention(
                HEADS, SIZE, SCALE, KV_HEADS, prefix=f"layers.{number}", attn_backend=PagedBackend,
                tag="passed to the impl",
            )
            for number in range(2)
        )  # fmt: skip

    def forward(self, hidden, dense=None):
        for number, (project, layer) in enumerate(zip(self.projections, self.layers, strict=True)):
            sizes = (HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE)
            q, k, v = project(hidden).split(sizes, dim=-1)
            hidden = hidden + (layer(q, k, v) if dense is None else dense(q, k, v, number))
        return hidden


def dense_layer(q, k, v, number):
    heads = (x.unflatten(1, (-1, SIZE)) for x in (q, k, v))
    return causal(*heads, SCALE).flatten(1)


@torch.inference_mode()
def main() -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Model()
    for layer in model.layers:
        assert layer.get_attn_backend() is PagedBackend and layer.impl.tag == "passed to the impl"
        shape = PagedBackend.get_kv_cache_shape(BLOCKS, BLOCK, KV_HEADS, SIZE)
        layer.kv_cache = [torch.zeros(shape)]
    runner = SimpleNamespace(attn_backend=PagedBackend)
    runner.attn_state = PagedBackend.get_state_cls()(runner)
    prompts, tables = (
        [torch.randn(5, HEADS * SIZE), torch.randn(7, HEADS * SIZE)],
        [[3, 9, 2], [6, 1, 4]],
    )
    model_input, outputs = SimpleNamespace(attn_metadata=None), []
    for step in range(3):
        new = [p if step == 0 else p[-1:] for p in prompts]
        groups = [SimpleNamespace(block_tables={i: table}) for i, table in enumerate(tables)]
        builder = PagedBackend.get_builder_cls()(
            SimpleNamespace(runner=runner, inter_data_list=groups)
        )
        builder.prepare()
        lens = [len(p) for p in prompts], [len(x) for x in new]
        model_input.attn_metadata = builder.build(*lens, -1, len(prompts))
        runner.attn_state.begin_forward(model_input)
        with set_forward_context(model_input.attn_metadata):
            output = model(torch.cat(new))
        wanted = [model(p, dense_layer)[-len(x) :] for p, x in zip(prompts, new, strict=True)]
        torch.testing.assert_close(output, torch.cat(wanted))
        outputs.append(output)
        prompts = [
            torch.cat([p, o[-1:]])
            for p, o in zip(prompts, output.split(lens[1]), strict=True)
        ]  # fmt: skip
    assert runner.attn_state.graph_clone(2).begun == 0 and runner.attn_state.begun == 3
    captured = runner.attn_state.graph_capture_get_metadata_for_batch(2)
    names = {field.name for field in fields(captured)} - {"multi_modal_placeholder_index_maps"}
    assert set(runner.attn_state.get_graph_input_buffers(captured)) == names
    cache: Any = model.layers[0].kv_cache[0]
    PagedBackend.copy_blocks([cache], torch.tensor([[3, 12]]))
    PagedBackend.swap_blocks(cache, cache, torch.tensor([[12, 13]]))
    assert torch.equal(cache[:, 13], cache[:, 3]) and cache[:, 13].any()
    assert PagedBackend.full_cls_name() == (__name__, "PagedBackend")
    assert issubclass(get_attn_backend(64, torch.float32, None, 16), AttentionBackend)
    return [*outputs, cache]


result = main()
print(
    f"{len(result) - 1} steps of {[len(output) for output in result[:-1]]} tokens are as dense ones"
)
