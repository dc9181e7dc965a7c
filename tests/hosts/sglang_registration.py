"""attnlib in SGLang's own plug-in framework and behind its real classes; run by `test_sglang.py`.

SGLang's engine does not start on a CPU. Its base class of backends, pools, layers and batches work
there.
"""

from __future__ import annotations

import inspect
import sys
from types import SimpleNamespace
from typing import Any

import torch

if torch.version.cuda is None:  # the compiled operations of torchvision need CUDA
    for _name in ("nms", "qnms"):
        torch.library.define(
            f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        )

HEADS, KV_HEADS, SIZE, PAGE, DRAFTED, CHUNK = 4, 2, 32, 16, 4, 13


IS_OLD = "--old" in sys.argv
"""SGLang 0.5.17, which asks less. Its trees have masks over all keys."""

if IS_OLD:  # names that transformers has of its own by now
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    _take = CONFIG_MAPPING.register
    CONFIG_MAPPING.register = lambda key, value, exist_ok=False: _take(key, value, exist_ok=True)


def check_registration() -> Any:
    """The backend class that SGLang's registry gives for a runner."""
    try:
        from sglang.srt.arg_groups import choices
    except ImportError:  # 0.5.17
        from sglang.srt import server_args as choices  # type: ignore[no-redef]
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.plugins import load_plugins_by_group

    register, distribution = load_plugins_by_group("sglang.srt.plugins")["attnlib"]
    assert distribution == "attnlib"
    names = [
        "ATTENTION_BACKEND_CHOICES", "DETERMINISTIC_ATTENTION_BACKEND_CHOICES",
        "RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND",
    ]  # fmt: skip
    if not IS_OLD:
        names.append("DRAFT_ATTENTION_BACKEND_CHOICES")
    lists = [getattr(choices, name) for name in names]
    assert not any("attnlib" in found for found in lists)
    register()
    assert all("attnlib" in found for found in lists)
    return ATTENTION_BACKENDS["attnlib"]


def check_model_lists() -> None:
    """The checks of models that are served see `triton`, those of others attnlib, which they
    refuse."""
    from sglang.srt.arg_groups import model_hook
    from sglang.srt.plugins.hook_registry import HookRegistry

    HookRegistry.apply_hooks()
    for architecture, seen in {
        "GptOssForCausalLM": "triton",
        "Llama4ForCausalLM": "triton",
        "Exaone4ForCausalLM": "triton",
        "Gemma4ForCausalLM": "attnlib",
    }.items():
        model = SimpleNamespace(hf_config=SimpleNamespace(architectures=[architecture]))
        named = dict.fromkeys(("prefill_attention_backend", "decode_attention_backend"))
        record = SimpleNamespace(attention_backend="attnlib", **named, _model_config=model)
        view = model_hook.resolved_view(record)
        assert model_hook.attention_backends_of(view) == (seen, seen), architecture
        assert view.attention_backend == seen and record.attention_backend == "attnlib"
        record.attention_backend = "fa3"
        assert model_hook.resolved_view(record).attention_backend == "fa3"


