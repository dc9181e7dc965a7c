"""Compile the Triton kernels for chips that are not available, through the public operations.

A stub driver provides the target, and every launch becomes a compilation. It needs a process that
does not interpret Triton: the tests start a few with
`python -m tests.ops.triton.cross_compile TARGET CASE... [TARGET CASE...]` and read one JSON line
per case.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from attnlib import AttentionSpec, PagedKVCache
from attnlib.kv_dtype import PAGE_FORMATS
from attnlib.kv_formats import register_kv_format
from attnlib.kv_rotation import KVRotation
from attnlib.object_path import load_object
from attnlib.ops.triton.heuristics import device
from attnlib.ops.triton.heuristics.device import DeviceLimits
from attnlib.ops.triton.heuristics.packed_tiles import packed_shared_bytes
from attnlib.ops.triton.heuristics.page_tiles import page_shared_bytes
from attnlib.ops.triton.heuristics.tile_table import TileEntry, TileTable, shipped_tables
from attnlib.ops.triton.heuristics.tiles import Tile, latents_in_place, shared_bytes
from attnlib.ops.triton.kernels.arguments import AttentionConfig
from attnlib.ops.triton.kernels.convert_cache import CopiedSide, convert_cache_kernel
from attnlib.ops.triton.kernels.float8_copy import float8_copy_kernel
from attnlib.ops.triton.kernels.packed_latents import packed_latent_kernel
from attnlib.ops.triton.launch.cache import LAUNCHES
from attnlib.ops.triton.launch.score_compile import compile_score
from attnlib.ops.triton.launch.settle import settle_keys
from attnlib.ops.triton.quantized_pages import page_kind, page_words
from attnlib.testing.score_functions import SUITE, load_score_function, make_score_tensors
from tests.fresh_process import run_module
from tests.kv_formats.conftest import MODULE
from tests.kv_formats.device_formats import CUBES, SQUARES, STEPS
from tests.ops.calls import call_operation, split_options
from tests.ops.triton.sass import descriptor_sources, disassemble
from tests.ops.triton.state_cases import STATE_CASES, run_convolution, run_fused, run_state

__all__ = [
    "CASES", "PROCESSES", "SCORE_CASES", "TARGETS", "Compiled", "Launch", "Target",
    "collect_rarely", "compile_for", "compile_in_process", "describe", "entry_cases", "entry_fits",
    "entry_sizes", "formats_of", "largest_tiles", "run_case", "score_options", "stub_target",
    "write_table",
]  # fmt: skip

KB = 1024
PROCESSES = 1 if "PYTEST_XDIST_WORKER" in os.environ else max(2, len(os.sched_getaffinity(0)))
"""Processes of one file of compile tests. In two workers, the files for Hopper and for the other
kernels compile side by side."""


@dataclass(frozen=True)
class Target:
    """A chip, as the compiler and the heuristics see it."""

    gpu: GPUTarget
    limits: DeviceLimits
    device_id: int


TARGETS = {
    "sm_80": Target(
        GPUTarget("cuda", 80, 32), DeviceLimits(108, 163 * KB, 164 * KB, (8, 0), False), 0
    ),
    "sm_86": Target(
        GPUTarget("cuda", 86, 32), DeviceLimits(84, 99 * KB, 100 * KB, (8, 6), False), 1
    ),
    "sm_89": Target(
        GPUTarget("cuda", 89, 32), DeviceLimits(58, 99 * KB, 100 * KB, (8, 9), True), 2
    ),
    "sm_90": Target(
        GPUTarget("cuda", 90, 32), DeviceLimits(132, 227 * KB, 228 * KB, (9, 0), True), 3
    ),
    "sm_100": Target(
        GPUTarget("cuda", 100, 32), DeviceLimits(148, 227 * KB, 228 * KB, (10, 0), True), 4
    ),
    "sm_120": Target(
        GPUTarget("cuda", 120, 32), DeviceLimits(188, 99 * KB, 100 * KB, (12, 0), True), 5
    ),
    "gfx942": Target(
        GPUTarget("hip", "gfx942", 64), DeviceLimits(304, 64 * KB, 64 * KB, (0, 0), False, True), 6
    ),
}


@dataclass(frozen=True)
class Compiled:
    """One compiled kernel.

    Attributes:
        kernel: name of the kernel function.
        hash: Triton's hash of the compiled kernel.
        shared: bytes of shared memory.
        estimate: the estimate of `shared` for the tile choice; None for kernels without tiles.
        tile: its tile; None for kernels without tiles.
        registers: per thread; None if the toolchain does not report it.
        spilled: bytes of local memory per thread (stack and spills); None if not reported.
        seconds: compile time.
        instructions: number of occurrences of some instructions in the PTX.
        descriptors: address of a product of Hopper -> sources that its shared memory descriptors
            must not have (`sass.descriptor_sources`); None without such products.
    """

    kernel: str
    hash: str
    shared: int
    estimate: int | None
    tile: dict[str, int] | None
    registers: int | None
    spilled: int | None
    seconds: float
    instructions: dict[str, int]
    descriptors: dict[str, list[str]] | None = None


@dataclass(frozen=True)
class Launch:
    """One launch that only compiled.

    Attributes:
        kernel: the compiled kernel.
        seconds: compile time.
        estimate: the estimate of its shared memory; None for kernels without tiles.
        tile: its tile; None for kernels without tiles.
        log: what the compiler printed, such as the log of ptxas; empty for a cached kernel.
    """

    kernel: Any
    seconds: float
    estimate: int | None
    tile: Tile | None
    log: str


class _StubDriver:
    """The part of a driver that a compilation needs: a target and a device id."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target.gpu

    def get_current_device(self) -> int:
        return self._target.device_id

    def get_current_stream(self, index: int) -> int:
        return 0


@contextmanager
def stub_target(name: str) -> Iterator[list[Launch]]:
    """Turn launches into compilations for the target `name`; yield the list of them."""
    if device.INTERPRETED:
        raise RuntimeError("this process interprets Triton; start one without TRITON_INTERPRET")
    target = TARGETS[name]
    compiled: list[Launch] = []
    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        began = time.perf_counter()
        with contextlib.redirect_stdout(io.StringIO()) as log:
            kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        seconds = time.perf_counter() - began
        tile = _tile(self, args, kwargs, target.limits)
        compiled.append(Launch(kernel, seconds, *tile, log.getvalue()))
        return kernel

    LAUNCHES.clear()  # their keys name a device, not a target
    saved = device.INTERPRETED, device.INTERPRETER_LIMITS
    triton.runtime.driver.set_active(_StubDriver(target))
    JITFunction.run = compile_only
    device.INTERPRETED, device.INTERPRETER_LIMITS = True, target.limits
    try:
        yield compiled
    finally:
        JITFunction.run = launch
        device.INTERPRETED, device.INTERPRETER_LIMITS = saved


def compile_for(name: str, cases: list[str]) -> dict[str, list[Compiled]]:
    """Compile the named cases for one target."""
    results: dict[str, list[Compiled]] = {}
    with stub_target(name) as compiled:
        for case in cases:
            del compiled[:]
            run_case(case)
            results[case] = [describe(launch) for launch in compiled]
    return results


