"""Seed 4: a v1 builder over persistent buffers drives an engine of two layers.

The program reorders each batch, builds its metadata, splits it into decodes and prefills, runs
them, and compares with dense attention; one layer attends within chunks by virtual batches.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from attnlib.compat.vllm.v1.attention.backends.utils import (
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    PerLayerParameters,
    get_kv_cache_layout,
    get_per_layer_parameters,
    infer_global_hyperparameters,
    make_local_attention_virtual_batches,
    reorder_batch_to_split_decodes_and_prefills,
    set_kv_cache_layout,
    split_decodes_and_prefills,
)

HEADS, KV_HEADS, SIZE, BLOCK, CHUNK, MOST = 4, 2, 16, 4, 8, 6
SCALE = SIZE**-0.5


@dataclass
class Plan:
    """Metadata of the program: no class of a library."""

    common: CommonAttentionMetadata
    decodes: int
    decode_tokens: int
    prefills: int


class PlanBuilder(AttentionMetadataBuilder[Plan]):
    full_cudagraph_supported = True

    def __init__(self, kv_cache_spec, vllm_config, device):
        super().__init__(kv_cache_spec, vllm_config, device)
        self.shared = infer_global_hyperparameters(get_per_layer_parameters(vllm_config, Impl))

    def build(self, *, common_prefix_len, common_attn_metadata, fast_build=False):
        decodes, prefills, tokens, _ = split_decodes_and_prefills(common_attn_metadata)
        return Plan(common_attn_metadata, decodes, tokens, prefills)

    def reorder_batch(self, input_batch, scheduler_output):
        return reorder_batch_to_split_decodes_and_prefills(input_batch, scheduler_output)


class Impl:
    sliding_window = None
    scale = SCALE

    def __init__(self, chunk: int) -> None:
        self.chunk, self.kv_cache = chunk, torch.zeros(2, 32 * BLOCK, KV_HEADS, SIZE)

    def forward(self, q, k, v, plan):
        common, tokens = plan.common, plan.common.num_actual_tokens
        written = common.slot_mapping >= 0
        assert written[:tokens].all() and not written[tokens:].any()
        self.kv_cache[:, common.slot_mapping[:tokens].long()] = torch.stack([k, v])
        starts, lens = (x.numpy() for x in (common.query_start_loc_cpu, common.seq_lens_cpu))
        starts, lens = starts[: common.num_reqs + 1], lens[: common.num_reqs]
        table = common.block_table_tensor[: common.num_reqs]
        if self.chunk:
            queries, starts, lens, table = make_local_attention_virtual_batches(
                self.chunk, starts, lens, table, BLOCK
            )
            assert queries.tolist() == np.diff(starts).tolist()
        rows = zip(starts, starts[1:], lens, table.long(), strict=False)
        return torch.cat([self.attend(q[a:b], blocks, n) for a, b, n, blocks in rows])

    def attend(self, q, blocks, length):
        slots = (blocks[:, None] * BLOCK + torch.arange(BLOCK)).flatten()[:length]
        return dense(q, *self.kv_cache[:, slots])


def dense(q, k, v, chunk=0):
    """Attention of the last tokens of one sequence, `[tokens, heads, size]`."""
    rows = torch.arange(len(k) - len(q), len(k))[:, None]
    columns = torch.arange(len(k))[None]
    mask = columns <= rows
    if chunk:
        mask &= columns // chunk == rows // chunk
    heads = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = scaled_dot_product_attention(*heads, attn_mask=mask, scale=SCALE, enable_gqa=True)
    return out[0].transpose(0, 1)


class Batch:
    """The runner's batch: one row per request, in persistent buffers."""

    def __init__(self, tables) -> None:
        self.req_ids, self.tables = list(tables), dict(tables)
        self.computed = dict.fromkeys(tables, 0)
        self.starts = torch.zeros(MOST + 1, dtype=torch.int64)
        self.lens = torch.zeros(MOST, dtype=torch.int32)
        self.block_table = torch.zeros(MOST, 8, dtype=torch.int32)
        self.slots = torch.zeros(64, dtype=torch.int32)

    def swap_states(self, one, other) -> None:
        ids = self.req_ids
        ids[one], ids[other] = ids[other], ids[one]

    def common(self, scheduled) -> CommonAttentionMetadata:
        self.slots.fill_(99)
        token = 0
        for row, name in enumerate(self.req_ids):
            positions = torch.arange(scheduled[name]) + self.computed[name]
            table = torch.tensor(self.tables[name])
            slots = table[positions // BLOCK] * BLOCK + positions % BLOCK
            self.slots[token : token + len(slots)] = slots
            token += len(slots)
            self.starts[row + 1 :] = token
            self.lens[row] = self.computed[name] + len(slots)
            self.block_table[row, : len(table)] = table
        reqs = len(self.req_ids)
        computed = torch.tensor([self.computed[name] for name in self.req_ids])
        longest = max(scheduled.values())
        return CommonAttentionMetadata(
            self.starts[: reqs + 1], self.starts[: reqs + 1], self.lens, self.lens, computed,
            reqs, token, longest, self.block_table, self.slots,
        )  # fmt: skip


def main() -> list[torch.Tensor]:
    torch.manual_seed(0)
    layers = {"full": SimpleNamespace(impl=Impl(0)), "chunked": SimpleNamespace(impl=Impl(CHUNK))}
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    kv_cache_spec = SimpleNamespace(block_size=BLOCK, num_kv_heads=KV_HEADS, head_size=SIZE)
    builder = PlanBuilder(kv_cache_spec, config, torch.device("cpu"))
    assert builder.kv_cache_spec is kv_cache_spec
    assert builder.shared == PerLayerParameters(-1, None, SCALE)

    tables = {"a": range(8), "b": range(8, 16), "c": range(16, 24)}
    lengths = {"a": 19, "b": 14, "c": 11}
    batch = Batch({name: list(table) for name, table in tables.items()})
    heads = (HEADS, KV_HEADS, KV_HEADS)
    data = {n: [torch.randn(length, h, SIZE) for h in heads] for n, length in lengths.items()}
    steps = [{"a": 12, "b": 3, "c": 9}, {"a": 6, "b": 1, "c": 1}, {"a": 1, "b": 10, "c": 1}]
    reordered, outputs = [], []
    for scheduled in steps:
        scheduler_output = SimpleNamespace(num_scheduled_tokens=scheduled)
        reordered.append(builder.reorder_batch(batch, scheduler_output))
        common = batch.common(scheduled)
        plan = builder.build(common_prefix_len=0, common_attn_metadata=common)
        assert common.slot_mapping is batch.slots and plan.common is common
        assert plan.decodes + plan.prefills == 3
        assert plan.decodes == sum(tokens == 1 for tokens in scheduled.values())
        spans = {n: slice(batch.computed[n], batch.computed[n] + scheduled[n]) for n in scheduled}
        q, k, v = (torch.cat([data[n][i][spans[n]] for n in batch.req_ids]) for i in range(3))
        for name, layer in layers.items():
            wanted = [
                dense(
                    data[n][0][spans[n]], *(x[: spans[n].stop] for x in data[n][1:]),
                    CHUNK if name == "chunked" else 0,
                )
                for n in batch.req_ids
            ]  # fmt: skip
            outputs.append(layer.impl.forward(q, k, v, plan))
            torch.testing.assert_close(outputs[-1], torch.cat(wanted))
        for name in scheduled:
            batch.computed[name] += scheduled[name]
    assert reordered == [False, True, True]
    captured = builder.build_for_cudagraph_capture(common)
    assert captured.common is common and not builder.can_run_in_cudagraph(common)
    assert not builder.use_cascade_attention(0, np.array([1]), 4, 2, False, False, 132)

    set_kv_cache_layout(cache_layout="HND")
    get_kv_cache_layout.cache_clear()
    assert get_kv_cache_layout() == "HND"
    set_kv_cache_layout(cache_layout=None)
    get_kv_cache_layout.cache_clear()
    assert get_kv_cache_layout() == "NHD"
    for wrong in (
        lambda: infer_global_hyperparameters({}),
        lambda: get_per_layer_parameters(config, dict),
        lambda: make_local_attention_virtual_batches(
            5, *np.ones((2, 2), dtype=np.int32), batch.block_table, BLOCK
        ),
    ):
        try:
            wrong()
        except AssertionError:
            continue
        raise RuntimeError("no AssertionError")
    return outputs


result = main()
print(f"{len(result)} outputs of two layers are as dense ones")
