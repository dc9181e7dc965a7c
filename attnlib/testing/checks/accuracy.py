"""V2: attention results within the error budget for all declared capabilities.

The cases cover sizes that are not powers of two, all named batches, all features and pairs of them,
and all dtypes, layouts and cache dtypes. The backend writes the step's keys and values; the oracle
reads a cache that the suite filled.
"""

from __future__ import annotations

from collections.abc import Iterator

from attnlib.capabilities import Sizes
from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.batch_spec import NAMED_BATCHES
from attnlib.testing.case import Case
from attnlib.testing.check import Check, CheckCase
from attnlib.testing.layouts import CACHE_LAYOUTS
from attnlib.testing.runner import compare_with_oracle, run_case

__all__ = ["CHECKS"]

_HEAD_SIZES = (16, 32, 40, 64, 72, 80, 96, 112, 120, 128, 136, 160, 192, 256, 512, 576)
_GROUPS = (1, 3, 5, 6, 7, 8, 16, 24)
_BLOCKS = (8, 16, 32, 64, 128, 256, 544)
_LARGE = ("many_decodes", "long_keys", "long_prefill")
"""Batches beyond the sizes at which faults of splits, tiles and workspaces begin."""
_COMBINATIONS: dict[str, dict[str, object]] = {
    "window+sinks": {"sliding_window": 9, "sinks": True},
    "window+soft_cap": {"sliding_window": 20, "logits_soft_cap": 5.0},
    "window+alibi": {"sliding_window": 17, "alibi": True},
    "chunk+sinks": {"attention_chunk_size": 24, "sinks": True},
    "bidirectional+window": {"mask": "bidirectional", "window": (5, 3)},
    "right_window_only": {"mask": "bidirectional", "window": (None, 0)},
    "tree+soft_cap": {"mask": "query_bias", "logits_soft_cap": 3.0},
    "per_request+soft_cap": {"mask": "per_request", "logits_soft_cap": 3.0},
    "window+score_function": {
        "sliding_window": 11,
        "score": "attnlib.testing.score_functions:HEADS",
    },
    "sinks+score_function": {"sinks": True, "score": "attnlib.testing.score_functions:HEADS"},
    "everything": {"sliding_window": 13, "logits_soft_cap": 4.0, "alibi": True, "sinks": True},
}

_QUICK_COMBINATIONS = ("window+sinks", "sinks+score_function", "everything")
_LONG_PREFILLS: dict[str, dict[str, object]] = {
    "window": {"sliding_window": 300},
    "two_sided": {"mask": "bidirectional", "window": (40, 70)},
    "chunk+sinks": {"attention_chunk_size": 333, "sinks": True},
    "tree": {"mask": "query_bias"},
    "soft_cap": {"logits_soft_cap": 3.0, "num_heads": 28, "needs_lse": False},
}
"""Prompts of several blocks of rows, of which each sees other keys."""


def _check(target: BackendUnderTest, name: str, case: Case) -> CheckCase:
    return CheckCase(
        name,
        lambda: compare_with_oracle(
            case, run_case(target.backend, case, target.device), target.device
        ),
        case,
    )


def _batches(target: BackendUnderTest) -> Iterator[CheckCase]:
    for name in NAMED_BATCHES:
        if not target.quick or name in (
            "decode",
            "mixed",
            "chunked",
            "page_edges",
            "graph_padding",
            *_LARGE,
        ):
            yield _check(target, f"batch-{name}", target.case(batch=name))


def _features(target: BackendUnderTest) -> Iterator[CheckCase]:
    for name, features in _COMBINATIONS.items():
        for batch in ("decode_long", "chunked"):
            if not target.quick or (name in _QUICK_COMBINATIONS and batch == "chunked"):
                yield _check(target, f"{name}-{batch}", target.case(batch=batch, **features))
    for name, feature in (("alibi", {"alibi": True}), ("window", {"sliding_window": 2500})):
        yield _check(target, f"{name}-long_keys", target.case(batch="long_keys", **feature))
    for name, features in _LONG_PREFILLS.items():
        if not target.quick or name != "soft_cap":
            yield _check(target, f"{name}-long_prefill", target.case(batch="q700s900", **features))
    block = target.base_case.block_size
    full = f"q1s{2 * block}_q1s{5 * block}_q1s{block}"
    yield _check(target, "tree-full_blocks", target.case(batch=full, mask="query_bias"))
    yield _check(target, "alibi-full_blocks", target.case(batch=full, alibi=True))
    for batch in ("decode", "mixed", "chunked"):
        case = target.case(batch=batch, loose_bounds=True)
        yield _check(target, f"loose_bounds-{batch}", case)