OPEN_FORMATS = (load_object(f"{MODULE}:ROTATED_4BIT"), SQUARES, STEPS, CUBES)
"""Formats with device functions (P16)."""

_score_lookups: dict[Any, int] = {}
"""Device function of a score function -> its lookups that have a result for every score."""


def _tile(
    kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any], limits: DeviceLimits
) -> tuple[int | None, Tile | None]:
    """Return (estimate of shared memory, tile) of an attention kernel's launch."""
    config = kwargs.get("CONFIG")
    if not isinstance(config, AttentionConfig) or kernel is packed_latent_kernel:
        return None, None
    tile = Tile(config.BLOCK_M, config.BLOCK_N, kwargs["num_warps"], kwargs["num_stages"])
    query, key = args[:2]
    if config.PAGE_KIND is not None:
        known = (*PAGE_FORMATS.values(), *OPEN_FORMATS)
        kinds = {page_kind(stored): stored for stored in known}
        keys, values = kinds[config.PAGE_KIND], kinds[config.V_PAGE_KIND]
        sizes = [keys.head_size(2 * config.WORDS), values.head_size(2 * config.DV_WORDS)]
        sizes.append(query.element_size())
        return page_shared_bytes(tile, keys, *sizes, limits.products, values), tile
    if config.X:  # over the packed cache: 16 bytes of its elements
        return packed_shared_bytes(tile, config.D, query.element_size(), 16 // config.X), tile
    estimate = shared_bytes(
        tile,
        config.D,
        config.DV,
        query.element_size(),
        key.element_size(),
        limits.products,
        config.HAS_BIAS + _score_lookups.get(kwargs.get("SCORE"), 0),
        config.LATENT,
        limits.has_fp8,
        kwargs.get("SCORE") is not None,
    )
    return estimate, tile


def describe(launch: Launch) -> Compiled:
    """Read the resources and instructions of a compiled kernel."""
    kernel = launch.kernel
    if (known := _described.get(kernel.hash)) is None:
        known = _described[kernel.hash] = _describe(launch)
    tile = vars(launch.tile) if launch.tile else None
    seconds = round(launch.seconds, 2)
    return replace(known, estimate=launch.estimate, tile=tile, seconds=seconds)


_described: dict[str, Compiled] = {}
"""Hash of a compiled kernel -> its description: cases share kernels, disassembly takes a second."""


def _describe(launch: Launch) -> Compiled:
    kernel = launch.kernel
    registers = spilled = None
    ptx = kernel.asm.get("ptx", "")
    if ptx:
        registers, spilled = _resources(kernel.asm["cubin"])
    elif "amdgcn" in kernel.asm:
        registers, spilled = _amd_resources(kernel.asm["amdgcn"])
    names = (
        "wgmma.mma_async",
        "mma.sync",
        "tcgen05.mma",
        "ldmatrix",
        "cp.async.cg",
        "cp.async.ca",
        "bar.sync",
    )
    counts = {name: len(re.findall(rf"\b{re.escape(name)}", ptx)) for name in names}
    descriptors = None
    if counts["wgmma.mma_async"]:
        found = descriptor_sources(disassemble(kernel.asm["cubin"]))
        descriptors = {address: sorted(sources) for address, sources in found.items()}
    return Compiled(
        kernel=kernel.metadata.name,
        hash=kernel.hash,
        shared=kernel.metadata.shared,
        estimate=launch.estimate,
        tile=vars(launch.tile) if launch.tile else None,
        registers=registers,
        spilled=spilled,
        seconds=round(launch.seconds, 2),
        instructions={name: count for name, count in counts.items() if count},
        descriptors=descriptors,
    )


def _resources(cubin: bytes) -> tuple[int | None, int | None]:
    """Return (registers, bytes of local memory) of a cubin, by the cuobjdump of Triton's wheel."""
    tool = triton.knobs.nvidia.cuobjdump.path
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=False
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    return (int(found[1]), int(found[2]) + int(found[3])) if found else (None, None)


def _amd_resources(assembly: str) -> tuple[int | None, int | None]:
    """Return (vector registers, bytes of scratch memory per thread) of AMD assembly."""
    registers = re.search(r"\.vgpr_count:\s+(\d+)", assembly)
    scratch = re.search(r"\.private_segment_fixed_size:\s+(\d+)", assembly)
    return (int(registers[1]) if registers else None), (int(scratch[1]) if scratch else None)


_KEYS = {"decode": 32768, "prefill": 2048}
"""Longest sequences of the cases. Longer prefills of so few tokens divide their keys."""


def _paged(name: str, options: dict[str, Any]) -> None:
    from attnlib.ops.triton.paged_decode import paged_decode
    from attnlib.ops.triton.paged_prefill import paged_prefill

    latent = options.pop("latent", False)
    group, kv_heads = options.pop("group", 4), 1 if latent else 8
    size, size_v = options.pop("d", 128), options.pop("dv", 0)
    dtype, cache_dtype = options.pop("dtype", torch.bfloat16), options.pop("cache", None)
    block_size = options.pop("n", 16)
    query_len = options.pop("q", 1 if name == "decode" else 2048)
    query = torch.empty(64, group * kv_heads, size, dtype=dtype)
    key = torch.empty(2, block_size, kv_heads, size, dtype=cache_dtype or dtype)
    value = torch.empty(2, block_size, kv_heads, size_v or size, dtype=cache_dtype or dtype)
    if latent:
        value = key[..., : size_v or size]
    table, lengths = torch.zeros(2, 4, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    features = _features(options.pop("features", ""), query, kv_heads)
    operation = paged_decode if name == "decode" else paged_prefill
    starts = torch.zeros(3, dtype=torch.int32)
    call_operation(
        operation,
        *(query, key, value, table, starts, lengths),
        max_query_len=query_len,
        max_seq_len=options.pop("keys", _KEYS[name]),
        scale=0.1,
        out=torch.empty(64, group * kv_heads, size_v or size, dtype=dtype),
        kernels="portable",
        **features,
        **options,
    )


def _varlen(options: dict[str, Any]) -> None:
    from attnlib.ops.triton.varlen_prefill import varlen_prefill

    size, dtype = options.get("d", 64), options.get("dtype", torch.float16)
    query, key = torch.empty(64, 12, size, dtype=dtype), torch.empty(64, 12, size, dtype=dtype)
    starts = torch.zeros(3, dtype=torch.int32)
    params, more = split_options(
        {"scale": 0.1, "causal": False, **_features(options.get("features", ""), query, 12)}
    )
    varlen_prefill(
        *(query, key, key, starts, starts, params),
        max_seqlen_q=512,
        max_seqlen_k=512,
        out=torch.empty_like(query),
        **more,
    )


def _features(names: str, query: torch.Tensor, kv_heads: int) -> dict[str, Any]:
    heads = query.shape[1]
    values: dict[str, Any] = {
        "window": (127, 0),
        "sinks": torch.empty(heads),
        "token_sinks": torch.empty(query.shape[0], heads),
        "alibi": torch.empty(heads),
        "bias": torch.empty(query.shape[0], 2048),
        "cap": 50.0,
        "chunk": 8192,
        "lse": torch.empty(query.shape[0], heads),
        "causal_each": torch.zeros(2, dtype=torch.bool),
        "k_heads": torch.ones(kv_heads),
    }
    options: dict[str, Any] = {}
    arguments = {
        "alibi": "alibi_slopes",
        "bias": "query_bias",
        "cap": "logits_soft_cap",
        "chunk": "attention_chunk_size",
        "causal_each": "causal",
        "k_heads": "k_scale",
        "token_sinks": "sinks",
    }
    for name in names.split():
        if name.startswith("score:"):
            options |= score_options(name.partition(":")[2], heads)
        else:
            options[arguments.get(name, name)] = values[name]
    return options


def score_options(name: str, num_heads: int, num_reqs: int = 2) -> dict[str, Any]:
    """The parameters of a score function of the conformance suite."""
    path, fields = SUITE[name]
    function = load_score_function(path)
    _score_lookups[compile_score(function, "triton").apply] = function.count_tile_lookups()
    options: dict[str, Any] = {
        "score_function": function,
        "score_tensors": make_score_tensors(function, num_heads, [64] * num_reqs),
    }
    return {**options, "causal": fields.get("mask") != "bidirectional"}


def _packed(name: str, options: dict[str, Any]) -> None:
    """Decodes, prefills and writes over the packed cache."""
    from attnlib.ops.block_sparse import BlockSparsePattern
    from attnlib.ops.packed_cache import typed_cache
    from attnlib.ops.paged_attention import PagedAttention
    from attnlib.ops.params import AttentionParams
    from attnlib.ops.triton import packed_attention, packed_decode

    group, kv_heads, size = options.get("group", 4), 8, options.get("d", 128)
    dtype, fp8 = options.get("dtype", torch.bfloat16), options.get("fp8", "auto")
    shape = PagedAttention.get_kv_cache_shape(2, options.get("n", 16), kv_heads, size)
    kv_cache = torch.empty(shape, dtype=dtype if fp8 == "auto" else torch.uint8)
    caches = [
        typed_cache(cache, fp8) for cache in PagedAttention.split_kv_cache(kv_cache, kv_heads, size)
    ]
    query = torch.empty(2, group * kv_heads, size, dtype=dtype)
    new = torch.empty(2, kv_heads, size, dtype=dtype)
    table, lengths = torch.zeros(2, 4, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    all_features = options.get("all", False)
    slopes = torch.empty(group * kv_heads) if all_features else None
    scales = {"k_scale": torch.ones(8), "v_scale": 0.5} if fp8 != "auto" else {}
    params = AttentionParams(
        scale=0.1, window=(100 if all_features else -1, -1), alibi_slopes=slopes, **scales
    )
    out = torch.empty_like(query)
    if name == "decode":
        pattern = BlockSparsePattern(1, 4, 64, 1, group * kv_heads, kv_heads, 0)
        packed_attention.packed_decode(
            query, *caches, table, lengths[:2], params, max_seq_len=32768, out=out,
            pattern=pattern if all_features else None, kernels="portable",
        )  # fmt: skip
    elif name == "counters":
        packed_decode.cleared_counters(query, device.INTERPRETER_LIMITS)
    elif name == "prefill":
        packed_attention.packed_prefill(
            query, new, new, *caches, table, lengths, lengths[:2], params, max_query_len=2048,
            out=out,
        )  # fmt: skip
    else:
        slots = torch.zeros(2, dtype=torch.int64)
        packed_attention.packed_write(new, new, *caches, slots, **scales)


def _pages(name: str, options: dict[str, Any]) -> None:
    """Decodes, prefills and writes over pages that hold their scales."""
    from attnlib.cache.storage import PagedKVCache
    from attnlib.ops.triton.cache_write import write_kv
    from attnlib.ops.triton.paged_decode import paged_decode
    from attnlib.ops.triton.paged_prefill import paged_prefill
    from attnlib.spec import AttentionSpec

    for stored in OPEN_FORMATS:
        register_kv_format(stored)
    group, kv_heads, size = options.get("group", 4), 8, options.get("d", 128)
    dtype = options.get("dtype", torch.bfloat16)
    spec = AttentionSpec(
        num_heads=group * kv_heads, num_kv_heads=kv_heads, head_size=size,
        head_size_v=options.get("dv", size), dtype=dtype, kv_cache_dtype=options["cache"],
        value_cache_dtype=options.get("values"), block_size=options.get("n", 16),
        kv_rotation=options.get("rotation"),
    )  # fmt: skip
    cache = PagedKVCache.allocate(spec, 2)
    scales: dict[str, Any] = {"k_scale": cache.k_scale, "v_scale": cache.v_scale}
    if name == "rotary":
        _rotary_pages(spec, cache)
        return
    if spec.has_open_format:
        scales |= {"k_format": spec.kv_format, "v_format": spec.value_format}
    if name == "write":
        new = torch.empty(4, kv_heads, size, dtype=dtype)
        new_v, slots = new[..., : spec.head_size_v], torch.zeros(4, dtype=torch.int64)
        scales["rotation"] = spec.kv_rotation
        write_kv(new, new_v, cache.key_cache, cache.value_cache, slots, **scales)
        return
    query = torch.empty(64, spec.num_heads, size, dtype=dtype)
    table, lengths = torch.zeros(2, 4, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    call_operation(
        paged_decode if name == "decode" else paged_prefill,
        *(query, cache.key_cache, cache.value_cache, table, torch.zeros(3, dtype=torch.int32)),
        lengths, max_query_len=options.get("q", 1 if name == "decode" else 2048),
        max_seq_len=_KEYS[name], scale=0.1,
        out=torch.empty(64, spec.num_heads, spec.head_size_v, dtype=dtype), **scales,
        **_features(options.get("features", ""), query, kv_heads),
        **({"kernels": "portable"} if name == "decode" else {}),
    )  # fmt: skip


def _rotate_heads(options: dict[str, Any]) -> None:
    from attnlib.ops.triton.hadamard import rotate_heads

    heads = torch.empty(64, 8, options["d"], dtype=options.get("dtype", torch.bfloat16))
    rotate_heads(heads)
    rotate_heads(heads, inverse=True, out=heads)


def _context(options: dict[str, Any]) -> None:
    from attnlib.ops.params import AttentionParams
    from attnlib.ops.triton.context_attention import context_attention

    query = torch.empty(64, 12, options["d"], dtype=torch.bfloat16)
    lengths = torch.zeros(2, dtype=torch.int32)
    params = AttentionParams(scale=0.1, causal=options["causal"], window=options["window"])
    context_attention(
        *(query, query[:, :4], query[:, :4], lengths, lengths, params),
        max_seq_len=512,
        out=torch.empty_like(query),
    )


def _selected(options: dict[str, Any]) -> None:
    """Attention over selected keys; with `latent`, values are a prefix of the keys."""
    from attnlib.ops.triton.selected_attention import selected_attention
    from attnlib.sparse.key_selection import KeySelection, SelectedKeys

    kv_heads, group = options.get("kv_heads", 4), options.get("group", 16)
    size, size_v = options.get("d", 128), options.get("dv", options.get("d", 128))
    dtype, tokens = options.get("dtype", torch.bfloat16), options.get("t", 8)
    key = torch.empty(2, options.get("n", 64), kv_heads, size, dtype=options.get("cache", dtype))
    value = key[..., :size_v] if options.get("latent") else torch.empty_like(key)[..., :size_v]
    query = torch.empty(tokens, kv_heads * group, size, dtype=dtype)
    selection = KeySelection(**options["selection"])
    heads = selection.num_lists_heads(kv_heads * group, kv_heads)
    indices = torch.zeros(tokens, heads, selection.max_blocks, dtype=torch.int32)
    starts = torch.zeros(3, dtype=torch.int32)
    params, more = split_options(
        {"scale": 0.1, **_features(options.get("features", ""), query, kv_heads)}
    )
    selected_attention(
        query, key, value, torch.zeros(2, 64, dtype=torch.int32), starts, starts[:2], params,
        selection, SelectedKeys(indices, starts if selection.query_block_size > 1 else None),
        out=torch.empty(tokens, kv_heads * group, size_v, dtype=dtype), kernels="portable", **more,
    )  # fmt: skip


def _indexer(options: dict[str, Any]) -> None:
    from attnlib.ops.triton.key_indexer import select_keys
    from attnlib.sparse.key_selection import KeySelection

    heads, size, dtype = options["heads"], 128, torch.bfloat16
    tokens, selection = options.get("t", 4), KeySelection(**options["selection"])
    cache = torch.empty(2, 64, size, dtype=options.get("cache", dtype))
    weights = torch.empty(tokens, heads) if options["weights"] else None
    scales = torch.empty(2, 64) if "cache" in options else None
    starts = torch.zeros(3, dtype=torch.int32)
    list_heads = 1 if options["weights"] else heads
    select_keys(
        torch.empty(tokens, heads, size, dtype=dtype), weights, cache, scales,
        torch.zeros(2, 64, dtype=torch.int32), starts, starts[:2], selection,
        max_query_len=tokens, max_seq_len=4096,
        out=torch.empty(tokens, list_heads, selection.max_blocks, dtype=torch.int32),
    )  # fmt: skip


def _packed_latent(options: dict[str, Any]) -> None:
    from attnlib.ops.triton.packed_latents import packed_latent_attention
    from attnlib.sparse.key_selection import KeySelection, SelectedKeys

    heads, dtype = options["heads"], options.get("dtype", torch.bfloat16)
    query = torch.empty(8, heads, 576, dtype=dtype)
    starts = torch.zeros(3, dtype=torch.int32)
    params, more = split_options({"scale": 0.1, **_features(options.get("features", ""), query, 1)})
    if num_blocks := options.get("select"):
        more["selection"] = KeySelection(max_blocks=num_blocks)
        more["selected"] = SelectedKeys(torch.zeros(8, 1, num_blocks, dtype=torch.int32))
    packed_latent_attention(
        query, torch.empty(2, 64, 656, dtype=torch.uint8), torch.zeros(2, 64, dtype=torch.int32),
        starts, starts[:2], params, max_query_len=4, max_seq_len=4096,
        out=torch.empty(8, heads, 512, dtype=dtype), **more,
    )  # fmt: skip


def _packed_latent_write() -> None:
    from attnlib.ops.triton.packed_latents import write_packed_latents

    write_packed_latents(
        torch.empty(4, 576, dtype=torch.bfloat16),
        torch.empty(2, 64, 656, dtype=torch.uint8),
        torch.zeros(4, dtype=torch.int64),
    )


def _cache_write(dtype: torch.dtype, latent: bool = False) -> None:
    from attnlib.ops.triton.cache_write import write_kv

    key = torch.empty(4, 8, 128, dtype=torch.bfloat16)
    cache = torch.empty(2, 16, 8, 128, dtype=dtype)
    write_kv(
        key,
        key,
        cache,
        cache if latent else torch.empty_like(cache),
        torch.zeros(4, dtype=torch.int64),
        k_scale=0.5,
        v_scale=torch.ones(8),
    )


def _rotary_write(cache: torch.dtype, dtype: torch.dtype = torch.bfloat16, **options: Any) -> None:
    from attnlib.ops.rotary import HeadNorm
    from attnlib.ops.triton.rotary_write import rotate_and_write

    half, offset = options.get("half", 64), options.get("offset", 0.0)
    query, key = torch.empty(4, 32, 128, dtype=dtype), torch.empty(4, 8, 128, dtype=dtype)
    stored = torch.empty(2, 16, 8, 128, dtype=cache)
    angles = torch.empty(4, half, dtype=options.get("angles", dtype))
    norm = HeadNorm(torch.ones(128, dtype=dtype), 1e-6, offset, bool(offset))
    rotate_and_write(
        query, key, key, stored, torch.empty_like(stored), torch.zeros(4, dtype=torch.int64),
        angles, angles, interleaved=options.get("interleaved", False), q_norm=norm, k_norm=norm,
        v_scale=torch.ones(8),
    )  # fmt: skip


def _rotary_pages(spec: AttentionSpec, cache: PagedKVCache) -> None:
    """A rotation, and a write of pages that hold their scales."""
    from attnlib.ops.rotary import HeadNorm
    from attnlib.ops.triton.rotary_write import rotate_and_write

    size, dtype = spec.head_size, spec.dtype
    query, key = (torch.empty(4, n, size, dtype=dtype) for n in (spec.num_heads, spec.num_kv_heads))
    angles, norm = torch.empty(4, size // 2, dtype=dtype), HeadNorm(torch.ones(size, dtype=dtype))
    rotate_and_write(
        query, key, key[..., : spec.head_size_v], cache.key_cache, cache.value_cache,
        torch.zeros(4, dtype=torch.int64), angles, angles, q_norm=norm, k_norm=norm,
        k_scale=cache.k_scale, v_scale=cache.v_scale, rotation=spec.kv_rotation,
    )  # fmt: skip


def _convert(
    format_name: str | None = None, values: str | None = None, rotation: str | None = None
) -> None:
    """A copy of a cache of 16-bit elements, or of pages with scales, for the Hopper prefill."""
    heads, size, dtype = 8, 128, torch.bfloat16
    stored = {} if format_name is None else {"kv_cache_dtype": format_name}
    spec = AttentionSpec(
        num_heads=heads, num_kv_heads=heads, head_size=size, dtype=dtype, block_size=16,
        value_cache_dtype=values, kv_rotation=KVRotation.of(rotation), **stored,
    )  # fmt: skip
    cache = PagedKVCache.allocate(spec, 2)
    views, scales = (cache.key_cache, cache.value_cache), (cache.k_scale, cache.v_scale)
    sides = [CopiedSide(size, size, 16 // view.element_size()) for view in views]
    strides: list[int | None] = [None] * 6
    if format_name is not None:
        signs = spec.kv_rotation.sign_bits(size, size) if spec.kv_rotation else (0, 0)
        formats = (spec.kv_format, spec.value_format)
        sides = [
            CopiedSide(*side[:3], page_kind(one), 0, *page_words(view, scale, one), bits)
            for side, view, scale, one, bits in zip(
                sides, views, scales, formats, signs, strict=True
            )
        ]
        strides = [stride for scale in scales for stride in scale.stride()[:3]]
        views = tuple(view.view(torch.uint8) for view in views)
    outputs = [torch.empty(32, heads, size, dtype=dtype) for _ in views]
    lengths, table = torch.zeros(3, dtype=torch.int32), torch.zeros(2, 4, dtype=torch.int32)
    settle_keys(convert_cache_kernel)
    convert_cache_kernel[(264,)](
        *views, *(scales if format_name else (None, None)), *outputs, lengths, lengths[:2], table,
        2, 32, 4, *views[0].stride()[:3], *views[1].stride()[:3], *strides, NUM_KV_HEADS=heads,
        BLOCK_SIZE=16, TOKENS=32, KEYS=sides[0], VALUES=sides[1], num_warps=4,
    )  # fmt: skip


def _float8_copy() -> None:
    """A copy of an e4m3 cache, values transposed, for the Hopper prefill with float8 products."""
    heads, size, tokens = 8, 128, 128
    # The kernel reads and writes bytes, and Triton has no e4m3 type for sm_80.
    cache = torch.empty(2, 16, heads, size, dtype=torch.uint8)
    keys = torch.empty(32, heads, size, dtype=torch.uint8)
    values = torch.empty(heads * size, 464, dtype=torch.uint8)
    lengths, table = torch.zeros(3, dtype=torch.int32), torch.zeros(2, 4, dtype=torch.int32)
    settle_keys(float8_copy_kernel)
    float8_copy_kernel[(264,)](
        cache, cache, None, None, keys, values, lengths, lengths[:2], table, 2, 32, 4,
        *cache.stride()[:3], *cache.stride()[:3], *[None] * 6, NUM_KV_HEADS=heads, D=size, DV=size,
        BLOCK_SIZE=16, VEC_K=16, VEC_V=16, TOKENS=tokens, num_warps=4,
    )  # fmt: skip


def _append() -> None:
    from attnlib.ops.triton.append_kv import append_kv

    key, cache = (torch.empty(*shape, 8, 128, dtype=torch.bfloat16) for shape in ((2, 3), (4, 16)))
    table, lengths = torch.zeros(2, 4, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    for new in (key, key[:, :1]):  # one new token has code of its own
        append_kv(new, new, cache, cache, table, lengths, torch.zeros_like(lengths))


def _append_rows() -> None:
    from attnlib.ops.triton.append_rows import RowAppend

    new, buffer = (torch.empty(2, 8, n, 128, dtype=torch.bfloat16) for n in (1, 64))
    RowAppend(new, new, buffer, buffer).run(new, new, buffer, buffer, 63)


def _slots() -> None:
    from attnlib.ops.triton.slots import compute_slot_mapping

    starts, lengths = torch.zeros(3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    compute_slot_mapping(starts, lengths, torch.zeros(2, 4, dtype=torch.int32), 16, 100)


def _visible_keys() -> None:
    from attnlib.ops.triton.visible_keys import list_visible_keys

    table, lengths, starts = (torch.zeros(n, dtype=torch.int32) for n in (256, 2, 3))
    visible = torch.ones(2, 128, dtype=torch.bool)
    list_visible_keys(visible, 128, table=table.view(2, 128), lengths=lengths, starts=starts)


def _merge() -> None:
    from attnlib.ops.triton.merge_states import merge_states

    out, lse = torch.empty(4, 8, 128, dtype=torch.bfloat16), torch.empty(4, 8)
    merge_states(out, lse, out, lse, out, lse)


def _merge_rows() -> None:
    from attnlib.ops.triton.merge_states import merge_partial_rows

    out, lse = torch.empty(4, 8, 128, dtype=torch.bfloat16), torch.empty(4, 8)
    starts = torch.zeros(5, dtype=torch.int32)
    merge_partial_rows(out, lse, out, lse, starts, starts)


def _peer_words() -> None:
    from attnlib.ops.peer_buffers import PeerBuffers
    from attnlib.ops.split_states import SplitStates
    from attnlib.ops.triton.peer_words import merge_words, share_words

    buffers = [torch.zeros(PeerBuffers.num_bytes(), dtype=torch.uint8) for _ in range(2)]
    peers = PeerBuffers.of(buffers, 0)
    share_words(torch.empty(4, 256, dtype=torch.bfloat16), peers)
    partial, out = (torch.empty(4, heads, 128, dtype=torch.bfloat16) for heads in (8, 4))
    lses, sinks = (torch.empty(4, 8), torch.empty(4, 4)), torch.empty(4)
    states = partial, lses[0], out, lses[1]
    for splits in (None, SplitStates.of(4, 2, partial.device)):
        merge_words(*states, peers, num_kv_heads=2, sinks=sinks, splits=splits)


def _varying() -> None:
    """Decodes and prefills of one layer with everything that varies from step to step."""
    from attnlib.ops.triton.paged_decode import paged_decode
    from attnlib.ops.triton.paged_prefill import paged_prefill

    key = torch.empty(2, 16, 8, 128, dtype=torch.bfloat16)
    value = torch.empty_like(key)
    for requests, tokens, columns, longest, window in (
        (1, 1, 1, 1000, 16),
        (3, 5, 16, 4096, 33),
        (16, 16, 17, 77, 1),
    ):
        query = torch.empty(tokens, 32, 128, dtype=torch.bfloat16)
        table = torch.zeros(requests, columns, dtype=torch.int32)
        lengths = torch.zeros(requests + 1, dtype=torch.int32)
        batch = (query, key, value, table, lengths, lengths[:-1])
        options = {
            "max_seq_len": longest,
            "scale": 1 / requests,
            "window": (window, -1),
            "out": query,
        }
        call_operation(paged_decode, *batch, max_query_len=1, num_splits=2 + requests, **options)
        call_operation(
            paged_prefill, *batch, max_query_len=512 + requests, kernels="portable", **options
        )


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_ALL = "window alibi bias cap chunk lse sinks"
_BLOCKS: dict[str, Any] = {"max_blocks": 16, "block_size": 128, "scope": "kv_head"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "write": ("write", {"dtype": torch.bfloat16}),
    "write-fp8": ("write", {"dtype": E4M3}),
    "write-latent": ("write", {"dtype": torch.bfloat16, "latent": True}),
    "rotary-write": ("rotary-write", {"cache": torch.bfloat16}),
    "rotary-write-e4m3": (
        "rotary-write",
        {"cache": E4M3, "interleaved": True, "half": 48, "offset": 1.0, "angles": torch.float32},
    ),
    "convert": ("convert", {}),
    "convert-int8": ("convert", {"format_name": "int8_per_token_head"}),
    "convert-int8-int4-rotated": (
        "convert",
        {
            "format_name": "int8_per_token_head",
            "values": "int4_per_group",
            "rotation": "hadamard",
        },
    ),
    "float8-copy": ("float8-copy", {}),
    "append": ("append", {}),
    "append-rows": ("append-rows", {}),
    "slots": ("slots", {}),
    "visible-keys": ("visible-keys", {}),
    "merge": ("merge", {}),
    "merge-rows": ("merge-rows", {}),
    "peer-words": ("peer-words", {}),
    "varying": ("varying", {}),
    "decode-64": ("decode", {"d": 64, "group": 8, "features": "window sinks"}),
    "decode-128": ("decode", {}),
    "decode-128-page128": ("decode", {"n": 128}),
    "decode-128-verify": ("decode", {"q": 4}),
    "decode-256": ("decode", {"d": 256, "group": 2, "features": "cap"}),
    "decode-96": ("decode", {"d": 96}),
    "decode-128-e4m3": ("decode", {"cache": E4M3}),
    "decode-128-e5m2": ("decode", {"cache": E5M2, "features": "k_heads"}),
    "decode-128-f32": ("decode", {"dtype": torch.float32}),
    "decode-512": ("decode", {"d": 512, "group": 16}),
    "decode-576": ("decode", {"d": 576, "dv": 512, "group": 16}),
    "decode-latent": ("decode", {"d": 576, "dv": 512, "group": 16, "latent": True, "n": 64}),
    "decode-latent-128": ("decode", {"d": 576, "dv": 512, "group": 128, "latent": True}),
    "decode-latent-512": ("decode", {"d": 512, "group": 64, "latent": True, "n": 64}),
    "decode-latent-e4m3": (
        "decode",
        {"d": 576, "dv": 512, "group": 16, "latent": True, "cache": E4M3},
    ),
    "decode-latent-all": (
        "decode",
        {"d": 576, "dv": 512, "group": 16, "latent": True, "features": _ALL},
    ),
    "decode-all": ("decode", {"features": _ALL}),
    "decode-128-token-sinks": ("decode", {"features": "token_sinks lse"}),
    "prefill-128-token-sinks": ("prefill", {"features": "token_sinks lse"}),
    "invariant-decode-128-token-sinks": (
        "decode",
        {"features": "token_sinks lse", "batch_invariant": True},
    ),
    "prefill-64": ("prefill", {"d": 64, "group": 8, "features": "sinks"}),
    "prefill-64-window": ("prefill", {"d": 64, "group": 8, "features": "window sinks"}),
    "prefill-128": ("prefill", {}),
    "prefill-128-page128": ("prefill", {"n": 128}),
    "prefill-256": ("prefill", {"d": 256, "group": 2, "features": "cap"}),
    "prefill-96": ("prefill", {"d": 96}),
    "prefill-192": ("prefill", {"d": 192, "dv": 128, "group": 1}),
    "prefill-128-e4m3": ("prefill", {"cache": E4M3}),
    "prefill-128-e5m2": ("prefill", {"cache": E5M2}),
    "prefill-128-16-e5m2": ("prefill", {"dv": 16, "cache": E5M2}),
    "prefill-64-32-e4m3": ("prefill", {"d": 64, "dv": 32, "cache": E4M3, "features": "window"}),
    "prefill-96-e5m2": ("prefill", {"d": 96, "cache": E5M2, "n": 17}),
    "prefill-128-f32": ("prefill", {"dtype": torch.float32}),
    "prefill-512": ("prefill", {"d": 512}),
    "prefill-latent": ("prefill", {"d": 576, "dv": 512, "group": 128, "latent": True, "n": 64}),
    "prefill-latent-512": (
        "prefill",
        {"d": 512, "group": 64, "latent": True, "n": 64, "features": "window sinks lse"},
    ),
    "prefill-latent-e4m3": (
        "prefill",
        {"d": 576, "dv": 512, "group": 128, "latent": True, "cache": E4M3},
    ),
    "prefill-all": ("prefill", {"features": _ALL + " causal_each"}),
    "prefill-128-splits": ("prefill", {"keys": 32768, "q": 64, "features": "sinks"}),
    "invariant-decode-128": ("decode", {"batch_invariant": True}),
    "invariant-decode-64": (
        "decode",
        {"d": 64, "group": 8, "features": "window sinks", "batch_invariant": True},
    ),
    "invariant-decode-256": (
        "decode",
        {"d": 256, "group": 2, "features": "cap", "batch_invariant": True},
    ),
    "invariant-decode-latent": (
        "decode",
        {"d": 576, "dv": 512, "group": 16, "latent": True, "n": 64, "batch_invariant": True},
    ),
    "invariant-decode-all": ("decode", {"features": _ALL, "batch_invariant": True}),
    "invariant-prefill-128": ("prefill", {"batch_invariant": True}),
    "invariant-prefill-128-e4m3": ("prefill", {"cache": E4M3, "batch_invariant": True}),
    "invariant-prefill-256": (
        "prefill",
        {"d": 256, "group": 2, "features": "cap", "batch_invariant": True},
    ),
    "invariant-prefill-f32": ("prefill", {"dtype": torch.float32, "batch_invariant": True}),
    "invariant-prefill-all": (
        "prefill",
        {"features": _ALL + " causal_each", "batch_invariant": True},
    ),
    "context-128": ("context", {"d": 128, "causal": True, "window": (-1, -1)}),
    "context-80-window": ("context", {"d": 80, "causal": False, "window": (100, 7)}),
    "packed-decode-128": ("packed decode", {}),
    "packed-decode-all": ("packed decode", {"d": 96, "all": True}),
    "packed-decode-256-e4m3": ("packed decode", {"d": 256, "fp8": "fp8"}),
    "packed-decode-f32": ("packed decode", {"dtype": torch.float32}),
    "packed-prefill-128": ("packed prefill", {}),
    "packed-prefill-all": ("packed prefill", {"d": 80, "fp8": "fp8_e5m2", "all": True}),
    "packed-prefill-f32": ("packed prefill", {"dtype": torch.float32}),
    "selected-blocks": ("selected", {"selection": _BLOCKS}),
    "selected-blocks-many": ("selected", {"selection": _BLOCKS, "t": 4096}),
    "selected-all": (
        "selected",
        {
            "d": 96,
            "n": 16,
            "cache": E4M3,
            "selection": {"max_blocks": 64, "block_size": 4, "scope": "query_head"},
            "features": "window alibi cap chunk lse sinks causal_each k_heads",
        },
    ),
    "selected-shared": ("selected", {"selection": {**_BLOCKS, "query_block_size": 64}, "t": 4096}),
    "selected-latent": (
        "selected",
        {
            "d": 576,
            "dv": 512,
            "kv_heads": 1,
            "latent": True,
            "selection": {"max_blocks": 2048},
        },
    ),
    "selected-latent-512": (
        "selected",
        {
            "d": 512,
            "kv_heads": 1,
            "group": 64,
            "latent": True,
            "selection": {"max_blocks": 512},
        },
    ),
    "selected-latent-many": (
        "selected",
        {
            "d": 576,
            "dv": 512,
            "kv_heads": 1,
            "group": 128,
            "t": 4096,
            "latent": True,
            "selection": {"max_blocks": 2048},
        },
    ),
    "indexer-tokens": (
        "indexer",
        {"heads": 64, "weights": True, "cache": E4M3, "selection": {"max_blocks": 2048}, "t": 64},
    ),
    "indexer-tokens-bf16": (
        "indexer",
        {"heads": 64, "weights": True, "selection": {"max_blocks": 2048}},
    ),
    "indexer-blocks": ("indexer", {"heads": 4, "weights": False, "selection": _BLOCKS}),
    "packed-latent-write": ("packed-latent-write", {}),
    "packed-latent-64": ("packed-latent", {"heads": 64}),
    "packed-latent-selected": ("packed-latent", {"heads": 128, "select": 2048}),
    "packed-latent-all": (
        "packed-latent",
        {"heads": 16, "dtype": torch.float16, "features": "window cap chunk lse sinks"},
    ),
    "selected-f32": ("selected", {"selection": _BLOCKS, "dtype": torch.float32}),
    "pages-decode-int8": ("pages decode", {"cache": "int8_per_token_head"}),
    "pages-decode-fp8-all": (
        "pages decode",
        {"cache": "fp8_per_token_head", "d": 96, "features": _ALL, "n": 17},
    ),
    "pages-decode-int4": ("pages decode", {"cache": "int4_per_group"}),
    "pages-decode-int4-f16": (
        "pages decode",
        {"cache": "int4_per_group", "d": 256, "dtype": torch.float16, "q": 4},
    ),
    "pages-decode-int8-f32": (
        "pages decode",
        {"cache": "int8_per_token_head", "dtype": torch.float32},
    ),
    "pages-prefill-int8": ("pages prefill", {"cache": "int8_per_token_head"}),
    "pages-prefill-fp8": ("pages prefill", {"cache": "fp8_per_token_head", "d": 64, "dv": 128}),
    "pages-prefill-int4-all": (
        "pages prefill",
        {"cache": "int4_per_group", "features": _ALL + " causal_each"},
    ),
    "pages-decode-nvfp4": ("pages decode", {"cache": "nvfp4"}),
    "pages-prefill-mxfp4": ("pages prefill", {"cache": "mxfp4"}),
    "pages-write-nvfp4": ("pages write", {"cache": "nvfp4"}),
    "pages-write-mxfp4": ("pages write", {"cache": "mxfp4"}),
    "pages-write-int8": ("pages write", {"cache": "int8_per_token_head"}),
    "pages-write-fp8": ("pages write", {"cache": "fp8_per_token_head", "dv": 64}),
    "pages-write-int4": ("pages write", {"cache": "int4_per_group"}),
    "pages-write-int8-rotated": (
        "pages write",
        {"cache": "int8_per_token_head", "values": "int4_per_group", "rotation": "hadamard"},
    ),
    "pages-rotary-fp8": ("pages rotary", {"cache": "fp8_per_token_head", "d": 96}),
    "pages-rotary-int8-int4": (
        "pages rotary",
        {"cache": "int8_per_token_head", "values": "int4_per_group", "rotation": "hadamard"},
    ),
    "pages-rotary-nvfp4": ("pages rotary", {"cache": "nvfp4", "rotation": "hadamard@1"}),
    "pages-rotary-int4": (
        "pages rotary",
        {"cache": "int4_per_group", "d": 96, "rotation": "hadamard"},
    ),
    "pages-decode-int8-int4": (
        "pages decode",
        {"cache": "int8_per_token_head", "values": "int4_per_group"},
    ),
    "pages-prefill-int8-nvfp4": (
        "pages prefill",
        {"cache": "int8_per_token_head", "values": "nvfp4"},
    ),
    "pages-write-int8-nvfp4": ("pages write", {"cache": "int8_per_token_head", "values": "nvfp4"}),
    "pages-decode-open4": ("pages decode", {"cache": "example:rotated4"}),
    "pages-decode-open4-f32": (
        "pages decode",
        {"cache": "example:rotated4", "dtype": torch.float32},
    ),
    "pages-decode-int8-open4": (
        "pages decode",
        {"cache": "int8_per_token_head", "values": "example:rotated4"},
    ),
    "pages-decode-open8-steps": ("pages decode", {"cache": "tests:steps"}),
    "pages-decode-open8-table": ("pages decode", {"cache": "tests:cubes"}),
    "pages-decode-tables": (
        "pages decode",
        {"cache": "tests:cubes", "values": "example:rotated4"},
    ),
    "pages-prefill-open8-table": ("pages prefill", {"cache": "tests:cubes", "dv": 64}),
    "pages-prefill-open8": ("pages prefill", {"cache": "tests:squares", "dv": 64}),
    "rotate-heads": ("rotate heads", {"d": 256}),
    "rotate-heads-80-f16": ("rotate heads", {"d": 80, "dtype": torch.float16}),
    "packed-write": ("packed write", {}),
    "packed-write-fp8": ("packed write", {"fp8": "fp8"}),
    "packed-counters": ("packed counters", {}),
    "varlen-64": ("varlen", {}),
    "varlen-64-window": ("varlen", {"features": "window"}),
}


SCORE_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    f"{op}-{size}-{name}": (
        op,
        {"d": size, "group": 8 if size == 64 else 4, "features": f"score:{name}"},
    )
    for op in ("decode", "prefill")
    for size in (64, 128)
    for name in (
        "positions",
        "heads",
        "requests",
        "spans",
        "documents",
        "relative_bias",
        "alibi_sqrt",
        "multi_item",
        "head_windows",
        "relative_logits",
    )
}
"""Cases with a score function, apart from `CASES`, whose machine code is compared over time."""


CASES |= STATE_CASES


def entry_cases() -> dict[str, TileEntry]:
    """Return the shipped entries for the portable kernels by case name, `entry:FILE:INDEX`."""
    return {
        f"entry:{Path(table.name).stem}:{index}": entry
        for table in shipped_tables()
        for index, entry in enumerate(table.entries)
        if entry.op in ("decode", "prefill", "latent")
    }


def entry_sizes(entry: TileEntry) -> tuple[int, int]:
    """Return the largest head sizes of an entry."""
    _, most = next((least, most) for name, least, most in entry.ranges if name == "head_size")
    if most is not None:
        return (most, most // 2) if entry.op == "latent" else (most, most)
    return (512, 512) if entry.op == "prefill" else (576, 512)


def largest_tiles(entries: dict[str, TileEntry]) -> set[str]:
    """Return the names of the entries with the largest tile for each kind of kernel.

    Entries for the same operation, bits of an element, instructions and consumers compile the same
    code with other sizes. The largest tile, in elements of keys and queries, needs the most
    registers and shared memory.
    """
    found: dict[Any, list[tuple[tuple[int, ...], str]]] = {}
    for name, entry in entries.items():
        tile = dict(entry.tile)
        size = max((most or 576 for field, _, most in entry.ranges if field == "head_size"))
        rows = tile.get("block_m", 1)
        stages = tile.get("num_stages", tile.get("stages", 0))
        bits = {_ELEMENT_BITS[element] for element in entry.elements}
        kind = entry.op, entry.products, max(bits, default=None), tile.get("consumers")
        found.setdefault(kind, []).append(((rows * tile["block_n"] * size, size, stages), name))
    return {max(tiles)[1] for tiles in found.values()}


_ELEMENT_BITS = {
    "float32": 32,
    "16-bit": 16,
    "fp8": 8,
    "fp8-bytes": 8,
    "int8": 8,
    "int8-int4": 8,
    "fp4": 4,
    "int8-fp4": 8,
    "int4": 4,
}
"""Elements of a table entry -> their bits."""


def formats_of(entry: TileEntry, target: str) -> list[str]:
    """Return the suffixes of an entry's cases: "" for a cache of the query's dtype, ":fp8"."""
    fp8 = "fp8" if TARGETS[target].limits.has_fp8 else "fp8-bytes"
    plain = {"16-bit", "float32"} & set(entry.elements)
    return [*([""] if plain else []), *([":fp8"] if fp8 in entry.elements else [])]


def entry_fits(entry: TileEntry, target: str) -> bool:
    """Return whether an entry is for the target and fits in its shared memory."""
    limits = TARGETS[target].limits
    if entry.elements and not formats_of(entry, target):
        return False
    if entry.products and limits.products not in entry.products:
        return False
    latent, block_m = entry.op == "latent", dict(entry.tile)["block_m"]
    query = 4 if entry.elements == ("float32",) else 2
    if latent and block_m > 32 and not latents_in_place(limits.capability, query, query, True):
        return False
    cache = query if formats_of(entry, target)[:1] == [""] else 1
    need = shared_bytes(
        Tile(**dict(entry.tile)), *entry_sizes(entry), query, cache, limits.products, 0, latent,
        limits.has_fp8,
    )  # fmt: skip
    return need <= limits.shared_memory


def _run_entry(name: str) -> None:
    """Launch with a table that has this entry only, so that its tile is used."""
    entry, fp8 = entry_cases()[name.removesuffix(":fp8")], name.endswith(":fp8")
    size, size_v = entry_sizes(entry)
    latent = entry.op == "latent"
    group = 128 if latent else 16 if size > 256 else 4
    options: dict[str, Any] = {"d": size, "dv": size_v, "group": group, "latent": latent}
    rows = next((least for name, least, _ in entry.ranges if name == "rows"), None)
    if latent and rows is None:
        options["group"] = 16
    if entry.elements == ("float32",):
        options["dtype"] = torch.float32
    elif fp8:
        options["cache"] = torch.float8_e4m3fn
    device.set_tuned_tiles(-1, TileTable(name, "any", (entry,)))
    try:
        _paged("decode" if latent else entry.op, options)
    finally:
        device.set_tuned_tiles(-1, None)


def run_case(name: str) -> None:
    """Call the operation of one case."""
    if name.startswith("entry:"):
        _run_entry(name)
        return
    operation, options = (CASES | SCORE_CASES)[name]
    options = dict(options)
    if operation in ("decode", "prefill"):
        _paged(operation, options)
    elif operation == "varlen":
        _varlen(options)
    elif operation == "selected":
        _selected(options)
    elif operation == "indexer":
        _indexer(options)
    elif operation in ("state", "convolution", "fused"):
        run = {"state": run_state, "convolution": run_convolution, "fused": run_fused}
        run[operation](options)
    elif operation == "packed-latent":
        _packed_latent(options)
    elif operation == "context":
        _context(options)
    elif operation.startswith("packed "):
        _packed(operation.split()[1], options)
    elif operation == "rotate heads":
        _rotate_heads(options)
    elif operation.startswith("pages "):
        _pages(operation.split()[1], options)
    elif operation == "write":
        _cache_write(**options)
    elif operation == "rotary-write":
        _rotary_write(**options)
    elif operation == "convert":
        _convert(**options)
    else:
        {
            "append": _append, "append-rows": _append_rows, "float8-copy": _float8_copy,
            "slots": _slots, "merge": _merge, "merge-rows": _merge_rows, "varying": _varying,
            "packed-latent-write": _packed_latent_write, "visible-keys": _visible_keys,
            "peer-words": _peer_words,
        }[operation]()  # fmt: skip


def compile_in_process(module: str, *arguments: str) -> list[dict[str, Any]]:
    """Run this module or `hopper.cross_compile` in a process that does not interpret Triton.

    Returns:
        The JSON objects that it prints, one for each case.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # Line numbers have no effect on the machine code and take a tenth of the time. Threads of MLIR
    # take more time than they save: a module is one function.
    environment |= {"TRITON_DISABLE_LINE_INFO": "1", "MLIR_DISABLE_MULTITHREADING": "1"}
    if PROCESSES == 1:
        run = run_module(module, arguments, environment)
    else:
        run = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", module, *arguments],
            capture_output=True,
            text=True,
            cwd=Path(__file__).parents[3],
            env=environment,
            check=False,
        )
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


_TABLE_HEAD = """\
# Every case, score function and tile table entry, compiled for every target without a GPU.
# Bytes of local memory per thread and their limit, bytes of shared memory.
# Triton {triton}, torch {torch}, commit {commit}:
# pytest -m "" tests/ops/triton/test_compile.py tests/ops/triton/hopper/test_compile.py
#     --every-target --compile-table FILE
"""


def write_table(path: Path, rows: list[tuple[Any, ...]]) -> None:
    """Append (target, case, kernel, registers, bytes of local memory, their limit, bytes of shared
    memory) of compiled kernels to a text file."""
    form = "{:<8} {:<32} {:<28} {:>9} {:>7} {:>7} {:>9}\n"
    title = ("target", "case", "kernel", "registers", "spilled", "limit", "shared")
    with path.open("a", encoding="utf-8") as file:
        if not file.tell():
            git = ["git", "rev-parse", "--short", "HEAD"]
            found = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
            versions = {"triton": triton.__version__, "torch": torch.__version__}
            file.write(_TABLE_HEAD.format(**versions, commit=found or "unknown"))
            file.write(form.format(*title))
        file.writelines(form.format(*map(str, line)) for line in rows)


def collect_rarely() -> None:
    """torch and Triton are many objects, which every collection would traverse, and a compilation
    makes hundreds of thousands."""
    gc.freeze()
    gc.set_threshold(200_000)


def main(arguments: list[str]) -> None:
    collect_rarely()
    target, cases = arguments[0], arguments[1:] or list(CASES)
    for case in cases:
        if case in TARGETS:
            target = case
            continue
        try:
            results: dict[str, Any] = {
                "kernels": [asdict(c) for c in compile_for(target, [case])[case]]
            }
        except Exception as error:
            results = {"error": f"{type(error).__name__}: {error}"[-2000:]}
        print(json.dumps({"target": target, "case": case, **results}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
