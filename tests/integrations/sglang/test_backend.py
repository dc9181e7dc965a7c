"""The SGLang adapter over an emulated pool and emulated batches, against torch's attention."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

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

    def __init__(self, page: int, **options: Any) -> None:
        from attnlib.integrations.sglang.backend import AttnlibAttentionBackend

        torch.manual_seed(0)
        self.pool = Pool(CAPACITY, page, KV_HEADS, SIZE)
        self.runner = make_runner(page, self.pool)
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
            forward_mode=mode, batch_size=2, req_pool_indices=torch.tensor([0, 1]),
            seq_lens=torch.tensor(lengths), seq_lens_cpu=torch.tensor(lengths),
            extend_seq_lens=torch.tensor(new) if extends else None,
            extend_seq_lens_cpu=new if extends else None, out_cache_loc=torch.cat(slots).long(),
            spec_info=SimpleNamespace(draft_token_num=new[0]),
        )  # fmt: skip

    def expected(
        self, q: torch.Tensor, layer: Any, new: list[int], total: list[int]
    ) -> torch.Tensor:
        """Attention over the keys that the pool holds now."""
        keys, values = self.pool.get_kv_buffer(layer.layer_id)
        rows, start = [], 0
        for request, (n, t) in enumerate(zip(new, total, strict=True)):
            slots = self.table[request, :t].long()
            visible = torch.ones(n, t).tril(t - n).bool()
            if layer.sliding_window_size >= 0:
                visible &= torch.ones(n, t).triu(t - n - layer.sliding_window_size).bool()
            rows.append(
                torch.nn.functional.scaled_dot_product_attention(
                    q[start : start + n].view(n, HEADS, SIZE).transpose(0, 1),
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
    attention, cache = backend._layers[layer.layer_id]
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
    attention, cache = backend._layers[layer.layer_id]
    q, k, v = tensors(2 * query_len)
    out = attention.forward(q.view(-1, HEADS, SIZE), k, v, cache, captured)
    keys, _ = engine.pool.get_kv_buffer(layer.layer_id)
    changed = (keys != before).flatten(1).any(1).nonzero()[:, 0]
    assert sorted(changed.tolist()) == sorted(live.out_cache_loc.tolist())
    expected = engine.expected(q, layer, new, [90, 33])[:query_len]
    torch.testing.assert_close(out[:query_len].flatten(1), expected)


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
    backend = sglang["backends"]["attnlib"](make_runner(16, Pool(64, 16, KV_HEADS, SIZE)))
    assert type(backend).__name__ == "AttnlibAttentionBackend"


def test_what_is_not_supported_is_refused_with_reasons(sglang: Any) -> None:
    with pytest.raises(UnsupportedConfigError, match="speculation trees") as caught:
        Engine(16, speculative_eagle_topk=4, dcp_size=2)
    assert len(caught.value.reasons) == 2
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
