"""The smallest attention backend: plain PyTorch, one request at a time."""

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

import attnlib


@dataclass(kw_only=True)
class LoopMetadata(attnlib.AttentionMetadata):
    batch: attnlib.CommonAttentionMetadata


class LoopBuilder(attnlib.AttentionMetadataBuilder[LoopMetadata]):
    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        slots = common_attn_metadata.slot_mapping
        return LoopMetadata(slot_mapping=slots, batch=common_attn_metadata)


class LoopImpl(attnlib.AttentionImpl):
    def forward(self, query, cache, metadata, output, lse=None):
        output.zero_()  # padding rows (M6)
        starts = metadata.batch.query_start_loc_cpu.tolist()
        for request, seq_len in enumerate(metadata.batch.seq_lens_cpu.tolist()):
            q = query[starts[request] : starts[request + 1]]
            position = torch.arange(seq_len, device=q.device)
            blocks = metadata.batch.block_table_tensor[request, position // cache.block_size]
            index = blocks.long(), position % cache.block_size
            visible = position <= position.new_tensor(range(seq_len - len(q), seq_len))[:, None]
            q, k, v = (
                x.transpose(0, 1) for x in (q, cache.key_cache[index], cache.value_cache[index])
            )
            out = scaled_dot_product_attention(q, k, v, visible, scale=self.scale, enable_gqa=True)
            out = out.transpose(0, 1).masked_fill(~visible.any(dim=1)[:, None, None], 0)  # M5
            output[starts[request] : starts[request + 1]] = out


class OneFileBackend(attnlib.AttentionBackend):
    capabilities = attnlib.Capabilities(
        devices=("cpu", "cuda"),
        dtypes=(torch.float32, torch.bfloat16, torch.float16),
        head_sizes=attnlib.capabilities.Sizes(1),
        group_sizes=attnlib.capabilities.Sizes(1),
        block_sizes=attnlib.capabilities.Sizes(1),
        kv_cache_layouts=("NHD", "ANY"),
        attn_types=(attnlib.AttentionType.DECODER,),
        mask_kinds=(attnlib.MaskKind.CAUSAL,),
    )
    get_name = staticmethod(lambda: "one_file")
    get_impl_cls = staticmethod(lambda: LoopImpl)
    get_builder_cls = staticmethod(lambda: LoopBuilder)
