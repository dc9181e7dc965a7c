"""Bound launches equal launches by Triton bitwise, at any address and stride, also captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from tests.gpu.devices import needs_gpu
from tests.ops.calls import call_operation

pytest.importorskip("triton")
pytestmark = [pytest.mark.gpu, needs_gpu]

Call = Callable[[], None]
HEADS, KV_HEADS, SIZE, BLOCK, BLOCKS = 8, 2, 128, 16, 64


class Placement(NamedTuple):
    """Memory placement: `offset` elements at the start, `row_padding` after each token row."""

    offset: int
    row_padding: int


PLACEMENTS = [Placement(0, 0), Placement(8, 16), Placement(1, 0), Placement(0, 3), Placement(0, 0)]


def _tensor(
    shape: tuple[int, ...], place: Placement, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    inner = [1]
    for size in reversed(shape[1:]):
        inner.insert(0, inner[0] * size)
    inner[0] += place.row_padding
    flat = torch.randn(place.offset + shape[0] * inner[0], device="cuda").to(dtype)
    return flat.as_strided(shape, inner, place.offset)


def _attention(
    place: Placement,
    query_lens: list[int],
    seq_lens: list[int],
    num_splits: int | None,
    decode: bool,
    kernels: str = "auto",
) -> tuple[Call, list[torch.Tensor]]:
    from attnlib.ops.triton.paged_decode import paged_decode
    from attnlib.ops.triton.paged_prefill import paged_prefill

    tokens = sum(query_lens)
    query, out = (_tensor((tokens, HEADS, SIZE), place) for _ in range(2))
    cache = [_tensor((BLOCKS, BLOCK, KV_HEADS, SIZE), place) for _ in range(2)]
    lse = torch.empty(tokens, HEADS, device="cuda")
    starts = torch.tensor(
        [0, *torch.tensor(query_lens).cumsum(0).tolist()], dtype=torch.int32, device="cuda"
    )
    lens = torch.tensor(seq_lens, dtype=torch.int32, device="cuda")
    table = (
        torch.randperm(BLOCKS, device="cuda")[: len(seq_lens) * 8]
        .view(len(seq_lens), 8)
        .to(torch.int32)
    )
    batch = (query, cache[0], cache[1], table, starts, lens)
    options: dict[str, Any] = {
        "max_query_len": max(query_lens),
        "max_seq_len": 128,
        "scale": 0.1,
        "out": out,
        "lse": lse,
        "kernels": kernels,
    }
    if not decode:
        return lambda: call_operation(paged_prefill, *batch, **options), [out, lse]
    workspace = torch.empty(1 << 21, device="cuda")  # enough for the Hopper decode
    return lambda: call_operation(
        paged_decode, *batch, num_splits=num_splits, workspace=workspace, **options
    ), [
        out,
        lse,
    ]


def _write(place: Placement) -> tuple[Call, list[torch.Tensor]]:
    from attnlib.ops.triton.cache_write import write_kv

    key, value = (_tensor((9, KV_HEADS, SIZE), place) for _ in range(2))
    cache = [_tensor((BLOCKS, BLOCK, KV_HEADS, SIZE), place) for _ in range(2)]
    slots = torch.randperm(BLOCKS * BLOCK, device="cuda")[:9]
    return lambda: write_kv(key, value, cache[0], cache[1], slots), cache


CASES: dict[str, Callable[[Placement], tuple[Call, list[torch.Tensor]]]] = {
    "decode": lambda place: _attention(place, [1] * 4, [128, 1, 77, 16], 1, True),
    "decode-split": lambda place: _attention(place, [1] * 4, [128, 1, 77, 16], 4, True),
    "decode-auto": lambda place: _attention(place, [1], [128], None, True),
    "verify": lambda place: _attention(place, [4, 2, 3], [128, 12, 77], None, True),
    "prefill": lambda place: _attention(place, [50, 1, 17], [100, 1, 128], None, False),
    "prefill-portable": lambda place: _attention(
        place, [50, 1, 17], [100, 1, 128], None, False, "portable"
    ),
    "hopper-decode": lambda place: _attention(
        place, [1] * 4, [128, 1, 77, 16], None, True, "hopper"
    ),
    "hopper-verify": lambda place: _attention(
        place, [4, 2, 3], [128, 12, 77], None, True, "hopper"
    ),
    "write": _write,
}


def _result(call: Call, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    for output in outputs:
        output.zero_()
    call()
    return [output.clone() for output in outputs]


def _by_triton(
    monkeypatch: pytest.MonkeyPatch, call: Call, outputs: list[torch.Tensor]
) -> list[torch.Tensor]:
    from attnlib.ops.triton.launch import bound as launch

    with monkeypatch.context() as patch:
        patch.setattr(launch, "_JIT_RUN", None)  # as if somebody had replaced the launcher
        return _result(call, outputs)


def _same_bits(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_bound_launches_give_the_same_bits(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """Aligned and unaligned addresses, padded and odd strides; each is called until it is bound."""
    for place in PLACEMENTS:
        call, outputs = CASES[case](place)
        expected = _by_triton(monkeypatch, call, outputs)
        assert all(bool(result.float().abs().sum() > 0) for result in expected)
        for _ in range(3):
            assert _same_bits(_result(call, outputs), expected), place


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_bound_launches_are_captured(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """G1: a bound launch uses the stream that is current at the call, so a graph captures it."""
    call, outputs = CASES[case](PLACEMENTS[0])
    expected = _by_triton(monkeypatch, call, outputs)
    for _ in range(2):
        call()  # bound by now
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for output in outputs:
        output.zero_()
    torch.cuda.synchronize()
    assert not any(bool(output.any()) for output in outputs), "capturing ran the kernel"
    graph.replay()
    torch.cuda.synchronize()
    assert _same_bits([output.clone() for output in outputs], expected)


@torch.inference_mode()
def test_launches_are_bound_on_this_triton() -> None:
    """With supported versions launches are bound, which avoids the launch overhead of Triton."""
    from attnlib.ops.triton.cache_write import CacheWrite
    from attnlib.ops.triton.launch.attention import PlainAttention
    from attnlib.ops.triton.launch.cache import LAUNCHES

    LAUNCHES.clear()
    for case in ("decode-split", "prefill-portable", "write"):
        CASES[case](PLACEMENTS[0])[0]()
    plain = {id(value): value for value in LAUNCHES.values() if isinstance(value, PlainAttention)}
    (cache_write,) = (value for value in LAUNCHES.values() if isinstance(value, CacheWrite))
    assert len(plain) == 2 and any(launch.combine is not None for launch in plain.values())
    assert all(kernel.is_direct for launch in plain.values() for kernel in launch.kernels)
    assert cache_write.launch is not None and cache_write.launch.is_direct


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9,
    reason="the Gluon kernels need Hopper",
)
@torch.inference_mode()
def test_hopper_launches_keep_their_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoded descriptors are reused: 6 alternating calls over two caches encode each one once."""
    from attnlib.ops.triton.hopper.descriptors import CacheView, QueryView
    from attnlib.ops.triton.launch.cache import LAUNCHES

    made: list[str] = []
    for view in (CacheView, QueryView):
        own = view.describe

        def counted(self: Any, pointer: int, own: Any = own) -> Any:
            made.append(type(self).__name__)
            return own(self, pointer)

        monkeypatch.setattr(view, "describe", counted)
    for case, views in (
        ("hopper-decode", ["CacheView"] * 4),
        ("prefill", ["CacheView"] * 4 + ["QueryView"] * 2),
    ):
        LAUNCHES.clear()  # other tests had tensors of the same shapes, maybe at the same addresses
        calls = [CASES[case](PLACEMENTS[0]) for _ in range(2)]
        expected = [_by_triton(monkeypatch, *own) for own in calls]
        calls[0][0]()  # launched by Triton, which makes direct launches possible
        made.clear()
        for call, _ in calls * 3:
            call()
        assert sorted(made) == views
        for own, result in zip(calls, expected, strict=True):
            assert _same_bits(_result(*own), result)


