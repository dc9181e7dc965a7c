"""The layer: writes, then attends; and what it refuses before anything is written."""

import copy
import dataclasses
import functools
import gc
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import attnlib
from attnlib import instrumentation
from attnlib.backends.torch import TorchBackend
from attnlib.cache.storage import PagedKVCache
from attnlib.errors import ContractError, LayoutMismatchError
from attnlib.layer import attention
from attnlib.layer.plans import MAX_PLANS
from tests.ops.naive import naive_attention

SPEC = attnlib.AttentionSpec(
    num_heads=4, num_kv_heads=2, head_size=8, head_size_v=6, dtype=torch.float32, block_size=4
)


def _inputs(tokens: int = 6, **changes):
    torch.manual_seed(0)
    spec = SPEC.replace(**changes)
    layer = attnlib.Attention(spec, device="cpu", prefix="layers.0")
    cache = attnlib.PagedKVCache.allocate(spec, 8, "cpu")
    common = attnlib.CommonAttentionMetadata.from_lengths(
        [1, tokens - 1], [1, tokens - 1], [[6], [1, 3]], 4, "cpu"
    )
    step = layer.backend.make_builder(spec, "cpu").build(0, common)
    q, k, v = torch.randn(tokens, 4, 8), torch.randn(tokens, 2, 8), torch.randn(tokens, 2, 6)
    return layer, cache, step, q, k, v


def test_it_writes_then_attends() -> None:
    """P7: new keys are in the cache before anyone attends to them."""
    layer, cache, step, q, k, v = _inputs()
    out, lse = layer(q, k, v, cache, step, return_lse=True)
    reference, reference_lse = naive_attention(
        q,
        cache.key_cache,
        cache.value_cache,
        step.block_table,
        step.query_start_loc,
        step.seq_lens,
        max_query_len=5,
        max_seq_len=5,
        scale=8**-0.5,
    )
    assert torch.allclose(out.double(), reference, atol=1e-6) and torch.allclose(
        lse.double(), reference_lse, atol=1e-6
    )
    assert torch.equal(cache.key_cache[6, 0], k[0]) and torch.equal(cache.value_cache[3, 0], v[5])


def test_output_comes_as_the_query_came() -> None:
    layer, cache, step, q, k, v = _inputs()
    per_head = layer(q, k, v, cache, step)
    flat = layer(q.flatten(1), k.flatten(1), v.flatten(1), cache, step)
    assert (
        per_head.shape == (6, 4, 6)
        and flat.shape == (6, 24)
        and torch.equal(per_head.flatten(1), flat)
    )


def test_it_writes_into_a_given_output_strided_or_flat() -> None:
    """P9"""
    layer, cache, step, q, k, v = _inputs()
    expected = layer(q, k, v, cache, step)
    wide = torch.full((6, 4, 10), float("nan"))
    assert layer(q, k, v, cache, step, output=wide[..., :6]) is not None
    assert torch.equal(wide[..., :6], expected) and wide[..., 6:].isnan().all()


def test_fused_qkv_views_are_ordinary() -> None:
    """P9: q, k, v as strided views of one projection."""
    layer, cache, step, q, k, v = _inputs()
    fused = torch.cat([q.flatten(1), k.flatten(1), v.flatten(1)], dim=1)
    views = fused[:, :32], fused[:, 32:48], fused[:, 48:]
    assert torch.equal(layer(*views, cache, step).view(6, 4, 6), layer(q, k, v, cache, step))


def test_padding_rows_come_back_as_zero() -> None:
    """M6"""
    layer, cache, step, q, k, v = _inputs()
    pad = torch.full((9, 4, 8), float("nan"))
    pad[:6] = q
    out = layer(pad, k, v, cache, step)
    assert (out[6:] == 0).all() and torch.equal(out[:6], layer(q, k, v, cache, step))


def test_a_layer_that_shares_a_cache_never_writes() -> None:
    """P8"""
    layer, cache, step, q, k, v = _inputs()
    layer(q, k, v, cache, step)
    before = cache.key_cache.clone()
    reader = attnlib.Attention(SPEC, device="cpu", kv_sharing_target_layer_name="layers.0")
    assert reader.spec.kv_sharing
    assert torch.equal(reader(q, k + 1, v + 1, cache, step), reader(q, None, None, cache, step))
    assert torch.equal(cache.key_cache, before)


def test_encoders_need_no_cache() -> None:
    spec = SPEC.replace(attn_type="encoder_only", mask_kind="bidirectional")
    layer = attnlib.Attention(spec, device="cpu")
    step = layer.backend.make_builder(spec, "cpu").build(
        0, attnlib.CommonAttentionMetadata.from_lengths([2, 3], [2, 3], device="cpu")
    )
    q, k, v = torch.randn(5, 4, 8), torch.randn(5, 2, 8), torch.randn(5, 2, 6)
    out = layer(q, k, v, None, step)
    weights = torch.softmax(q[2:, 1] @ k[2:, 0].T * 8**-0.5, -1)
    assert torch.allclose(out[2:, 1], weights @ v[2:, 0], atol=1e-6)
    with pytest.raises(ContractError, match="caches nothing, so key and value must be given"):
        layer(q, None, None, None, step)


@pytest.mark.parametrize("name", ["key", "value"])
def test_an_encoder_does_not_write_over_its_keys(name: str) -> None:
    """Later rows read them."""
    spec = SPEC.replace(num_kv_heads=4, head_size_v=8, attn_type="encoder_only")
    layer = attnlib.Attention(spec, device="cpu")
    batch = attnlib.CommonAttentionMetadata.from_lengths([5], [5], device="cpu")
    step = layer.backend.make_builder(spec, "cpu").build(0, batch)
    q, k, v = torch.randn(3, 5, 4, 8)
    wanted = layer(q, k, v, None, step)
    with pytest.raises(ContractError, match=f"output is {name}, which is read after rows"):
        layer(q, k, v, None, step, output=k if name == "key" else v)
    memory = torch.randn(5, 3, 4, 8)
    memory[:, 0], memory[:, 1], memory[:, 2] = q, k, v
    q, k, v = memory.unbind(1)
    shifted = memory.view(-1)[k.storage_offset() + 1 :].as_strided(k.shape, k.stride())
    for output in (shifted, k if name == "key" else v):
        with pytest.raises(ContractError, match="output is (in the memory of )?(key|value)"):
            layer(q, k, v, None, step, output=output)
    assert torch.equal(layer(q, k, v, None, step, output=q), wanted)


