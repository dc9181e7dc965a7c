"""`LatentAttention`: absorbed and expanded forms against attention over expanded keys (M12)."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import attnlib
from attnlib.errors import ContractError
from attnlib.mla import expanded, expanded_rows
from attnlib.mla.latent_attention import LatentAttention
from attnlib.sparse.key_selection import KeySelection, SelectedKeys

HEADS, KEY, ROTARY, LATENT, VALUE, BLOCK = 3, 24, 16, 48, 20, 8


def _spec(**changes: Any) -> attnlib.AttentionSpec:
    return attnlib.AttentionSpec(
        num_heads=HEADS, num_kv_heads=1, head_size=LATENT + ROTARY, head_size_v=LATENT,
        dtype=torch.float32, use_mla=True, **{"block_size": BLOCK, **changes},
    )  # fmt: skip


def _step(
    query_lens: list[int], seq_lens: list[int], **options: Any
) -> tuple[LatentAttention, tuple[Any, ...], list[Tensor]]:
    """A layer, the arguments of one step over a context, and the latents of each request."""
    draw = torch.Generator().manual_seed(5)
    spec = _spec(**options.pop("spec", {}))
    weights = torch.randn(HEADS, KEY + VALUE, LATENT, generator=draw) / LATENT**0.5
    module = LatentAttention(spec, weights, KEY, backend="torch", device="cpu", **options)
    latents = [torch.randn(length, LATENT + ROTARY, generator=draw) for length in seq_lens]
    size = spec.block_size
    blocks = [-(-length // size) for length in seq_lens]
    order = torch.randperm(sum(blocks), generator=draw).tolist()
    table = [[order.pop() for _ in range(count)] for count in blocks]
    cache = attnlib.PagedKVCache.allocate(spec, max(1, sum(blocks)), "cpu")
    cache.key_cache.fill_(float("nan"))
    for rows, row, count in zip(latents, table, query_lens, strict=True):
        for position in range(len(rows) - count):
            cache.key_cache[row[position // size], position % size, 0] = rows[position]
    width = max(map(len, table))
    padded = torch.tensor([[*row, *[-1] * (width - len(row))] for row in table])
    common = attnlib.CommonAttentionMetadata.from_lengths(query_lens, seq_lens, padded, size, "cpu")
    metadata = module.layer.backend.make_builder(spec, "cpu").build(0, common)
    query = torch.randn(sum(query_lens), HEADS, KEY + ROTARY, generator=draw)
    new = [rows[len(rows) - count :] for rows, count in zip(latents, query_lens, strict=True)]
    return module, (query, torch.cat(new), cache, metadata), latents


def _expected(
    module: LatentAttention, query: Tensor, query_lens: list[int], latents: list[Tensor]
) -> Tensor:
    """In float64, over the keys and values of every head."""
    weights, sinks = module.projection.double(), module.layer.sinks
    parts, begin = [], 0
    for rows, count in zip(latents, query_lens, strict=True):
        both = torch.einsum("hnr,tr->thn", weights, rows[:, :LATENT].double())
        rotary = rows[:, None, LATENT:].double().expand(-1, HEADS, -1)
        keys = torch.cat((both[..., :KEY], rotary), -1)
        q = query[begin : begin + count].double()
        scores = module.layer.impl.scale * torch.einsum("qhd,khd->hqk", q, keys)
        positions = torch.arange(len(rows) - count, len(rows))[:, None]
        seen = torch.arange(len(rows)) <= positions
        if module.spec.sliding_window:
            seen &= torch.arange(len(rows)) > positions - module.spec.sliding_window
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            column = sinks.double()[:, None, None].expand(-1, count, 1)
            scores = torch.cat((scores, column), -1)
        shares = scores.softmax(-1)[..., : len(rows)]
        parts.append(torch.einsum("hqk,khd->qhd", shares, both[..., KEY:]))
        begin += count
    return torch.cat(parts)


BATCHES = {
    "decodes": ([1, 1], [9, 30]),
    "prompts": ([33, 140], [33, 140]),
    "chunks": ([20, 7], [61, 300]),
    "mixed": ([1, 2, 25, 40], [19, 8, 25, 140]),
    "empty": ([1, 0, 12], [5, 0, 12]),
}


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("form", ["absorbed", "expanded", "small chunks"])
def test_both_forms_are_attention_over_expanded_keys(name: str, form: str) -> None:
    """M12: also with a context in several chunks; the cache then holds the new latents (P7)."""
    query_lens, seq_lens = BATCHES[name]
    options: dict[str, Any] = {"expand_from": None if form == "absorbed" else 1}
    if form == "small chunks":
        options["context_tokens"] = 50
    module, call, latents = _step(query_lens, seq_lens, **options)
    expected = _expected(module, call[0], query_lens, latents)
    out = module(*call)
    assert out.shape == (sum(query_lens), HEADS, VALUE)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-5)
    slots = call[3].slot_mapping
    stored = call[2].key_cache.flatten(0, 2)[slots]
    assert torch.equal(stored, call[1])


def test_layers_of_a_batch_share_their_plan() -> None:
    """Only the first layer of a batch arranges rows on the host and copies them to the device."""
    module, call, latents = _step([12, 30], [70, 200], expand_from=1, context_tokens=80)
    wanted = _expected(module, call[0], [12, 30], latents)
    with patch.object(expanded_rows, "_in_blocks", wraps=expanded_rows._in_blocks) as arrange:
        first, second = module(*call), module(*call)
    assert arrange.call_count == 1 + 2  # new tokens, and 170 of context in chunks of one block
    torch.testing.assert_close(first.double(), wanted, rtol=0, atol=2e-5)
    assert torch.equal(first, second)


@pytest.mark.parametrize("size", [16, 48, 128, 192, 256])
def test_blocks_of_the_cache_and_of_expanded_keys_differ(size: int) -> None:
    """Blocks that divide those of expanded keys, are multiples of them, or neither."""
    lens = [12, 30, 1], [70, 500, 140]
    module, call, latents = _step(*lens, spec={"block_size": size}, expand_from=1)
    expected = _expected(module, call[0], lens[0], latents)
    torch.testing.assert_close(module(*call).double(), expected, rtol=0, atol=2e-5)


def test_a_call_is_checked_once_per_batch() -> None:
    """Layers with equal caches; another cache is checked."""
    module, (query, latent, cache, batch), _ = _step([12, 30], [70, 200], expand_from=1)
    with patch.object(expanded, "check_call", wraps=expanded.check_call) as check:
        for _ in range(3):
            module(query, latent, cache, batch)
        assert check.call_count == 1
        batch.drop_plans()
        module(query, latent, cache, batch)
        assert check.call_count == 2
    other = attnlib.PagedKVCache.allocate(_spec(block_size=2 * BLOCK), 40, "cpu")
    with pytest.raises(ContractError, match="block_size=16, the spec says 8"):
        module(query, latent, other, batch)


@pytest.mark.parametrize("lens", [([1, 20], [9, 50]), ([1, 1], [9, 30])], ids=["mixed", "decodes"])
@pytest.mark.parametrize("expand_from", [None, 1], ids=["absorbed", "expanded"])
def test_an_output_of_the_caller_is_written(
    lens: tuple[list[int], list[int]], expand_from: int | None
) -> None:
    """Rows of an engine's output, also those past the tokens; nothing else is."""
    module, (query, latent, cache, batch), _ = _step(*lens, expand_from=expand_from)
    wanted, tokens = module(query, latent, cache, batch), query.shape[0]
    batch.slot_mapping = nn.functional.pad(batch.slot_mapping, (0, 2), value=-1)
    query, latent = (
        nn.functional.pad(rows, (0,) * (2 * rows.dim() - 1) + (2,)) for rows in (query, latent)
    )
    memory = torch.full((tokens + 4, HEADS * VALUE), 7.0)
    output = memory[1 : tokens + 3].view(tokens + 2, HEADS, VALUE)
    assert module(query, latent, cache, batch, output=output) is output
    torch.testing.assert_close(output[:tokens], wanted)
    assert not output[tokens:].any()
    assert memory[0].eq(7).all() and memory[-1].eq(7).all()