def check_draft_steps(create: Any) -> None:
    """SGLang's factory makes attnlib's backends of EAGLE drafts, whose steps see the keys of the
    steps before: eagerly, captured, and replayed with other lengths."""
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
    from sglang.srt.speculative import draft_utils
    from sglang.srt.speculative.eagle_utils import per_step_draft_out_cache_loc

    engine, steps = Engine(create), 4
    run(engine)
    runner = engine.runner
    runner.draft_attention_backend = "attnlib"
    runner.model_config.hf_config = SimpleNamespace(architectures=[])
    runner.model_config.hf_text_config = None
    draft_utils.attention_backends = lambda: ("attnlib", "attnlib")  # of the server's arguments
    draft_utils.get_spec = lambda: SimpleNamespace(speculative_attention_mode="prefill")
    factory = draft_utils.DraftBackendFactory(runner, topk=1, speculative_num_steps=steps)
    assert type(factory.create_draft_extend_backend()) is type(engine.backend)
    drafts = factory.create_decode_backend()
    assert len(drafts.attn_backends) == steps - 1
    drafts.init_cuda_graph_state(max_bs=2, max_num_tokens=2)
    captured: list[Any] = []
    for lengths, how in (([48, 27], "eager"), ([50, 30], "capture"), ([52, 29], "replay")):
        held = [
            engine.table[row, : n + steps].long() for row, n in zip((1, 2), lengths, strict=True)
        ]
        slots = torch.cat([s[n:] for s, n in zip(held, lengths, strict=True)])
        batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE, batch_size=2, input_ids=torch.zeros(2).long(),
            req_pool_indices=torch.tensor([1, 2]), seq_lens=torch.tensor(lengths),
            seq_lens_cpu=torch.tensor(lengths), seq_lens_sum=sum(lengths), out_cache_loc=slots,
        )  # fmt: skip
        if how == "eager":
            drafts.init_forward_metadata(batch)
        else:
            drafts.init_forward_metadata_out_graph(batch, in_capture=how == "capture")
            drafts.init_forward_metadata_in_graph(batch)
        if how == "replay":  # it reads the metadata of the capture
            for backend, metadata in zip(drafts.attn_backends, captured, strict=True):
                backend._batches = metadata
        for step, written in enumerate(per_step_draft_out_cache_loc(slots, 2, 1, steps)[:-1]):
            batch.out_cache_loc = written
            q, k, v = (torch.randn(2, heads, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS))
            out = drafts.attn_backends[step].forward(q.flatten(1), k, v, engine.layer, batch)
            keys, values = engine.pool.get_kv_buffer(1)
            torch.testing.assert_close(keys[written], k)
            for request, (n, row) in enumerate(zip(lengths, held, strict=True)):
                seen = row[: n + step + 1]
                visible = torch.ones(1, len(seen)).bool()
                expected = engine._dense(
                    q[request : request + 1], keys[seen], values[seen], visible
                )
                torch.testing.assert_close(
                    out.view(-1, HEADS, SIZE)[request : request + 1], expected
                )
        captured = [backend._batches for backend in drafts.attn_backends]
    try:
        draft_utils.DraftBackendFactory(runner, 2, steps).create_decode_backend()
    except ValueError as error:
        assert "--speculative-eagle-topk" in str(error)
    else:
        raise AssertionError("trees of drafts are not served")


def check_methods(ours: type, base: type) -> None:
    """Every public method of the adapter is one of SGLang's, with the same leading parameters."""
    public = {name: item for name, item in vars(ours).items() if not name.startswith("_")}
    assert len(public) == 10 and all(hasattr(base, name) for name in public), public
    for name, item in public.items():
        if not callable(item) or name == "forward_decode":  # takes any arguments
            continue
        mine, theirs = (list(inspect.signature(f).parameters) for f in (item, getattr(base, name)))
        theirs = [parameter for parameter in theirs if parameter != "kwargs"]
        assert mine[: len(theirs)] == theirs, (name, mine, theirs)