@pytest.mark.parametrize("validate", [False, True])
def test_an_output_is_apart_from_later_queries_and_the_cache(
    validate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused before anything is written, on the first call of a kind or with ATTNLIB_VALIDATE."""
    layer, cache, step, q, k, v = _inputs()
    rows = q.shape[0]
    memory = torch.zeros(rows + 1, 4, 8)
    memory[1:] = q
    if validate:
        layer(q, k, v, cache, step, output=torch.empty(rows, 4, 6))
        monkeypatch.setenv("ATTNLIB_VALIDATE", "1")
    before = cache.key_cache.clone()
    for output, message in (
        (memory[:-1, :, :6], "output is in the memory of query, which is read after rows"),
        (
            cache.value_cache.flatten()[: rows * 24].view(rows, 4, 6),
            "is in the memory of the cache",
        ),
    ):
        with pytest.raises(ContractError, match=message):
            layer(memory[1:], k, v, cache, step, output=output)
        assert torch.equal(cache.key_cache, before)
    out = layer(q, k, v, cache, step)
    if out.shape[-1] == q.shape[-1]:
        assert torch.equal(layer(q, k, v, cache, step, output=q), out)


def test_vllms_argument_list() -> None:
    layer = attnlib.Attention.from_arguments(
        4, 8, 0.5, 2, alibi_slopes=[0.1] * 4, per_layer_sliding_window=9, prefix="a", device="cpu"
    )
    assert layer.spec.sliding_window == 9 and layer.spec.has_alibi and layer.impl.scale == 0.5
    assert layer.get_attn_backend().get_name() == "torch" and "scale=0.5" in repr(layer)


def test_scales_go_to_the_cache_and_must_agree() -> None:
    """M9"""
    layer, cache, step, q, k, v = _inputs(kv_cache_dtype="fp8")
    layer.calc_kv_scales(q, k, v)
    out = layer(q, k, v, cache, step)
    keys, values = (
        cache.key_cache.float() * layer.k_scale,
        cache.value_cache.float() * layer.v_scale,
    )
    reference, _ = naive_attention(
        q,
        keys,
        values,
        step.block_table,
        step.query_start_loc,
        step.seq_lens,
        max_query_len=5,
        max_seq_len=5,
        scale=8**-0.5,
    )
    assert torch.allclose(out.double(), reference, atol=1e-5), (
        "exact over what the cache really holds"
    )
    assert (keys[6, 0] - k[0]).abs().max() <= k.abs().max() / 16, (
        "and what it holds is within e4m3's half step of 1/16"
    )
    assert cache.k_scale is layer.k_scale
    other = attnlib.Attention(layer.spec, device="cpu", k_scale=3.0)
    with pytest.raises(
        ContractError, match=r"k_scale of layer \(unnamed\) is 3.0.*must agree.*\[M9\]"
    ):
        other(q, k, v, cache, step)


def _break(name: str):
    layer, cache, step, q, k, v = _inputs()
    call = {"query": q, "key": k, "value": v, "cache": cache, "metadata": step}
    call.update(
        {
            "query dtype": {"query": q.half()},
            "key heads": {"key": torch.zeros(6, 3, 8)},
            "value size": {"value": torch.zeros(6, 2, 8)},
            "key rows": {"key": k[:4], "value": v[:4]},
            "value rows": {"value": v[:4]},
            "no value": {"value": None},
            "query rows": {"query": q[:3]},
            "cache block": {
                "cache": attnlib.PagedKVCache.allocate(SPEC.replace(block_size=8), 8, "cpu")
            },
            "cache heads": {
                "cache": attnlib.PagedKVCache.allocate(SPEC.replace(num_kv_heads=4), 8, "cpu")
            },
            "cache dtype": {
                "cache": attnlib.PagedKVCache.allocate(SPEC.replace(kv_cache_dtype="fp8"), 8, "cpu")
            },
            "one memory": {
                "cache": attnlib.PagedKVCache.from_views(cache.key_cache, cache.key_cache[..., :6])
            },
            "no cache": {"cache": None},
            "strided head": {"query": torch.zeros(6, 8, 4).transpose(1, 2)},
            "slots int32": {"metadata": _with(step, slot_mapping=step.slot_mapping.int())},
            "device": {"key": k.to("meta"), "value": v.to("meta")},
            "flat query too narrow": {"query": torch.zeros(6, 31)},
            "flat query of two tokens in a row": {"query": torch.zeros(6, 64)},
            "flat key of two tokens in a row": {
                "key": torch.zeros(6, 32),
                "value": torch.zeros(6, 24),
            },
        }[name]
    )
    return layer, cache, call


def _with(step, **changes):
    return dataclasses.replace(step, **changes)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("query dtype", "query is torch.float16, the spec says torch.float32"),
        ("key heads", r"key has shape \(6, 3, 8\); it must be \[tokens, 2, 8\] or \[tokens, 16\]"),
        ("value size", r"value has shape \(6, 2, 8\); it must be \[tokens, 2, 6\]"),
        ("key rows", r"slot_mapping names 6 tokens, but key has 4 rows \[P4\]"),
        ("value rows", "key has 6 rows and value 4"),
        ("no value", "value is None and the other is not"),
        ("query rows", r"query has 3 rows, but the batch has 6 tokens"),
        ("cache block", r"cache has block_size=8, the spec says 4"),
        ("cache heads", "cache has num_kv_heads=4, the spec says 2"),
        ("cache dtype", "cache stores float8_e4m3fn, the spec says float32"),
        ("one memory", r"key_cache and value_cache are the same memory.*use_mla=True.*\[P1\]"),
        ("no cache", "attends through a cache: pass a PagedKVCache"),
        ("strided head", "query has stride 4 along the head"),
        ("slots int32", r"slot_mapping is torch.int32; it must be int64"),
        ("device", "key is on meta, query on cpu"),
        (
            "flat query too narrow",
            r"query has shape \(6, 31\); it must be \[tokens, 4, 8\] or \[tokens, 32\]",
        ),
        ("flat query of two tokens in a row", r"query has shape \(6, 64\); it must be"),
        (
            "flat key of two tokens in a row",
            r"key has shape \(6, 32\); it must be \[tokens, 2, 8\] or \[tokens, 16\]",
        ),
    ],
)
@pytest.mark.parametrize("seasoned", [False, True], ids=["first-call", "after-a-good-call"])
def test_bad_calls_are_named_and_change_nothing(name: str, message: str, seasoned: bool) -> None:
    layer, cache, call = _break(name)
    if (
        seasoned
    ):  # what a layer has accepted once it does not check again, so every difference has to count
        _, other_cache, step, q, k, v = _inputs()
        layer(q, k, v, other_cache, step)
    before = cache.key_cache.clone(), cache.value_cache.clone()
    with pytest.raises(ContractError, match=message):
        layer(**call)
    assert torch.equal(cache.key_cache, before[0]) and torch.equal(cache.value_cache, before[1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query_start_loc": [0, 4, 3]}, r"query_start_loc falls from 4 to 3 at request 1"),
        ({"query_start_loc": [1, 4, 6]}, r"query_start_loc\[0\]=1 must be 0"),
        ({"query_start_loc": [0, 1, 60]}, "query_start_loc ends at 60, but query has 6 rows"),
        ({"seq_lens": [1, -5]}, r"seq_lens\[1\]=-5 must not be negative"),
        (
            {"seq_lens": [1, 9]},
            r"block_table row 1 has 2 entries, but seq_lens\[1\]=9 needs 3 blocks of 4 "
            r"tokens \[P3\]",
        ),
        (
            {"block_table": [[6, 0], [1, 8]]},
            r"block_table\[1\]\[1\]=8 is outside the pool of 8 blocks \(0 to 7\) \[P3\]",
        ),
        ({"block_table": [[-1, 0], [1, 3]]}, r"block_table\[0\]\[0\]=-1 is outside"),
        (
            {"slot_mapping": [24, 4, 5, 6, 7, 32]},
            r"slot_mapping\[5\]=32 is outside the cache of 32 slots",
        ),
        ({"slot_mapping": [24, 4, 5, -2, 7, 12]}, r"slot_mapping\[3\]=-2 is outside"),
        (
            {"slot_mapping": [24, 4, 5, 4, 7, 12]},
            r"slot_mapping\[3\] and slot_mapping\[1\] are both 4",
        ),
    ],
)
def test_validation_reads_the_numbers(
    changes: dict, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O3: ATTNLIB_VALIDATE=1 names tensor, request and value; nothing is written."""
    monkeypatch.setenv("ATTNLIB_VALIDATE", "1")
    layer, cache, step, q, k, v = _inputs()
    layer(q, k, v, cache, step)
    before = cache.key_cache.clone()
    broken = {
        name: torch.tensor(value, dtype=getattr(step, name).dtype)
        for name, value in changes.items()
    }
    with pytest.raises(ContractError, match=message):
        layer(q, k + 1, v, cache, _with(step, **broken))
    assert torch.equal(cache.key_cache, before)


def test_garbage_behind_a_rows_end_is_legal(monkeypatch: pytest.MonkeyPatch) -> None:
    """P3: entries past the last block mean nothing, to validation too."""
    monkeypatch.setenv("ATTNLIB_VALIDATE", "1")
    layer, cache, step, q, k, v = _inputs()
    garbage = _with(step, block_table=torch.tensor([[6, 2**30], [1, 3]], dtype=torch.int32))
    assert torch.equal(layer(q, k, v, cache, garbage), layer(q, k, v, cache, step))


def test_a_cache_in_an_order_that_the_backend_does_not_read_is_refused() -> None:
    """P2: a kernel for one layout never reads another. The backend checks unnamed layouts."""
    backend = type(
        "HeadsFirst",
        (TorchBackend,),
        {"capabilities": dataclasses.replace(TorchBackend.capabilities, kv_cache_layouts=("HND",))},
    )
    _, cache, step, q, k, v = _inputs()
    layer, before = attnlib.Attention(SPEC, backend=backend, device="cpu"), cache.key_cache.clone()
    with pytest.raises(
        LayoutMismatchError,
        match=r"reads HND, but the cache is laid out as NHD: allocate it with layout='HND' \[P2\]",
    ):
        layer(q, k, v, cache, step)
    assert torch.equal(cache.key_cache, before)
    expected = attnlib.Attention(SPEC, device="cpu")(q, k, v, cache, step)
    assert torch.equal(
        layer(q, k, v, attnlib.PagedKVCache.allocate(SPEC, 8, "cpu", "HND"), step), expected
    )
    wide = torch.zeros(8, 4, 2, 20)
    assert torch.equal(
        layer(q, k, v, attnlib.PagedKVCache.from_views(wide[..., :8], wide[..., 12:18]), step),
        expected,
    )


def test_selection_is_told_the_layers_name(caplog: pytest.LogCaptureFixture) -> None:
    """S7"""
    with caplog.at_level("INFO", logger="attnlib"):
        attnlib.Attention(SPEC.replace(head_size=56), device="cpu", prefix="vision.layers.3")
    assert "vision.layers.3: chose torch on cpu" in caplog.text


def test_slopes_and_sinks_agree_with_the_spec() -> None:
    with pytest.raises(ContractError, match="sinks missing, but the spec says has_sink=True"):
        attnlib.Attention(SPEC.replace(has_sink=True), device="cpu")
    with pytest.raises(
        ContractError, match="alibi_slopes given, but the spec says has_alibi=False"
    ):
        attnlib.Attention(SPEC, device="cpu", alibi_slopes=[0.1] * 4)
    with pytest.raises(
        ContractError, match=r"sinks is torch.float32 \(3,\); it must be floating-point \[4\]"
    ):
        attnlib.Attention(SPEC.replace(has_sink=True), device="cpu", sinks=torch.zeros(3))


class PlanningImpl(TorchBackend.get_impl_cls()):
    """Plans every call that it is asked about, and counts plans and runs."""

    plans = 0
    runs: list[object] = []

    def plan(self, signature, query, key, value, cache, metadata, output, lse):
        PlanningImpl.plans += 1
        return SimpleNamespace(run=functools.partial(_run_plan, metadata))


def _run_plan(metadata, impl, query, key, value, cache, output, lse):
    PlanningImpl.runs.append(impl)
    if key is not None:
        impl.write_kv(key.view(-1, 2, 8), value.view(-1, 2, 6), cache, metadata.slot_mapping)
    impl.forward(query.view(-1, 4, 8), cache, metadata, output.view(-1, 4, 6), lse)


class PlanningBackend(TorchBackend):
    @staticmethod
    def get_impl_cls():
        return PlanningImpl


@pytest.fixture
def planning():
    PlanningImpl.plans, PlanningImpl.runs = 0, []
    layers = [attnlib.Attention(SPEC, backend=PlanningBackend, device="cpu") for _ in range(2)]
    _, cache, step, q, k, v = _inputs()
    return layers, cache, step, q, k, v


def test_a_plan_serves_all_layers_of_a_group(planning) -> None:
    (first, second), cache, step, q, k, v = planning
    expected = first(q, k, v, cache, step)
    assert (PlanningImpl.plans, PlanningImpl.runs) == (1, [first.impl])
    other = attnlib.PagedKVCache.allocate(SPEC, 8, "cpu")
    assert torch.equal(second(q, k, v, other, step), expected)
    assert torch.equal(other.key_cache, cache.key_cache)
    assert torch.equal(first(q, k, v, cache, step), expected)
    assert (PlanningImpl.plans, PlanningImpl.runs[1:]) == (1, [second.impl, first.impl])
    flat = q.flatten(1), k.flatten(1), v.flatten(1)
    for _ in range(3):
        assert torch.equal(first(*flat, cache, step), expected.flatten(1)), "flat in, flat out"
        assert PlanningImpl.plans == 2, "flat tensors are another call signature"
    given = torch.empty(6, 24)
    for _ in range(2):
        assert first(*flat, cache, step, output=given) is given
    assert torch.equal(given, expected.flatten(1)) and PlanningImpl.plans == 3
    first(q, None, None, cache, step)
    _, lse = first(q, k, v, cache, step, return_lse=True)
    assert PlanningImpl.plans == 5 and lse.shape == (6, 4)


def test_a_call_of_another_signature_gets_a_plan_of_its_own(planning) -> None:
    """Strides, rows, the cache, the scale and the batch are part of what a plan is made for."""
    (layer, _), cache, step, q, k, v = planning
    layer(q, k, v, cache, step)
    strided = torch.stack([q, q], 1)[:, 0]
    padded = torch.cat([q, q[:1]]), torch.cat([k, k[:1]]), torch.cat([v, v[:1]])
    scaled = attnlib.Attention(SPEC, backend=PlanningBackend, scale=0.5, device="cpu")
    larger = attnlib.PagedKVCache.allocate(SPEC, 9, "cpu")
    again = layer.backend.make_builder(SPEC, "cpu").build(
        0, attnlib.CommonAttentionMetadata.from_lengths([1, 5], [1, 5], [[6], [1, 3]], 4, "cpu")
    )
    calls = (
        lambda: layer(strided, k, v, cache, step),
        lambda: layer(*padded, cache, step),
        lambda: layer(q, k, v, larger, step),
        lambda: scaled(q, k, v, cache, step),
        lambda: layer(q, k, v, cache, again),
        lambda: layer(q, k, v, cache, step, output=torch.empty(6, 4, 12)[..., :6]),
    )
    for number, call in enumerate(calls, 2):
        call()
        assert PlanningImpl.plans == number
        call()
        assert PlanningImpl.plans == number


def test_bad_input_is_refused_beside_a_plan(planning) -> None:
    (layer, _), cache, step, q, k, v = planning
    layer(q, k, v, cache, step)
    for wrong in (
        (q[:5], k, v),
        (q.double(), k, v),
        (q, k[:5], v),
        (q, k, v.double()),
        (q, k[:, :1], v),
    ):
        with pytest.raises(ContractError):
            layer(*wrong, cache, step)
    assert len(PlanningImpl.runs) == PlanningImpl.plans == 1


def test_observers_see_planned_calls(planning) -> None:
    (layer, _), cache, step, q, k, v = planning
    layer(q, k, v, cache, step)
    seen = []
    instrumentation.OBSERVERS.append(lambda *call: seen.append(call))
    flat = q.flatten(1), k.flatten(1), v.flatten(1)
    try:
        out = layer(*flat, cache, step)
    finally:
        instrumentation.OBSERVERS.pop()
    (call,) = seen
    assert call[0] is layer and call[1].shape == q.shape and torch.equal(call[6].flatten(1), out)


def test_assigning_a_field_drops_plans_and_derived_parts(planning) -> None:
    """Writes and reads of a mixed batch follow an assignment alike."""
    (layer, _), _, _, _, _, _ = planning
    cache = attnlib.PagedKVCache.allocate(SPEC, 16, "cpu")
    common = attnlib.CommonAttentionMetadata.from_lengths(
        [1, 12], [1, 12], [[6, 7, 8], [1, 3, 5]], 4, "cpu"
    )
    builder = layer.backend.make_builder(SPEC, "cpu")
    step = builder.build(0, common)
    q, k, v = torch.randn(13, 4, 8), torch.randn(13, 2, 8), torch.randn(13, 2, 6)
    layer(q, k, v, cache, step)
    prefill = step.prefill_metadata
    assert step.num_decodes == 1 and prefill is not None
    moved = step.block_table + 8
    step.block_table, step.slot_mapping = moved, step.slot_mapping + 8 * 4
    assert not step.plans and step.prefill_metadata is not prefill
    assert torch.equal(step.prefill_metadata.block_table, moved[1:])
    fresh = attnlib.PagedKVCache.allocate(SPEC, 16, "cpu")
    assert torch.equal(layer(q, k, v, fresh, step), layer(q, k, v, cache, builder.build(0, common)))
    assert PlanningImpl.plans == 3


def test_plans_are_bounded() -> None:
    layer, cache, step, q, k, v = _inputs()
    for rows in range(200):
        more = torch.cat([q, torch.zeros(rows, 4, 8)])
        layer(more, None, None, cache, step)
    assert 0 < len(step.plans) <= MAX_PLANS
    assert not pickle.loads(pickle.dumps(step)).plans


def test_repeated_calls_are_recognized_in_any_mode(planning, monkeypatch) -> None:
    """From the third call on, a layer does not look up its plan, also after a change between
    inference mode and `no_grad`."""
    (layer, _), cache, step, q, k, v = planning
    lookups: list[int] = []
    find = attention.find_plan
    monkeypatch.setattr(attention, "find_plan", lambda *call: lookups.append(1) or find(*call))
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode():
            lookups.clear()
            for _ in range(5):
                layer(q.clone(), k.clone(), v.clone(), cache, step)
            assert 1 <= len(lookups) <= 2


def test_hooks_of_a_module_see_planned_calls(planning) -> None:
    (layer, _), cache, step, q, k, v = planning
    for _ in range(3):
        expected = layer(q, k, v, cache, step)
    before, after = [], []
    PlanningImpl.runs.clear()
    layer.register_forward_pre_hook(lambda module, args: before.append(module))
    layer.register_forward_hook(lambda module, args, out: after.append(out) or out + 1)
    assert torch.equal(layer(q, k, v, cache, step), expected + 1)
    assert before == [layer] and len(after) == 1 and len(PlanningImpl.runs) == 1


def test_hooks_of_all_modules_see_planned_calls(planning) -> None:
    (layer, _), cache, step, q, k, v = planning
    for _ in range(3):
        expected = layer(q, k, v, cache, step)
    seen = []
    handles = [
        nn.modules.module.register_module_forward_pre_hook(lambda module, args: seen.append(0)),
        nn.modules.module.register_module_forward_hook(lambda module, args, out: seen.append(1)),
    ]
    try:
        assert torch.equal(layer(q, k, v, cache, step), expected) and seen == [0, 1]
    finally:
        for handle in handles:
            handle.remove()


def test_a_replaced_forward_is_called(planning) -> None:
    """A subclass's forward, and one that is assigned to an instance, see every call."""
    (layer, _), cache, step, q, k, v = planning

    class Doubled(attnlib.Attention):
        def forward(self, *args, **kwargs):
            return 2 * super().forward(*args, **kwargs)

    doubled = Doubled(SPEC, backend=PlanningBackend, device="cpu")
    for _ in range(3):
        expected = layer(q, k, v, cache, step)
        assert torch.equal(doubled(q, k, v, cache, step), 2 * expected)
    own = layer.forward
    layer.forward = lambda *args, **kwargs: own(*args, **kwargs) + 1
    step.drop_plans()
    for _ in range(3):
        assert torch.equal(layer(q, k, v, cache, step), expected + 1)


def test_an_inherited_plan_does_not_hide_other_methods(planning) -> None:
    """A plan stands for the `forward` and `write_kv` that it was written with."""
    (layer, other), cache, step, q, k, v = planning

    class Doubled(PlanningImpl):
        def forward(self, query, cache, metadata, output, lse=None):
            super().forward(query, cache, metadata, output, lse)
            output.mul_(2)

    class DoubledBackend(TorchBackend):
        @staticmethod
        def get_impl_cls():
            return Doubled

    expected = layer(q, k, v, cache, step)
    doubled = attnlib.Attention(SPEC, backend=DoubledBackend, device="cpu")
    assert torch.equal(doubled(q, k, v, cache, step), 2 * expected)
    original = other.impl.forward
    assert torch.equal(other(q, k, v, cache, step), expected)

    def tripled(query, cache, metadata, output, lse=None):
        original(query, cache, metadata, output, lse)
        output.mul_(3)

    other.impl.forward = tripled
    assert torch.equal(other(q, k, v, cache, step), 3 * expected)
    assert torch.equal(layer(q, k, v, cache, step), expected)


def test_replaced_parts_of_a_layer_reach_the_next_call(planning) -> None:
    """The impl, its scale and its sinks have one source of truth each."""
    _, cache, step, q, k, v = planning
    spec = SPEC.replace(has_sink=True)
    sinks = [torch.randn(4), torch.randn(4)]
    layers = [
        attnlib.Attention(spec, backend=PlanningBackend, device="cpu", sinks=own) for own in sinks
    ]
    step = (
        layers[0]
        .backend.make_builder(spec, "cpu")
        .build(
            0, attnlib.CommonAttentionMetadata.from_lengths([1, 5], [1, 5], [[6], [1, 3]], 4, "cpu")
        )
    )
    first, second = (layer(q, k, v, cache, step) for layer in layers)
    assert not torch.equal(first, second)
    layers[0].impl.sinks = sinks[1]
    assert torch.equal(layers[0](q, k, v, cache, step), second)
    layers[0].sinks = sinks[0]
    assert torch.equal(layers[0](q, k, v, cache, step), first)
    layers[0].impl.scale = 0.01
    scaled = layers[0](q, k, v, cache, step)
    assert not torch.equal(scaled, first)
    layers[0].impl = layers[1].impl
    assert torch.equal(layers[0](q, k, v, cache, step), second)


def test_weights_loaded_after_construction_arrive() -> None:
    """bfloat16 parameters too; `.to()` and `state_dict` hold them."""
    spec = SPEC.replace(has_sink=True)
    given = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16), requires_grad=False)
    layer = attnlib.Attention(spec, device="cpu", sinks=given)
    constant = attnlib.Attention(spec, device="cpu", sinks=torch.zeros(4))
    _, cache, _, q, k, v = _inputs()
    step = layer.backend.make_builder(spec, "cpu").build(
        0, attnlib.CommonAttentionMetadata.from_lengths([1, 5], [1, 5], [[6], [1, 3]], 4, "cpu")
    )
    before = layer(q, k, v, cache, step)
    assert torch.equal(before, constant(q, k, v, cache, step))
    loaded = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.bfloat16)
    layer.load_state_dict({**layer.state_dict(), "sinks": loaded})
    constant.load_state_dict({**constant.state_dict(), "sinks": loaded.float()})
    after = layer(q, k, v, cache, step)
    assert not torch.equal(after, before)
    assert torch.equal(after, constant(q, k, v, cache, step))
    assert layer.to(torch.float64).impl.per_head_tensors[1].dtype == torch.float64