@pytest.mark.parametrize("expand_from", [1, None])
def test_bad_outputs_are_refused_before_a_write(expand_from: int | None) -> None:
    """P9: the message names what is wrong, and nothing is written."""
    module, (query, latent, cache, batch), _ = _step([20], [20], expand_from=expand_from)
    before, rows = cache.key_cache.clone(), torch.zeros(20, HEADS, VALUE)
    shared = torch.zeros(20 * HEADS * (LATENT + ROTARY))
    query = shared.view(query.shape[0], HEADS, -1)[..., : query.shape[2]].copy_(query)
    for output, message in (
        (rows[1:], r"output has shape \(19, 3, 20\); it must be \[tokens=20, 3, 20\]"),
        (rows.double(), "output is torch.float64"),
        (rows[:1].expand(20, -1, -1), "separate memory for each row"),
        (torch.zeros(20, HEADS, 2 * VALUE)[..., ::2], "last stride 1"),
        (torch.zeros(20, HEADS, VALUE, device="meta"), "output is on meta"),
        (shared[: rows.numel()].view(rows.shape), "output is query"),
    ):
        with pytest.raises(ContractError, match=message):
            module(query, latent, cache, batch, output=output)
    with torch.inference_mode():
        output = torch.zeros(20, HEADS, VALUE)
    with pytest.raises(ContractError, match=r"memory of output was made in torch.inference_mode"):
        module(query, latent, cache, batch, output=output)
    assert torch.equal(cache.key_cache.isnan(), before.isnan())


