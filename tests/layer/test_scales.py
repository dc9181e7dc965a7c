"""`calc_kv_scales` and `enable_kv_scales_calculation`: scales from the keys of a step (M9)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import attnlib
from attnlib.errors import ContractError
from attnlib.layer.scales import _warn_of_old_scales
from attnlib.ops.scales import MIN_KV_SCALE, scale_for
from tests.ops.naive import naive_attention

SPEC = attnlib.AttentionSpec(
    num_heads=4,
    num_kv_heads=2,
    head_size=16,
    dtype=torch.float32,
    kv_cache_dtype="fp8",
    block_size=4,
)


def _step(layer: attnlib.Attention, first: int = 0) -> Any:
    """New tokens `[first, first + 4)` of two requests."""
    common = attnlib.CommonAttentionMetadata.from_lengths(
        [4, 4], [first + 4, first + 4], [[0, 1], [2, 3]], 4, "cpu"
    )
    return layer.backend.make_builder(layer.spec, "cpu").build(0, common)


def _tensors(factor: float = 1.0) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [factor * torch.randn(8, heads, 16) for heads in (4, 2, 2)]


@pytest.mark.parametrize("backend", ["torch", "triton", "prefill:torch,decode:triton"])
def test_a_step_computes_the_scales_of_its_layers(backend: str) -> None:
    layers = [attnlib.Attention(SPEC, backend=backend, device="cpu") for _ in range(2)]
    caches = [attnlib.PagedKVCache.allocate(SPEC, 4, "cpu") for _ in range(2)]
    step = _step(layers[0])
    step.enable_kv_scales_calculation = True
    outputs = []
    for layer, cache, factor in zip(layers, caches, (100.0, 3000.0), strict=True):
        q, k, v = _tensors(factor)
        outputs.append(layer(q / factor / factor, k, v, cache, step))
        assert cache.k_scale is layer.k_scale and cache.v_scale is layer.v_scale
        assert float(cache.k_scale) == pytest.approx(float(k.abs().max()) / 448)
        assert float(cache.v_scale) == pytest.approx(float(v.abs().max()) / 448)
        assert float(cache.key_cache.float().abs().max()) == 448, "the largest element is stored"
        keys, values = (
            cache.key_cache.float() * cache.k_scale,
            cache.value_cache.float() * cache.v_scale,
        )
        expected, _ = naive_attention(
            q / factor / factor,
            keys,
            values,
            step.block_table,
            step.query_start_loc,
            step.seq_lens,
            max_query_len=4,
            max_seq_len=4,
            scale=16**-0.5,
        )
        assert torch.allclose(outputs[-1].double(), expected, rtol=1e-4, atol=1e-4 * factor)
        assert float((keys[0] - k[:4]).abs().max()) <= float(k.abs().max()) / 16


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_latents_have_one_scale(backend: str) -> None:
    """Values over latents are a prefix of the keys, and stored once."""
    spec = SPEC.replace(num_kv_heads=1, head_size=24, head_size_v=16, use_mla=True)
    layer = attnlib.Attention(spec, backend=backend, device="cpu")
    cache = attnlib.PagedKVCache.allocate(spec, 4, "cpu")
    step = _step(layer)
    step.enable_kv_scales_calculation = True
    torch.manual_seed(1)
    latents = 100.0 * torch.randn(8, 1, 24)
    layer(torch.randn(8, 4, 24) / 100, latents, latents[..., :16], cache, step)
    assert cache.k_scale is cache.v_scale is layer.k_scale
    assert float(cache.k_scale) == pytest.approx(float(latents.abs().max()) / 448)


def test_scales_are_computed_once() -> None:
    """They hold for everything that the cache stores."""
    layer = attnlib.Attention(SPEC, device="cpu")
    cache = attnlib.PagedKVCache.allocate(SPEC, 4, "cpu")
    step = _step(layer)
    step.enable_kv_scales_calculation = True
    layer(*_tensors(100.0), cache, step)
    scale = cache.k_scale
    layer(*_tensors(1.0), cache, step)
    later = _step(layer, first=4)
    later.enable_kv_scales_calculation = True
    layer(*_tensors(10.0), cache, later)
    assert cache.k_scale is scale and layer.k_scale is scale
    given = attnlib.Attention(SPEC, device="cpu", k_scale=2.0)
    other = attnlib.PagedKVCache.allocate(SPEC, 4, "cpu")
    given(*_tensors(100.0), other, step)
    assert (other.k_scale, other.v_scale) == (2.0, 1.0)


def test_only_written_keys_count() -> None:
    """Padding, tokens without a slot, NaN and Inf do not; a layer that reads computes nothing."""
    layer = attnlib.Attention(SPEC, device="cpu")
    cache = attnlib.PagedKVCache.allocate(SPEC, 4, "cpu")
    step = _step(layer)
    slots = step.slot_mapping.clone()
    slots[3] = -1
    step.slot_mapping = slots
    step.enable_kv_scales_calculation = True
    q, k, v = _tensors()
    k[3] = 1e6
    k[0, 0, 0], v[0, 0, 0] = float("nan"), float("inf")
    padded = [torch.cat([x, torch.full_like(x[:1], 1e9)]) for x in (q, k, v)]
    reader = attnlib.Attention(SPEC, device="cpu", kv_sharing_target_layer_name="layers.0")
    reader(*padded, cache, step)
    assert cache.k_scale == 1.0
    layer(*padded, cache, step)
    written = [0, 1, 2, 4, 5, 6, 7]
    finite = k[written].nan_to_num(0.0)
    assert float(cache.k_scale) == pytest.approx(float(finite.abs().max()) / 448)
    assert float(cache.v_scale) == pytest.approx(float(v[v.isfinite()].abs().max()) / 448, rel=0.3)


def test_the_scale_of_a_sharing_layer_does_not_reach_the_cache() -> None:
    """P8: the cache holds elements that another layer wrote with its own scale."""
    writer = attnlib.Attention(SPEC, device="cpu")
    cache = attnlib.PagedKVCache.allocate(SPEC, 4, "cpu")
    step = _step(writer)
    writer(*_tensors(), cache, step)
    reader = attnlib.Attention(
        SPEC, device="cpu", kv_sharing_target_layer_name="layers.0", k_scale=3.0
    )
    with pytest.raises(ContractError, match="shares its cache and has k_scale=3.0"):
        reader(_tensors()[0], None, None, cache, step)
    assert cache.k_scale == 1.0


def test_a_cache_that_is_not_quantized_has_no_scales() -> None:
    spec = SPEC.replace(kv_cache_dtype="auto")
    layer = attnlib.Attention(spec, device="cpu")
    cache = attnlib.PagedKVCache.allocate(spec, 4, "cpu")
    step = _step(layer)
    step.enable_kv_scales_calculation = True
    layer(*_tensors(), cache, step)
    layer.calc_kv_scales(*_tensors())
    assert cache.k_scale == layer.k_scale == 1.0


def test_scales_of_extreme_values_are_valid() -> None:
    """M9: keys of zeros have a scale of 1, not one that kernels flush to zero."""
    assert float(scale_for(torch.zeros(4), 448.0)) == 1.0
    assert float(scale_for(torch.empty(0), 448.0)) == 1.0
    assert float(scale_for(torch.full((4,), torch.nan), 448.0)) == 1.0
    assert float(scale_for(torch.tensor([1e-38]), 448.0)) == MIN_KV_SCALE
    assert float(scale_for(torch.tensor([-896.0, torch.inf]), 448.0)) == 2.0


@pytest.mark.parametrize("backend", ["torch", "triton", "prefill:torch,decode:triton"])
def test_a_common_prefix_is_a_hint(backend: str) -> None:
    """No built-in backend has cascade attention, and results do not depend on the hint."""
    spec = SPEC.replace(kv_cache_dtype="auto")
    layer = attnlib.Attention(spec, backend=backend, device="cpu")
    builder = layer.backend.make_builder(spec, "cpu")
    common = attnlib.CommonAttentionMetadata.from_lengths(
        [1, 7], [5, 7], [[0, 1], [0, 2]], 4, "cpu"
    )
    results = []
    for common_prefix_len in (0, 4):
        cache = attnlib.PagedKVCache.allocate(spec, 4, "cpu")
        results.append(layer(*_tensors(), cache, builder.build(common_prefix_len, common)))
    assert torch.equal(*results)
    import numpy as np

    lens = np.array([1, 7])
    assert not builder.use_cascade_attention(4, lens, 4, 2, False, False, 132)


@pytest.mark.parametrize(
    ("scales", "calculates", "warns"),
    [({}, False, True), ({}, True, False), ({"k_scale": 0.5}, False, False)],
)
def test_unit_scales_are_reported_once(
    scales: dict[str, float], calculates: bool, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    from attnlib.layer import cache_checks

    cache_checks._warn_of_unit_scales.cache_clear()
    for _ in range(2):
        layer = attnlib.Attention(SPEC, device="cpu", **scales)
        step = _step(layer)
        step.enable_kv_scales_calculation = calculates
        with caplog.at_level("WARNING", logger="attnlib"):
            layer(*_tensors(), attnlib.PagedKVCache.allocate(SPEC, 4, "cpu"), step)
    reports = [record.getMessage() for record in caplog.records if "k_scale" in record.message]
    assert len(reports) == warns
    if warns:
        assert "float8_e4m3fn" in reports[0] and "448" in reports[0]


def test_a_warmup_does_not_report_the_scales(caplog: pytest.LogCaptureFixture) -> None:
    """It writes nothing, and the first step may set them; a step that does not is reported."""
    from attnlib.layer import cache_checks

    cache_checks._warn_of_unit_scales.cache_clear()
    layer, cache = attnlib.Attention(SPEC, device="cpu"), attnlib.PagedKVCache.allocate(SPEC, 4)
    limits = attnlib.BatchLimits(max_num_reqs=2, max_num_tokens=8, max_seq_len=16)
    attnlib.warmup(layer, cache, limits)
    assert "k_scale" not in caplog.text
    layer(*_tensors(), cache, _step(layer))
    assert "set metadata.enable_kv_scales_calculation = True in the first step" in caplog.text


def _dummy(step: Any, tensors: list[torch.Tensor], how: str) -> list[torch.Tensor]:
    """The tensors of a step that writes nothing from which a scale follows."""
    if how == "slots":
        step.slot_mapping = torch.full_like(step.slot_mapping, -1)
        return tensors
    value = {"zeros": 0.0, "nan": float("nan"), "inf": float("inf")}[how]
    return [tensors[0], *(torch.full_like(x, value) for x in tensors[1:])]


@pytest.mark.parametrize("how", ["zeros", "slots", "nan", "inf"])
@pytest.mark.parametrize("method", ["forward", "rotate_and_write_kv"])
def test_a_dummy_step_leaves_the_scales_unset(
    how: str, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The step after it computes them."""
    from attnlib.layer import cache_checks

    layer = attnlib.Attention(SPEC, device="cpu")
    cache = attnlib.PagedKVCache.allocate(SPEC, 4, "cpu")
    angles = () if method == "forward" else (torch.ones(8, 8), torch.zeros(8, 8))
    run = getattr(layer, method)
    for _ in range(2):
        step = _step(layer)
        step.enable_kv_scales_calculation = True
        run(*_dummy(step, _tensors(1000.0), how), cache, step, *angles)
        assert cache.k_scale == cache.v_scale == layer.k_scale == layer.v_scale == 1.0
    cache_checks._warn_of_unit_scales.cache_clear()
    layer(*_tensors(), cache, _step(layer))
    assert "k_scale = v_scale = 1" in caplog.text
    step = _step(layer)
    step.enable_kv_scales_calculation = True
    q, k, v = _tensors(1000.0)
    run(q, k, v, cache, step, *angles)
    assert float(cache.k_scale) == pytest.approx(float(k.abs().max()) / 448)
    assert float(cache.v_scale) == pytest.approx(float(v.abs().max()) / 448)


