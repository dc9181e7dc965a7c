"""The Hopper kernels and the table entries for them, compiled for sm_90 without the chip.

By default each kernel is compiled for each element size, number of consumers and form of the cache,
in the case with most features. Entries of the tables add the largest tile of what these cases leave
out. `--every-target` compiles all cases and entries.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.ops.triton.cross_compile import (
    PROCESSES,
    compile_in_process,
    largest_tiles,
    write_table,
)
from tests.ops.triton.hopper.cross_compile import CASES as EVERY_CASE
from tests.ops.triton.hopper.cross_compile import (
    INVARIANT_CASES,
    LATENT_CASES,
    SCORE_CASES,
    SELECTED_CASES,
    SHARED_CASES,
    STREAM_CASES,
    entry_cases,
    problem_of,
    tile_of,
)

pytestmark = pytest.mark.slow  # compiles for more than a minute

SAMPLE = [
    "192-128", "192", "decode-128-all", "packed-decode-80-mqa", "128-e4m3-all",
    "decode-128-e4m3-all", "decode-64-int8-tokens-all", "decode-128-int4",
    "decode-128-int4-warp-all", "decode-128-int8-workers-all", "512-group5-page1", "80",
    "decode-128-int8-int4-warp-all", "decode-128-int8-int4-workers-all",
    "decode-128-int8-nvfp4-warp-all", "decode-128-int8-nvfp4-workers-all",
    "decode-128-nvfp4-all", "decode-128-mxfp4-all", "decode-128-mxfp4-rotated",
    "decode-128-int8-rotated", "decode-128-int8-int4-rotated-warp",
    "64-three-consumers-cap", "128-float8-products", "128-leads", "192-128-leads",
]  # fmt: skip
CASES = [*SAMPLE, *(case for case in EVERY_CASE if case not in SAMPLE)]
MAX_STACK = 304
"""Bytes of local memory per thread; nearly all of it is used between query tiles, not in the loops
over keys. Table entries have limits of their own."""
LARGE_STACK = {"decode-512": 880, "128-e4m3-fp16": 416, "128-float8-products": 456}
"""The same of cases that need more, outside of the loops: head size 512 (872 with Triton 3.6, 208
with 3.9), float16 queries that no box loads over a float8 cache (96 and 408), and float8 products
by three consumers (168 and 456)."""


ENTRIES = entry_cases()


def _covering(entry: str) -> list[str]:
    """Return the cases of `SAMPLE` with the tile of an entry, its head size or a larger one, and
    more features."""
    kernel, size = problem_of(entry)
    problems = {case: problem_of(case) for case in SAMPLE}
    return [case for case, found in problems.items() if found[0] == kernel and found[1] >= size]


def _kind(case: str) -> tuple[Any, ...]:
    """Return the operation, bits of an element, form of the cache, number of consumers and whether
    a CTA is one warp."""
    *kernel, tile = problem_of(case)[0]
    return (*kernel, tile.consumers, getattr(tile, "warps", 0) > 0)


COVERED = {entry: cases for entry in sorted(ENTRIES) if (cases := _covering(entry))}
"""Entry -> cases that are compiled in its place, with its limit of local memory."""
ENTRY_SAMPLE = [
    entry
    for entry in sorted(largest_tiles(ENTRIES) - set(COVERED))
    if _kind(entry) not in set(map(_kind, SAMPLE))
]
TWO_CONSUMERS = [
    case
    for case in (*CASES, *ENTRIES)
    if "decode" in case and tile_of(case).consumers == 2 and not tile_of(case).warps
]
INVARIANT_SAMPLE = ["invariant-128", "invariant-decode-128"]
SHARED_SAMPLE = ["shared-decode-112-group5-cap-page128"]
MAX_SHARED_STACK, MAX_SHARED_LOOP = 432, 16
"""Bytes of local memory per thread of the decode of shared prefixes with Triton 3.9 (104 and 6 with
3.6), and accesses to it in a loop over keys with a soft cap: fields of the next item."""
ALL_LATENT = [*LATENT_CASES, *SELECTED_CASES]
CONVERTED = ["latent-16-packed-converted"]
BYTES = [
    *("latent-16-e4m3", "latent-5-verify-page16-e5m2-all", "latent-32-e4m3-all"),
    *("latent-16-e4m3-one-worker", "latent-16-packed", "latent-32-packed-all"),
]
"""Cases of warps that convert 8-bit latents for a consumer of up to 16 query rows, and of workers
that convert them in registers."""
FEW_ROWS = [
    *CONVERTED,
    "latent-32",
    *(
        case
        for case in ALL_LATENT
        if case.split("-")[1] in ("5", "16")
        and "256" not in case
        and "prefill" not in case
        and case not in BYTES
        and case not in CONVERTED
    ),
]
"""Cases of the kernels for up to 32 query rows as the columns of the products, or 16 over selected
latents."""
LATENT_SAMPLE = [
    "latent-64-all", "latent-5-verify-page16-all", "selected-64-blocks-all", "selected-16-all",
    "selected-16-splits-lse", "latent-32-verify-e4m3-all", "latent-32-verify-packed-all",
    "latent-32-e4m3-all", "latent-5-prefill-page16-all",
]  # fmt: skip
STREAM_SAMPLE = ["streams-64-lists-splits"]
MAX_LATENT_STACK = 240
"""Bytes of local memory per thread of the kernels over latents, whose accumulators are half of the
registers: scalars."""
SCORE = [
    "128-multi_item",
    "64-head_windows",
    "128-relative_bias",
    "decode-128-documents-combine",
]
"""Cases with a score function: with two ranges, one range, no range, and in a decode.
`--every-target` compiles all of `SCORE_CASES`."""
WHOLE_SAMPLE = [
    *(*SAMPLE, *LATENT_SAMPLE, *STREAM_SAMPLE, *INVARIANT_SAMPLE, *SHARED_SAMPLE),
    *(*ENTRY_SAMPLE, *SCORE),
]
MAX_SCORE_STACK, MAX_SCORE_LOOP = 352, 24
"""Bytes of local memory per thread of a prefill with a score function, and accesses to it in a loop
over keys."""
DECODE_SCORE_STACK = {"decode-128-e4m3-heads": 48}
"""The same of decodes, 0 for others. Triton 3.9 keeps scalars of this one there outside of its loop
over keys, 3.6 does not."""
SCORE_LOOP = {"128-e4m3-multi_item": 40}
"""Accesses in loops over keys above `MAX_SCORE_LOOP`: the masked loops of two ranges over a
converted cache with Triton 3.9, which run for the first and last tiles of a range."""


Compiled = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> Compiled:
    """Compile every case once, in concurrent processes."""
    cases = WHOLE_SAMPLE
    if request.config.getoption("--every-target"):
        cases = [
            *CASES, *ALL_LATENT, *STREAM_CASES, *INVARIANT_CASES, *SHARED_CASES, *ENTRIES,
            *SCORE_CASES,
        ]  # fmt: skip
    module = "tests.ops.triton.hopper.cross_compile"
    with ThreadPoolExecutor(PROCESSES) as pool:
        parts = [cases[part::PROCESSES] for part in range(min(PROCESSES, len(cases)))]
        found = pool.map(lambda part: compile_in_process(module, *part), parts)
        results = {result["case"]: result for part in found for result in part}
    if table := request.config.getoption("--compile-table"):
        names = ("registers", "stack", "shared")
        rows = [
            ("sm_90", case, "hopper", registers, stack, max_stack(case), shared)
            for case in cases
            for registers, stack, shared in [[results[case].get(name) for name in names]]
        ]
        write_table(Path(table), rows)
    return results


def max_stack(case: str) -> int:
    """Return the limit of a kernel's bytes of local memory per thread."""
    if case in ENTRIES:
        return ENTRIES[case].spills
    if case in LARGE_STACK:
        return LARGE_STACK[case]
    if case in SHARED_CASES:
        return MAX_SHARED_STACK
    if case in ALL_LATENT:
        return MAX_LATENT_STACK
    if case in SCORE_CASES:
        return DECODE_SCORE_STACK.get(case, 0) if "decode" in case else MAX_SCORE_STACK
    covered = [ENTRIES[entry].spills for entry, cases in COVERED.items() if case in cases]
    return min([MAX_STACK, *covered])