def test_groups_of_layers_in_threads() -> None:
    """Two scales in one group would launch one's kernels for the other."""
    with ThreadPoolExecutor(8) as pool:
        layers = list(
            pool.map(
                lambda n: attnlib.Attention(
                    SPEC, backend=PlanningBackend, scale=1 / (7 + n), device="cpu"
                ),
                range(64),
            )
        )
    assert len({layer.impl.group for layer in layers}) == 64
    copied = copy.deepcopy(layers[0])
    assert copied.impl.group is layers[0].impl.group


def test_groups_do_not_outlive_their_layers() -> None:
    def make() -> weakref.ref:
        layer = attnlib.Attention(SPEC, backend=PlanningBackend, scale=0.123, device="cpu")
        return weakref.ref(layer.impl.group)

    group = make()
    gc.collect()
    assert group() is None


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda common, step: common, "metadata is a CommonAttentionMetadata; backend torch needs"),
        (lambda common, step: None, "metadata is a NoneType; backend torch needs the"),
    ],
)
def test_metadata_of_another_type_is_refused(wrong, message) -> None:
    layer, cache, step, q, k, v = _inputs()
    common = attnlib.CommonAttentionMetadata.from_lengths([1, 5], [1, 5], [[6], [1, 3]], 4, "cpu")
    before = cache.key_cache.clone()
    with pytest.raises(ContractError, match=message):
        layer(q, k, v, cache, wrong(common, step))
    assert torch.equal(cache.key_cache, before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 8}, "metadata was built for block_size=8, the layer's spec has 4"),
        ({"head_size_v": 8}, "metadata was built for head_size_v=8, the layer's spec has 6"),
    ],
)
def test_metadata_of_another_spec_is_refused(change, message) -> None:
    layer, cache, _, q, k, v = _inputs()
    spec = SPEC.replace(**change)
    step = layer.backend.make_builder(spec, "cpu").build(
        0,
        attnlib.CommonAttentionMetadata.from_lengths(
            [1, 5], [1, 5], [[6], [1, 3]], spec.block_size, "cpu"
        ),
    )
    with pytest.raises(ContractError, match=message):
        layer(q, k, v, cache, step)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_are_finite_and_positive(scale) -> None:
    """M9"""
    with pytest.raises(ContractError, match="must be finite and above 0"):
        attnlib.Attention(SPEC, device="cpu", k_scale=scale)
    cache = attnlib.PagedKVCache.allocate(SPEC, 8, "cpu")
    with pytest.raises(ContractError, match="must be finite and above 0"):
        cache.v_scale = scale


