"""Hopper decodes over rotated heads (P15) that rotate in their kernels equal those around which
other launches rotate, bit for bit; prefills over copies rotate these back."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

import attnlib
from attnlib.backends.triton import TritonBackend
from attnlib.backends.triton.impl import TritonImpl
from attnlib.kv_rotation import KVRotation
from attnlib.ops.triton.hopper import select_decodes, sizes
from attnlib.ops.triton.launch.cache import LAUNCHES
from tests.gpu.devices import needs_gpu

pytestmark = [
    pytest.mark.gpu,
    needs_gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9,
        reason="needs compute capability 9.0",
    ),
]

INT8, FP8, INT4, NVFP4 = "int8_per_token_head", "fp8_per_token_head", "int4_per_group", "nvfp4"
FEW, LONG = [1, 9, 3077, 25, 2048, 640], [8192] * 8
LAYERS: dict[str, dict[str, Any]] = {
    "one-split": {"lengths": [1 + 37 * index % 900 for index in range(16)]},
    "few": {"lengths": FEW},
    "long": {"lengths": LONG, "groups": 4},
    "verify": {"lengths": FEW, "query_len": 3, "dtype": torch.float16},
    "all": {"lengths": FEW, "has_sink": True, "logits_soft_cap": 20.0, "sliding_window": 300},
    "keys": {"lengths": FEW, "kv_rotation": "hadamard_keys@3", "groups": 8},
    "values": {"lengths": FEW, "kv_rotation": "hadamard_values", "groups": 1},
}
CASES = {
    f"{keys}-{values or keys}-{name}": (keys, values, options)
    for keys, values in ((INT8, None), (INT8, INT4), (INT8, NVFP4), (FP8, None), (INT4, None))
    for name, options in LAYERS.items()
} | {
    f"{INT8}-head{size}": (INT8, None, {"lengths": FEW, "head_size": size})
    for size in (64, 80, 96, 256)
}
CASES |= {
    f"{name}-{layer}": (name, None, LAYERS[layer])
    for name in (NVFP4, "mxfp4")
    for layer in ("few", "all", "keys", "values")
}


class Hopper(TritonBackend):
    """The Hopper kernels wherever they support a call."""

    config: ClassVar[dict[str, Any]] = {"kernels": "hopper"}


def _run(
    keys: str,
    values: str | None,
    *,
    lengths: list[int],
    query_len: int = 1,
    groups: int = 4,
    head_size: int = 128,
    **changes: Any,
) -> tuple[list[torch.Tensor], bool]:
    """Outputs and LSEs of two calls, and whether their plan rotates in its kernels."""
    torch.manual_seed(0)
    fields = {"kv_rotation": "hadamard", "dtype": torch.bfloat16, **changes}
    spec = attnlib.AttentionSpec(
        num_heads=8 * groups, num_kv_heads=8, head_size=head_size, needs_lse=True,
        kv_cache_dtype=keys, value_cache_dtype=values, **fields,
    )  # fmt: skip
    sinks = torch.randn(spec.num_heads, device="cuda") if spec.has_sink else None
    layer = attnlib.Attention(spec, backend=Hopper, device="cuda", sinks=sinks)
    lengths = [max(length, query_len) for length in lengths]
    pages = [-(-length // 16) for length in lengths]
    cache = attnlib.PagedKVCache.allocate(spec, sum(pages), "cuda")
    order, blocks = torch.randperm(sum(pages)).tolist(), []
    for count in pages:
        blocks.append(order[:count])
        order = order[count:]
    heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)

    def step(query_lens: list[int]) -> tuple[list[torch.Tensor], Any]:
        common = attnlib.CommonAttentionMetadata.from_lengths(
            query_lens, lengths, blocks, 16, "cuda"
        )
        shapes = [(sum(query_lens), count, head_size) for count in heads]
        rows = [torch.randn(*shape, device="cuda").to(spec.dtype) for shape in shapes]
        return rows, layer.backend.make_builder(spec, "cuda").build(0, common)

    rows, batch = step(lengths)
    layer.impl.write_kv(*rows[1:], cache, batch.slot_mapping)
    rows, batch = step([query_len] * len(lengths))
    if query_len < 100:  # roundings of copies would change which keys such queries see
        rows[0][..., 0] *= 50.0
    outputs = [x for _ in range(2) for x in layer(*rows, cache, batch, return_lse=True)]
    plans = [plan for plan, _ in batch.plans.values()]
    return outputs, any(type(plan).__name__ == "RotatingPlan" for plan in plans)


@pytest.mark.parametrize("name", CASES)
def test_kernels_that_rotate_have_equal_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """P15: queries, splits, outputs, LSEs; direct launches, and launches by Triton."""
    keys, values, options = CASES[name]
    found: dict[bool, list[torch.Tensor]] = {}
    for rotates in (True, False):
        if not rotates:
            monkeypatch.setattr(TritonImpl, "rotating_plan", lambda *call: None)
        found[rotates], inside = _run(keys, values, **options)
        assert inside == rotates
    for ours, theirs in zip(found[True], found[False], strict=True):
        assert ours.isfinite().all() and torch.equal(ours, theirs)


@pytest.mark.parametrize("rotation", [None, "hadamard", "hadamard_values@5"])
@pytest.mark.parametrize("values", [None, INT4, NVFP4])
def test_prefills_over_copies(
    values: str | None, rotation: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies of pages of one or two formats, rotated back, serve plain queries: the same outputs as
    prefills over pages, up to the rounding of copies to bfloat16."""
    options: dict[str, Any] = {"lengths": [4500, 70], "query_len": 4200, "kv_rotation": rotation}
    found = []
    for copies in (True, False):
        if not copies:
            monkeypatch.setattr(TritonImpl, "rotating_plan", lambda *call: None)
            monkeypatch.setattr(sizes, "copied_tokens", lambda *batch: 1 << 30)
        LAUNCHES.clear()
        outputs, inside = _run(INT8, values, **options)
        assert inside == (copies and rotation is not None)
        found.append(outputs)
    for ours, theirs in zip(*found, strict=True):
        assert ours.isfinite().all()
        assert (ours - theirs).float().norm() <= 2**-7 * theirs.float().norm()


