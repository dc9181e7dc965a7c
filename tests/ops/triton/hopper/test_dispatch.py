"""Which calls the Hopper kernels serve, by strides, and how mixed batches share the chip."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnlib.ops.layer_shape import LayerShape
from attnlib.ops.params import AttentionParams
from attnlib.ops.triton import hopper
from attnlib.ops.triton.attention_call import AttentionCall
from attnlib.ops.triton.batch_tensors import LENGTH_STEP, BatchTensors
from attnlib.ops.triton.decode_schedule import DecodeSchedule
from attnlib.ops.triton.heuristics.device import DeviceLimits
from attnlib.ops.triton.heuristics.hopper_tiles import SHORT_CONTEXT
from attnlib.ops.triton.hopper.converted_prefill import ConvertedPrefill
from attnlib.ops.triton.hopper.decode_launches import HopperDecode
from attnlib.ops.triton.hopper.dispatch import (
    decode_workspace_bytes,
    select_decode,
    select_packed_decode,
    select_prefill,
    select_unpaged,
    supports_decode,
    unsupported_strides,
)
from attnlib.ops.triton.hopper.prefill_plan import HopperPrefill
from attnlib.ops.triton.hopper.sizes import latent_blocks, latent_head_blocks
from attnlib.ops.triton.kernels.quant import KV_PLAIN
from attnlib.ops.triton.launch.sequence import K_SCALE, V_SCALE
from attnlib.ops.triton.paged_mixed import can_run_concurrently, concurrent_ctas
from attnlib.score_functions import ScoreFunction, builtin

BF16 = torch.bfloat16


def test_strides_that_tma_does_not_support() -> None:
    """P1, P9: TMA needs strides that are multiples of 16 bytes."""
    query = torch.empty(4, 8, 128, dtype=BF16)
    cache = torch.empty(3, 16, 2, 132, dtype=BF16)[..., :128]
    first, second = unsupported_strides(query=query, key_cache=cache, value_cache=cache, out=query)
    assert (
        "key_cache has stride 132 in dimension 2" in first
        and "value_cache has stride 132" in second
    )


def test_strides_of_dimensions_of_size_1_are_ignored() -> None:
    """P1: such a dimension may have any stride."""
    query = torch.empty(4, 8, 128, dtype=BF16)
    cache = torch.empty(4096, dtype=BF16).as_strided((1, 16, 1, 128), (3, 128, 7, 1))
    assert unsupported_strides(query=query, key_cache=cache, value_cache=cache, out=query) == []


CHIP = DeviceLimits(132, 227 * 1024, 228 * 1024, (9, 0), True)


def _call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    batch: BatchTensors,
    params: AttentionParams,
) -> AttentionCall:
    return AttentionCall(query, key, value, out, None, batch, params, CHIP, ())


def _schedule(max_query_len: int) -> DecodeSchedule:
    return DecodeSchedule(max_query_len, 1, True, None, True)


def _prefill(
    head_size: int = 128, block_size: int = 16, tokens: int = 600, seq_len: int = 600,
    dtype: torch.dtype = BF16, head_size_v: int | None = None, divides_keys: bool = False,
    **params: Any,
) -> HopperPrefill:  # fmt: skip
    """The launch of prefills of two requests, with 8 / 2 heads."""
    query = torch.empty(tokens, 8, head_size, dtype=dtype)
    cache = torch.empty(5, block_size, 2, head_size, dtype=dtype)
    values = torch.empty(5, block_size, 2, head_size_v or head_size, dtype=dtype)
    out = torch.empty(tokens, 8, head_size_v or head_size, dtype=dtype)
    starts = torch.zeros(3, dtype=torch.int32)
    table = torch.zeros(2, -(-seq_len // block_size), dtype=torch.int32)
    given = AttentionParams(scale=0.1, **params)
    batch = BatchTensors(starts, starts[:2], table, max_seq_len=seq_len, max_query_len=tokens)
    found = select_prefill(_call(query, cache, values, out, batch, given), divides_keys)
    assert isinstance(found, HopperPrefill)
    return found


def test_few_query_tiles_over_long_keys_are_divided() -> None:
    """2 requests of up to 64 tokens: tiles of 32 tokens, so 4 work tiles and 2 KV heads."""
    sinks = torch.zeros(8)
    divided = _prefill(tokens=64, seq_len=100_000, divides_keys=True, sinks=sinks)
    config = divided.attend._constants["CONFIG"]
    assert divided.partials is not None and divided.partials.num_splits == 132 // 8
    assert len(divided.kernels) == 2 and config.SPLIT and not config.HAS_SINK
    shorter = _prefill(tokens=64, seq_len=5000, divides_keys=True, sinks=sinks)
    assert shorter.partials is not None and shorter.partials.num_splits == 8
    assert shorter.attend._constants == divided.attend._constants  # one kernel for all lengths
    assert len(divided.launches(False).steps) == 2
    assert divided.partials.combine is not None
    assert divided.partials.combine._constants["HAS_SINK"]
    assert divided.num_batch_values == _prefill().num_batch_values + 1
    starts = torch.zeros(3, dtype=torch.int32)
    batch = BatchTensors(starts, starts[:2], torch.zeros(2, 1, dtype=torch.int32))
    space = divided.with_scratch(batch).workspace
    assert space is not None and space.nbytes == 4 * (64 * 8 * 16 * 129 + 64)
    for undivided in (
        _prefill(tokens=64, seq_len=100_000),  # beside decodes
        _prefill(tokens=1100, seq_len=100_000, divides_keys=True),
        _prefill(tokens=64, seq_len=2048, divides_keys=True),
        _prefill(tokens=64, seq_len=100_000, divides_keys=True, window=(900, 0)),
        _prefill(tokens=64, seq_len=100_000, divides_keys=True, block_size=1),
    ):
        config = undivided.attend._constants["CONFIG"]
        assert undivided.partials is None and len(undivided.kernels) == 1 and not config.SPLIT


@pytest.mark.parametrize("max_seq_len", [600, SHORT_CONTEXT, SHORT_CONTEXT + 1, 1 << 20])
def test_prefills_of_long_requests_look_at_signs(max_seq_len: int) -> None:
    """By the bound of the batch, which also tells the launches apart: a captured kernel stays."""
    is_long = max_seq_len > SHORT_CONTEXT
    assert [
        _prefill(seq_len=max_seq_len, block_size=size).attend._constants["CONFIG"].SIGN_SOFTMAX
        for size in (16, 128)
    ] == [is_long, is_long]
    cache = torch.empty(5, 16, 2, 128, dtype=BF16)
    starts = torch.zeros(3, dtype=torch.int32)
    batch = BatchTensors(starts, starts[:2], None, max_seq_len=max_seq_len)
    assert batch.length_class(cache) % 2 == int(is_long)


@pytest.mark.parametrize("seq_len", [600, 1 << 20])
def test_expanded_latents_look_at_signs_at_every_length(seq_len: int) -> None:
    found = _prefill(head_size=192, head_size_v=128, block_size=128, seq_len=seq_len)
    assert found.attend._constants["CONFIG"].SIGN_SOFTMAX


@pytest.mark.parametrize("seq_len", [SHORT_CONTEXT, SHORT_CONTEXT + 1])
def test_prefills_over_copies_of_long_requests_look_at_signs(seq_len: int) -> None:
    """Classes of lengths, which share a launch, are on one side of the limit."""
    found = _long_prefill(seq_len=seq_len)
    assert isinstance(found, ConvertedPrefill)
    assert found.prefill.attend._constants["CONFIG"].SIGN_SOFTMAX == (seq_len > SHORT_CONTEXT)
    assert SHORT_CONTEXT % LENGTH_STEP == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"head_size": 64},
        {"head_size": 96},
        {"head_size": 256},
        {"head_size": 192, "head_size_v": 128, "dtype": torch.float16},
        {"block_size": 1},
        {"dtype": torch.float16},
        {"logits_soft_cap": 30.0},
        {"window": (127, 0)},
        {"score_function": builtin.relative_bias()},
    ],
    ids=lambda changes: " ".join(changes),
)
def test_prefills_that_compute_maxima_at_every_length(changes: dict[str, Any]) -> None:
    if function := changes.get("score_function"):
        changes = {**changes, "score_tensors": function.examples(8, [600])}
    assert not _prefill(seq_len=1 << 20, **changes).attend._constants["CONFIG"].SIGN_SOFTMAX


def _long_prefill(**changes: Any) -> Any:
    """The launch of a prefill of two requests over a float8 cache, with 8 / 2 heads."""
    options = {"tokens": 4096, "seq_len": 5000, "heads": 2, "cache": torch.float8_e4m3fn, "n": 16}
    options["reqs"] = 2
    options.update((name, changes.pop(name)) for name in list(changes) if name in options)
    tokens, seq_len, heads, cache, n, reqs = options.values()
    query = torch.empty(64, 8, 128, dtype=BF16)
    key = torch.empty(5, n, heads, 128, dtype=BF16).to(cache)
    starts = torch.zeros(reqs + 1, dtype=torch.int32)
    table = torch.zeros(reqs, 4, dtype=torch.int32)
    params, out = AttentionParams(scale=0.1, **changes), torch.empty_like(query)
    batch = BatchTensors(starts, starts[:-1], table, max_seq_len=seq_len, max_query_len=tokens)
    return select_prefill(_call(query, key, key.clone(), out, batch, params), reqs == 1)


def test_keys_of_long_prompts_are_copied_once() -> None:
    """Into packed rows for the longest lengths of the class; the scales stay exact."""
    scale = torch.ones(2)
    found = _long_prefill(k_scale=2.0, v_scale=scale)
    assert isinstance(found, ConvertedPrefill) and found.rows == 2 * 8192
    inner = found.prefill
    assert inner.attend._constants["CONFIG"].KV_KIND == KV_PLAIN.value
    assert inner.attend._constants["CONFIG"].BLOCK_SIZE == 0
    assert inner.views[0].shape == (1, 2 * 8192, 2, 128) and inner.views[0].dtype == BF16
    assert (inner.scale, inner.scales) == (0.2, (None, V_SCALE))
    assert _long_prefill(k_scale=scale).prefill.scales == (K_SCALE, None)
    assert isinstance(_long_prefill(n=1, cache=BF16), ConvertedPrefill)
    tiles = [_long_prefill(reqs=1, tokens=tokens).prefill.tile for tokens in (512, 4095, 4096)]
    assert [tile.persistent for tile in tiles] == [False, False, True]


@pytest.mark.parametrize("block_size", [1, 8, 24, 544])
def test_float8_in_other_blocks_is_copied_or_left_to_the_portable_kernel(block_size: int) -> None:
    found = _long_prefill(n=block_size, tokens=256, heads=8, k_scale=torch.ones(8))
    assert isinstance(found, ConvertedPrefill) and found.prefill.scales == (K_SCALE, None)
    assert _long_prefill(n=block_size, tokens=255) is None


@pytest.mark.parametrize(
    "changes",
    [{"tokens": 4095}, {"heads": 8}, {"seq_len": 1 << 20}, {"cache": BF16}],
    ids=["short prompt", "one query head per KV head", "too much memory", "16-bit"],
)
def test_keys_that_are_not_copied(changes: dict[str, Any]) -> None:
    assert isinstance(_long_prefill(**changes), HopperPrefill)


def test_a_conversion_does_not_run_beside_a_decode() -> None:
    decode = SimpleNamespace(needs_alignment=True)
    assert can_run_concurrently(_long_prefill(tokens=64), decode)  # type: ignore[arg-type]  # enough of a launch
    assert not can_run_concurrently(_long_prefill(), decode)  # type: ignore[arg-type]  # likewise


def test_two_prefills_with_the_same_counters_do_not_overlap() -> None:
    """Batch-invariant layers compute decodes of many rows by the prefill kernel. Both parts of a
    batch then take work items from the same counters."""
    decode, prefill = _long_prefill(tokens=8), _long_prefill(tokens=64)
    assert isinstance(decode, HopperPrefill) and isinstance(prefill, HopperPrefill)
    assert not can_run_concurrently(prefill, decode)


def test_scratch_memory_of_copies() -> None:
    """Copies, then the first rows of the requests; the prefill takes these as lengths and table."""
    found = _long_prefill()
    lens, table = torch.tensor([5000, 3], dtype=torch.int32), torch.zeros(2, 400).int()
    given = BatchTensors(torch.tensor([0, 10, 11]).int(), lens, table, max_seq_len=5000)
    batch = found.with_scratch(given)
    # Launches by Triton are aligned, so that direct ones can follow.
    addresses, values = found.addresses(batch), found.tensors(batch)
    assert addresses is not None and len(addresses) == len(values) == found.num_batch_values
    assert values[0] is given.query_start_loc
    keys, copies, starts = values[5:8]
    assert keys.numel() == copies.numel() == 2 * 8192 * 2 * 128 and starts.numel() == 3
    assert values[1].data_ptr() == values[2].data_ptr() == starts.data_ptr()
    assert values[2].shape == (3, 1) and starts.dtype == torch.int32
    assert values[8] is lens and values[9] is table
    assert [x.base.data_ptr() for x in values[10:]] == [keys.data_ptr(), copies.data_ptr()]


@pytest.mark.parametrize("block_size", [1, 2, 4, 8, 16])
def test_rows_of_small_blocks_are_gathered(block_size: int) -> None:
    """TMA reads boxes of at least 8 rows; a gathering kernel takes addresses and strides."""
    found = _prefill(block_size=block_size)
    gathered = block_size < 8
    assert found.gathers is gathered
    assert found.attend._constants["CONFIG"].GATHERS is gathered
    # Of blocks, rows and heads, in bytes.
    strides = (block_size * 512, 512, 256) * 2 if gathered else (None,) * 6
    assert found.cache_strides == strides
    # Descriptors of the queries, and of the caches.
    assert len(found.launches(False).lookups) == (1 if gathered else 2)


@pytest.mark.parametrize(
    ("function", "block_n"),
    [
        (builtin.documents(), 64),
        (builtin.documents(longest=1024), 64),
        (builtin.documents(longest=1025), 128),
        (builtin.bidirectional_spans(window=512), 64),
        (builtin.bidirectional_spans(window=4096), 128),
        (builtin.bidirectional_spans(), 128),
        (builtin.head_windows(), 64),
        (builtin.head_windows(1, 2048), 64),
        (builtin.head_windows(1, 4096), 128),
        (builtin.prefix_lm(), 128),
        (builtin.block_diffusion(), 128),
        (builtin.multi_item(), 128),
        (builtin.relative_bias(), 128),
    ],
)
def test_tiles_are_small_where_ranges_are_short(function: ScoreFunction, block_n: int) -> None:
    """M10: by the longest range; a length that only a tensor has counts as short."""
    made = function.examples(8, [600]) if function.examples else {}
    tensors = {name: made[name] for name in function.tensor_names}
    causal = not function.needs_bidirectional
    found = _prefill(score_function=function, score_tensors=tensors, causal=causal)
    assert (found.tile.block_n, found.tile.stages) == (block_n, 256 // block_n)


def test_wide_heads_share_rows_between_consumers() -> None:
    wide, usual = (_prefill(head_size=size).attend._constants["CONFIG"] for size in (512, 256))
    assert (wide.SPLIT_V, usual.SPLIT_V) == (True, False)
    assert wide.TILE_TOKENS * 2 == usual.TILE_TOKENS and not wide.STAGED_STORE


@pytest.mark.parametrize(
    ("cap", "dtype", "has_cap"),
    [
        (30.0, BF16, 2),
        (64.0, BF16, 2),
        (65.0, BF16, True),
        (30.0, torch.float16, True),
        (0.0, BF16, False),
    ],
)
def test_soft_caps_whose_weights_fit_need_no_running_maximum(
    cap: float, dtype: torch.dtype, has_cap: bool | int
) -> None:
    """bfloat16 has the range of float32; float16 has not."""
    found = _prefill(dtype=dtype, logits_soft_cap=cap).attend._constants["CONFIG"].HAS_CAP
    assert found == has_cap and type(found) is type(has_cap)


def test_few_work_tiles_are_not_ordered_by_groups_of_heads() -> None:
    """Two chunks of 512 tokens over long contexts: one section of all heads."""
    few, many = _prefill(tokens=600, seq_len=1 << 20), _prefill(tokens=40000, seq_len=1 << 20)
    assert few._l2_heads(1 << 20) == 2 and many._l2_heads(1 << 20) == 1


def test_packed_keys_are_read_by_the_hopper_prefill() -> None:
    query, key = torch.empty(600, 8, 128, dtype=BF16), torch.empty(700, 2, 128, dtype=BF16)
    starts = torch.zeros(3, dtype=torch.int32)
    table = starts.unsqueeze(1)
    batch = BatchTensors(starts, starts, table, max_seq_len=350, max_query_len=300)

    def select(params: AttentionParams, key: torch.Tensor) -> HopperPrefill | None:
        out = torch.empty_like(query)
        return select_unpaged(_call(query, key, key.clone(), out, batch, params))

    found = select(AttentionParams(scale=0.1, causal=False), key)
    assert found is not None and found.attend._constants["CONFIG"].BLOCK_SIZE == 0
    assert found.views[0].shape == (1, 700, 2, 128) and found.views[0].rows == 128
    assert select(AttentionParams(scale=0.1, alibi_slopes=torch.ones(8)), key) is None
    assert select(AttentionParams(scale=0.1), key.to(torch.float8_e4m3fn)) is None
    assert select(AttentionParams(scale=0.1), key[:0]) is None


PACKED = {
    "query": ((3, 8, 128), BF16),
    "key": ((9, 2, 16, 16, 8), BF16),
    "value": ((9, 2, 128, 16), BF16),
    "table": ((3, 4), torch.int32),
    "lens": ((3,), torch.int32),
}


def _packed_decode(params: AttentionParams, **changes: Any) -> HopperDecode | None:
    """The launch over a packed cache with some tensors changed."""
    tensors = {name: torch.empty(x[0], dtype=x[1]) for name, x in {**PACKED, **changes}.items()}
    query, lens = tensors["query"], tensors["lens"]
    batch = BatchTensors(lens, lens, tensors["table"])
    key, value, out = tensors["key"], tensors["value"], torch.empty_like(query)
    return select_packed_decode(_call(query, key, value, out, batch, params), None)


def test_packed_caches_are_read_by_the_hopper_decode() -> None:
    """TMA reads keys in units of 8 positions and values in rows of a page, at most 64 positions."""
    prepared = _packed_decode(AttentionParams(scale=0.1))
    assert prepared is not None and prepared.packed
    assert prepared.combine_tail[0] == 3  # requests; there is no `query_start_loc` of 4
    keys, values = prepared.views
    assert keys.sizes == ([9, 2, 2, 16, 64], [4096, 2048, 64, 128, 1])
    assert values.sizes == ([9, 2, 128, 16], [4096, 2048, 16, 1])
    shapes = {"key": ((9, 2, 16, 128, 8), BF16), "value": ((9, 2, 128, 128), BF16)}
    wide = _packed_decode(AttentionParams(scale=0.1), **shapes)
    assert wide is not None and [view.rows for view in wide.views] == [64, 64]


@pytest.mark.parametrize(
    "changes",
    [
        {"table": ((3, 4), torch.int64)},
        {"lens": ((3,), torch.int64)},
        {"key": ((9, 2, 16, 8, 8), BF16), "value": ((9, 2, 128, 8), BF16)},
        {"key": ((9, 2, 8, 16, 16), torch.float8_e4m3fn),
         "value": ((9, 2, 128, 16), torch.float8_e4m3fn)},
        {"query": ((3, 8, 32), BF16), "key": ((9, 2, 4, 16, 8), BF16),
         "value": ((9, 2, 32, 16), BF16)},
        {"query": ((3, 66, 128), BF16)},
    ],
)  # fmt: skip
def test_other_packed_caches_are_left_to_the_portable_kernel(changes: dict[str, Any]) -> None:
    """int64 tables and lengths, blocks of 8, float8, heads below 64, 33 heads per KV head."""
    assert _packed_decode(AttentionParams(scale=0.1), **changes) is None


def test_packed_decode_with_alibi_is_left_to_the_portable_kernel() -> None:
    assert _packed_decode(AttentionParams(scale=0.1, alibi_slopes=torch.ones(8))) is None


def test_failed_import_of_gluon_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The portable kernels then serve every call."""

    def fail(name: str) -> Any:
        raise ImportError(f"no {name} in this Triton")

    monkeypatch.setattr(hopper, "import_module", fail)
    hopper._load.cache_clear()
    try:
        assert hopper.load() is None
        assert (
            hopper.import_error()
            == "ImportError: no attnlib.ops.triton.hopper.dispatch in this Triton"
        )
    finally:
        hopper._load.cache_clear()


