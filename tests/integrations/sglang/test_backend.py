"""The SGLang adapter over an emulated pool and emulated batches, against torch's attention."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnlib.backends.triton import TritonBackend
from attnlib.errors import UnsupportedConfigError
from tests.integrations.sglang.conftest import Mode, Pool, make_runner

HEADS, KV_HEADS, SIZE = 4, 2, 32
CAPACITY = 512


def make_layer(**changes: Any) -> Any:
    """One of SGLang's `RadixAttention` layers."""
    fields = dict(
        layer_id=1, tp_q_head_num=HEADS, tp_k_head_num=KV_HEADS, qk_head_dim=SIZE, v_head_dim=SIZE,
        scaling=SIZE**-0.5, logit_cap=0.0, sliding_window_size=-1, is_cross_attention=False,
        attn_type=SimpleNamespace(value="decoder"), k_scale_float=None, v_scale_float=None,
    )  # fmt: skip
    return SimpleNamespace(**{**fields, **changes})


class Engine:
    """A runner with two requests whose pages are spread over the pool."""

    def __init__(self, page: int, rank: int | None = None, **options: Any) -> None:
        from attnlib.integrations.sglang.backend import AttnlibAttentionBackend

        torch.manual_seed(0)
        self.pool = Pool(CAPACITY, page, KV_HEADS if rank is None else 1, SIZE)
        self.runner = make_runner(page, self.pool)
        if rank is not None:
            self.pool.as_latents(rank)
            self.runner.use_mla_backend, self.runner.model_config.kv_lora_rank = True, rank
        vars(self.runner.server_args).update(options)
        pages = torch.randperm(CAPACITY // page) + 1  # page 0 is SGLang's padding
        slots = (pages[:, None] * page + torch.arange(page)).flatten()
        self.table = self.runner.req_to_token_pool.req_to_token
        for request in range(2):
            self.table[request] = slots[request * 256 : (request + 1) * 256].int()
        self.backend = AttnlibAttentionBackend(self.runner)

    def batch(self, mode: Mode, new: list[int], total: list[int]) -> Any:
        """A batch of both requests; `total` counts the new tokens."""
        slots = [self.table[r, t - n : t] for r, (n, t) in enumerate(zip(new, total, strict=True))]
        counted = [t - n for n, t in zip(new, total, strict=True)]
        lengths = counted if mode is Mode.TARGET_VERIFY else total
        extends = mode is Mode.EXTEND
        return SimpleNamespace(
            extend_prefix_lens_cpu=counted if extends else None,
            forward_mode=mode, batch_size=2, req_pool_indices=torch.tensor([0, 1]),
            seq_lens=torch.tensor(lengths), seq_lens_cpu=torch.tensor(lengths),
            extend_seq_lens=torch.tensor(new) if extends else None,
            extend_seq_lens_cpu=new if extends else None, out_cache_loc=torch.cat(slots).long(),
            spec_info=SimpleNamespace(draft_token_num=new[0]),
        )  # fmt: skip

    def expected(
        self, q: torch.Tensor, layer: Any, new: list[int], total: list[int], tree: Any = None
    ) -> torch.Tensor:
        """Attention over the keys that the pool holds now; `tree[r]` is the mask of the new tokens
        of a request."""
        keys, values = self.pool.get_kv_buffer(layer.layer_id)
        rows, start = [], 0
        for request, (n, t) in enumerate(zip(new, total, strict=True)):
            slots = self.table[request, :t].long()
            visible = torch.ones(n, t).tril(t - n).bool()
            if tree is not None:
                visible[:, t - n :] = tree[request]
            if layer.sliding_window_size >= 0:
                visible &= torch.ones(n, t).triu(t - n - layer.sliding_window_size).bool()
            rows.append(
                torch.nn.functional.scaled_dot_product_attention(
                    q[start : start + n].view(n, HEADS, -1).transpose(0, 1),
                    keys[slots].transpose(0, 1), values[slots].transpose(0, 1),
                    attn_mask=visible, enable_gqa=True, scale=layer.scaling,
                ).transpose(0, 1).reshape(n, -1)
            )  # fmt: skip
            start += n
        return torch.cat(rows)


def tensors(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, *kv = (torch.randn(tokens, heads * SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS))
    return q, kv[0].view(-1, KV_HEADS, SIZE), kv[1].view(-1, KV_HEADS, SIZE)


@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("window", [-1, 9])
def test_extend_decode_and_verify(sglang: Any, page: int, window: int) -> None:
    engine, layer = Engine(page), make_layer(sliding_window_size=window)
    steps = [
        (Mode.EXTEND, [40, 25], [40, 25]), (Mode.EXTEND, [7, 1], [47, 26]),
        (Mode.DECODE, [1, 1], [48, 27]), (Mode.TARGET_VERIFY, [4, 4], [52, 31]),
    ]  # fmt: skip
    for mode, new, total in steps:
        q, k, v = tensors(sum(new))
        batch = engine.batch(mode, new, total)
        engine.backend.init_forward_metadata(batch)
        out = engine.backend.forward_extend(q, k, v, layer, batch)
        keys, _ = engine.pool.get_kv_buffer(layer.layer_id)
        assert torch.equal(keys[batch.out_cache_loc], k)
        torch.testing.assert_close(out, engine.expected(q, layer, new, total))


@pytest.mark.parametrize("page", [1, 16])
def test_captured_metadata_follows_later_batches(sglang: Any, page: int) -> None:
    engine, layer = Engine(page), make_layer()
    backend = engine.backend
    backend.init_cuda_graph_state(max_bs=4, max_num_tokens=4)
    first = engine.batch(Mode.DECODE, [1, 1], [2, 2])
    backend.init_forward_metadata_out_graph(first, in_capture=True)
    q, k, v = tensors(2)
    backend.forward_decode(q, k, v, layer, first)
    (captured,) = backend._batches.values()
    addresses = [captured.seq_lens.data_ptr(), captured.block_table.data_ptr()]
    replayed = engine.batch(Mode.DECODE, [1, 1], [90, 33])
    backend.init_forward_metadata_out_graph(replayed, in_capture=False)
    attention, cache = backend._layers.find(layer, None, trees=False)
    q, k, v = tensors(2)
    out = attention.forward(q.view(2, HEADS, SIZE), k, v, cache, captured)
    assert [captured.seq_lens.data_ptr(), captured.block_table.data_ptr()] == addresses
    expected = engine.expected(q, layer, [1, 1], [90, 33])
    torch.testing.assert_close(out.view(2, -1), expected)


@pytest.mark.parametrize("query_len", [1, 4])
def test_padding_rows_of_a_replay_write_nothing(sglang: Any, query_len: int) -> None:
    """SGLang pads the requests of a replayed batch, but not its slots."""
    engine, layer = Engine(16), make_layer()
    backend = engine.backend
    backend.init_cuda_graph_state(max_bs=4, max_num_tokens=4 * query_len)
    mode = Mode.DECODE if query_len == 1 else Mode.TARGET_VERIFY
    new = [query_len] * 2
    first = engine.batch(mode, new, [20, 40])
    backend.init_forward_metadata_out_graph(first, in_capture=True)
    backend.forward_extend(*tensors(2 * query_len), layer, first)
    (captured,) = backend._batches.values()
    live = engine.batch(mode, new, [90, 33])
    live.out_cache_loc = live.out_cache_loc[:query_len]
    live.seq_lens[1] = 1  # the fill value
    backend.init_forward_metadata_out_graph(live)
    assert captured.slot_mapping[query_len:].tolist() == [-1] * query_len
    before, _ = (buffer.clone() for buffer in engine.pool.get_kv_buffer(layer.layer_id))
    attention, cache = backend._layers.find(layer, None, trees=False)
    q, k, v = tensors(2 * query_len)
    out = attention.forward(q.view(-1, HEADS, SIZE), k, v, cache, captured)
    keys, _ = engine.pool.get_kv_buffer(layer.layer_id)
    changed = (keys != before).flatten(1).any(1).nonzero()[:, 0]
    assert sorted(changed.tolist()) == sorted(live.out_cache_loc.tolist())
    expected = engine.expected(q, layer, new, [90, 33])[:query_len]
    torch.testing.assert_close(out[:query_len].flatten(1), expected)


@pytest.mark.parametrize("query_len", [1, 4])
def test_graphs_record_lengths_and_slots(
    sglang: Any, monkeypatch: pytest.MonkeyPatch, query_len: int
) -> None:
    """A graph reads SGLang's own tensors, which are padded: with slot 0, of its padding page."""
    engine, layer = Engine(16), make_layer()
    backend = engine.backend
    backend.init_cuda_graph_state(max_bs=4, max_num_tokens=4 * query_len)
    mode = Mode.DECODE if query_len == 1 else Mode.TARGET_VERIFY
    new = [query_len] * 2
    static = engine.batch(mode, new, [20, 40])
    backend.init_forward_metadata_out_graph(static, in_capture=True)
    backend.init_forward_metadata_in_graph(static)
    backend.forward_extend(*tensors(2 * query_len), layer, static)
    (captured,), (builder,) = backend._batches.values(), backend._builders.values()
    monkeypatch.setattr(type(builder), "follows_device", True)
    monkeypatch.setattr(builder, "build", lambda *given: pytest.fail("follows the device"))
    live = engine.batch(mode, new, [90, 33])
    live.out_cache_loc[query_len:] = 0
    live.seq_lens[1] = 1  # the fill value
    addresses = [buffer.data_ptr() for buffer in vars(captured).values() if torch.is_tensor(buffer)]
    for name in ("seq_lens", "out_cache_loc", "req_pool_indices"):
        getattr(static, name).copy_(getattr(live, name))
    backend.init_forward_metadata_out_graph(live)
    backend._buffers._fill_tokens(static)  # the replay of what was recorded
    before, _ = (buffer.clone() for buffer in engine.pool.get_kv_buffer(layer.layer_id))
    attention, cache = backend._layers.find(layer, None, trees=False)
    q, k, v = tensors(2 * query_len)
    out = attention.forward(q.view(-1, HEADS, SIZE), k, v, cache, captured)
    found = [buffer.data_ptr() for buffer in vars(captured).values() if torch.is_tensor(buffer)]
    assert found == addresses
    keys, _ = engine.pool.get_kv_buffer(layer.layer_id)
    changed = (keys != before).flatten(1).any(1).nonzero()[:, 0]
    assert sorted(changed.tolist()) == sorted({*live.out_cache_loc.tolist()})
    expected = engine.expected(q, layer, new, [90, 33])[:query_len]
    torch.testing.assert_close(out[:query_len].flatten(1), expected)


def replay_of(batch: Any, width: int) -> Any:
    """What SGLang's runner of captured drafts shows of a replay: its whole buffers, and padding."""
    host = torch.tensor([*batch.seq_lens.tolist(), 200, 200])
    info = SimpleNamespace(num_tokens_per_req=-1, extend_seq_lens_cpu=[width] * 2)
    return SimpleNamespace(
        forward_mode=batch.forward_mode, batch_size=2, seq_lens=host.clone(), seq_lens_cpu=host,
        req_pool_indices=torch.tensor([0, 1, 0, 0]), spec_info=info,
        out_cache_loc=batch.out_cache_loc[:width],
    )  # fmt: skip


@pytest.mark.parametrize("follows", [False, True])
def test_captured_extensions_of_drafts(
    sglang: Any, monkeypatch: pytest.MonkeyPatch, follows: bool
) -> None:
    """The draft model reads the tokens of a verification: equally many of each request, which the
    lengths contain. The second row of the replay is padding."""
    engine, layer = Engine(16), make_layer()
    backend, mode, new = engine.backend, Mode.DRAFT_EXTEND_V2, [4, 4]
    backend.init_cuda_graph_state(max_bs=4, max_num_tokens=16)
    static = engine.batch(mode, new, [20, 40])
    static.extend_seq_lens_cpu = new
    backend.init_forward_metadata_out_graph(static, in_capture=True)
    backend.init_forward_metadata_in_graph(static)
    backend.forward_extend(*tensors(8), layer, static)
    (captured,), (builder,) = backend._batches.values(), backend._builders.values()
    monkeypatch.setattr(type(builder), "follows_device", follows)
    live = engine.batch(mode, new, [90, 33])
    live.seq_lens[1] = 1  # the fill value
    backend.init_forward_metadata_out_graph(replay_of(live, 4))
    for name in ("seq_lens", "req_pool_indices"):
        getattr(static, name).copy_(getattr(live, name))
    static.out_cache_loc = torch.cat((live.out_cache_loc[:4], torch.zeros(4).long()))
    backend._buffers._fill_tokens(static)  # the replay of what was recorded
    assert captured.seq_lens.tolist() == [90, 4] and captured.query_start_loc.tolist() == [0, 4, 8]
    attention, cache = backend._layers.find(layer, None, trees=False)
    q, k, v = tensors(8)
    out = attention.forward(q.view(-1, HEADS, SIZE), k, v, cache, captured)
    expected = engine.expected(q, layer, new, [90, 33])[:4]
    torch.testing.assert_close(out[:4].flatten(1), expected)


def test_batches_that_are_not_captured_name_what_to_pass(sglang: Any) -> None:
    engine = Engine(16)
    engine.backend.init_cuda_graph_state(max_bs=4, max_num_tokens=16)
    with pytest.raises(UnsupportedConfigError, match="forward_mode=.*EXTEND.*--disable-decode-cud"):
        engine.backend.init_forward_metadata_out_graph(engine.batch(Mode.EXTEND, [4, 4], [20, 40]))
    uneven = engine.batch(Mode.DRAFT_EXTEND_V2, [4, 2], [20, 40])
    uneven.extend_seq_lens_cpu = [4, 2]
    with pytest.raises(UnsupportedConfigError, match=r"requests of \[2, 4\] new tokens"):
        engine.backend.init_forward_metadata_out_graph(uneven, in_capture=True)


def test_unrecorded_graphs_are_prepared_before_each_replay(
    sglang: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of other sizes, and where a builder computes values on the host."""
    engine, layer = Engine(16), make_layer()
    backend = engine.backend
    backend.init_cuda_graph_state(max_bs=4, max_num_tokens=16)
    first = engine.batch(Mode.DECODE, [1, 1], [2, 2])
    backend.init_forward_metadata_out_graph(first, in_capture=True)
    backend.init_forward_metadata_in_graph(first)
    backend.forward_decode(*tensors(2), layer, first)
    (builder,) = backend._builders.values()
    assert not builder.follows_device
    backend.init_forward_metadata_out_graph(engine.batch(Mode.DECODE, [1, 1], [90, 33]))
    assert backend._common.seq_lens.tolist() == [90, 33]
    monkeypatch.setattr(type(builder), "follows_device", True)
    verified = engine.batch(Mode.TARGET_VERIFY, [4, 4], [94, 37])
    backend.init_forward_metadata_out_graph(verified)
    assert backend._common.seq_lens.tolist() == [94, 37]


def test_a_replay_builds_the_metadata_of_its_batch(
    sglang: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph replays no Python code of the layers, and FlashAttention's and FlashInfer's metadata
    has values that depend on the lengths."""
    engine, layer = Engine(16), make_layer()
    backend = engine.backend
    backend.init_cuda_graph_state(max_bs=4, max_num_tokens=4)
    first = engine.batch(Mode.DECODE, [1, 1], [2, 2])
    backend.init_forward_metadata_out_graph(first, in_capture=True)
    backend.forward_decode(*tensors(2), layer, first)
    (builder,) = backend._builders.values()
    built = []

    def build(prefix: int, common: Any) -> None:
        built.append((common.seq_lens.tolist(), common.seq_lens_cpu))

    monkeypatch.setattr(builder, "build", build)
    backend.init_forward_metadata_out_graph(engine.batch(Mode.DECODE, [1, 1], [90, 33]))
    assert built == [([90, 33], None)]
    eager = engine.batch(Mode.DECODE, [1, 1], [91, 34])
    backend.init_forward_metadata(eager)
    assert len(built) == 1


@pytest.mark.parametrize(("mode", "query_len"), [(Mode.DECODE, 1), (Mode.TARGET_VERIFY, 4)])
def test_builders_of_graphs_get_host_lengths_if_they_need_them(
    sglang: Any, monkeypatch: pytest.MonkeyPatch, mode: Mode, query_len: int
) -> None:
    """FlashInfer's does. SGLang's lengths do not contain the drafted tokens."""
    engine, layer = Engine(16), make_layer()
    backend = engine.backend
    backend.init_cuda_graph_state(max_bs=4, max_num_tokens=4 * query_len)
    first = engine.batch(mode, [query_len] * 2, [20, 40])
    backend.init_forward_metadata_out_graph(first, in_capture=True)
    backend.forward_extend(*tensors(2 * query_len), layer, first)
    (builder,) = backend._builders.values()
    built = []
    assert builder.needs_host_lengths
    monkeypatch.setattr(backend, "_device", torch.device("cuda"))
    monkeypatch.setattr(
        builder, "build", lambda prefix, common: built.append(common.seq_lens_cpu.tolist())
    )
    backend.init_forward_metadata_out_graph(engine.batch(mode, [query_len] * 2, [90, 33]))
    assert built == [[90, 33]]


def test_without_save_nothing_is_written(sglang: Any) -> None:
    engine, layer = Engine(16), make_layer()
    batch = engine.batch(Mode.DECODE, [1, 1], [30, 20])
    engine.backend.init_forward_metadata(batch)
    before = engine.pool.keys.clone()
    q, k, v = tensors(2)
    out = engine.backend.forward_decode(q, k, v, layer, batch, save_kv_cache=False)
    assert torch.equal(engine.pool.keys, before)
    torch.testing.assert_close(out, engine.expected(q, layer, [1, 1], [30, 20]))


def test_registration(sglang: Any) -> None:
    from attnlib.integrations.sglang import register

    register()
    assert sglang["choices"] == ["attnlib"]
    assert list(sglang["more"].values()) == [["attnlib"]] * 3
    (target,) = sglang["hooks"]
    assert target.endswith("DraftBackendFactory._create_backend")
    backend = sglang["backends"]["attnlib"](make_runner(16, Pool(64, 16, KV_HEADS, SIZE)))
    assert type(backend).__name__ == "AttnlibAttentionBackend"


def test_models_and_options_that_are_not_supported_are_refused_with_all_reasons(
    sglang: Any,
) -> None:
    from attnlib.integrations.sglang.backend import AttnlibAttentionBackend

    runner = make_runner(16, Pool(CAPACITY, 16, KV_HEADS, SIZE))
    runner.token_to_kv_pool.translate_loc_from_full_to_swa = None
    runner.model_config.is_encoder_decoder, runner.server_args.dcp_size = True, 2
    with pytest.raises(UnsupportedConfigError, match="--disable-hybrid-swa-memory") as caught:
        AttnlibAttentionBackend(runner)
    parts = ("cross-attention", "pool for layers with windows", "decode context parallelism")
    for part, reason in zip(parts, caught.value.reasons, strict=True):
        assert part in reason


def test_what_is_not_supported_is_refused_with_reasons(sglang: Any) -> None:
    engine = Engine(16)
    batch = engine.batch(Mode.DECODE, [1, 1], [30, 20])
    engine.backend.init_forward_metadata(batch)
    with pytest.raises(UnsupportedConfigError, match="cross-attention"):
        engine.backend.forward_decode(*tensors(2), make_layer(is_cross_attention=True), batch)
    with pytest.raises(UnsupportedConfigError, match="k_rope"):
        engine.backend.forward_decode(*tensors(2), make_layer(), batch, k_rope=torch.zeros(1))
    draft = engine.batch(Mode.DRAFT_EXTEND_V2, [1, 1], [30, 20])
    with pytest.raises(NotImplementedError, match="speculative-draft-attention-backend"):
        engine.backend.init_forward_metadata(draft)


TREES = {"speculative_eagle_topk": 2, "speculative_num_draft_tokens": 4}


def trees(seed: int) -> torch.Tensor:
    """For both requests the ancestors of 4 tokens, `[2, 4, 4]`."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(2, 4, 4, generator=generator).round().bool().tril() | torch.eye(4).bool()
    mask[:, 1:, 0] = True
    return mask


def flat(mask: torch.Tensor, lengths: list[int], full: bool) -> torch.Tensor:
    """SGLang's mask of a batch: over all keys of a request, or over its draft tokens."""
    if not full:
        return mask.flatten()
    seen = (torch.ones(4, length, dtype=torch.bool) for length in lengths)
    return torch.cat([torch.cat(pair, 1).flatten() for pair in zip(seen, mask, strict=True)])


@pytest.mark.parametrize("full", [False, True])
def test_trees(sglang: Any, full: bool) -> None:
    engine, layer, mask = Engine(16, **TREES), make_layer(), trees(1)
    for mode, new, total in [
        (Mode.EXTEND, [40, 25], [40, 25]), (Mode.TARGET_VERIFY, [4, 4], [44, 29]),
        (Mode.DECODE, [1, 1], [41, 26]),
    ]:  # fmt: skip
        batch = engine.batch(mode, new, total)
        batch.spec_info.custom_mask = flat(mask, [40, 25], full)
        engine.backend.init_forward_metadata(batch)
        q, k, v = tensors(sum(new))
        out = engine.backend.forward_extend(q, k, v, layer, batch)
        tree = mask if mode is Mode.TARGET_VERIFY else None
        torch.testing.assert_close(out, engine.expected(q, layer, new, total, tree))
    with pytest.raises(UnsupportedConfigError, match="tokens of a tree share positions"):
        batch = engine.batch(Mode.TARGET_VERIFY, [4, 4], [44, 29])
        batch.spec_info.custom_mask = mask.flatten()
        engine.backend.init_forward_metadata(batch)
        engine.backend.forward_extend(
            *tensors(8), make_layer(layer_id=0, sliding_window_size=3), batch
        )


def test_captured_trees_take_the_mask_that_the_draft_stage_fills(sglang: Any) -> None:
    engine, layer = Engine(16, **TREES), make_layer()
    backend = engine.backend
    backend.init_cuda_graph_state(max_bs=4, max_num_tokens=16)
    first = engine.batch(Mode.TARGET_VERIFY, [4, 4], [20, 40])
    first.spec_info.custom_mask = flat(trees(1), [16, 36], True)
    backend.init_forward_metadata_out_graph(first, in_capture=True)
    backend.forward_extend(*tensors(8), layer, first)
    (captured,) = backend._batches.values()
    replayed = engine.batch(Mode.TARGET_VERIFY, [4, 4], [90, 33])
    replayed.spec_info.custom_mask = flat(trees(2), [86, 29], True)
    backend.init_forward_metadata_out_graph(replayed)
    replayed.spec_info.custom_mask = flat(trees(3), [86, 29], True)
    backend.update_verify_buffers_to_fill_after_draft(replayed.spec_info, 2)
    attention, cache = backend._layers.find(layer, None, trees=True)
    q, k, v = tensors(8)
    out = attention.forward(q.view(8, HEADS, SIZE), k, v, cache, captured)
    expected = engine.expected(q, layer, [4, 4], [90, 33], trees(3))
    torch.testing.assert_close(out.flatten(1), expected)
    assert backend.verify_mask is None  # the stand-in is of 0.5.17


def test_deterministic_mode_selects_batch_invariance(sglang: Any) -> None:
    for wanted in (False, True):
        engine = Engine(16, enable_deterministic_inference=wanted)
        attention, _ = engine.backend._layers.find(make_layer(), None, trees=False)
        assert attention.spec.batch_invariant is wanted


@pytest.mark.parametrize(("name", "reads"), [("torch", True), ("triton", False)])
def test_lengths_on_the_host_only_where_the_backend_reads_them(
    sglang: Any, name: str, reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNLIB_BACKEND", name)
    monkeypatch.setattr(TritonBackend, "unavailable", classmethod(lambda cls, *question: []))
    assert Engine(16).backend.needs_cpu_seq_lens is reads


def test_batches_without_lengths_on_the_host(sglang: Any) -> None:
    engine, layer = Engine(16), make_layer()
    for mode, new, total in [
        (Mode.DECODE, [1, 1], [48, 27]),
        (Mode.TARGET_VERIFY, [4, 4], [52, 31]),
    ]:
        batch = engine.batch(mode, new, total)
        batch.seq_lens_cpu = None
        engine.backend.init_forward_metadata(batch)
        assert engine.backend._common.max_seq_len == engine.backend.max_context_len
        q, k, v = tensors(sum(new))
        out = engine.backend.forward_extend(q, k, v, layer, batch)
        torch.testing.assert_close(out, engine.expected(q, layer, new, total))


def test_drafts_in_blocks_see_each_other(sglang: Any) -> None:
    """DFlash: verification batches whose layers SGLang calls encoders."""
    engine, layer = Engine(16), make_layer(attn_type=SimpleNamespace(value="encoder_only"))
    batch = engine.batch(Mode.TARGET_VERIFY, [4, 4], [52, 31])
    engine.backend.init_forward_metadata(batch)
    q, k, v = tensors(8)
    out = engine.backend.forward_extend(q, k, v, layer, batch)
    all_new = torch.ones(2, 4, 4, dtype=torch.bool)
    torch.testing.assert_close(out, engine.expected(q, layer, [4, 4], [52, 31], all_new))
    with pytest.raises(UnsupportedConfigError, match="keys are not in the pool"):
        engine.backend.forward_extend(q, k, v, layer, batch, save_kv_cache=False)


RANK = 24


def test_latents(sglang: Any) -> None:
    """Prefills without a prefix attend to keys of the heads, all else to the latents."""
    engine = Engine(16, rank=RANK)
    latent = make_layer(tp_k_head_num=1, v_head_dim=RANK)
    heads = make_layer(tp_k_head_num=HEADS, qk_head_dim=20, v_head_dim=12, scaling=20**-0.5)
    batch = engine.batch(Mode.EXTEND, [40, 25], [40, 25])
    engine.backend.init_forward_metadata(batch)
    q, k, v = (torch.randn(65, HEADS, size) for size in (20, 20, 12))
    out = engine.backend.forward_extend(q, k, v, heads, batch, save_kv_cache=False)
    for rows in (slice(0, 40), slice(40, 65)):
        parts = (x[rows].transpose(0, 1) for x in (q, k, v))
        expected = torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        torch.testing.assert_close(out[rows], expected.transpose(0, 1).flatten(1))
    for mode, new, total in [
        (Mode.EXTEND, [7, 1], [47, 26]), (Mode.DECODE, [1, 1], [48, 27]),
        (Mode.TARGET_VERIFY, [4, 4], [52, 31]),
    ]:  # fmt: skip
        batch = engine.batch(mode, new, total)
        engine.backend.init_forward_metadata(batch)
        q, k = torch.randn(sum(new), HEADS, SIZE), torch.randn(sum(new), 1, SIZE)
        out = engine.backend.forward_extend(q, k, k[..., :RANK], latent, batch)
        keys, _ = engine.pool.get_kv_buffer(latent.layer_id)
        assert torch.equal(keys[batch.out_cache_loc], k)
        torch.testing.assert_close(out, engine.expected(q, latent, new, total))
    batch = engine.batch(Mode.EXTEND, [7, 1], [47, 26])
    engine.backend.init_forward_metadata(batch)
    with pytest.raises(UnsupportedConfigError, match="has a prefix in the pool"):
        engine.backend.forward_extend(
            *(torch.randn(8, HEADS, n) for n in (20, 20, 12)), heads, batch
        )
    assert engine.backend.get_fused_kv_write_buffers(latent, batch) is None


def test_an_operation_of_sglang_may_write_the_pool(sglang: Any) -> None:
    engine, layer = Engine(16), make_layer()
    batch = engine.batch(Mode.DECODE, [1, 1], [48, 27])
    engine.backend.init_forward_metadata(batch)
    keys, values, slots = engine.backend.get_fused_kv_write_buffers(layer, batch)
    q, keys[slots], values[slots] = tensors(2)
    out = engine.backend.forward_decode(q, None, None, layer, batch, save_kv_cache=False)
    torch.testing.assert_close(out, engine.expected(q, layer, [1, 1], [48, 27]))