@pytest.mark.parametrize("expand_from", [None, 1], ids=["absorbed", "expanded"])
def test_values_of_a_batch_may_change_in_place(expand_from: int | None) -> None:
    """Other blocks and other lengths within its bounds, as in a batch that is built for them."""
    query_lens, seq_lens = [12, 30], [70, 200]
    module, call, _ = _step(query_lens, seq_lens, expand_from=expand_from, context_tokens=80)
    query, latent, cache, batch = call
    module(*call)
    cache.key_cache.nan_to_num_()
    batch.slot_mapping = None
    module(*call)
    batch.block_table[1, :25] = batch.block_table[1, :25].flip(0)
    found = module(*call)
    batch.drop_plans()
    blocks = module(*call)
    torch.testing.assert_close(found, blocks)
    for lengths in (batch.seq_lens, batch.seq_lens_cpu):
        lengths[1] = 150
    found = module(*call)
    batch.drop_plans()
    torch.testing.assert_close(found, module(*call))
    assert not torch.allclose(found, blocks)


@pytest.mark.parametrize("expand_from", [None, 1], ids=["absorbed", "expanded"])
def test_rows_past_the_tokens_become_0(expand_from: int | None) -> None:
    """M6."""
    module, (query, latent, cache, metadata), _ = _step([1, 20], [9, 50], expand_from=expand_from)
    wanted = module(query, latent, cache, metadata)
    metadata.slot_mapping = nn.functional.pad(metadata.slot_mapping, (0, 3), value=-1)
    padded = (
        nn.functional.pad(rows, (0,) * (2 * rows.dim() - 1) + (3,)) for rows in (query, latent)
    )
    found = module(*padded, cache, metadata)
    torch.testing.assert_close(found, nn.functional.pad(wanted, (0, 0, 0, 0, 0, 3)))


@pytest.mark.parametrize("expand_from", [None, 1], ids=["absorbed", "expanded"])
def test_weights_that_need_gradients_are_refused(expand_from: int | None) -> None:
    """They would get none."""
    module, call, _ = _step([1, 20], [9, 50], expand_from=expand_from)
    wanted = module(*call)
    module.projection = nn.Parameter(module.projection)
    with pytest.raises(ContractError, match="requires a gradient"):
        module(*call)
    with torch.no_grad():
        assert torch.equal(module(*call), wanted)


def test_a_sink_counts_once() -> None:
    """M4: in the state of the new tokens, not again in each chunk of the context."""
    sinks = torch.tensor([0.5, -1.0, 3.0])
    module, call, latents = _step(
        [12, 30], [70, 200], spec={"has_sink": True}, sinks=sinks, expand_from=1, context_tokens=40
    )
    expected = _expected(module, call[0], [12, 30], latents)
    torch.testing.assert_close(module(*call).double(), expected, rtol=0, atol=2e-5)


def test_windows_are_absorbed() -> None:
    """A window relates queries to positions in context and new tokens, so nothing is merged."""
    module, call, latents = _step([30], [70], spec={"sliding_window": 17}, expand_from=1)
    assert module._expanded_part(call[3], call[2]) is None
    expected = _expected(module, call[0], [30], latents)
    torch.testing.assert_close(module(*call).double(), expected, rtol=0, atol=2e-5)