def test_equal_scale_tensors_are_compared_once(monkeypatch) -> None:
    """Then they are one object, so no later call synchronizes."""
    _, _, step, q, k, v = _inputs(kv_cache_dtype="fp8")
    spec = SPEC.replace(kv_cache_dtype="fp8")
    scaled = attnlib.Attention(spec, device="cpu", k_scale=torch.tensor(2.0))
    cache = attnlib.PagedKVCache.allocate(spec, 8, "cpu", k_scale=torch.tensor(2.0))
    first = scaled(q, k, v, cache, step)
    assert scaled.k_scale is cache.k_scale
    monkeypatch.setattr("attnlib.layer.scales._equal_scales", None)  # a call would fail
    assert torch.equal(scaled(q, k, v, cache, step), first)
    other = attnlib.PagedKVCache.allocate(spec, 8, "cpu", k_scale=torch.tensor(3.0))
    monkeypatch.undo()
    with pytest.raises(ContractError, match="k_scale of layer .* they must agree"):
        scaled(q, k, v, other, step)


def test_gradients_are_refused() -> None:
    layer, cache, step, q, k, v = _inputs()
    with pytest.raises(ContractError, match="attnlib computes no gradients"):
        layer(q.requires_grad_(), k, v, cache, step)
    with torch.no_grad():
        layer(q, k, v, cache, step)