class Engine:
    """SGLang's pools with two requests on pages in a random order, and its layer with `options`;
    with `scales` of keys and values the pool is one of float8."""

    def __init__(
        self,
        create: Any,
        scales: tuple[float, float] | None = None,
        sinks: torch.Tensor | None = None,
        **options: Any,
    ) -> None:
        from sglang.srt.layers.radix_attention import RadixAttention
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool

        torch.manual_seed(0)
        self.sinks = sinks
        self.layer = RadixAttention(HEADS, SIZE, SIZE**-0.5, KV_HEADS, layer_id=1, **options)
        stored = torch.float32
        if scales is not None:
            stored = torch.float8_e4m3fn
            self.layer.k_scale_float, self.layer.v_scale_float = scales
        self.scales = scales or (1.0, 1.0)
        self.pool = MHATokenToKVPool(
            512, PAGE, stored, KV_HEADS, SIZE, 2, "cpu", False, enable_alt_stream=False
        )
        requests = ReqToTokenPool(4, 256, "cpu", False)
        pages = torch.randperm(512 // PAGE) + 1  # page 0 is padding
        slots = (pages[:, None] * PAGE + torch.arange(PAGE)).flatten()
        self.table = requests.req_to_token
        self.table[1], self.table[2] = slots[:256], slots[256:]
        self.runner = SimpleNamespace(
            token_to_kv_pool=self.pool, req_to_token_pool=requests, page_size=PAGE,
            model_config=SimpleNamespace(
                context_len=256, is_encoder_decoder=False, head_dim=SIZE,
                attention_chunk_size=CHUNK,
            ),
            server_args=SimpleNamespace(
                speculative_eagle_topk=2, speculative_num_draft_tokens=DRAFTED, dcp_size=1
            ),
            dtype=torch.float32, device="cpu", use_mla_backend=False,
        )  # fmt: skip
        self.backend = create(self.runner)
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
            batch.spec_info = SimpleNamespace(
                draft_token_num=DRAFTED, custom_mask=self._mask(tree, lengths)
            )
        q, k, v = (torch.randn(sum(new), heads, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS))
        more = {} if self.sinks is None else {"sinks": self.sinks}
        self.backend.init_forward_metadata(batch)
        out = self.backend.forward(q.flatten(1), k, v, self.layer, batch, **more)
        keys, values = (
            side.float() * scale
            for side, scale in zip(self.pool.get_kv_buffer(1), self.scales, strict=True)
        )
        new_slots = batch.out_cache_loc  # rounded to the nearest of 3 bits where they are float8
        rounding = {} if self.scales == (1.0, 1.0) else {"rtol": 2**-4, "atol": 2**-9}
        torch.testing.assert_close(keys[new_slots], k, **rounding)
        torch.testing.assert_close(values[new_slots], v, **rounding)
        for request, slots in enumerate(held):
            n, t, first = new[request], total[request], sum(new[:request])
            visible = torch.ones(n, t).tril(t - n).bool()
            if self.layer.sliding_window_size > 0:
                visible &= torch.ones(n, t).triu(t - n - self.layer.sliding_window_size).bool()
            if self.layer.use_irope:
                chunks = torch.arange(t) // CHUNK
                visible &= chunks[t - n :, None] == chunks
            if tree is not None:
                visible[:, t - n :] = tree[request]
            expected = self._dense(q[first : first + n], keys[slots], values[slots], visible)
            torch.testing.assert_close(out.view(-1, HEADS, SIZE)[first : first + n], expected)

    def _mask(self, tree: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        """SGLang's mask of a verification: over the drafted tokens, in 0.5.17 over all keys."""
        verify = self.backend.verify_mask
        if verify is None:
            past = [torch.ones(DRAFTED, length).bool() for length in lengths]
            return torch.cat([torch.cat(row, 1).flatten() for row in zip(past, tree, strict=True)])
        verify.buffer[: tree.numel()] = tree.flatten()
        return verify.buffer

    def _dense(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor
    ) -> torch.Tensor:
        keys, values = (side.repeat_interleave(HEADS // KV_HEADS, 1) for side in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", q, keys) * SIZE**-0.5
        if self.layer.logit_cap:
            scores = self.layer.logit_cap * torch.tanh(scores / self.layer.logit_cap)
        scores = scores.masked_fill(~visible, -torch.inf)
        if self.sinks is not None:
            scores = torch.cat([scores, self.sinks.view(-1, 1, 1).expand(-1, len(q), 1)], -1)
        weights = scores.softmax(-1)[..., : len(keys)]
        return torch.einsum("hqk,khd->qhd", weights, values)


def run(engine: Engine) -> None:
    """Prefill, prefill over a prefix, decode."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    engine.step(ForwardMode.EXTEND, [40, 25], [40, 25])
    engine.step(ForwardMode.EXTEND, [7, 1], [47, 26])
    engine.step(ForwardMode.DECODE, [1, 1], [48, 27])


def main() -> None:
    create = check_registration()
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    engine = Engine(create)
    assert isinstance(engine.backend, AttentionBackend)
    if not IS_OLD:
        check_methods(type(engine.backend), AttentionBackend)
        check_model_lists()
        check_draft_steps(create)
    run(Engine(create, scales=(0.5, 0.25)))
    run(Engine(create, sinks=torch.randn(HEADS), sliding_window_size=9, logit_cap=5.0))
    run(Engine(create, use_irope=True))
    run(engine)
    tree = torch.eye(DRAFTED).bool().repeat(2, 1, 1)
    tree[:, 1:, 0] = tree[:, 3, 1] = True
    engine.step(ForwardMode.TARGET_VERIFY, [4, 4], [52, 31], tree)


if __name__ == "__main__":
    main()
