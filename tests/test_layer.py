"""The layer: writes, then attends; and what it refuses before anything is written."""

import copy
import dataclasses
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import attnlib
from attnlib.backends.torch import TorchBackend
from attnlib.errors import ContractError, LayoutMismatchError
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
        ContractError, match=r"k_scale of layer \(unnamed\) is 3.0.*must agree \[M9\]"
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
        ("cache dtype", "cache stores torch.float8_e4m3fn, the spec says torch.float32"),
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
            r"block_table row 1 has 2 entries, but seq_lens\[1\]=9 needs 3 blocks of 4 tokens \[P3\]",
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
    """P2: kernels that read one order must never see another; views of no named order are left to the backend, which has their strides."""
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
    with pytest.raises(ContractError, match=r"sinks has shape \(3,\); it must be \[4\]"):
        attnlib.Attention(SPEC.replace(has_sink=True), device="cpu", sinks=torch.zeros(3))


class SettlingImpl(TorchBackend.get_impl_cls()):
    """Settles every call that it is asked to, and counts what it is asked."""

    asked = 0
    served: list[object] = []
    steps_aside = False

    def settle(self, query, key, value, cache, metadata, output):
        SettlingImpl.asked += 1
        table = metadata.block_table

        def step(impl, query, key, value, cache, metadata, output):
            if SettlingImpl.steps_aside or metadata.block_table is not table:
                return False
            SettlingImpl.served.append(impl)
            impl.write_kv(key.view(-1, 2, 8), value.view(-1, 2, 6), cache, metadata.slot_mapping)
            impl.forward(query.view(-1, 4, 8), cache, metadata, output.view(-1, 4, 6), None)
            return True

        return step


class SettlingBackend(TorchBackend):
    @staticmethod
    def get_impl_cls():
        return SettlingImpl


@pytest.fixture
def settling():
    SettlingImpl.asked, SettlingImpl.served, SettlingImpl.steps_aside = 0, [], False
    layers = [attnlib.Attention(SPEC, backend=SettlingBackend, device="cpu") for _ in range(2)]
    _, cache, step, q, k, v = _inputs()
    return layers, cache, step, q, k, v


def test_a_layer_repeats_what_one_that_means_the_same_had_served(settling) -> None:
    (first, second), cache, step, q, k, v = settling
    expected = first(q, k, v, cache, step)
    assert (SettlingImpl.asked, SettlingImpl.served) == (1, [])
    other = attnlib.PagedKVCache.allocate(SPEC, 8, "cpu")
    assert torch.equal(second(q, k, v, other, step), expected) and torch.equal(
        other.key_cache, cache.key_cache
    )
    assert torch.equal(first(q, k, v, cache, step), expected)
    assert (SettlingImpl.asked, SettlingImpl.served) == (1, [second.impl, first.impl])
    flat = q.flatten(1), k.flatten(1), v.flatten(1)
    for served in (2, 3, 4):
        assert torch.equal(first(*flat, cache, step), expected.flatten(1)), (
            "flat tensors come back flat"
        )
        assert (SettlingImpl.asked, len(SettlingImpl.served)) == (2, served), (
            "flat tensors are a kind of call of their own"
        )
    given = torch.empty(6, 24)
    assert (
        first(*flat, cache, step, output=given) is first(*flat, cache, step, output=given) is given
    )
    assert torch.equal(given, expected.flatten(1)) and (
        SettlingImpl.asked,
        len(SettlingImpl.served),
    ) == (3, 5)