def test_arguments_of_another_type_are_refused() -> None:
    """Before anything is written."""
    layer, cache, step, q, k, v = _inputs()
    before = cache.key_cache.clone()
    for arguments, message in (
        ((None, k, v, cache, step), "query is a NoneType; it must be a"),
        ((q, k.numpy(), v, cache, step), "key is a ndarray; it must be a"),
        ((q, k, 1.0, cache, step), "value is a float; it must be a"),
        ((q, k, v, cache, step, torch.empty_like(q)), "return_lse is a Tensor; .* as output="),
        ((q, k, v, cache, step, []), "return_lse is a list; it must be True or False"),
    ):
        with pytest.raises(ContractError, match=message):
            layer(*arguments)
        with torch.no_grad(), pytest.raises(ContractError, match=message):
            layer(*arguments)
    with pytest.raises(ContractError, match="output is a list; it must be a"):
        layer(q, k, v, cache, step, output=[])
    assert torch.equal(cache.key_cache, before)
    for changes, given, message in (
        ({}, {"scale": float("nan")}, "scale=nan must be a finite number"),
        ({}, {"k_scale": None}, "k_scale=None must be finite and above 0"),
        ({}, {"score_tensors": {"bias": q}}, "the spec has no score_function, which reads them"),
        ({"has_sink": True}, {"sinks": [0.0] * 4}, "sinks is a list; it must be a tensor"),
        ({}, {"score_tensors": q}, "score_tensors is a Tensor; it must be a dictionary"),
        ({"has_alibi": True}, {"alibi_slopes": "x"}, "alibi_slopes='x' must be numbers, one for"),
    ):
        with pytest.raises(ContractError, match=message):
            attnlib.Attention(SPEC.replace(**changes), device="cpu", **given)
    with pytest.raises(ContractError, match="kv_cache_layout=3 must be the name of a layout"):
        SPEC.replace(kv_cache_layout=3)