def test_keys_and_values_get_their_scales_in_different_steps() -> None:
    layer = attnlib.Attention(SPEC, device="cpu")
    cache = attnlib.PagedKVCache.allocate(SPEC, 4, "cpu")
    q, k, v = _tensors(100.0)
    for factor in (0.0, 1.0, 3.0):
        step = _step(layer)
        step.enable_kv_scales_calculation = True
        layer(q, k, factor * v, cache, step)
    assert float(cache.k_scale) == pytest.approx(float(k.abs().max()) / 448)
    assert float(cache.v_scale) == pytest.approx(float(v.abs().max()) / 448)


def _calculate(
    layer: attnlib.Attention, cache: attnlib.PagedKVCache, factor: float
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A step that asks for scales, over keys and values `factor` times as large."""
    step = _step(layer)
    step.enable_kv_scales_calculation = True
    rows = _tensors(factor)
    return layer(*rows, cache, step), rows


@pytest.mark.parametrize("rotation", [None, "hadamard"])
def test_scales_are_calculated_again_after_a_reset(rotation: str | None) -> None:
    """R1, R2: after an update of the weights, into the same memory."""
    spec = SPEC.replace(kv_rotation=rotation)
    layer = attnlib.Attention(spec, backend="torch", device="cpu")
    cache = attnlib.PagedKVCache.allocate(spec, 4, "cpu")
    _calculate(layer, cache, 1.0)
    first, memory = float(cache.k_scale), cache.k_scale
    assert isinstance(memory, torch.Tensor) and cache.scale_epoch == 0
    cache.reset_scales()
    signature = cache.signature
    _calculate(layer, cache, 10.0)
    assert cache.k_scale is memory is layer.k_scale and cache.signature is signature
    assert float(cache.k_scale) == pytest.approx(10 * first, rel=1e-5)
    assert float(cache.v_scale) == float(layer.v_scale) and cache.scale_epoch == 1
    # The cache is that of a layer that has seen the large tensors only.
    fresh = attnlib.PagedKVCache.allocate(spec, 4, "cpu")
    other = attnlib.Attention(spec, backend="torch", device="cpu")
    want, _ = _calculate(other, fresh, 10.0)
    got = layer(*_tensors(10.0), cache, _step(layer))
    assert torch.equal(got, want)
    assert torch.equal(cache.key_cache.view(torch.uint8), fresh.key_cache.view(torch.uint8))


def test_a_step_of_zeros_leaves_a_reset_pending() -> None:
    layer = attnlib.Attention(SPEC, backend="torch", device="cpu")
    cache = attnlib.PagedKVCache.allocate(SPEC, 4, "cpu")
    _calculate(layer, cache, 1.0)
    first = float(cache.k_scale), float(cache.v_scale)
    cache.reset_scales()
    _calculate(layer, cache, 0.0)
    assert cache.awaits_scales == {"k_scale", "v_scale"}
    _calculate(layer, cache, 3.0)
    assert not cache.awaits_scales
    assert (float(cache.k_scale), float(cache.v_scale)) == pytest.approx([3 * x for x in first])


def test_numbers_and_scales_by_hand_follow_a_reset() -> None:
    layer = attnlib.Attention(SPEC, backend="torch", device="cpu", k_scale=0.5, v_scale=0.25)
    cache = attnlib.PagedKVCache.allocate(SPEC, 4, "cpu")
    layer(*_tensors(), cache, _step(layer))
    q, k, v = _tensors(7.0)
    layer.calc_kv_scales(q, k, v)
    with pytest.raises(ContractError, match="call cache.reset_scales"):
        layer(q, k, v, cache, _step(layer))
    cache.reset_scales()
    layer(q, k, v, cache, _step(layer))
    assert float(cache.k_scale) == pytest.approx(float(k.abs().max()) / 448)
    assert cache.v_scale is layer.v_scale


def test_blocks_of_another_epoch_are_not_moved() -> None:
    """R3: they share a tensor of scales, which says nothing about when they were stored."""
    layer = attnlib.Attention(SPEC, backend="torch", device="cpu")
    cache = attnlib.PagedKVCache.allocate(SPEC, 4, "cpu")
    _calculate(layer, cache, 1.0)
    host = attnlib.PagedKVCache.allocate(
        SPEC, 4, "cpu", k_scale=cache.k_scale, v_scale=cache.v_scale
    )
    cache.swap_blocks(host, [(0, 0)])
    cache.reset_scales()
    with pytest.raises(ContractError, match="scale_epoch is 0 in the source and 1 in the dest"):
        host.swap_blocks(cache, [(0, 0)])
    host.reset_scales()
    host.swap_blocks(cache, [(0, 0)])


def test_formats_without_scales_of_their_own_need_no_reset() -> None:
    """R5."""
    for stored in ("fp8_per_token_head", "float32"):
        cache = attnlib.PagedKVCache.allocate(SPEC.replace(kv_cache_dtype=stored), 4, "cpu")
        cache.reset_scales()
        assert cache.scale_epoch == 0 and not cache.awaits_scales


def test_old_scales_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    """R4: without a reset, a second calculation changes nothing."""
    _warn_of_old_scales.cache_clear()
    layer = attnlib.Attention(SPEC, backend="torch", device="cpu")
    cache = attnlib.PagedKVCache.allocate(SPEC, 4, "cpu")
    with caplog.at_level("WARNING", logger="attnlib"):
        _calculate(layer, cache, 1.0)
        assert not caplog.records
        first = float(cache.k_scale)
        for _ in range(2):
            _calculate(layer, cache, 10.0)
    assert float(cache.k_scale) == first
    (record,) = caplog.records
    assert "keep the scales of an earlier step" in record.message
    assert "cache.reset_scales()" in record.message


def test_scales_of_something_else_are_refused() -> None:
    """Nothing changes: the key's scale stays with that of the value."""
    layer = attnlib.Attention(SPEC, device="cpu")
    _, key, value = _tensors()
    for given in ((None, value), (key, [1.0])):
        with pytest.raises(ContractError, match="(key|value) is a .*; it must be a tensor"):
            layer.calc_kv_scales(None, *given)
    assert layer.k_scale == layer.v_scale == 1.0