def test_longer_prefills_get_more_multiprocessors() -> None:
    """60 decodes of 4k keys with a prefill of 8k tokens, and of 2k."""
    shape = LayerShape(32, 8, 128, 128, BF16, BF16)
    chip = DeviceLimits(132, 227 * 1024, 228 * 1024, (9, 0), True)
    few, many = (
        concurrent_ctas(
            shape, chip, num_decodes=60, decode_visible=4096, prefill_tokens=tokens,
            prefill_visible=tokens, bounds=(tokens, tokens),
        )
        for tokens in (8192, 2048)
    )  # fmt: skip
    assert (few, many) == (48, 88)


@pytest.mark.parametrize(
    ("decodes", "tokens", "ctas"), [(8, 300, 48), (8, 340, 88), (8, 160, 88), (64, 300, 88)]
)
def test_few_query_tiles_run_beside_a_small_decode(decodes: int, tokens: int, ctas: int) -> None:
    """Prefills of 80, 88 and 40 query tiles beside decodes of 1k keys, which get fewer CTAs if all
    tiles fit beside them then and did not before; a large decode keeps its share."""
    shape = LayerShape(32, 8, 128, 128, BF16, BF16)
    chip = DeviceLimits(132, 227 * 1024, 228 * 1024, (9, 0), True)
    found = concurrent_ctas(
        shape, chip, num_decodes=decodes, decode_visible=1024, prefill_tokens=tokens,
        prefill_visible=tokens, bounds=(tokens, 1024),
    )  # fmt: skip
    assert found == ctas