def test_rows_of_an_output_have_memory_of_their_own() -> None:
    """P9; refused before anything is written."""
    layer, cache, step, q, k, v = _inputs()
    before = cache.key_cache.clone()
    memory = torch.empty(7, 4, 6)
    for output in (memory[:1].expand(6, 4, 6), memory.as_strided((6, 4, 6), (6, 6, 1))):
        with pytest.raises(ContractError, match=r"so that rows share memory.*\[P9\]"):
            layer(q, k, v, cache, step, output=output)
    assert torch.equal(cache.key_cache, before)
    layer(q, k, v, cache, step, output=memory.as_strided((6, 4, 6), (6, 36, 1)))


def test_tokens_of_a_written_cache_have_memory_of_their_own() -> None:
    """P1; expanded views can be read, and a write is refused before it changes anything."""
    layer, cache, step, q, k, v = _inputs()
    keys, values = cache.key_cache.clone(), cache.value_cache.clone()
    for shared in (keys[:1].expand_as(keys), keys[:, :, :1].expand_as(keys)):
        views = PagedKVCache.from_views(shared, values)
        before = keys.clone()
        with pytest.raises(ContractError, match=r"tokens share memory.*\[P1\]"):
            layer(q, k, v, views, step)
        assert torch.equal(keys, before)
        expected = layer(q, None, None, PagedKVCache.from_views(shared.clone(), values), step)
        assert torch.equal(layer(q, None, None, views, step), expected)


