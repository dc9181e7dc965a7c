"""attnlib in SGLang's own plug-in framework and behind its real classes; run by `test_sglang.py`.

SGLang's engine does not start on a CPU. Its base class of backends, pools, layers and batches work
there.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import torch

if torch.version.cuda is None:  # the compiled operations of torchvision need CUDA
    for _name in ("nms", "qnms"):
        torch.library.define(
            f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        )

HEADS, KV_HEADS, SIZE, PAGE, DRAFTED = 4, 2, 32, 16, 4


def check_registration() -> Any:
    """The backend class that SGLang's registry gives for a runner."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.plugins import load_plugins_by_group

    register, distribution = load_plugins_by_group("sglang.srt.plugins")["attnlib"]
    assert distribution == "attnlib"
    lists = (
        choices.ATTENTION_BACKEND_CHOICES,
        choices.DRAFT_ATTENTION_BACKEND_CHOICES,
        choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
        choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND,
    )
    assert not any("attnlib" in found for found in lists)
    register()
    assert all("attnlib" in found for found in lists)
    return ATTENTION_BACKENDS["attnlib"]


def check_methods(ours: type, base: type) -> None:
    """Every public method of the adapter is one of SGLang's, with the same leading parameters."""
    public = {name: item for name, item in vars(ours).items() if not name.startswith("_")}
    assert len(public) == 9 and all(hasattr(base, name) for name in public), public
    for name, item in public.items():
        if not callable(item) or name == "forward_decode":  # takes any arguments
            continue
        mine, theirs = (list(inspect.signature(f).parameters) for f in (item, getattr(base, name)))
        theirs = [parameter for parameter in theirs if parameter != "kwargs"]
        assert mine[: len(theirs)] == theirs, (name, mine, theirs)


class Engine:
    """SGLang's pools with two requests on pages in a random order, and its layer."""

    def __init__(self, create: Any) -> None:
        from sglang.srt.layers.radix_attention import RadixAttention
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool

        torch.manual_seed(0)
        self.layer = RadixAttention(HEADS, SIZE, SIZE**-0.5, KV_HEADS, layer_id=1)
        self.pool = MHATokenToKVPool(
            512, PAGE, torch.float32, KV_HEADS, SIZE, 2, "cpu", False, enable_alt_stream=False
        )
        requests = ReqToTokenPool(4, 256, "cpu", False)
        pages = torch.randperm(512 // PAGE) + 1  # page 0 is padding
        slots = (pages[:, None] * PAGE + torch.arange(PAGE)).flatten()
        self.table = requests.req_to_token
        self.table[1], self.table[2] = slots[:256], slots[256:]
        self.backend = create(
            SimpleNamespace(
                token_to_kv_pool=self.pool, req_to_token_pool=requests, page_size=PAGE,
                model_config=SimpleNamespace(
                    context_len=256, is_encoder_decoder=False, head_dim=SIZE
                ),
                server_args=SimpleNamespace(
                    speculative_eagle_topk=2, speculative_num_draft_tokens=DRAFTED, dcp_size=1
                ),
                dtype=torch.float32, device="cpu", use_mla_backend=False,
            )
        )  # fmt: skip
        self.backend.init_cuda_graph_state(max_bs=4, max_num_tokens=4 * DRAFTED)

    def step(self, mode: Any, new: list[int], total: list[int], tree: Any = None) -> None:
        """Run a batch by SGLang's own `forward`, and compare with torch's attention."""
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch

        lengths = [t - n for n, t in zip(new, total, strict=True)] if tree is not None else total
        held = [self.table[row, :t].long() for row, t in zip((1, 2), total, strict=True)]
        batch = ForwardBatch(
            forward_mode=mode, batch_size=2, input_ids=torch.zeros(sum(new), dtype=torch.int64),
            req_pool_indices=torch.tensor([1, 2]), seq_lens=torch.tensor(lengths),
            seq_lens_cpu=torch.tensor(lengths), seq_lens_sum=sum(lengths),
            out_cache_loc=torch.cat([s[t - n :] for s, n, t in zip(held, new, total, strict=True)]),
        )  # fmt: skip
        if mode.is_extend() and tree is None:
            batch.extend_seq_lens, batch.extend_seq_lens_cpu = torch.tensor(new), new
        if tree is not None:
            verify = self.backend.verify_mask
            verify.buffer[: tree.numel()] = tree.flatten()
            batch.spec_info = SimpleNamespace(draft_token_num=DRAFTED, custom_mask=verify.buffer)
        q, k, v = (torch.randn(sum(new), heads, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS))
        self.backend.init_forward_metadata(batch)
        out = self.backend.forward(q.flatten(1), k, v, self.layer, batch).view(-1, HEADS, SIZE)
        keys, values = self.pool.get_kv_buffer(1)
        for request, slots in enumerate(held):
            n, t, first = new[request], total[request], sum(new[:request])
            visible = torch.ones(n, t).tril(t - n).bool()
            if tree is not None:
                visible[:, t - n :] = tree[request]
            expected = torch.nn.functional.scaled_dot_product_attention(
                q[first : first + n].transpose(0, 1), keys[slots].transpose(0, 1),
                values[slots].transpose(0, 1), attn_mask=visible, enable_gqa=True,
            )  # fmt: skip
            torch.testing.assert_close(out[first : first + n], expected.transpose(0, 1))


def main() -> None:
    create = check_registration()
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    engine = Engine(create)
    assert isinstance(engine.backend, AttentionBackend)
    check_methods(type(engine.backend), AttentionBackend)
    engine.step(ForwardMode.EXTEND, [40, 25], [40, 25])
    engine.step(ForwardMode.EXTEND, [7, 1], [47, 26])
    engine.step(ForwardMode.DECODE, [1, 1], [48, 27])
    tree = torch.eye(DRAFTED).bool().repeat(2, 1, 1)
    tree[:, 1:, 0] = tree[:, 3, 1] = True
    engine.step(ForwardMode.TARGET_VERIFY, [4, 4], [52, 31], tree)


if __name__ == "__main__":
    main()