def test_latents_have_a_decode_of_their_own() -> None:
    """P10: aliased values select it; separate values of the same sizes select no Hopper kernel."""
    chip = DeviceLimits(132, 227 * 1024, 228 * 1024, (9, 0), True)
    query, key = torch.empty(3, 128, 576, dtype=BF16), torch.empty(4, 64, 1, 576, dtype=BF16)
    out, lengths = torch.empty(3, 128, 512, dtype=BF16), torch.zeros(4, dtype=torch.int32)
    batch = BatchTensors(lengths, lengths[:3], torch.zeros(3, 2, dtype=torch.int32))
    params = AttentionParams(scale=0.1)

    def select(value: torch.Tensor, **changes: Any) -> HopperDecode | None:
        own = AttentionParams(scale=0.1, **changes) if changes else params
        return select_decode(_call(query, key, value, out, batch, own), _schedule(1))

    found = select(key[..., :512])
    assert found is not None and found.combine is not None
    assert [view.width for view in found.views] == [64, 128], "rotary part, quarter of a value"
    shape = LayerShape(128, 1, 576, 512, BF16, BF16, 64, latent=True)
    assert supports_decode(shape, chip, 1) and supports_decode(shape, chip, 2)
    assert found.workspace_bytes == decode_workspace_bytes(shape, chip, 3, 1)
    assert select(torch.empty(4, 64, 1, 512, dtype=BF16)) is None
    assert select(key[..., :512], v_scale=0.5) is None