def test_the_form_follows_the_longest_prefill() -> None:
    module, call, _ = _step([1, 20], [9, 20], expand_from=20)
    assert module._expanded_part(call[3], call[2]) is not None
    module, call, _ = _step([1, 20], [9, 20], expand_from=21)
    assert module._expanded_part(call[3], call[2]) is None


def test_the_default_scale_is_that_of_the_expanded_heads() -> None:
    """M12: not that of the latent."""
    assert _step([1], [3])[0].layer.impl.scale == (KEY + ROTARY) ** -0.5
    assert _step([1], [3], scale=0.25)[0].layer.impl.scale == 0.25


@pytest.mark.parametrize("expand_from", [None, 1])
def test_bad_calls_are_refused_before_a_write(expand_from: int | None) -> None:
    """The message names the tensor, its shape and the needed one."""
    module, (query, latent, cache, metadata), _ = _step([20], [20], expand_from=expand_from)
    before = cache.key_cache.clone()
    for call, message in (
        (
            (query[..., 1:], latent),
            r"query has shape \(20, 3, 39\); it must be \[tokens=20, 3, 40\]",
        ),
        ((query, latent[:, 1:]), r"latent has shape \(20, 63\); it must be \[tokens=20, 64\]"),
        ((query, latent[1:]), r"latent has shape \(19, 64\); it must be \[tokens=20, 64\]"),
        ((query.double(), latent), "query is torch.float64, the spec says torch.float32"),
    ):
        with pytest.raises(ContractError, match=message):
            module(*call, cache, metadata)
    assert torch.equal(cache.key_cache.isnan(), before.isnan())


def test_sizes_that_do_not_agree() -> None:
    weights = torch.zeros(HEADS, KEY + VALUE, LATENT)
    with pytest.raises(ContractError, match="use_mla=False"):
        LatentAttention(_spec().replace(use_mla=False), weights, KEY)
    for projection, size in ((weights[:2], KEY), (weights, KEY + VALUE), (weights[..., 1:], KEY)):
        with pytest.raises(
            ContractError, match=r"projection has shape .* it must be \[num_heads=3"
        ):
            LatentAttention(_spec(), projection, size)


def test_selected_keys_run_in_the_absorbed_form() -> None:
    """M11: a long prefill with lists is not expanded; lists of all keys change nothing."""
    lens, options = ([20, 7], [61, 300]), {"expand_from": 1}
    selection = KeySelection(max_blocks=300)
    module, step, latents = _step(*lens, spec={"key_selection": selection}, **options)
    lists = torch.full((27, 1, 300), -1, dtype=torch.int32)
    lists[..., :] = torch.arange(300)
    out = module(*step, selected_keys=SelectedKeys(lists))
    expected = _expected(module, step[0], lens[0], latents)
    assert (out - expected).abs().max() < 1e-4
    lists[:, :, 4:] = -1
    fewer = module(*step, selected_keys=SelectedKeys(lists))
    assert (fewer - expected).abs().amax((1, 2)).min() > 1e-2
    with pytest.raises(ContractError, match="selected_keys is missing"):
        module(*step)
    module, step, _ = _step(*lens, **options)
    with pytest.raises(ContractError, match="selected_keys is given"):
        module(*step, selected_keys=SelectedKeys(lists))


@pytest.mark.parametrize("expand_from", [1, None])
def test_a_batch_without_slots_writes_nothing(expand_from: int | None) -> None:
    """Its new latents are in the cache already."""
    module, (query, latent, cache, metadata), latents = _step(
        [12, 30], [40, 30], expand_from=expand_from
    )
    wanted = module(query, latent, cache, metadata)
    cache.key_cache.nan_to_num_()
    metadata.slot_mapping = None
    metadata.plans.clear()
    found = module(query, latent, cache, metadata)
    torch.testing.assert_close(found, wanted)
    cache.key_cache.zero_()
    module(query, latent, cache, metadata)
    assert not cache.key_cache.any()


@pytest.mark.parametrize("expand_from", [None, 2], ids=["absorbed", "expanded"])
def test_autocast_changes_no_bit(expand_from: int | None) -> None:
    """The projections of a float32 layer stay in float32."""
    module, call, _ = _step([1, 7], [9, 20], expand_from=expand_from)
    expected = module(*call)
    with torch.autocast("cpu", torch.bfloat16):
        found = module(*call)
    assert found.dtype == torch.float32 and torch.equal(found, expected)
