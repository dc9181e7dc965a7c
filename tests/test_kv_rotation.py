"""P15: caches of rotated heads."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import attnlib
from attnlib.backends.rotated import RotatedImpl
from attnlib.backends.torch import TorchBackend
from attnlib.backends.torch.impl import TorchImpl
from attnlib.cache.hybrid import HybridKVCache, KVCacheGroup
from attnlib.debug.record import load_recording, record_calls, save_recording
from attnlib.debug.replay import replay
from attnlib.errors import ContractError
from attnlib.kv_rotation import KVRotation, rotation_signs
from attnlib.ops.torch.hadamard import rotate_heads
from attnlib.sparse.compressed_entries import CompressedEntries
from attnlib.testing.case import Case
from attnlib.testing.runner import run_materialized_case
from tests.debug.recorded_calls import captured

PAIRS = (
    "torch", "prefill:torch,decode:torch", "prefix:torch,suffix:torch",
    pytest.param("triton", marks=pytest.mark.slow),
)  # fmt: skip
BATCHES = (([20, 5], [20, 5]), ([1, 3], [21, 8]), ([1, 1], [22, 9]))


def _spec(**changes: Any) -> attnlib.AttentionSpec:
    fields: dict[str, Any] = {
        "num_heads": 4, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32,
        "needs_lse": True, "kv_rotation": "hadamard",
    }  # fmt: skip
    return attnlib.AttentionSpec(**(fields | changes))


def _run(spec: attnlib.AttentionSpec, backend: str = "torch", rotary: bool = False) -> Any:
    """Outputs and LSEs of three steps, and the cache."""
    torch.manual_seed(0)
    layer = attnlib.Attention(spec, backend=backend, device="cpu")
    cache, found = attnlib.PagedKVCache.allocate(spec, 8, "cpu"), []
    for query_lens, seq_lens in BATCHES:
        common = attnlib.CommonAttentionMetadata.from_lengths(
            query_lens, seq_lens, [[2, 0], [1]], 16, "cpu"
        )
        batch = layer.backend.make_builder(spec, "cpu").build(0, common)
        tokens = sum(query_lens)
        rows = [torch.randn(tokens, heads * spec.head_size) for heads in (4, 2, 2)]
        angles = torch.randn(tokens, spec.head_size // 2)
        for _ in range(2):  # the second call repeats the plan
            if rotary:
                turned = layer.rotate_and_write_kv(*rows, cache, batch, angles.cos(), angles.sin())
                found += layer(turned, None, None, cache, batch, return_lse=True)
            else:
                found += layer(*rows, cache, batch, return_lse=True)
    return found, cache


def _rotated_back(cache: attnlib.PagedKVCache) -> tuple[torch.Tensor, torch.Tensor]:
    views = (cache.key_cache, cache.value_cache)
    return tuple(  # type: ignore[return-value]  # two
        rotate_heads(view.flatten(0, 1), inverse=True).view(view.shape) for view in views
    )


@pytest.mark.parametrize("rotary", [False, True], ids=["write", "rotary-write"])
@pytest.mark.parametrize("backend", PAIRS)
def test_a_rotation_changes_neither_outputs_nor_lse(backend: str, rotary: bool) -> None:
    """R is orthogonal: prefills, decodes and shared prefixes give the results of plain heads."""
    want, plain = _run(_spec(kv_rotation=None), "torch", rotary)
    for kind in ("hadamard", "hadamard_keys", "hadamard_values@5"):
        got, cache = _run(_spec(kv_rotation=kind), backend, rotary)
        torch.testing.assert_close(got, want, rtol=2e-6, atol=3e-6)
        same = [torch.equal(cache.key_cache, plain.key_cache),
                torch.equal(cache.value_cache, plain.value_cache)]  # fmt: skip
        assert same == [kind == "hadamard_values@5", kind == "hadamard_keys"]
        if kind == "hadamard":
            back = _rotated_back(cache)
            torch.testing.assert_close(back, (plain.key_cache, plain.value_cache))


def test_an_outlier_is_spread() -> None:
    """Why the rotation exists: int8 with one scale per head, and one channel 50 times larger."""
    errors = []
    for rotation in (None, "hadamard"):
        found = []
        for stored in ("auto", "int8_per_token_head"):
            torch.manual_seed(0)
            spec = _spec(kv_cache_dtype=stored, kv_rotation=rotation)
            layer = attnlib.Attention(spec, backend="torch", device="cpu")
            cache = attnlib.PagedKVCache.allocate(spec, 8, "cpu")
            common = attnlib.CommonAttentionMetadata.from_lengths([30], [30], [[0, 1]], 16, "cpu")
            batch = layer.backend.make_builder(spec, "cpu").build(0, common)
            rows = [torch.randn(30, heads, 32) for heads in (4, 2, 2)]
            rows[1][..., 3] *= 50
            rows[0][..., 3] /= 50
            found.append(layer(*rows, cache, batch))
        errors.append(float((found[1] - found[0]).norm() / found[0].norm()))
    assert errors[1] < errors[0] / 3


@pytest.mark.parametrize(
    ("text", "want"),
    [
        (None, None),
        ("hadamard", KVRotation()),
        ("hadamard_keys", KVRotation(values=False)),
        ("hadamard_values@12", KVRotation(keys=False, seed=12)),
    ],
)
def test_a_rotation_has_a_text(text: str | None, want: KVRotation | None) -> None:
    spec = _spec(kv_rotation=text)
    assert spec.kv_rotation == want and (want is None or str(want) == text)
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert want is None or f"kv_rotation={text}" in str(spec)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_rotation": "random"}, "use one of hadamard, hadamard_keys, hadamard_values"),
        ({"kv_rotation": "hadamard@-1"}, "with @SEED"),
        ({"kv_rotation": 1}, "kv_rotation=1 is not known"),
        ({"attn_type": "encoder"}, "attn_type=encoder with kv_rotation=hadamard"),
        (
            {"use_mla": True, "num_kv_heads": 1, "head_size": 96, "head_size_v": 64},
            "use_mla=True with kv_rotation=hadamard",
        ),
        (
            {"kv_cache_dtype": "fp8_e4m3", "allow_fp8_queries": True},
            "allow_fp8_queries=True with kv_rotation=hadamard",
        ),
        (
            {"compressed_entries": CompressedEntries(compress_rate=4, block_size=16)},
            "compressed_entries=",
        ),
    ],
)
def test_specs_that_cannot_rotate(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        _spec(**changes)
    with pytest.raises(ContractError, match="keys, values or both"):
        KVRotation(keys=False, values=False)
    with pytest.raises(ContractError, match="seed"):
        KVRotation(seed=-1)


def test_an_impl_without_the_rotation_is_refused() -> None:
    """Code that makes the impl of a backend by itself would store plain heads."""
    with pytest.raises(ContractError, match="TorchImpl does not rotate heads"):
        TorchImpl(_spec())
    assert isinstance(attnlib.Attention(_spec(), backend="torch", device="cpu").impl, RotatedImpl)


def test_a_class_that_replaces_plans_only_rotates_by_separate_launches() -> None:
    """Its plan is made for rotated tensors, as before kernels could rotate."""

    class Rotating(TorchImpl):
        def rotating_plan(self, rotation: KVRotation, *args: Any) -> Any:
            return "a plan"

    class Replaced(Rotating):
        def plan(self, *args: Any) -> Any:
            return None

    for impl_class, wanted in ((TorchImpl, None), (Rotating, "a plan"), (Replaced, None)):
        backend = type(
            "Own", (TorchBackend,), {"get_impl_cls": staticmethod(lambda c=impl_class: c)}
        )
        impl = RotatedImpl(_spec(), backend=backend)
        assert impl._rotating_plan() == wanted


@pytest.mark.parametrize("side", [KVRotation(), KVRotation(values=False)])
@pytest.mark.parametrize("writes", [True, False])
def test_plans_that_rotate_queries_leave_outputs_to_the_layer(
    side: KVRotation, writes: bool
) -> None:
    """In calls of the layer with and without keys, and in `forward` of the impl."""

    class Plan:
        rotated = side

        def run(self, impl: Any, query: Any, key: Any, value: Any, *rest: Any) -> None:
            cache, output, lse = rest
            if key is not None:
                used.append(side)
                impl.write_kv(key.view(-1, 2, 32), value.view(-1, 2, 32), cache, batch.slot_mapping)
            output = output.view(-1, 4, 32)
            impl.forward(rotate_heads(query.view(-1, 4, 32)), cache, batch, output, lse)
            if side.values:
                rotate_heads(output, inverse=True, out=output)

    class Rotating(TorchImpl):
        rotates_writes = True

        def write_kv(self, key: Any, value: Any, cache: Any, slot_mapping: Any) -> None:
            new = KVRotation().turn(rotate_heads, key, value)
            super().write_kv(*new, cache, slot_mapping)

        def plan(self, *args: Any) -> Any:
            return None

        def rotating_plan(self, rotation: KVRotation, *args: Any) -> Any:
            return Plan()

    backend = type("Own", (TorchBackend,), {"get_impl_cls": staticmethod(lambda: Rotating)})
    common = attnlib.CommonAttentionMetadata.from_lengths([3], [3], [[0]], 16, "cpu")
    rows, found = [torch.randn(3, heads, 32) for heads in (4, 2, 2)], []
    used: list[KVRotation] = []
    for chosen in ("torch", backend):
        layer = attnlib.Attention(_spec(), backend=chosen, device="cpu")
        cache = attnlib.PagedKVCache.allocate(_spec(), 4, "cpu")
        batch = layer.backend.make_builder(_spec(), "cpu").build(0, common)
        out = layer(*rows, cache, batch)
        if not writes:
            out = torch.zeros_like(rows[0])
            layer.impl.forward(rows[0], cache, batch, out)
        found.append(out.view(3, 4, 32))
    assert used == [side]
    torch.testing.assert_close(*found)


def test_a_layer_refuses_a_cache_with_another_rotation() -> None:
    spec = _spec()
    other = attnlib.PagedKVCache.allocate(_spec(kv_rotation="hadamard@1"), 4, "cpu")
    plain = attnlib.PagedKVCache.allocate(_spec(kv_rotation=None), 4, "cpu")
    layer = attnlib.Attention(spec, backend="torch", device="cpu")
    common = attnlib.CommonAttentionMetadata.from_lengths([3], [3], [[0]], 16, "cpu")
    batch = layer.backend.make_builder(spec, "cpu").build(0, common)
    rows = [torch.randn(3, heads, 32) for heads in (4, 2, 2)]
    for cache in (other, plain):
        with pytest.raises(ContractError, match="the spec says kv_rotation=hadamard"):
            layer(*rows, cache, batch)
        assert not cache.key_cache.any()
    sharing = attnlib.Attention(spec.replace(kv_sharing=True), backend="torch", device="cpu")
    with pytest.raises(ContractError, match="the spec says kv_rotation=hadamard"):
        sharing(rows[0], None, None, plain, batch)
    plain.rotation = "hadamard"  # type: ignore[assignment]  # memory of rotated heads
    layer(*rows, plain, batch)
    assert plain.key_cache.any() and plain.rotation == KVRotation()


def test_blocks_move_between_caches_of_one_rotation_only() -> None:
    caches = [
        attnlib.PagedKVCache.allocate(
            _spec(kv_rotation=kind, kv_cache_dtype="int8_per_token_head"), 4, "cpu"
        )
        for kind in ("hadamard", "hadamard", "hadamard@2", None)
    ]
    caches[0].key_cache.fill_(3)
    caches[0].swap_blocks(caches[1], [(0, 1)])
    assert bool((caches[1].key_cache[1] == 3).all())
    for other in caches[2:]:
        with pytest.raises(ContractError, match="rotation is hadamard in the source"):
            caches[0].swap_blocks(other, [(0, 1)])
    assert caches[0].signature is caches[1].signature
    assert caches[0].signature is not caches[2].signature
    assert "hadamard@2" in repr(caches[2])
    for copied in (copy.deepcopy(caches[2]), pickle.loads(pickle.dumps(caches[2]))):
        assert copied.rotation == KVRotation(seed=2)


def test_pools_of_several_groups_rotate() -> None:
    for stored in ("auto", "int4_per_group"):
        group = KVCacheGroup(_spec(kv_cache_dtype=stored), 2)
        (caches,) = HybridKVCache({"all": group}, 4, "cpu").caches.values()
        assert [cache.rotation for cache in caches] == [KVRotation()] * 2


@pytest.mark.parametrize("kv_written", [True, False])
@pytest.mark.parametrize("stored", ["auto", "int4_per_group"])
def test_rotated_calls_are_recorded(stored: str, kv_written: bool, tmp_path: Path) -> None:
    layout = "NHD" if stored == "auto" else "HND_INTERLEAVED"
    case = Case(batch="mixed", kv_cache_dtype=stored, layout=layout, kv_rotation="hadamard_keys@4")
    torch_backend = attnlib.get_attn_backend(case.spec, "torch", "cpu")
    live = run_materialized_case(torch_backend, case.materialize(kv_written=kv_written)).out
    step = captured(case, kv_written=kv_written)
    loaded = load_recording(save_recording(step, tmp_path / "call.pt"))
    result = replay(loaded, "torch")
    assert result.passed and result.output is not None, str(result)
    assert torch.equal(result.output.out, live)
    assert loaded.spec == step.spec and loaded.case.kv_rotation == "hadamard_keys@4"


def test_recorded_layers_replay(tmp_path: Path) -> None:
    with record_calls(tmp_path):
        _run(_spec(kv_cache_dtype="int8_per_token_head"))
    files = sorted(tmp_path.iterdir())
    assert files and all(replay(load_recording(file), "torch").passed for file in files)


@pytest.mark.parametrize("rotary", [False, True])
def test_scales_are_those_of_rotated_heads(rotary: bool) -> None:
    """M9: what a step stores decides, and that is rotated."""
    spec = _spec(kv_cache_dtype="fp8_e4m3")
    layer = attnlib.Attention(spec, backend="torch", device="cpu")
    cache = attnlib.PagedKVCache.allocate(spec, 4, "cpu")
    common = attnlib.CommonAttentionMetadata.from_lengths([3], [3], [[0]], 16, "cpu")
    batch = layer.backend.make_builder(spec, "cpu").build(0, common)
    batch.enable_kv_scales_calculation = True
    rows = [torch.zeros(3, heads, 32) for heads in (4, 2, 2)]
    rows[1][..., 3] = rows[2][..., 3] = 64.0
    if rotary:
        layer.rotate_and_write_kv(*rows, cache, batch, None, None)
    else:
        layer(*rows, cache, batch)
    largest = 64.0 / 32**0.5
    assert float(cache.k_scale) == pytest.approx(largest / 448, rel=1e-5)
    assert float(cache.v_scale) == pytest.approx(largest / 448, rel=1e-5)
    layer.k_scale = layer.v_scale = 1.0
    layer.calc_kv_scales(rows[0], rows[1].flatten(1), rows[2])
    assert float(layer.k_scale) == pytest.approx(largest / 448, rel=1e-5)


def test_signs_are_fixed() -> None:
    """Caches live longer than a process: the signs are part of their bytes."""
    assert "".join("-+"[x > 0] for x in rotation_signs(32, 0)) == "-----++-+++++-++++-----+-+---+--"
    assert rotation_signs(32, 1) != rotation_signs(32, 0)
    x = torch.randn(3, 2, 48, dtype=torch.float64)
    back = rotate_heads(rotate_heads(x, 9), 9, inverse=True)
    torch.testing.assert_close(back, x, rtol=1e-6, atol=1e-6)  # the factor is a float32 number
    assert rotate_heads(torch.zeros(1, 1, 8), inverse=True).signbit().sum() == 0
