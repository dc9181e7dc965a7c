"""The Hopper kernels over float8 caches equal attention in float32 over the same elements."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnlib.ops.params import AttentionParams
from attnlib.ops.torch.paged_prefill import paged_prefill as reference_attention
from tests.gpu.devices import needs_gpu

pytestmark = [
    pytest.mark.gpu,
    needs_gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9,
        reason="needs compute capability 9.0",
    ),
]

HEADS, DEVICE = 8, "cuda"
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DECODES: dict[str, dict[str, Any]] = {
    "e4m3": {},
    "e5m2": {"cache": E5M2, "scales": "tensor"},
    "page128": {"block_size": 128, "group": 8, "scales": "heads"},
    "blocks-of-1": {"block_size": 1, "scales": "heads"},
    "blocks-of-4": {"block_size": 4, "head_size": 64, "cache": E5M2},
    "blocks-of-8": {"block_size": 8, "query_len": 4},
    "fp16": {"dtype": torch.float16},
    "group5": {"group": 5},
    "verify": {"query_len": 4},
    "most-rows": {"query_len": 8, "group": 8},
    "mqa": {"group": 32},
    "head64-sinks": {"head_size": 64, "group": 8, "sinks": True},
    "head96": {"head_size": 96, "cache": E5M2},
    "head256-cap": {"head_size": 256, "group": 2, "cap": 30.0},
    "window": {"left": 300, "scales": "heads"},
    "many": {"lengths": [1 + 37 * index % 900 for index in range(200)], "scales": "heads"},
    "some-empty": {"query_lens": [0, 1, 0, 0, 1, 1]},
    "large-queries": {"magnitude": 1e6, "scale": 1e-6},
    "small-queries": {"magnitude": 1e-30, "scale": 1e-2},
}
PREFILLS: dict[str, dict[str, Any]] = {
    "e4m3": {},
    "e5m2": {"cache": E5M2, "scales": "tensor"},
    "page128": {"block_size": 128, "group": 8, "scales": "heads"},
    "fp16-group5": {"dtype": torch.float16, "group": 5},
    "head64-sinks": {"head_size": 64, "group": 8, "sinks": True},
    "head96": {"head_size": 96, "cache": E5M2},
    "head256-cap": {"head_size": 256, "group": 2, "cap": 30.0},
    "window": {"left": 100, "scales": "heads"},
    "large-queries": {"magnitude": 1e6, "scale": 1e-6},
    "small-queries": {"magnitude": 1e-30, "scale": 1e-2},
}
CONTEXTS, CHUNKS = [1000, 9, 3077, 25, 2048, 640], [300, 9, 77, 1, 129, 0]


def _run(
    operation: str,
    query_lens: list[int],
    seq_lens: list[int],
    *,
    head_size: int = 128,
    group: int = 4,
    block_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    cache: torch.dtype = E4M3,
    scales: str = "float",
    sinks: bool = False,
    cap: float = 0.0,
    left: int = -1,
    magnitude: float = 1.0,
    scale: float | None = None,
    fault: str = "",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (output, LSE) of an operation, and those of the reference in float32."""
    from attnlib.ops.triton.paged_decode import paged_decode
    from attnlib.ops.triton.paged_prefill import paged_prefill

    torch.manual_seed(0)
    pages = [-(-length // block_size) for length in seq_lens]
    order, table = torch.randperm(sum(pages)).int(), torch.zeros(len(pages), max(pages)).int()
    caches = [
        torch.randn(sum(pages), block_size, HEADS, head_size, device=DEVICE).to(cache)
        for _ in range(2)
    ]
    for row, (count, length) in enumerate(zip(pages, seq_lens, strict=True)):
        table[row, :count], order = order[:count], order[count:]
        if length % block_size:
            for tensor in caches:  # NaN in both formats
                tensor.view(torch.uint8)[table[row, count - 1], length % block_size :] = 0x7F
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    query = torch.randn(int(starts[-1]), HEADS * group, head_size) * magnitude
    query = query.to(DEVICE, dtype)
    given: dict[str, Any] = {
        "one": (1.0, 1.0),
        "float": (0.7, 1.9),
        "tensor": (torch.tensor(0.7, device=DEVICE), torch.tensor(1.9, device=DEVICE)),
        "heads": (torch.rand(HEADS, device=DEVICE) + 0.2, torch.rand(HEADS, device=DEVICE) + 0.2),
    }
    k_scale, v_scale = given[scales]
    if fault == "k_scale":
        k_scale = torch.zeros(1, device=DEVICE)
    elif fault == "value":
        caches[1].view(torch.uint8)[table[0, 0], 3, 0, 0] = 0x7F
    params = AttentionParams(
        scale=head_size**-0.5 if scale is None else scale,
        causal=True,
        window=(left, 0 if left >= 0 else -1),
        logits_soft_cap=cap,
        sinks=torch.randn(HEADS * group, device=DEVICE) if sinks else None,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    batch = (table.to(DEVICE), starts.to(DEVICE), torch.tensor(seq_lens, device=DEVICE).int())
    bounds = {"max_query_len": max(query_lens), "max_seq_len": max(seq_lens)}
    run = paged_decode if operation == "decode" else paged_prefill
    results = []
    for attend, rows, kernels in ((run, query, "hopper"), (reference_attention, query.float(), "")):
        out, lse = torch.empty_like(rows), torch.empty(rows.shape[:2], device=DEVICE)
        chosen: dict[str, Any] = {"kernels": kernels} if kernels else {}
        if attend is paged_prefill:
            chosen = {}
        attend(rows, *caches, *batch, params, **bounds, out=out, lse=lse, **chosen)
        results += [out.float(), lse]
    return results[0], results[1], results[2], results[3]


def _assert_close(
    got: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], dtype: torch.dtype
) -> None:
    """The output is as close to the reference as its rounding to 16 bits allows."""
    out, lse, expected, expected_lse = got
    error = (out - expected).norm() / expected.norm()
    assert error < (5e-4 if dtype == torch.float16 else 3e-3), error
    torch.testing.assert_close(lse, expected_lse, atol=1e-4, rtol=1e-5)


def _uses(kind: str) -> bool:
    from attnlib.ops.triton.launch.cache import LAUNCHES

    return any(type(value).__name__ == kind for value in LAUNCHES.values())


@pytest.mark.parametrize("name", DECODES)
def test_decode_equals_float32(name: str) -> None:
    from attnlib.ops.triton.launch.cache import LAUNCHES

    options = dict(DECODES[name])
    length = options.pop("query_len", 1)
    lengths = [max(x, length) for x in options.pop("lengths", CONTEXTS)]
    query_lens = options.pop("query_lens", [length] * len(lengths))
    LAUNCHES.clear()
    got = _run("decode", query_lens, lengths, **options)
    assert _uses("HopperDecode")
    _assert_close(got, options.get("dtype", torch.bfloat16))


@pytest.mark.parametrize(
    ("name", "tile"),
    [
        (name, tile)
        for number, (name, options) in enumerate(DECODES.items())
        for place, tile in enumerate(((128, 2, 1), (128, 2, 2), (64, 3, 2)))
        if options.get("group", 4) * options.get("query_len", 1) <= 16
        and options.get("head_size", 128) <= 128
        and (number == 0 or (number + place) % 3)  # two of the tiles
    ],
    ids=str,
)
def test_decode_with_any_number_of_consumers(
    name: str, tile: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two consumers with tiles of 64 keys get their queries from another warp."""
    from attnlib.ops.triton.heuristics.hopper_decode_tiles import DecodeTile
    from attnlib.ops.triton.hopper import select_decodes
    from attnlib.ops.triton.launch.cache import LAUNCHES

    chosen = DecodeTile(*tile)
    monkeypatch.setattr(select_decodes, "choose_hopper_decode_tile", lambda *_, **__: chosen)
    LAUNCHES.clear()
    test_decode_equals_float32(name)
    LAUNCHES.clear()


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, options in DECODES.items()
        if options.get("group", 4) * options.get("query_len", 1) <= 8
        and options.get("head_size", 128) in (64, 128)
    ],
)
def test_decode_by_ctas_of_one_warp(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from attnlib.ops.triton.heuristics.hopper_decode_tiles import DecodeTile
    from attnlib.ops.triton.hopper import select_decodes
    from attnlib.ops.triton.launch.cache import LAUNCHES

    tile = DecodeTile(32, 4, warps=8)
    monkeypatch.setattr(select_decodes, "choose_hopper_decode_tile", lambda *_, **__: tile)
    LAUNCHES.clear()
    test_decode_equals_float32(name)
    LAUNCHES.clear()


@pytest.mark.parametrize("name", PREFILLS)
def test_prefill_equals_float32(name: str) -> None:
    from attnlib.ops.triton.launch.cache import LAUNCHES

    options = dict(PREFILLS[name])
    LAUNCHES.clear()
    got = _run("prefill", CHUNKS, CONTEXTS, **options)
    assert _uses("HopperPrefill")
    _assert_close(got, options.get("dtype", torch.bfloat16))


OTHER_BLOCKS: dict[str, dict[str, Any]] = {
    "small-blocks": {"cache": torch.bfloat16, "block_size": 2, "scales": "one"},
    "e4m3-blocks-of-1": {"block_size": 1, "scales": "heads"},
    "e4m3-blocks-of-24": {"block_size": 24},
}


@pytest.mark.parametrize("name", [*PREFILLS, *OTHER_BLOCKS])
def test_converted_prefill_equals_float32(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values are copied before the prefill, launched by Triton, then directly."""
    from attnlib.ops.triton.hopper import sizes
    from attnlib.ops.triton.launch.cache import LAUNCHES

    options = dict((PREFILLS | OTHER_BLOCKS)[name])
    monkeypatch.setattr(sizes, "COPIED_TOKENS", 1)
    LAUNCHES.clear()
    for _ in range(2):
        got = _run("prefill", CHUNKS, CONTEXTS, **options)
        assert _uses("ConvertedPrefill")
        _assert_close(got, options.get("dtype", torch.bfloat16))
    LAUNCHES.clear()


@pytest.mark.parametrize("fault", ["k_scale", "value"])
def test_faults_of_converted_keys_are_not_hidden(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from attnlib.ops.triton.hopper import sizes
    from attnlib.ops.triton.launch.cache import LAUNCHES

    monkeypatch.setattr(sizes, "COPIED_TOKENS", 1)
    LAUNCHES.clear()
    test_faults_are_not_hidden("prefill", fault)
    assert _uses("ConvertedPrefill")
    LAUNCHES.clear()


@pytest.mark.parametrize("num_decodes", [0, 3])
def test_layers_with_converted_keys(num_decodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of a step use the same scratch memory, one after the other; their first call is
    launched by Triton, later ones directly."""
    import attnlib
    from attnlib.ops.triton.hopper import sizes
    from attnlib.ops.triton.launch.cache import LAUNCHES

    monkeypatch.setattr(sizes, "COPIED_TOKENS", 1)
    LAUNCHES.clear()
    torch.manual_seed(0)
    spec = attnlib.AttentionSpec(
        num_heads=32, num_kv_heads=8, head_size=128, dtype=torch.bfloat16,
        kv_cache_dtype="fp8_e4m3", block_size=16,
    )  # fmt: skip
    query_lens, seq_lens = [1] * num_decodes + [500, 70], [900] * num_decodes + [1300, 70]
    num_blocks = 90 * len(seq_lens)
    table = torch.randperm(num_blocks).int().view(len(seq_lens), -1)
    tokens = sum(query_lens)
    shapes = [(tokens, 32, 128), (tokens, 8, 128), (tokens, 8, 128)]
    for _ in range(3):  # steps
        common = attnlib.CommonAttentionMetadata.from_lengths(
            query_lens, seq_lens, table, 16, DEVICE
        )
        metadata, expected = {}, {}
        for backend in ("triton", "torch"):
            layer = attnlib.Attention(spec, backend=backend, device=DEVICE)
            metadata[backend] = layer.backend.make_builder(spec, DEVICE).build(0, common)
        for number in range(3):  # layers
            cache = attnlib.PagedKVCache.allocate(spec, num_blocks, DEVICE)
            for view in (cache.key_cache, cache.value_cache):
                view.copy_(torch.randn(view.shape, device=DEVICE).to(view.dtype))
            q, k, v = (torch.randn(s, device=DEVICE, dtype=torch.bfloat16) for s in shapes)
            for backend, built in metadata.items():
                layer = attnlib.Attention(spec, backend=backend, device=DEVICE)
                expected[backend] = layer(q, k, v, cache, built).float()
            error = (expected["triton"] - expected["torch"]).norm() / expected["torch"].norm()
            assert error < 6e-3, (number, error)
    assert _uses("StepLaunches")
    kinds = {type(x.prefill).__name__ for x in LAUNCHES.values() if hasattr(x, "of_layer")}
    assert "ConvertedPrefill" in kinds
    LAUNCHES.clear()


@pytest.mark.parametrize("in_registers", [False, True])
@pytest.mark.parametrize("name", ["e4m3", "page128", "fp16-group5", "head64-sinks", "window"])
def test_prefill_with_queries_anywhere(
    name: str, in_registers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queries are in shared memory or in registers."""
    from attnlib.ops.triton.heuristics.hopper_tiles import HopperTile
    from attnlib.ops.triton.hopper import select_prefills
    from attnlib.ops.triton.launch.cache import LAUNCHES

    registers = (224, 40) if in_registers else (216, 56)
    tile = HopperTile(
        128, 2, persistent=True, consumer_registers=registers[0], producer_registers=24,
        byte_stages=2, converter_registers=registers[1], query_registers=in_registers,
    )  # fmt: skip
    monkeypatch.setattr(select_prefills, "choose_hopper_tile", lambda *_, **__: tile)
    test_prefill_equals_float32(name)
    LAUNCHES.clear()


@pytest.mark.parametrize("operation", ["decode", "prefill"])
@pytest.mark.parametrize("fault", ["k_scale", "value"])
def test_faults_are_not_hidden(operation: str, fault: str) -> None:
    """M9: a scale out of range makes every output NaN; a NaN in the cache that of its readers."""
    query_lens = [1] * len(CONTEXTS) if operation == "decode" else CHUNKS
    out, _, _, _ = _run(operation, query_lens, CONTEXTS, fault=fault)
    first = out[: query_lens[0], :4]
    assert first.isnan()[..., 0].all()
    if fault == "k_scale":
        assert out.isnan().all()
    else:
        assert not out[query_lens[0] :].isnan().any() and not out[:, 4:].isnan().any()


@pytest.mark.parametrize("cache", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("operation", ["decode", "prefill", "copied"])
def test_retrieval_from_128k_keys(
    operation: str, cache: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each query and head finds its own key among 128k others and returns its value."""
    from attnlib.ops.triton.hopper import sizes
    from attnlib.ops.triton.launch.cache import LAUNCHES
    from attnlib.ops.triton.paged_decode import paged_decode
    from attnlib.ops.triton.paged_prefill import paged_prefill

    if operation == "copied":
        for name, limit in (("TOKENS", 1), ("GROUP", 1), ("BYTES", 1 << 30)):
            monkeypatch.setattr(sizes, f"COPIED_{name}", limit)
    LAUNCHES.clear()
    torch.manual_seed(0)
    length, count, size = 128 * 1024, 8 if operation == "decode" else 300, 128
    query = torch.randn(count, HEADS, size, device=DEVICE, dtype=torch.bfloat16)
    needles = torch.randperm(length - count)[:count].to(DEVICE)
    keys, values = (torch.randn(length, HEADS, size, device=DEVICE) for _ in range(2))
    # Scores of 18 beside a log-sum-exp of about 12.3 of the other keys.
    keys[needles] = 18.0 * size**0.5 * query.float() / query.float().square().sum(2, keepdim=True)
    stored = [tensor.to(cache).view(-1, 16, HEADS, size) for tensor in (keys, values)]
    blocks = torch.arange(length // 16, device=DEVICE).int()
    query_lens = [1] * count if operation == "decode" else [count]
    table = blocks.expand(len(query_lens), -1).contiguous()
    starts = torch.tensor([0, *query_lens]).cumsum(0).int().to(DEVICE)
    lens = torch.full((len(query_lens),), length, device=DEVICE).int()
    params = AttentionParams(scale=size**-0.5, causal=True)
    out = torch.empty_like(query)
    run = paged_decode if operation == "decode" else paged_prefill
    run(
        query, *stored, table, starts, lens, params, max_query_len=max(query_lens),
        max_seq_len=length, out=out,
    )  # fmt: skip
    kinds = {"decode": "HopperDecode", "prefill": "HopperPrefill", "copied": "ConvertedPrefill"}
    assert _uses(kinds[operation])
    wanted = stored[1].view(length, HEADS, size)[needles].float()
    products = torch.einsum("ihd,jhd->hij", out.float(), wanted)
    found = products.argmax(2) == torch.arange(count, device=DEVICE)
    assert found.all(), f"{found.float().mean()} of the values were found"
    cosine = torch.nn.functional.cosine_similarity(out.float(), wanted, dim=2)
    assert cosine.min() > 0.9