def test_views_that_torch_negates_are_refused() -> None:
    """P9; the imaginary part of a conjugate has the memory of other numbers."""
    layer, cache, step, q, k, v = _inputs()
    before = cache.key_cache.clone()
    for name in ("query", "key", "value"):
        given = {"query": q, "key": k, "value": v}
        negated = torch.complex(given[name], given[name]).conj().imag
        assert negated.is_neg() and torch.equal(negated, -given[name])
        given[name] = torch._neg_view(given[name].clone())
        with pytest.raises(ContractError, match=rf"{name} is a view that torch negates.*\[P9\]"):
            layer(*given.values(), cache, step)
    assert torch.equal(cache.key_cache, before)
    layer(q, k, v, cache, step)
    other = cache.key_cache.clone()
    layer(q, torch._neg_view(-k).resolve_neg(), v, cache, step)
    assert torch.equal(cache.key_cache, other)


def test_keys_without_slots_are_refused() -> None:
    """P4: keys that nothing would store are an error, not dropped."""
    layer, cache, step, q, k, v = _inputs()
    step.slot_mapping = None
    with pytest.raises(ContractError, match="the batch has no slot_mapping to write them to"):
        layer(q, k, v, cache, step)
    layer(q, None, None, cache, step)


def test_sinks_on_another_device_are_refused() -> None:
    """Before anything is written."""
    spec = SPEC.replace(has_sink=True)
    layer = attnlib.Attention(spec, device="cpu", sinks=torch.zeros(4, device="meta"))
    _, cache, step, q, k, v = _inputs()
    before = cache.key_cache.clone()
    with pytest.raises(ContractError, match="sinks is on meta, query on cpu: move the layer"):
        layer(q, k, v, cache, step)
    assert torch.equal(cache.key_cache, before)


def test_mla_needs_a_latent_cache() -> None:
    """P10: values elsewhere are refused before anything is written, also after a good call."""
    spec = attnlib.AttentionSpec(
        num_heads=2, num_kv_heads=1, head_size=8, head_size_v=4, dtype=torch.float32, use_mla=True
    )
    layer = attnlib.Attention(spec, backend="torch", device="cpu")
    common = attnlib.CommonAttentionMetadata.from_lengths([1], [1], [[0]], 16, "cpu")
    metadata = layer.backend.make_builder(spec, "cpu").build(0, common)
    q, k = torch.randn(1, 2, 8), torch.randn(1, 1, 8)
    layer(q, k, k[..., :4], attnlib.PagedKVCache.allocate(spec, 1, "cpu"), metadata)
    keys, memory = torch.zeros(1, 16, 1, 8), torch.zeros(1, 16, 1, 8)
    for values in (memory[..., :4], torch.zeros(1, 16, 1, 4)):
        cache = attnlib.PagedKVCache.from_views(keys, values)
        with pytest.raises(ContractError, match=r"not a prefix of key_cache.*from_views.*\[P10\]"):
            layer(q, k, k[..., :4], cache, metadata)
        assert not keys.any() and not memory.any(), "nothing is written"


def test_mla_has_one_scale_for_keys_and_values() -> None:
    """M9: the value is a prefix of the stored key. Another scale would overwrite the keys."""
    spec = attnlib.AttentionSpec(
        num_heads=2, num_kv_heads=1, head_size=8, head_size_v=4, dtype=torch.float32,
        kv_cache_dtype="fp8", use_mla=True,
    )  # fmt: skip
    layer = attnlib.Attention(spec, backend="torch", device="cpu")
    common = attnlib.CommonAttentionMetadata.from_lengths([1], [1], [[0]], 16, "cpu")
    q, k = torch.randn(1, 2, 8), torch.randn(1, 1, 8)
    half = torch.tensor(0.5)
    for scales, accepted in (
        ((0.5, 0.5), True),
        ((half, half), True),
        ((0.5, 0.25), False),
        ((0.5, half), False),
    ):
        cache = attnlib.PagedKVCache.allocate(spec, 1, "cpu", k_scale=scales[0], v_scale=scales[1])
        metadata = layer.backend.make_builder(spec, "cpu").build(0, common)
        if accepted:
            layer(q, k, k[..., :4], cache, metadata)
            continue
        with pytest.raises(ContractError, match=r"give the same number or the same tensor"):
            layer(q, k, k[..., :4], cache, metadata)
        assert not cache.key_cache.view(torch.uint8).any(), "nothing is written"


