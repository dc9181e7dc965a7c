"""Cases: the anchors by name, the grammar, and the cases that a command line selects."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest
import torch

from attnlib.bench.case import BenchCase
from attnlib.bench.case_text import parse_case
from attnlib.bench.inputs import make_inputs
from attnlib.bench.key_lists import spread_lists
from attnlib.bench.state_case import MODELS
from attnlib.bench.suites import SUITES, choose_cases, known_cases
from attnlib.bench.work import flops, kv_bytes, read_keys, roofline_us, visible_pairs
from attnlib.errors import ContractError
from attnlib.sparse.key_selection import KeySelection
from attnlib.testing.batch_spec import parse_batch
from attnlib.testing.oracle import OracleParams, visible_keys

ANCHORS = {
    # name: (batch, Hq/Hkv, D, page, window, cap, sinks)
    "decode-1x1k": ("q1s1024", "32/8", 128, 16, None, None, False),
    "decode-1x8k": ("q1s8192", "32/8", 128, 16, None, None, False),
    "decode-1x128k": ("q1s131072", "32/8", 128, 16, None, None, False),
    "decode-4x32k": ("4q1s32768", "32/8", 128, 16, None, None, False),
    "decode-8x8k": ("8q1s8192", "32/8", 128, 16, None, None, False),
    "decode-16x4k": ("16q1s4096", "32/8", 128, 16, None, None, False),
    "decode-32x4k": ("32q1s4096", "32/8", 128, 16, None, None, False),
    "decode-64x8k": ("64q1s8192", "32/8", 128, 16, None, None, False),
    "decode-128x2k": ("128q1s2048", "32/8", 128, 16, None, None, False),
    "decode-256x1k": ("256q1s1024", "32/8", 128, 16, None, None, False),
    "decode-1x32k-64heads": ("q1s32768", "64/8", 128, 16, None, None, False),
    "decode-32x4k-mha": ("32q1s4096", "32/32", 128, 16, None, None, False),
    "decode-32x8k-mqa": ("32q1s8192", "32/1", 128, 16, None, None, False),
    "decode-32x8k-d64-w128-sinks": ("32q1s8192", "64/8", 64, 16, 128, None, True),
    "decode-32x8k-d64-sinks": ("32q1s8192", "64/8", 64, 16, None, None, True),
    "decode-32x8k-d256-cap50": ("32q1s8192", "16/8", 256, 16, None, 50.0, False),
    "verify-16x4k": ("16q4s4096", "32/8", 128, 16, None, None, False),
    "prefill-1x2k-p16": ("q2048", "32/8", 128, 16, None, None, False),
    "prefill-4x4k-p16": ("4q4096", "32/8", 128, 16, None, None, False),
    "prefill-1x16k-p16": ("q16384", "32/8", 128, 16, None, None, False),
    "prefill-1x32k-p16": ("q32768", "32/8", 128, 16, None, None, False),
    "prefill-2k-over-32k-p16": ("q2048s32768", "32/8", 128, 16, None, None, False),
    "prefill-1x2k-p128": ("q2048", "32/8", 128, 128, None, None, False),
    "prefill-4x4k-p128": ("4q4096", "32/8", 128, 128, None, None, False),
    "prefill-1x16k-p128": ("q16384", "32/8", 128, 128, None, None, False),
    "prefill-1x32k-p128": ("q32768", "32/8", 128, 128, None, None, False),
    "prefill-2k-over-32k-p128": ("q2048s32768", "32/8", 128, 128, None, None, False),
    "prefill-1x8k-d64-sinks": ("q8192", "64/8", 64, 16, None, None, True),
    "prefill-1x8k-d64-w128-sinks": ("q8192", "64/8", 64, 16, 128, None, True),
    "prefill-1x8k-d256": ("q8192", "16/8", 256, 16, None, None, False),
    "mixed-60x4k-and-2k": ("60q1s4096_q2048", "32/8", 128, 16, None, None, False),
}


def test_the_anchors() -> None:
    found = {
        case.name: (
            str(case.batch), f"{case.num_heads}/{case.num_kv_heads}", case.head_size,
            case.block_size, case.sliding_window, case.logits_soft_cap, case.sinks,
        )
        for case in SUITES["anchors"]
    }  # fmt: skip
    ragged = found.pop("decode-ragged48")
    assert found == ANCHORS
    assert ragged[1:] == ("32/8", 128, 16, None, None, False)
    assert {case.dtype for case in SUITES["anchors"]} == {"bfloat16"}


def test_a_layer_that_is_not_causal() -> None:
    case = parse_case("q8k@causal=0")
    assert not case.spec.is_causal and flops(case) == 4 * 128 * 32 * 8192 * 8192
    assert flops(parse_case("q8k")) == 4 * 128 * 32 * 8192 * 8193 // 2
    with pytest.raises(ContractError, match="not causal and has a window"):
        parse_case("q8k@causal=0,window=128")


def test_the_ragged_batch_is_fixed() -> None:
    """48 decodes of 200 to 32k keys, 452943 in all.

    Another seed would make results incomparable.
    """
    batch = known_cases()["decode-ragged48"].batch
    assert batch.num_reqs == 48 and set(batch.query_lens) == {1} and sum(batch.seq_lens) == 452943
    assert 200 <= min(batch.seq_lens) < 400 and 28_000 < max(batch.seq_lens) <= 32 * 1024
    assert len(set(batch.seq_lens)) > 40


def test_kinds() -> None:
    kinds = {case.name: case.kind for case in known_cases().values()}
    for name, kind in kinds.items():
        suite = "^(cpu|cov|mla|sparse|streams|gap|e4m3|e5m2|bf16|int8|fp8|fp8q|int4)-"
        first = re.sub(suite, "", re.sub(f"^({'|'.join(MODELS)})-", "", name)).split("-")[0]
        decodes = dict.fromkeys(("verify", "step", "separate"), "decode")
        assert kind == decodes.get(first, first), name


def test_scales_in_pages_are_read() -> None:
    """P13: 128 elements and one float32 scale, or 64 bytes and four float16 scales, per head."""
    for name, size in (("int8_per_token_head", 132), ("int4_per_group", 72)):
        case = parse_case(f"2q1s100@heads=8/2,kv={name}")
        assert kv_bytes(case) == 2 * 100 * 2 * 2 * size and case.spec.kv_cache_layout is None


def test_latents_are_read_once() -> None:
    """P10: one latent of 576 elements per key, for all heads."""
    case = parse_case("2q1s100@heads=16/1,d=576,dv=512,mla,page=64")
    assert case.spec.use_mla and "latents" in case.shape
    assert kv_bytes(case) == 2 * 100 * 576 * 2
    assert flops(case) == 2 * 100 * 2 * (576 + 512) * 16


def test_selected_keys_are_the_work_of_a_case() -> None:
    """M11: at most 2 * 16 keys per query are read and multiplied, whatever the context."""
    case, long = (parse_case(f"2q1s{n}@heads=8/2,d=64,select=kv_head:16:2") for n in (100, 9000))
    assert "selected 2 blocks of 16 tokens per kv_head" in case.shape
    assert kv_bytes(case) == kv_bytes(long) == 2 * 32 * 2 * 128 * 2
    assert flops(case) == flops(long) == 2 * 32 * 2 * 128 * 8
    with pytest.raises(ContractError, match="write SCOPE:BLOCK_SIZE:MAX_BLOCKS|does not parse"):
        parse_case("q1s9@select=kv_head")


def test_compressed_entries_are_part_of_the_work() -> None:
    """M17: own keys of the window, and the selected or all entries that are complete."""
    text = "q1s{}@heads=4/1,d=64,mla=1,window=16,entries=4:8:{}"
    for length, most, entries in ((103, 10, 10), (103, 60, 25), (9000, 10, 10)):
        case = parse_case(text.format(length, most))
        assert f"and {most} entries of 4 tokens" in case.shape
        assert kv_bytes(case) == (16 + entries) * 64 * 2
        assert flops(case) == (16 + entries) * 2 * 128 * 4
    every = parse_case("q3s103@heads=4/1,d=64,mla=1,window=16,entries=4:8")
    assert kv_bytes(every) == (18 + 25) * 64 * 2
    assert flops(every) == (3 * 16 + 25 + 25 + 25) * 2 * 128 * 4
    with pytest.raises(ContractError, match="entries=4. does not parse"):
        parse_case("q1s9@entries=4")


def test_random_lists_hold_distinct_visible_blocks_and_the_own_one() -> None:
    selection = KeySelection(max_blocks=5, block_size=4, scope="kv_head")
    lengths = torch.arange(1, 90)
    for length, lists in zip(lengths.tolist(), spread_lists(2, selection, lengths), strict=True):
        count = -(-length // 4)
        for entries in lists.tolist():
            real = [entry for entry in entries if entry >= 0]
            assert len(set(real)) == len(real) >= min(count, 5) - 1
            assert max(real) == count - 1 and min(entries) >= -1


def test_float8_cases_have_a_float8_cache() -> None:
    """A decode of the published results and its counterpart differ in the cache only."""
    cases = {case.name: case for case in SUITES["float8"]}
    assert {case.kv_cache_dtype for case in cases.values()} == {"fp8_e4m3", "fp8_e5m2"}
    pair = cases["e4m3-decode-8x8k"], known_cases()["decode-8x8k"]
    assert replace(pair[0], name="", kv_cache_dtype="") == replace(
        pair[1], name="", kv_cache_dtype=""
    )


@pytest.mark.parametrize("window", [None, 1, 2, 3, 5, 8, 100])
def test_work_counts_visible_pairs(window: int | None) -> None:
    """Compared with the mask of the oracle, pair by pair."""
    terms = OracleParams(scale=1.0, window=(-1, -1) if window is None else (window - 1, 0))
    for query_len, context in itertools.product((0, 1, 2, 4, 9), (0, 1, 3, 7, 12)):
        seq_len = query_len + context
        mask = visible_keys(torch.arange(context, seq_len), seq_len, terms)
        assert visible_pairs(query_len, seq_len, window) == int(mask.sum()), (query_len, seq_len)
        assert read_keys(query_len, seq_len, window) == int(mask.any(dim=0).sum()), (
            query_len,
            seq_len,
        )


def test_bytes_and_operations() -> None:
    case = parse_case("2q1s100_q10@heads=6/2,d=32,dv=16,window=40,kv=fp8_e4m3,dtype=float16")
    assert kv_bytes(case) == (40 + 40 + 10) * 2 * (32 + 16)
    assert flops(case) == (40 + 40 + 55) * 6 * 2 * (32 + 16)
    assert known_cases()["decode-32x4k"].spec.kv_dtype == torch.bfloat16
    assert kv_bytes(known_cases()["decode-32x4k"]) == 2 * 32 * 4096 * 8 * 128 * 2
    assert flops(known_cases()["prefill-1x2k-p16"]) == 4 * 128 * 32 * (2048 * 2049 // 2)


def test_the_roofline_takes_the_bound_of_each_request() -> None:
    """anchors: 1 x 128k reads 537 MB, 126 us at 4270 GB/s.

    A 16k prefill is bound by its products.
    """
    assert roofline_us(known_cases()["decode-1x128k"], 4270, 700) == pytest.approx(125.7, abs=0.1)
    prefill = known_cases()["prefill-1x16k-p16"]
    assert roofline_us(prefill, 4270, 700) == pytest.approx(flops(prefill) / 700e6)
    parts = [BenchCase(name="", batch=parse_batch(text)) for text in ("60q1s4k", "q2k")]
    assert roofline_us(known_cases()["mixed-60x4k-and-2k"], 4270, 700) == pytest.approx(
        sum(roofline_us(part, 4270, 700) for part in parts)
    )


def test_the_grammar_of_cases() -> None:
    case = parse_case("32q1s8k@heads=64/8,d=64,window=128,sinks,page=32,cap=30")
    assert (case.num_heads, case.num_kv_heads, case.head_size, case.block_size) == (64, 8, 64, 32)
    assert (case.sliding_window, case.logits_soft_cap, case.sinks, case.kind) == (
        128,
        30.0,
        True,
        "decode",
    )
    spec = case.spec
    assert spec.has_sink and spec.sliding_window == 128 and spec.kv_cache_layout == "NHD"


def test_a_case_with_a_score_function_has_its_tensors() -> None:
    """M10: layer tensors for the layer, batch tensors in the batch, and the oracle's function."""
    case = parse_case("2q1s40@heads=4/2,d=16,score=attnlib.testing.score_functions:REQUESTS")
    assert case.spec.score_function is not None and "score REQUESTS" in case.shape
    inputs = make_inputs(case, torch.device("cpu"))
    assert set(inputs.score_tensors) == {"weight"}
    assert inputs.common.score_tensors is not None
    assert inputs.common.score_tensors["shift"].shape == (2, 1)
    assert inputs.params.score is not None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("32q1s8k@haeds=4", "'haeds' is not a setting; write BATCH@KEY=VALUE,... with heads, d"),
        ("32q1s8k@d=big", "'d=big' does not parse"),
        ("decode-1x9k", "segment 'decode-1x9k' does not parse"),
        ("q1s8@heads=3/2", "num_heads=3 is not a multiple"),
        ("q1s8@dtype=float7", "dtype=float7 of case"),
        ("q8s4", "8 query tokens in a sequence of 4"),
        ("q1s4_pad2", "padding rows"),
        (
            "q8@score=attnlib.score_functions.builtin:prefix_lm",
            "decides about later keys itself, and mask_kind=causal hides them",
        ),
        ("empty", "no query tokens"),
    ],
)
def test_invalid_cases_are_errors(text: str, message: str) -> None:
    with pytest.raises(ContractError, match=message.replace("(", r"\(")):
        parse_case(text)


def test_choosing_cases() -> None:
    assert [case.name for case in choose_cases([], None, "quick")] == [
        case.name for case in SUITES["quick"]
    ]
    assert len(SUITES["quick"]) == 6
    names = [
        case.name
        for case in choose_cases(
            ["prefill-*-p128", "decode-1x1k", "decode-1x*", "q5@page=8"], None, "cpu"
        )
    ]
    assert names[:5] == [
        f"prefill-{length}-p128" for length in ("1x2k", "4x4k", "1x16k", "1x32k", "2k-over-32k")
    ]
    assert names[5:] == [
        "decode-1x1k",
        "decode-1x8k",
        "decode-1x128k",
        "decode-1x32k-64heads",
        "q5@page=8",
    ]
    with pytest.raises(ContractError, match="is neither one of the"):
        choose_cases(["decode-*"], "cpu", "cpu")


def test_the_block_size_is_part_of_the_name() -> None:
    paged = choose_cases(["prefill-1x2k-*", "decode-1x1k"], None, "cpu", block_size=128)
    assert [(case.name, case.block_size) for case in paged] == [
        ("prefill-1x2k-p128", 128),
        ("decode-1x1k-p128", 128),
    ]