@pytest.mark.parametrize("heads", [5, 16, 20, 32, 128])
def test_workspace_of_all_query_lengths_of_decodes_over_latents(heads: int) -> None:
    """That of the longest query of a builder has room for the blocks of shorter ones."""
    chip = DeviceLimits(132, 227 * 1024, 228 * 1024, (9, 0), True)
    query, key = torch.empty(24, heads, 576, dtype=BF16), torch.empty(4, 64, 1, 576, dtype=BF16)
    out, lengths = torch.empty(24, heads, 512, dtype=BF16), torch.zeros(4, dtype=torch.int32)
    batch = BatchTensors(lengths, lengths[:3], torch.zeros(3, 2, dtype=torch.int32))
    call = _call(query, key, key[..., :512], out, batch, AttentionParams(scale=0.1))
    shape = LayerShape(heads, 1, 576, 512, BF16, BF16, 64, latent=True)
    most = decode_workspace_bytes(shape, chip, 24, 8)
    for tokens in range(1, 9):
        found = select_decode(call, _schedule(tokens))
        assert found is not None and found.workspace_bytes <= most
        blocks = latent_blocks(heads, tokens)
        (ctas, _, _), headers = found.attend._grid, found.header_offset
        assert ctas <= 132 and ctas % blocks == 0
        assert 4 * (headers + 24 * latent_head_blocks(heads)) <= found.workspace_bytes