def _replaced(layer, how: str):
    """Replace what a call of the layer runs; returns a function that undoes it."""
    mark = lambda *args, **kwargs: "replaced"  # noqa: E731
    if how == "instance":
        layer.forward = mark
        return lambda: None
    if how == "class":
        saved, attnlib.Attention.forward = attnlib.Attention.forward, mark
        return lambda: setattr(attnlib.Attention, "forward", saved)
    if how == "compiled":
        layer._compiled_call_impl = mark
        return lambda: None
    if how == "hook":
        return layer.register_forward_hook(mark).remove
    return nn.modules.module.register_module_forward_hook(mark).remove


@pytest.mark.parametrize("how", ["instance", "class", "compiled", "hook", "global hook"])
def test_a_replaced_forward_and_hooks_win_over_the_quick_path(planning, how: str) -> None:
    """Also after calls with the same metadata, and in a copy of the layer."""
    (layer, other), cache, step, q, k, v = planning
    for _ in range(3):
        layer(q, k, v, cache, step)
    assert step.recent_plan is not None
    undo = _replaced(layer, how)
    try:
        assert layer(q, k, v, cache, step) == "replaced"
        if how in ("instance", "hook"):
            assert copy.deepcopy(layer)(q, k, v, cache, step) == "replaced"
            assert isinstance(other(q, k, v, cache, step), torch.Tensor)
    finally:
        undo()


def test_a_subclass_with_its_own_forward_is_called(planning) -> None:
    class Doubled(attnlib.Attention):
        def forward(self, *args, **kwargs):
            return 2 * super().forward(*args, **kwargs)

    (layer, _), cache, step, q, k, v = planning
    doubled = Doubled(SPEC, backend=PlanningBackend, device="cpu")
    for _ in range(3):
        expected = layer(q, k, v, cache, step)
        assert torch.equal(doubled(q, k, v, cache, step), 2 * expected)


def test_attributes_behind_the_impl_cannot_be_assigned() -> None:
    """They would be ignored."""
    layer, cache, step, q, k, v = _inputs()
    expected = layer(q, k, v, cache, step)
    for name, value in (
        ("spec", SPEC.replace(sliding_window=2)),
        ("backend", PlanningBackend),
        ("writes", False),
        ("kv_sharing_target_layer_name", "layers.1"),
    ):
        with pytest.raises(ContractError, match=f"{name} of layer layers.0 .*make a new layer"):
            setattr(layer, name, value)
    assert torch.equal(layer(q, k, v, cache, step), expected)
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        with pytest.raises(ContractError):
            copied.spec = SPEC


def test_gradients_are_refused_after_calls_without(planning) -> None:
    """The signature of a call does not say whether keys and values require a gradient."""
    (layer, _), cache, step, q, k, v = planning
    for _ in range(3):
        layer(q, k, v, cache, step)
    for given in ((q, k.clone().requires_grad_(), v), (q, k, v.clone().requires_grad_())):
        with pytest.raises(ContractError, match="requires a gradient"):
            layer(*given, cache, step)
        with torch.no_grad():
            layer(*given, cache, step)


def test_validation_follows_the_variable_at_every_call(planning, monkeypatch) -> None:
    """ATTNLIB_VALIDATE may change between two calls with one plan."""
    (layer, _), cache, step, q, k, v = planning
    step.seq_lens_cpu = None
    for _ in range(3):
        layer(q, k, v, cache, step)
    step.query_start_loc_cpu[1] = 2  # contradicts the lengths of the device
    step.query_start_loc = torch.tensor([0, 1, 6], dtype=torch.int32)
    for _ in range(3):
        layer(q, k, v, cache, step)
    monkeypatch.setenv("ATTNLIB_VALIDATE", "1")
    for _ in range(2):
        with pytest.raises(ContractError, match="query_start_loc"):
            layer(q, k, v, cache, step)
    monkeypatch.setenv("ATTNLIB_VALIDATE", "0")
    layer(q, k, v, cache, step)
    monkeypatch.delenv("ATTNLIB_VALIDATE")
    layer(q, k, v, cache, step)


@pytest.mark.parametrize(
    "changes",
    [{}, {"logits_soft_cap": 5.0}, {"batch_invariant": True}, {"sliding_window": 3}],
    ids=["plain", "soft cap", "invariant", "window"],
)
@pytest.mark.parametrize("backend", ["torch", "triton", "prefill:torch,decode:torch"])
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_autocast_changes_no_bit(backend: str, changes: dict, low: torch.dtype) -> None:
    """The products of a float32 layer stay in float32, also from the second call on."""
    spec = SPEC.replace(head_size_v=8, **changes)
    layer = attnlib.Attention(spec, backend=backend, device="cpu")
    cache = attnlib.PagedKVCache.allocate(spec, 8, "cpu")
    common = attnlib.CommonAttentionMetadata.from_lengths([1, 5], [4, 8], [[6], [1, 3]], 4, "cpu")
    step = layer.backend.make_builder(spec, "cpu").build(0, common)
    torch.manual_seed(0)
    for part in (cache.key_cache, cache.value_cache):
        part.normal_()
    q, k, v = torch.randn(6, 4, 8), torch.randn(6, 2, 8), torch.randn(6, 2, 8)
    expected = layer(q, k, v, cache, step)
    with torch.autocast("cpu", low):
        for _ in range(3):
            assert torch.equal(layer(q, k, v, cache, step), expected)
        assert torch.is_autocast_enabled("cpu")