def test_a_call_unlike_any_before_is_served_the_usual_way(settling) -> None:
    """Whatever the launches follow from: strides, rows, the cache, the layer's meaning, the batch."""
    (layer, _), cache, step, q, k, v = settling
    layer(q, k, v, cache, step)
    strided = torch.stack([q, q], 1)[:, 0]
    padded = torch.cat([q, q[:1]]), torch.cat([k, k[:1]]), torch.cat([v, v[:1]])
    scaled, larger = (
        attnlib.Attention(SPEC, backend=SettlingBackend, scale=0.5, device="cpu"),
        attnlib.PagedKVCache.allocate(SPEC, 9, "cpu"),
    )
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
    for number, call in enumerate(calls):
        call()
        assert (SettlingImpl.asked, SettlingImpl.served) == (number + 2, []), number
    layer(q, None, None, cache, step)
    layer(q, k, v, cache, step, return_lse=True)
    assert (SettlingImpl.asked, SettlingImpl.served) == (len(calls) + 1, []), (
        "nothing to write, or an LSE, is never settled"
    )


def test_bad_input_is_refused_though_calls_are_settled(settling) -> None:
    (layer, _), cache, step, q, k, v = settling
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
    assert SettlingImpl.served == [] and SettlingImpl.asked == 1


def test_whoever_looks_at_calls_still_sees_them(settling, monkeypatch) -> None:
    """Observers, ATTNLIB_VALIDATE and scales of the cache lead the usual way, and so does a step that steps aside."""
    (layer, _), cache, step, q, k, v = settling
    layer(q, k, v, cache, step)
    seen = []
    monkeypatch.setattr("attnlib.layer.OBSERVERS", [lambda *call: seen.append(call)])
    layer(q, k, v, cache, step)
    monkeypatch.undo()
    monkeypatch.setenv("ATTNLIB_VALIDATE", "1")
    layer(q, k, v, cache, step)
    monkeypatch.undo()
    SettlingImpl.steps_aside = True
    expected = layer(q, k, v, cache, step)
    SettlingImpl.steps_aside = False
    step.block_table = step.block_table.clone()
    assert torch.equal(layer(q, k, v, cache, step), expected)
    cache.k_scale = 2.0
    assert not torch.equal(layer(q, k, v, cache, step), expected)
    assert len(seen) == 1 and SettlingImpl.served == []


def test_hooks_of_a_module_see_settled_calls(settling) -> None:
    (layer, _), cache, step, q, k, v = settling
    expected = layer(q, k, v, cache, step)
    before, after = [], []
    layer.register_forward_pre_hook(lambda module, args: before.append(module))
    layer.register_forward_hook(lambda module, args, out: after.append(out) or out + 1)
    assert torch.equal(layer(q, k, v, cache, step), expected + 1)
    assert before == [layer] and len(after) == 1 and SettlingImpl.served == [layer.impl]


def test_a_step_that_steps_aside_leaves_the_output_to_the_usual_way(settling) -> None:
    (layer, _), cache, step, q, k, v = settling
    flat = q.flatten(1), k.flatten(1), v.flatten(1)
    expected = layer(*flat, cache, step)
    SettlingImpl.steps_aside = True
    given = torch.empty(6, 24)
    for _ in range(2):
        assert torch.equal(layer(*flat, cache, step), expected) and torch.equal(
            layer(q, k, v, cache, step).flatten(1), expected
        )
        assert layer(*flat, cache, step, output=given) is given
    assert SettlingImpl.served == [] and torch.equal(given, expected)


def test_layers_get_numbers_of_their_own_in_threads() -> None:
    """Two meanings with one number would launch one's kernels for the other."""
    with ThreadPoolExecutor(8) as pool:
        layers = list(
            pool.map(
                lambda n: attnlib.Attention(
                    SPEC, backend=SettlingBackend, scale=1 / (7 + n), device="cpu"
                ),
                range(64),
            )
        )
    assert len({layer.meaning for layer in layers}) == 64


def test_backends_that_settle_nothing_are_not_asked(monkeypatch) -> None:
    layer, cache, step, q, k, v = _inputs()
    monkeypatch.setattr("attnlib.backends.base.AttentionImpl.settle", None)  # a call would fail
    layer(q, k, v, cache, step)
    assert layer.meaning is None and step.settled == {}


def test_a_copy_of_a_layer_means_the_same() -> None:
    layer = attnlib.Attention(SPEC, backend=SettlingBackend, device="cpu")
    assert copy.deepcopy(layer).meaning == layer.meaning is not None