def _result(case: str, compiled: Compiled) -> dict[str, Any]:
    if case not in compiled:
        assert case not in WHOLE_SAMPLE
        pytest.skip("compiled with --every-target")
    return compiled[case]


def _warps(case: str) -> int:
    """CTAs of one warp on a multiprocessor; 0 for other kernels."""
    return getattr(tile_of(case), "warps", 0)


@pytest.mark.parametrize("case", [*CASES, *ENTRIES])
def test_compiles_within_the_chip(case: str, compiled: Compiled) -> None:
    """P6 of the speed rules: within the estimated shared memory, with WGMMA, with few spills."""
    result = _result(case, compiled)
    assert "error" not in result, result["error"]
    assert result["shared"] <= result["estimate"] <= 227 * 1024, result
    assert result["stack"] <= max_stack(case), result
    assert (result["wgmma"] > 0) != bool(_warps(case)), result


@pytest.mark.parametrize("case", [case for case in (*CASES, *ENTRIES) if "decode" in case])
def test_ctas_of_a_decode_on_a_multiprocessor(case: str, compiled: Compiled) -> None:
    """8 warps of a CTA with WGMMA use more than half of the registers, also with small tiles; as
    many CTAs of one warp as the tile states fit, and use no local memory."""
    result = _result(case, compiled)
    if warps := _warps(case):
        # Registers are allocated in units of 8.
        assert -(-result["registers"] // 8) * 8 * 32 * warps <= 65536, result
        assert result["stack"] == 0, result
    else:
        assert result["registers"] * 256 > 65536 // 2, result


@pytest.mark.parametrize("case", [*CASES, *ENTRIES])
def test_loops_over_keys_are_asynchronous_and_in_registers(case: str, compiled: Compiled) -> None:
    """ptxas serializes no WGMMA (C7510, C7512), and loops over keys hardly touch local memory.

    The unmasked loop of each consumer, which takes most of the time, does not touch it at all.
    Masked loops reload a few scalars.
    """
    result = _result(case, compiled)
    assert result["warnings"] == []
    if _warps(case):
        return  # without local memory and WGMMA
    if "decode" in case:
        # One loop of the one consumer, with a branch for masked and one for unmasked tiles.
        assert result["loops"] and max(result["loops"]) <= 8, result["loops"]
        return
    # A masked and an unmasked loop of each consumer.
    assert len(result["loops"]) >= 4, result["loops"]
    # All features at once, queries that no TMA box can load, and keys in three parts need registers
    # for more scalars.
    unmasked = {
        "128-all": 1, "128-group5": 3, "192-128": 1, "128-static": 1,
        "128-float8-products": 1, "128-float8-products-window": 1,
    }.get(case, 0)  # fmt: skip
    if case in ENTRIES and ("head_size", 192, 192) in ENTRIES[case].ranges:
        unmasked = 1
    # Three consumers have 160 registers per thread. Triton 3.9 keeps a part of their masked loops,
    # which run once or twice per query tile, in local memory.
    most = 48 if len(result["loops"]) in (6, 9) and result["registers"] <= 128 else 8
    if len(result["loops"]) == 4 and result["registers"] <= 128:
        most = 16  # so it does beside the converter of a float8 cache
    assert max(sorted(result["loops"])[:2]) <= unmasked, result["loops"]
    if "float8-products" in case:
        most = 48  # with Triton 3.9, in masked loops, which run once or twice per query tile
    assert max(result["loops"]) <= most, result["loops"]


@pytest.mark.parametrize(
    ("case", "columns"),
    [("80", 104), ("96", 104), ("96-static", 104), ("96-lse", 96), ("112-fp16-page128", 112),
     ("64-three-consumers", 72)],
)  # fmt: skip
def test_products_with_values_have_the_columns_of_the_head(
    case: str, columns: int, compiled: Compiled
) -> None:
    """Rounded up to 32, and 8 of ones; of the head where sums are not rounded, or no part is left.
    Their address is that of the ring of values."""
    result = _result(case, compiled)
    assert result["columns"] == [columns, 128], result
    stored, read = result["marks"]
    assert stored == read, result


@pytest.mark.parametrize("case", ["80", "96-lse", "128-leads"])
def test_the_softmax_overlaps_with_the_product_with_the_values(
    case: str, compiled: Compiled
) -> None:
    """Exponentials of a tile precede the wait for P @ V (`instruction_order`): 24 to 35 of 66 with
    Triton 3.6, 15 to 26 with 3.9, none if ptxas chooses."""
    result = _result(case, compiled)
    assert result["overlapped"] >= 12, result


@pytest.mark.parametrize("case", TWO_CONSUMERS)
def test_threads_release_a_stage_after_products_with_it(case: str, compiled: Compiled) -> None:
    """`_release` does not wait for the thread's loads from shared memory. The products that use
    them precede it: in the prologue (keys), the masked and the unmasked step (keys and values), and
    the epilogue (values, and queries where another warp prepares them), of two consumers."""
    releases = _result(case, compiled)["releases"]
    bits = problem_of(case)[0][1]
    sends_queries = tile_of(case).block_n <= 64 and bits[1] == 8
    assert len(releases) == (14 if sends_queries else 12) and all(releases), releases


@pytest.mark.parametrize("case", ALL_LATENT)
def test_kernels_over_latents_load_and_multiply_each_tile_once(
    case: str, compiled: Compiled
) -> None:
    """P10: 36 products of queries and keys and 8 of weights and values in the loop of each of two
    warpgroups, and the same once more for the first and last tile of the first one. With up to 16
    query rows, 36 products of keys and queries and 32 of values and weights in the loop of one
    warpgroup, two of which fit an SM over selected latents. The second of two launches over those
    has no local memory in its loop. Over 8-bit latents each worker has a loop with 36 and 32
    products, which reloads a few scalars. None is serialized."""
    result = _result(case, compiled)
    assert "error" not in result, result["error"]
    assert result["shared"] <= 227 * 1024 and result["stack"] <= max_stack(case), result
    assert result["warnings"] == []
    if case in BYTES:
        workers = 1 if "one-worker" in case else 2
        assert result["wgmma"] == workers * (36 + 32) and all(result["releases"]), result
        assert max(result["tile_loops"]) <= 6, result
        return
    if case in FEW_ROWS:
        two_launches = case in ("selected-16", "selected-16-all")
        assert result["wgmma"] == 36 + 32, result
        assert not two_launches or result["repeat_loops"] == [[0]], result
        if case in SELECTED_CASES:
            assert 2 * (result["shared"] + 1024) <= 228 * 1024, result
            assert 2 * 256 * result["registers"] <= 65536, result
        return
    assert result["wgmma"] == 3 * (36 + 8)


@pytest.mark.parametrize("case", STREAM_CASES)
def test_the_kernel_over_two_streams_loads_and_multiplies_each_tile_once(
    case: str, compiled: Compiled
) -> None:
    """M17: as over selected latents, with 32 products of queries and keys: there is no rotary part
    besides the values."""
    result = _result(case, compiled)
    assert "error" not in result, result["error"]
    assert result["shared"] <= 227 * 1024 and result["stack"] <= max_stack(case), result
    assert result["warnings"] == [] and result["wgmma"] == 3 * (32 + 8), result


@pytest.mark.parametrize("case", INVARIANT_CASES)
def test_batch_invariant_kernels_compile_with_few_spills(case: str, compiled: Compiled) -> None:
    """M15: both kernels fit the chip, serialize no WGMMA and keep their loops in registers."""
    result = _result(case, compiled)
    assert "error" not in result, result["error"]
    assert result["shared"] <= 227 * 1024 and result["wgmma"] > 0, result
    assert result["warnings"] == [], result
    if "decode" in case:
        assert result["stack"] <= 128 and max(result["loops"]) == 0, result
        if "window" in case:
            # Several CTAs run on a multiprocessor.
            assert 2 * (result["shared"] + 1024) <= 228 * 1024, result
            assert 2 * 128 * result["registers"] <= 65536, result
        else:
            assert result["registers"] * 256 > 65536 // 2, result
        return
    if case == "invariant-64-window":
        # Three CTAs run on a multiprocessor, without spills.
        assert 3 * (result["shared"] + 1024) <= 228 * 1024 and result["stack"] == 0, result
        assert 3 * 256 * result["registers"] <= 65536, result
        return
    assert result["stack"] <= MAX_STACK and len(result["loops"]) >= 4, result
    # The accumulator of 256 elements is half of the registers; with Triton 3.6 there is no access.
    assert max(sorted(result["loops"])[:2]) <= (16 if case == "invariant-256" else 8), result


@pytest.mark.parametrize("case", SHARED_CASES)
def test_the_decode_of_shared_prefixes_compiles(case: str, compiled: Compiled) -> None:
    """M13: it fits the chip and serializes no WGMMA; loops over keys reload a few scalars with a
    soft cap."""
    result = _result(case, compiled)
    assert "error" not in result, result["error"]
    assert result["shared"] <= 227 * 1024 and result["wgmma"] > 0, result
    assert result["warnings"] == [] and max(result["loops"]) <= MAX_SHARED_LOOP, result
    assert result["stack"] <= MAX_SHARED_STACK, result


@pytest.mark.parametrize("case", SCORE_CASES)
def test_score_functions_compile_with_few_spills(case: str, compiled: Compiled) -> None:
    """M10: a score function fits the registers of both kernels and serializes no WGMMA."""
    result = _result(case, compiled)
    assert "error" not in result, result["error"]
    assert result["shared"] <= result["estimate"] <= 227 * 1024, result
    assert result["warnings"] == [] and result["wgmma"] > 0
    assert result["stack"] <= max_stack(case), result
    if "decode" in case:
        assert result["loops"], result
        return
    # A masked and an unmasked loop of each consumer; one loop where a range is the function.
    most = SCORE_LOOP.get(case, MAX_SCORE_LOOP)
    assert len(result["loops"]) >= 2 and max(result["loops"]) <= most, result


def test_a_kernel_is_compiled_once(compiled: Compiled) -> None:
    """Another run finds kernels and logs in Triton's cache, so that a long one can be repeated."""
    case = SCORE[2]
    (again,) = compile_in_process("tests.ops.triton.hopper.cross_compile", case)
    assert again["cached"]
    changing = {"cached": True, "seconds": 0.0}
    assert again | changing == compiled[case] | changing


def test_descriptors_come_from_constants(compiled: Compiled) -> None:
    """ptxas 12.8 computes them from other registers in some kernels; see `sass`.

    Not of decodes, whose position in the ring depends on values from memory.
    """
    found = {
        case: result.get("descriptors") for case, result in compiled.items() if "decode" not in case
    }
    assert len(found) > 4
    assert not any(found.values()), {case: wrong for case, wrong in found.items() if wrong}