@torch.inference_mode()
def test_hooks_see_bound_kernels() -> None:
    """A profiler that hooks launches after they were bound still sees each of them."""
    triton = pytest.importorskip("triton")
    call, _ = CASES["decode-split"](PLACEMENTS[0])
    for _ in range(2):
        call()
    seen: list[str] = []

    def listen(metadata: Any) -> None:
        seen.append(metadata.get()["name"])

    triton.knobs.runtime.launch_enter_hook.add(listen)
    try:
        call()
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(listen)
    call()
    assert seen == ["decode_kernel", "combine_kernel"]


BATCHES = {
    "decode": ([1, 1, 1], [40, 7, 100]),
    "hopper decode": ([1, 1, 1], [3000, 900, 1500]),
    "many decodes": ([1] * 40, [200] * 40),
    "prefill": ([50, 300], [900, 300]),
    "mixed": ([1, 1, 300], [3000, 900, 300]),
    "padded mixed": ([1, 0, 1, 300, 0], [3000, 0, 900, 300, 0]),
}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "sinks": {"has_sink": True},
    "lse": {"needs_lse": True},
    "fp8": {"kv_cache_dtype": "fp8_e4m3"},
}


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("batch", BATCHES)
@torch.inference_mode()
def test_plans_equal_separate_calls(batch: str, feature: str) -> None:
    """A plan that is shared by layers equals separate calls bitwise, eager and captured."""
    import attnlib
    from attnlib.ops.triton.launch.cache import LAUNCHES

    torch.manual_seed(0)
    query_lens, seq_lens = BATCHES[batch]
    spec = attnlib.AttentionSpec(
        num_heads=32,
        num_kv_heads=8,
        head_size=128,
        dtype=torch.bfloat16,
        block_size=16,
        **FEATURES[feature],
    )
    sinks = [torch.randn(32, device="cuda") if spec.has_sink else None for _ in range(3)]
    layers = [attnlib.Attention(spec, backend="triton", device="cuda", sinks=own) for own in sinks]
    pages = [-(-length // 16) for length in seq_lens]
    order = iter(torch.randperm(sum(pages)).tolist())
    table = [[next(order) for _ in range(count)] for count in pages]
    common = attnlib.CommonAttentionMetadata.from_lengths(query_lens, seq_lens, table, 16, "cuda")
    builder = layers[0].backend.make_builder(spec, "cuda")
    shapes = [(sum(query_lens), heads, 128) for heads in (32, 8, 8)]
    inputs = [
        [torch.randn(shape, device="cuda").to(torch.bfloat16) for shape in shapes] for _ in layers
    ]
    results = []
    for keeps_plans in (False, True):
        caches = []
        for number in range(3):
            cache = attnlib.PagedKVCache.allocate(spec, sum(pages), "cuda")
            draw = torch.Generator("cuda").manual_seed(number)
            for view in (cache.key_cache, cache.value_cache):
                view.copy_(torch.randn(view.shape, device="cuda", generator=draw).to(view.dtype))
            caches.append(cache)
        metadata = builder.build(0, common)
        found: list[torch.Tensor] = []

        def call(keeps: bool = keeps_plans, caches: Any = caches, batch: Any = metadata) -> list:
            outs: list[torch.Tensor] = []
            for layer, own, cache in zip(layers, inputs, caches, strict=True):
                result = layer(*own, cache, batch, spec.needs_lse)
                outs.extend(result if spec.needs_lse else [result])
                if not keeps:
                    batch.plans.clear()
                    LAUNCHES.clear()
            return outs

        for _ in range(3):  # the first round encodes the descriptors of new caches
            found += call()
        assert len(metadata.plans) == int(keeps_plans)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = call()
        graph.replay()
        torch.cuda.synchronize()
        for cache in caches:
            found += [view.view(torch.uint8) for view in (cache.key_cache, cache.value_cache)]
        results.append([*found, *captured])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