@pytest.mark.parametrize("requests", [[2048] * 32, [640] * 256, FEW, [8192] * 8])
def test_rotations_that_overlap_other_kernels(
    requests: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a graph of many steps, each of which writes keys and values, rotates queries and decodes:
    the same bits as kernels that rotate both or queries only, so that no launch is ahead of what it
    reads."""
    spec = attnlib.AttentionSpec(
        num_heads=32, num_kv_heads=8, head_size=128, dtype=torch.bfloat16, kv_cache_dtype=INT8,
        kv_rotation="hadamard",
    )  # fmt: skip
    pages = [-(-length // 16) for length in requests]
    ends = [sum(pages[: number + 1]) for number in range(len(pages))]
    blocks = [list(range(end - count, end)) for end, count in zip(ends, pages, strict=True)]
    tokens, steps = len(requests), 12
    torch.manual_seed(0)
    new = torch.randn(steps, tokens, 48, 128, device="cuda").bfloat16()
    found = []
    queries = KVRotation(values=False)
    for inside in (KVRotation(), queries, None):
        monkeypatch.setattr(select_decodes, "_rotated_inside", lambda *call, found=inside: found)
        LAUNCHES.clear()
        layer = attnlib.Attention(spec, backend=Hopper, device="cuda")
        cache = attnlib.PagedKVCache.allocate(spec, sum(pages), "cuda")
        assert cache.pages is not None
        cache.pages.zero_()
        common = attnlib.CommonAttentionMetadata.from_lengths(
            [1] * tokens, requests, blocks, 16, "cuda"
        )
        batch = layer.backend.make_builder(spec, "cuda").build(0, common)
        slots = [batch.slot_mapping - step for step in range(steps)]
        outputs = torch.zeros(steps, tokens, 32, 128, device="cuda", dtype=torch.bfloat16)

        def run(step: int, layer: Any, cache: Any, batch: Any, slots: Any, outputs: Any) -> None:
            q, k, v = new[step].split([32, 8, 8], 1)
            # Slots change from step to step: a key that is read too early is another one.
            layer.impl.write_kv(k, v, cache, slots[step])
            layer.impl.forward(q, cache, batch, outputs[step])

        run(0, layer, cache, batch, slots, outputs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for step in range(steps):
                run(step, layer, cache, batch, slots, outputs)
        for _ in range(5):
            cache.pages.zero_()
            graph.replay()
        torch.cuda.synchronize()
        found.append(outputs)
    assert found[0].isfinite().all()
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
