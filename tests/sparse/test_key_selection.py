"""M11: layers that attend to selected keys; what they compute and what they refuse."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

import attnlib
from attnlib.errors import ContractError, UnsupportedConfigError
from attnlib.ops.torch.merge_states import merge_states
from attnlib.sparse.key_selection import KeySelection, SelectedKeys

BLOCKS = KeySelection(max_blocks=3, block_size=4, scope="kv_head")
SPEC = attnlib.AttentionSpec(
    num_heads=4, num_kv_heads=2, head_size=8, dtype=torch.float32, block_size=4,
    key_selection=BLOCKS,
)  # fmt: skip
LENGTHS = [1, 5, 3], [11, 9, 12]


def _step(spec: attnlib.AttentionSpec = SPEC, backend: str = "torch") -> tuple[Any, ...]:
    torch.manual_seed(0)
    layer = attnlib.Attention(spec, backend=backend, device="cpu")
    cache = attnlib.PagedKVCache.allocate(spec, 10, "cpu")
    cache.key_cache.normal_()
    cache.value_cache.normal_()
    table = torch.randperm(10)[:9].view(3, 3).int()
    common = attnlib.CommonAttentionMetadata.from_lengths(*LENGTHS, table, 4, "cpu")
    metadata = layer.backend.make_builder(spec, "cpu").build(0, common)
    return layer, cache, metadata, torch.randn(9, 4, 8)


def _lists(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(*shape, 3, generator=generator).argsort(-1).int()


def test_the_form_of_lists_checks_itself() -> None:
    with pytest.raises(ContractError, match=r"max_blocks=0 .* at least 1 \[M11\]"):
        KeySelection(max_blocks=0)
    with pytest.raises(ContractError, match="scope='rows' .* all_heads, kv_head, query_head"):
        KeySelection(max_blocks=1, scope="rows")
    with pytest.raises(ContractError, match="key_selection=3 is a int"):
        SPEC.replace(key_selection=3)
    with pytest.raises(ContractError, match="no paged keys"):
        SPEC.replace(attn_type="encoder_only", mask_kind="bidirectional")
    assert pickle.loads(pickle.dumps(SPEC)) == SPEC and BLOCKS.max_keys == 12


@pytest.mark.parametrize(
    ("indices", "starts", "message"),
    [
        (torch.zeros(9, 2, 3), None, "float32; they must be torch.int32"),
        (torch.zeros(9, 4, 3).int(), None, r"shape \(9, 4, 3\); they must be \[lists, 2, at most"),
        (torch.zeros(9, 2, 4).int(), None, r"shape \(9, 2, 4\)"),
        (torch.zeros(8, 2, 3).int(), None, "8 lists, but the batch has 9 tokens"),
        (torch.zeros(9, 3, 2).int().transpose(1, 2), None, "last stride 2"),
        (torch.zeros(9, 2, 3).int(), torch.zeros(4).int(), "list_start_loc .* is given"),
        (torch.zeros(9, 2, 3).int().to("meta"), None, "is on meta, query on cpu"),
    ],
)  # fmt: skip
def test_lists_of_another_form_are_refused_before_anything_is_written(
    indices: torch.Tensor, starts: torch.Tensor | None, message: str
) -> None:
    layer, cache, metadata, q = _step()
    before = cache.key_cache.clone()
    with pytest.raises(ContractError, match=message):
        layer(q, q[:, :2], q[:, :2], cache, metadata, selected_keys=SelectedKeys(indices, starts))
    assert torch.equal(cache.key_cache, before)


def test_shared_lists_need_their_starts() -> None:
    layer, cache, metadata, q = _step(
        SPEC.replace(key_selection=KeySelection(max_blocks=3, query_block_size=4))
    )
    lists = torch.zeros(4, 1, 3, dtype=torch.int32)
    for starts, message in (
        (None, "list_start_loc .* is missing"),
        (torch.zeros(3).int(), r"int32 \(3,\)|torch.int32 \[4\]"),
        (torch.zeros(4), "float32"),
    ):
        with pytest.raises(ContractError, match=message):
            layer(q, None, None, cache, metadata, selected_keys=SelectedKeys(lists, starts))


def test_lists_are_given_exactly_when_the_spec_declares_them() -> None:
    layer, cache, metadata, q = _step()
    with pytest.raises(ContractError, match="selected_keys is missing"):
        layer(q, None, None, cache, metadata)
    with pytest.raises(ContractError, match="selected_keys is a Tensor"):
        layer(q, None, None, cache, metadata, selected_keys=_lists(9, 2))
    dense, cache, metadata, q = _step(SPEC.replace(key_selection=None))
    for _ in range(3):  # a repeated call without lists must not hide the check
        dense(q, None, None, cache, metadata)
    with pytest.raises(ContractError, match="selected_keys is given"):
        dense(q, None, None, cache, metadata, selected_keys=SelectedKeys(_lists(9, 2)))


FORMS: dict[str, dict[str, Any]] = {
    "GQA": {"num_heads": 4, "num_kv_heads": 2, "head_size": 16},
    "MLA": {
        "num_heads": 4, "num_kv_heads": 1, "head_size": 24, "head_size_v": 16, "use_mla": True,
    },
}  # fmt: skip
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {}, "sinks": {"has_sink": True}, "window": {"sliding_window": 50},
}  # fmt: skip
EVERYTHING = [
    ([1, 5, 3, 1], [200, 150, 130, 1]),
    ([1], [300]),
    ([40, 7], [260, 90]),
]
"""Query lengths and sequence lengths."""


def _all_blocks(form: KeySelection, lists: int, heads: int, draw: torch.Generator) -> torch.Tensor:
    """Lists of the first `max_blocks - 3` blocks in random order, with -1 between them."""
    order = torch.rand(lists, heads, form.max_blocks, generator=draw).argsort(-1)
    return order.masked_fill(order >= form.max_blocks - 3, -1).int()


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("query_block_size", [1, 4])
@pytest.mark.parametrize("block_size", [1, 4, 64, 128])
@pytest.mark.parametrize("scope", ["all_heads", "kv_head", "query_head"])
def test_selecting_everything_equals_dense_bit_for_bit(
    scope: str, block_size: int, query_block_size: int, form: str, feature: str
) -> None:
    """M11: output and LSE, with shuffled and padded lists; without a block they change."""
    draw = torch.Generator().manual_seed(0)
    fields: dict[str, Any] = {**FORMS[form], **FEATURES[feature]}
    spec = attnlib.AttentionSpec(**fields, dtype=torch.float32, block_size=16)
    heads = {"all_heads": 1, "kv_head": spec.num_kv_heads, "query_head": spec.num_heads}[scope]
    sinks = torch.randn(spec.num_heads, generator=draw) if spec.has_sink else None
    for query_lens, seq_lens in EVERYTHING:
        columns, requests = -(-max(seq_lens) // 16), len(seq_lens)
        table = torch.randperm(requests * columns, generator=draw).view(requests, columns).int()
        common = attnlib.CommonAttentionMetadata.from_lengths(
            query_lens, seq_lens, table, 16, "cpu"
        )
        cache = attnlib.PagedKVCache.allocate(spec, requests * columns, "cpu")
        cache.value_cache.normal_(generator=draw)
        cache.key_cache.normal_(generator=draw)
        query = torch.randn(sum(query_lens), spec.num_heads, spec.head_size, generator=draw)
        selection = KeySelection(
            max_blocks=-(-max(seq_lens) // block_size) + 3, block_size=block_size, scope=scope,
            query_block_size=query_block_size,
        )  # fmt: skip
        counts = [-(-length // query_block_size) for length in query_lens]
        starts = torch.tensor([0, *counts]).cumsum(0).int() if query_block_size > 1 else None
        everything = _all_blocks(selection, sum(counts), heads, draw)
        without_last = everything.clone()  # without the block of the last query
        without_last[-1][without_last[-1] == (seq_lens[-1] - 1) // block_size] = -1
        results = []
        for indices in (None, everything, without_last):
            own = spec if indices is None else spec.replace(key_selection=selection)
            layer = attnlib.Attention(own, backend="torch", device="cpu", sinks=sinks)
            metadata = layer.backend.make_builder(own, "cpu").build(0, common)
            lists = None if indices is None else SelectedKeys(indices, starts)
            results.append(layer(query, None, None, cache, metadata, True, selected_keys=lists))
        (out, lse), (found, found_lse), (other, other_lse) = results
        assert torch.equal(found, out) and torch.equal(found_lse, lse)
        assert (other[-1] != out[-1]).any(-1).all() and (other_lse[-1] != lse[-1]).all()
        rest = slice(None, sum(query_lens[:-1]))
        assert torch.allclose(other[rest], out[rest], atol=1e-6)


def test_order_and_padding_change_no_bit() -> None:
    layer, cache, metadata, q = _step()
    lists = _lists(9, 2)
    lists[..., 2] = -1
    expected = layer(q, None, None, cache, metadata, selected_keys=SelectedKeys(lists))
    for other in (lists.flip(-1).contiguous(), lists[..., :2].contiguous(), lists.clone()):
        out = layer(q, None, None, cache, metadata, selected_keys=SelectedKeys(other))
        assert torch.equal(out, expected)
    beyond = lists.masked_fill(lists < 0, 1 << 30)
    out = layer(q, None, None, cache, metadata, selected_keys=SelectedKeys(beyond))
    assert torch.equal(out, expected)


def test_each_call_uses_its_own_lists() -> None:
    """A repeated call over one batch finds its plan by the form of the lists, not by values."""
    layer, cache, metadata, q = _step()
    lists = _lists(9, 2)
    lists[..., 1:] = -1
    first = layer(q, None, None, cache, metadata, selected_keys=SelectedKeys(lists))
    second = layer(q, None, None, cache, metadata, selected_keys=SelectedKeys((lists + 1) % 2))
    again = layer(q, None, None, cache, metadata, selected_keys=SelectedKeys(lists))
    assert torch.equal(first, again) and not torch.equal(first, second)


def test_values_of_lists_are_validated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNLIB_VALIDATE", "1")
    layer, cache, metadata, q = _step()
    lists = _lists(9, 2)
    layer(q, None, None, cache, metadata, selected_keys=SelectedKeys(lists))
    lists[7, 1] = torch.tensor([2, 0, 2])
    with pytest.raises(ContractError, match="list 7 of head 1 .* holds the entry 2 twice"):
        layer(q, None, None, cache, metadata, selected_keys=SelectedKeys(lists))
    shared = SPEC.replace(key_selection=KeySelection(max_blocks=3, query_block_size=4))
    layer, cache, metadata, q = _step(shared)
    for starts, message in (
        ([0, 1, 2, 3], "gives request 1 the lists .1, 2., but its 5 queries need 2 lists"),
        ([0, 1, 3, 5], "list_start_loc ends at 5, past the 4 rows"),
    ):
        selected = SelectedKeys(_lists(4, 1), torch.tensor(starts, dtype=torch.int32))
        with pytest.raises(ContractError, match=message):
            layer(q, None, None, cache, metadata, selected_keys=selected)


def test_two_sets_of_keys_under_one_softmax() -> None:
    """M4, M11: a window of keys and selected entries, with a sink in one of the two layers."""
    torch.manual_seed(0)
    latents: dict[str, Any] = {
        "num_heads": 4, "num_kv_heads": 1, "head_size": 16, "dtype": torch.float32, "block_size": 4,
        "use_mla": True, "needs_lse": True,
    }  # fmt: skip
    sinks = torch.randn(4)
    window = attnlib.AttentionSpec(**latents, sliding_window=5, has_sink=True)
    selection = KeySelection(max_blocks=3)
    entries = attnlib.AttentionSpec(**latents, attn_type="encoder_decoder", key_selection=selection)
    query, parts, keys = torch.randn(4, 4, 16), [], []
    lists = torch.tensor([[[6, 2, 0]], [[1, -1, 0]], [[-1, -1, -1]], [[3, 2, 1]]]).int()
    for spec, lengths in ((window, [11, 9]), (entries, [7, 4])):
        layer = attnlib.Attention(
            spec, backend="torch", device="cpu", sinks=sinks if spec.has_sink else None
        )
        cache = attnlib.PagedKVCache.allocate(spec, 6, "cpu")
        cache.key_cache.normal_()
        table = torch.tensor([[4, 0, 5], [2, 3, 1]], dtype=torch.int32)
        common = attnlib.CommonAttentionMetadata.from_lengths(
            [1, 3], lengths, table, 4, "cpu", is_cross_attention=spec is entries
        )
        metadata = layer.backend.make_builder(spec, "cpu").build(0, common)
        selected = None if spec is window else SelectedKeys(lists)
        parts += layer(query, None, None, cache, metadata, True, selected_keys=selected)
        keys.append([cache.key_cache[row.long()].flatten(0, 2) for row in table])
    out = torch.empty_like(query)
    merge_states(*parts, out=out)
    for token, (request, position) in enumerate([(0, 10), (1, 6), (1, 7), (1, 8)]):
        near = keys[0][request][max(position - 4, 0) : position + 1]
        chosen = keys[1][request][[entry for entry in lists[token, 0].tolist() if entry >= 0]]
        both = torch.cat([near, chosen])
        scores = torch.cat([query[token] @ both.T / 4, sinks[:, None]], dim=1)
        expected = scores.softmax(-1)[:, :-1] @ both
        assert torch.allclose(out[token], expected, atol=1e-5)


def test_compiled_layers_take_lists() -> None:
    layer, cache, metadata, q = _step()
    lists = _lists(9, 2)
    lists[..., 1:] = -1

    def attend(q: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        return layer(q, None, None, cache, metadata, selected_keys=SelectedKeys(indices)) * 2

    expected = attend(q, lists)
    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    assert torch.equal(compiled(q, lists), expected)


def test_backends_without_selected_keys_say_so() -> None:
    composite = attnlib.get_attn_backend
    for name in ("prefill:torch,decode:triton",):
        with pytest.raises(UnsupportedConfigError, match="key_selection=3 blocks of 4 tokens"):
            composite(SPEC, name, "cpu")
    with pytest.raises(UnsupportedConfigError, match="batch_invariant"):
        composite(SPEC.replace(batch_invariant=True), "torch", "cpu")


@pytest.mark.parametrize(
    ("starts", "lists", "message"),
    [
        ([0, 1, 2], 2, "gives request 0 the lists .0, 1., but its 4 queries need 2 lists"),
        ([0, 2, 3], 2, "list_start_loc ends at 3, past the 2 rows"),
        ([0, 5, 3], 9, "list_start_loc falls from 5 to 3"),
        ([1, 3, 4], 4, r"list_start_loc\[0\]=1 must be 0"),
    ],
)
def test_lists_past_their_end_are_refused_in_every_call(
    starts: list[int], lists: int, message: str
) -> None:
    """M11: before the new keys are written, also in a call whose signature is known."""
    selection = KeySelection(max_blocks=2, block_size=4, query_block_size=2)
    spec = attnlib.AttentionSpec(
        num_heads=4, num_kv_heads=2, head_size=16, dtype=torch.float32, key_selection=selection
    )
    layer = attnlib.Attention(spec, backend="torch", device="cpu")
    common = attnlib.CommonAttentionMetadata.from_lengths([4, 2], [9, 5], [[2], [1]], 16, "cpu")
    q, kv = torch.randn(6, 4, 16), torch.ones(6, 2, 16)
    indices = torch.zeros(lists, 1, 2, dtype=torch.int32)
    wrong = SelectedKeys(indices, torch.tensor(starts, dtype=torch.int32))
    enough = torch.zeros(max(lists, 3), 1, 2, dtype=torch.int32)
    right = SelectedKeys(enough, torch.tensor([0, 2, 3], dtype=torch.int32))
    for known in (False, True):
        metadata = layer.backend.make_builder(spec, "cpu").build(0, common)
        cache = attnlib.PagedKVCache.allocate(spec, 4, "cpu")
        if known:
            layer(q, 0 * kv, kv, cache, metadata, selected_keys=right)
        with pytest.raises(ContractError, match=message):
            layer(q, kv, kv, cache, metadata, selected_keys=wrong)
        assert not cache.key_cache.any()


def test_lists_that_are_no_tensors_are_refused() -> None:
    lists: Any = [[1, 2]]
    with pytest.raises(ContractError, match="indices of the selected keys is a list"):
        SelectedKeys(lists)
    with pytest.raises(ContractError, match="list_start_loc of the selected keys is a list"):
        SelectedKeys(torch.zeros(1, 1, 1, dtype=torch.int32), lists)
