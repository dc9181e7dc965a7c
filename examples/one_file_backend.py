"""The smallest attention backend: plain PyTorch, one request at a time."""

import torch
from torch.nn.functional import scaled_dot_product_attention

import attnlib


class LoopImpl(attnlib.AttentionImpl):
    def forward(self, query, cache, metadata, output, lse=None):
        output.zero_()  # rows past the last request must be 0 (M6)
        starts = metadata.query_start_loc_cpu.tolist()
        for request, seq_len in enumerate(metadata.seq_lens_cpu.tolist()):
            q = query[starts[request] : starts[request + 1]]
            position = torch.arange(seq_len, device=q.device)
            blocks = metadata.block_table[request, position // cache.block_size].long()
            index = (blocks, position % cache.block_size)  # page, slot in page
            k, v = cache.key_cache[index], cache.value_cache[index]
            own = torch.arange(seq_len - len(q), seq_len, device=q.device)[:, None]  # M1
            visible = position <= own
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))  # heads first
            out = scaled_dot_product_attention(q, k, v, visible, scale=self.scale, enable_gqa=True)
            out = out.transpose(0, 1).masked_fill((own < 0)[:, None], 0)  # no visible key (M5)
            output[starts[request] : starts[request + 1]] = out


class OneFileBackend(attnlib.AttentionBackend):
    capabilities = attnlib.Capabilities(
        devices=("cpu", "cuda"),
        dtypes=(torch.float32, torch.bfloat16, torch.float16),
        head_sizes=attnlib.Sizes(1),
        group_sizes=attnlib.Sizes(1),
        block_sizes=attnlib.Sizes(1),
        kv_cache_layouts=("NHD", "ANY"),
        attn_types=(attnlib.AttentionType.DECODER,),
        mask_kinds=(attnlib.MaskKind.CAUSAL,),
    )
    get_name = staticmethod(lambda: "one_file")
    get_impl_cls = staticmethod(lambda: LoopImpl)
