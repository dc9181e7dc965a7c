"""V3: random combinations of batches, features and storage.

Faults hide where two features meet: a bias in the second tile of a window, a layout whose blocks
happen to be consecutive, a list of keys under chunks. Each case draws a batch whose lengths are
near multiples of the block size, and some of the features, sizes and forms of storage. Features
that the backend does not support, or that a layer cannot combine, are dropped one after another.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial

from attnlib.errors import ContractError
from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.case import Case
from attnlib.testing.check import Check, CheckCase
from attnlib.testing.layouts import CACHE_LAYOUTS
from attnlib.testing.page_formats import PAGE_LAYOUT_NAMES, PAGE_NAMES
from attnlib.testing.runner import compare_with_oracle, run_case

__all__ = ["CHECKS"]

_Fields = dict[str, object]
_SCORES = ("POSITIONS", "LINEAR", "FINITE", "HEADS", "REQUESTS", "NONLINEAR")
_OF_HEADS = {"layout", "num_kv_heads", "head_size", "head_size_v"}
_PLACEMENTS = ("contiguous", "shuffled", "interleaved", "reversed", "shared_prefix")


def _batch(draw: random.Random, block: int) -> str:
    """Up to six requests; lengths near multiples of the block size, and some equal ones."""

    def length(most: int) -> int:
        return max(block * draw.randint(0, most) + draw.choice((-1, 0, 0, 1, 3)), 1)

    parts = []
    for _ in range(draw.randint(1, 6)):
        query = draw.choice((1, 1, 1, draw.randint(2, 9), length(3)))
        context = draw.choice((0, draw.randint(0, 9), length(5), length(2)))
        repeats = draw.choice(("", "", "", "3"))
        parts.append(f"{repeats}q{query}s{query + context}")
    if draw.random() < 0.2:
        parts.insert(draw.randint(0, len(parts)), f"q0s{draw.randint(0, 9)}")
    if draw.random() < 0.2:
        parts.append("q3s2")  # a query before the first key
    return "_".join(parts) + draw.choice(("", "", "_pad3"))


def _mask(draw: random.Random, block: int) -> list[_Fields]:
    """Masks, windows and chunks."""
    sizes = (0, 1, 2, 5, block - 1, block, block + 3)
    left, right = draw.choice((None, *sizes)), draw.choice((None, *sizes[:5]))
    masks: list[list[_Fields]] = [
        [],
        [{"sliding_window": draw.choice(sizes[1:])}],
        [{"mask": "bidirectional", "window": (left, right)}],
        [{"mask": draw.choice(("bidirectional", "per_request"))}],
        [{"mask": "query_bias", "loose_bounds": False}],  # its width is the longest query
        [{"attention_chunk_size": draw.choice((3, block, block + 5))}],
    ]
    return draw.choice(masks)


def _scores(draw: random.Random) -> list[_Fields]:
    """What changes the scores and the denominator."""
    name = f"attnlib.testing.score_functions:{draw.choice(_SCORES)}"
    features: list[_Fields] = [
        {"logits_soft_cap": draw.choice((1.0, 4.0))},
        {"alibi": True},
        {"sinks": True, "disabled_sinks": draw.random() < 0.3},
        {"score": name},
        {"scale": draw.choice((0.4, 0.05))},
    ]
    return draw.sample(features, draw.choice((0, 1, 1, 2, 3)))


def _storage(draw: random.Random, block: int) -> list[_Fields]:
    """Dtypes, layouts and the order of blocks."""
    fp8 = {"kv_cache_dtype": draw.choice(("fp8_e4m3", "fp8_e5m2")), "k_scale": 0.25, "v_scale": 0.5}
    pages = {"kv_cache_dtype": draw.choice(PAGE_NAMES), "layout": draw.choice(PAGE_LAYOUT_NAMES)}
    stored: list[_Fields] = [
        {},
        {},
        {"dtype": draw.choice(("float16", "bfloat16"))},
        {"dtype": "float64"},
        {**fp8, "kv_scale_kind": draw.choice(("tensor", "head"))},
        {"kv_cache_dtype": draw.choice(("bfloat16", "float16"))},
        {**pages, "head_size": 64},
    ]
    chosen = draw.choice(stored)
    layout: _Fields = {} if "layout" in chosen else {"layout": draw.choice(CACHE_LAYOUTS)}
    return [
        chosen,
        layout,
        {"placement": draw.choice(_PLACEMENTS)},
        {"block_size": draw.choice((block, block, block // 2))},
    ]


def _shape(draw: random.Random) -> list[_Fields]:
    """Heads and head sizes."""
    shapes: list[_Fields] = [
        {},
        {},
        {"num_heads": 3, "num_kv_heads": 3},
        {"num_heads": 5, "num_kv_heads": 1},
        {"num_heads": 9, "num_kv_heads": 3},
        {"head_size": 64, "head_size_v": 32},
        {"head_size": 32, "head_size_v": 64},
    ]
    return [draw.choice(shapes)]


def _selection(draw: random.Random) -> list[_Fields]:
    """Lists of selected keys, for some cases."""
    if draw.random() < 0.75:
        return []
    scope = draw.choice(("all_heads", "kv_head", "query_head"))
    size, most = draw.choice(((1, 20), (4, 6), (16, 3), (8, 40)))
    form = (scope, size, most, draw.choice((1, 1, 3, 8)))
    return [{"key_selection": form, "selects_everything": size == 8}]


def _supported(target: BackendUnderTest, case: Case) -> bool:
    try:
        return target.supports(case)
    except ContractError:
        return False  # features that no layer combines


def draw_case(target: BackendUnderTest, seed: int) -> Case:
    """A case that the backend supports, or its base case with another batch."""
    draw = random.Random(seed)
    block = target.base_case.block_size
    changes: list[_Fields] = [
        *_shape(draw),
        *_storage(draw, block),
        {"loose_bounds": draw.random() < 0.3},
        *_mask(draw, block),
        *_scores(draw),
        *_selection(draw),
        {"batch_invariant": draw.random() < 0.25},
        {"needs_lse": target.base_case.needs_lse and draw.random() < 0.5},
        {"hidden_columns": draw.choice((0, 4))},
    ]
    if target.base_case.use_mla:  # latents have one layout and one KV head (P10)
        changes = [fields for fields in changes if not _OF_HEADS & fields.keys()]
    changes = [fields for fields in changes if fields]
    batch = _batch(draw, block)
    # Every feature is drawn before one is dropped, so that cases of all backends are similar.
    while True:
        fields = {name: value for change in changes for name, value in change.items()}
        case = target.case(batch=batch, seed=target.seed + seed, **fields)
        if not changes or _supported(target, case):
            return case
        changes.remove(draw.choice(changes))


def _check(target: BackendUnderTest, case: Case) -> str:
    return compare_with_oracle(case, run_case(target.backend, case, target.device), target.device)


def _combinations(target: BackendUnderTest) -> Iterator[CheckCase]:
    few, many = (10, 40) if target.on_gpu else (40, 160)  # a GPU compiles kernels for each
    for number in range(few if target.quick else many):
        case = draw_case(target, number)
        yield CheckCase(f"case-{number}", partial(_check, target, case), case)


CHECKS = (Check("V3", "random combinations of features", _combinations),)