@pytest.mark.parametrize(("heads", "tokens"), [(16, 1), (5, 3), (16, 2)])
def test_workspace_of_decodes_over_latents(heads: int, tokens: int) -> None:
    """One CTA on each multiprocessor for any number of requests, and two partial results for it."""
    chip = DeviceLimits(132, 227 * 1024, 228 * 1024, (9, 0), True)
    query, key = torch.empty(6, heads, 576, dtype=BF16), torch.empty(4, 64, 1, 576, dtype=BF16)
    out, lengths = torch.empty(6, heads, 512, dtype=BF16), torch.zeros(3, dtype=torch.int32)
    batch = BatchTensors(lengths, lengths[:2], torch.zeros(2, 2, dtype=torch.int32))
    params = AttentionParams(scale=0.1)
    call = _call(query, key, key[..., :512], out, batch, params)
    found = select_decode(call, _schedule(tokens))
    assert found is not None
    shape = LayerShape(heads, 1, 576, 512, BF16, BF16, latent=True)
    rows = heads * tokens
    assert found.workspace_bytes == 4 * (2 * 132 * rows * 513 + 6)
    assert found.workspace_bytes == decode_workspace_bytes(shape, chip, 6, tokens)
    many = torch.zeros(18, dtype=torch.int32)
    batch = BatchTensors(many, many[:17], torch.zeros(17, 2, dtype=torch.int32))
    query, out = query[:1].expand(17, -1, -1), out[:1].expand(17, -1, -1)
    tensors = query.contiguous(), key, key[..., :512], out.contiguous()
    found = select_decode(_call(*tensors, batch, params), _schedule(tokens))
    assert found is not None and found.workspace_bytes == 4 * (2 * 132 * rows * 513 + 17)