def _shapes(target: BackendUnderTest) -> Iterator[CheckCase]:
    heads = (40, 64, 96) if target.quick else _HEAD_SIZES
    for head in heads:
        yield _check(target, f"head-{head}", target.case(batch="q7s20_q1s37", head_size=head))
    for key_size, value_size in ((48, 32), (64, 128), (192, 128)):
        if not target.quick or key_size == 48:
            case = target.case(batch="q7s20_q1s37", head_size=key_size, head_size_v=value_size)
            yield _check(target, f"head-{key_size}-value-{value_size}", case)
    for group in (5, 7) if target.quick else _GROUPS:
        case = target.case(batch="q5s21_q1s40", num_heads=2 * group, num_kv_heads=2)
        yield _check(target, f"group-{group}", case)
    for dtype in ("float16", "bfloat16"):  # sizes for which 16 bits may have kernels of their own
        sizes = {"dtype": dtype, "num_heads": 24, "num_kv_heads": 2}
        case = target.case(batch="q5s21_q1s40", **sizes)
        yield _check(target, f"group-12-{dtype}", case)
    # More than 4 MiB of scattered keys in 16 bits, which may be read a few heads at a time.
    sizes = {"dtype": "bfloat16", "num_heads": 16, "num_kv_heads": 8, "head_size": 256}
    for feature, batch, fields in (
        ("alibi", "2q1s530", {"sinks": True, "alibi": True}),
        ("unequal", "q1s560_q1s530", {"sinks": True}),
    ):
        case = target.case(batch=batch, **sizes, **fields)
        yield _check(target, f"many-heads-{feature}-bfloat16", case)
    if not target.quick:  # more than 2 MiB of one head
        sizes |= {"num_heads": 2, "num_kv_heads": 1, "head_size": 512}
        yield _check(target, "many-keys-bfloat16", target.case(batch="2q1s2200", **sizes))
    for head in (256,) if target.quick else (128, 256, 512):
        case = target.case(batch="q1s700_q2s300", head_size=head)
        yield _check(target, f"head-{head}-splits", case)
    yield _check(
        target, "one-kv-head", target.case(batch="q5s21_q1s40", num_heads=3, num_kv_heads=1)
    )
    for block in (8, 64) if target.quick else _BLOCKS:
        batch = f"q1s{block + 1}_q3s{block}_q2s{2 * block - 1}"
        yield _check(target, f"block-{block}", target.case(batch=batch, block_size=block))


def _storage(target: BackendUnderTest) -> Iterator[CheckCase]:
    for dtype in ("float32", "float16", "bfloat16", "float64"):
        yield _check(target, f"dtype-{dtype}", target.case(dtype=dtype))
    for dtype in ("float16", "bfloat16"):  # enough rows for the limit of the bias
        for batch in ("many_decodes", "long_prefill"):
            yield _check(target, f"{dtype}-{batch}", target.case(dtype=dtype, batch=batch))
    # Latents have one memory, in which the values are a prefix of the keys (P10).
    for layout in () if target.base_case.use_mla else CACHE_LAYOUTS:
        if layout != target.base_case.layout and not (
            target.quick and layout not in ("HND", "NHD_PACKED")
        ):
            yield _check(
                target, f"layout-{layout}", target.case(layout=layout, batch="q7s40_q1s33")
            )
    if not target.base_case.use_mla:
        # As many heads as tokens of a block: their strides are easily mistaken.
        sizes = {"num_heads": 16, "num_kv_heads": 16, "block_size": 16}
        case = target.case(batch="q7s40_q1s33", layout="HND", placement="contiguous", **sizes)
        yield _check(target, "layout-HND-square", case)
    for stored in ("fp8_e4m3", "fp8_e5m2"):
        for kind in ("tensor", "head"):
            if not target.quick or (stored == "fp8_e4m3" and kind == "head"):
                changes = {
                    "kv_cache_dtype": stored,
                    "kv_scale_kind": kind,
                    "k_scale": 0.0625,
                    "v_scale": 0.03125,
                }
                yield _check(
                    target, f"cache-{stored}-{kind}", target.case(batch="q5s40_q1s33", **changes)
                )
    yield _check(
        target, "cache-bfloat16", target.case(batch="q5s40_q1s33", kv_cache_dtype="bfloat16")
    )
    yield _check(
        target, "cache-float16", target.case(batch="q5s40_q1s33", kv_cache_dtype="float16")
    )
    for placement in ("reversed", "interleaved", "shared_prefix", "top"):
        if not target.quick or placement == "shared_prefix":
            yield _check(
                target,
                f"placement-{placement}",
                target.case(batch="q5s70_3q1s60", placement=placement),
            )


def _attention_types(target: BackendUnderTest) -> Iterator[CheckCase]:
    for name, features in (
        ("encoder", {}),
        ("encoder-window", {"window": (4, 2)}),
        ("encoder-soft_cap", {"logits_soft_cap": 2.0}),
        ("encoder-batch_invariant", {"batch_invariant": True, "window": (9, 3)}),
    ):
        case = target.case(
            batch="q20_q1_q33_q0_pad2", attn_type="encoder_only", mask="bidirectional", **features
        )
        yield _check(target, name, case)
    encoder = target.case(batch="q9_q14", attn_type="encoder", mask="bidirectional")
    yield _check(target, "encoder-of-a-decoder", encoder)
    cross = target.case(
        batch="q3s20_q40s7_q1s33_q2s0", attn_type="encoder_decoder", mask="bidirectional"
    )
    yield _check(target, "cross-attention", cross)


def _accuracy(target: BackendUnderTest) -> Iterator[CheckCase]:
    yield from _batches(target)
    yield from _features(target)
    yield from _shapes(target)
    yield from _storage(target)
    yield from _attention_types(target)
    yield from _declared_sizes(target)


def _declared_sizes(target: BackendUnderTest) -> Iterator[CheckCase]:
    """One case for each size that the backend lists in `Sizes(exactly=...)`."""
    capabilities = target.backend.capabilities
    for field, sizes in (
        ("head_size", capabilities.head_sizes),
        ("block_size", capabilities.block_sizes),
    ):
        for size in sizes.exactly if isinstance(sizes, Sizes) else ():
            yield _check(
                target,
                f"declared-{field}-{size}",
                target.case(batch="q3s20_q1s17", **{field: size}),
            )


CHECKS = (Check("V2", "results within the error budget", _accuracy),)
