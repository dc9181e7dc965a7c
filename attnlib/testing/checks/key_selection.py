"""S2: queries attend to exactly the selected visible keys, and nothing else is read (M11).

Keys that no list selects hold poison, and the block table entries of blocks without a selected key
are invalid. A dropped or shifted block, a list of another head or query, a block that is not cut at
the query, or a sink that counts per block give other results than the oracle.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.budget import compare
from attnlib.testing.case import Case
from attnlib.testing.check import Check, CheckCase
from attnlib.testing.layouts import poison_value
from attnlib.testing.materialized_case import MaterializedCase
from attnlib.testing.runner import (
    check_supported,
    compare_with_oracle,
    equals_result_without,
    make_impl,
    run_materialized_case,
)

__all__ = ["CHECKS"]

_BATCHES = {
    "decode": "q1s37_q1s5_q1s150_q4s80",
    "prefill": "q23_q17s70",
    "mixed": "q1s90_q19s44_q2s2_q40",
    "long": "q1s600_q2s411",
}
_FORMS: dict[str, tuple[str, int, int, int]] = {
    # name: (scope, block_size, max_blocks, query_block_size)
    "tokens": ("all_heads", 1, 20, 1),
    "four_tokens": ("kv_head", 4, 6, 1),
    "blocks": ("kv_head", 16, 3, 1),
    "query_head": ("query_head", 8, 4, 1),
    "shared": ("kv_head", 16, 3, 8),
    "shared_by_six": ("all_heads", 8, 5, 6),
    "wide": ("kv_head", 64, 4, 1),
    "widest": ("kv_head", 128, 2, 1),
    "many": ("all_heads", 2, 200, 1),
}
_FEATURES: dict[str, dict[str, object]] = {
    "sinks": {"sinks": True},
    "lse": {"needs_lse": True, "sinks": True, "sliding_window": 21},
    "no_lse": {"needs_lse": False},
    "window": {"sliding_window": 21},
    "soft_cap": {"logits_soft_cap": 3.0},
    "alibi": {"alibi": True},
    "bidirectional": {"mask": "bidirectional"},
    "per_request": {"mask": "per_request"},
    "query_bias": {"mask": "query_bias"},
    "chunk": {"attention_chunk_size": 24},
    "score": {"score": "attnlib.testing.score_functions:HEADS"},
    "fp8": {"kv_cache_dtype": "fp8_e4m3", "k_scale": 0.25, "v_scale": 0.5},
    "fp8_per_head": {
        "kv_cache_dtype": "fp8_e4m3",
        "k_scale": 0.25,
        "v_scale": 0.5,
        "kv_scale_kind": "head",
    },
    "mla": {
        "use_mla": True,
        "num_kv_heads": 1,
        "head_size": 96,
        "head_size_v": 64,
        "layout": "ALIASED",
    },
    "HND": {"layout": "HND"},
    "contiguous": {"contiguous": True},
}
_DEEPSEEK: dict[str, object] = {
    **_FEATURES["mla"],
    "head_size": 576,
    "head_size_v": 512,
    "scale": 192**-0.5,
}
"""Sizes for which a chip may have a kernel of its own."""
_LATENTS: dict[str, dict[str, object]] = {
    "16-heads": {**_DEEPSEEK, "num_heads": 16},
    "128-heads": {**_DEEPSEEK, "num_heads": 128, "block_size": 64},
    "64-heads-sinks-window": {
        **_DEEPSEEK,
        "num_heads": 64,
        "sinks": True,
        "sliding_window": 60,
    },
}
_MORE_PADDING = 5
"""Columns of -1 that check "order" adds to lists."""
_QUICK = {
    "tokens": ("mixed",),
    "blocks": ("decode", "mixed"),
    "shared": ("prefill",),
    "wide": ("long",),
}
"""Form -> batches of the short run."""


def _hide_unselected(step: MaterializedCase) -> None:
    """Poison the keys and values that no query of their request selects, and invalidate the block
    table entries of blocks without a selected key."""
    case, inputs = step.case, step.inputs
    masks = step.params.selected
    assert masks is not None
    num_kv_heads, block_size = case.num_kv_heads, case.block_size
    poison = poison_value(case.dimensions.cache_dtype, case.poison)
    for request, mask in enumerate(masks):
        seq_len = mask.shape[2]
        if mask.numel() == 0:
            continue
        of_kv_head = mask.view(num_kv_heads, -1, seq_len).any(dim=1)
        row = inputs.placement.blocks[request]
        for position in range(seq_len):
            block, offset = row[position // block_size], position % block_size
            for head in torch.nonzero(~of_kv_head[:, position]).flatten().tolist():
                for cache in (inputs.cache.key, inputs.cache.value):
                    cache[block, offset, head] = poison
        for column in range(-(-seq_len // block_size)):
            if not mask[:, :, column * block_size : (column + 1) * block_size].any():
                inputs.block_table[request, column] = 1 << 30


def _check(target: BackendUnderTest, case: Case) -> str:
    check_supported(target.backend, case, target.device)
    step = case.materialize(target.device)
    clean = case.materialize(target.device)
    _hide_unselected(step)
    output = run_materialized_case(target.backend, step)
    error = compare_with_oracle(case, output, target.device, clean)
    if not error:
        return ""
    plain = case.replace(key_selection=None).materialize(target.device)
    with_it, without_it = (
        (given.oracle(), given.oracle(case.torch_dtype)) for given in (clean, plain)
    )
    # The output of above cannot equal that without a selection: the other keys were hidden.
    shown = run_materialized_case(target.backend, case.materialize(target.device))
    if equals_result_without(shown, with_it, without_it, case.torch_dtype):
        return f"the selection is ignored: the output equals the one without | case: {case}"
    return error


def _check_empty_list(target: BackendUnderTest, case: Case) -> str:
    """The list of one head is empty, and that of the other has the query's own block only: block 0
    of the table is invalid."""
    lists = case.key_lists
    assert lists is not None and case.key_selection is not None
    lists.indices[:] = -1
    ends = torch.tensor(case.batch_spec.seq_lens, dtype=torch.int32)
    lists.indices[:, 1, 0] = (ends - 1) // case.key_selection[1]
    return _check(target, case)


def _check_everything(target: BackendUnderTest, case: Case) -> str:
    """Lists that select all keys give the result without selection."""
    check_supported(target.backend, case, target.device)
    step = case.materialize(target.device)
    output = run_materialized_case(target.backend, step)
    without = case.replace(key_selection=None)
    return compare_with_oracle(without, output, target.device)


def _check_order(target: BackendUnderTest, case: Case) -> str:
    """Calls with the same keys in another order and with more padding are within the budget of the
    oracle; a call twice gives the same bits (M8)."""
    step = case.materialize(target.device)
    selected = step.selected_keys()
    assert selected is not None and case.key_selection is not None
    scope, block_size, max_blocks, query_block_size = case.key_selection
    selection = (scope, block_size, max_blocks + _MORE_PADDING, query_block_size)
    wider = case.replace(key_selection=selection)  # its layer takes lists with more columns
    check_supported(target.backend, wider, target.device)
    metadata = target.backend.make_builder(wider.spec, target.device).build(0, step.common())
    impl = make_impl(target.backend, wider.materialize(target.device))
    indices = selected.indices
    padded = torch.nn.functional.pad(indices, (0, _MORE_PADDING), value=-1)
    results = []
    for changed in (indices, indices, indices.flip(-1), padded, padded.flip(-1)):
        lists = type(selected)(changed.contiguous(), selected.list_start_loc)
        out = torch.full_like(step.inputs.out, float("nan"))
        impl.forward_selected(step.inputs.query, step.cache(), metadata, lists, out)
        results.append(out)
    if not torch.equal(results[0], results[1]):
        return f"the same call twice gives other bits (M8) | case: {case}"
    expected, same_precision = step.oracle(), step.oracle(case.torch_dtype)
    for result in results[1:]:
        found = compare(result, expected.out, same_precision.out, case.torch_dtype)
        if not found.passed:
            return f"{found} | case: {case}"
    return ""


def _cases(target: BackendUnderTest) -> Iterator[CheckCase]:
    for form, selection in _FORMS.items():
        for phase, batch in _BATCHES.items():
            if target.quick and phase not in _QUICK.get(form, ()):
                continue
            case = target.case(batch=batch, key_selection=selection)
            yield CheckCase(f"{form}-{phase}", partial(_check, target, case), case)
    for feature, fields in _FEATURES.items():
        if target.quick and feature not in ("sinks", "fp8_per_head", "mla"):
            continue
        for form in ("blocks", "shared") if not target.quick else ("blocks",):
            changes = {"key_selection": _FORMS[form], **fields}
            case = target.case(batch=_BATCHES["mixed"], **changes)
            yield CheckCase(f"{feature}-{form}", partial(_check, target, case), case)
    for name, fields in _LATENTS.items():
        for form in ("tokens", "many"):
            if target.quick and (name, form) != ("16-heads", "tokens"):
                continue
            case = target.case(batch=_BATCHES["long"], key_selection=_FORMS[form], **fields)
            yield CheckCase(f"{name}-{form}", partial(_check, target, case), case)
    sinks_split = target.case(batch=_BATCHES["long"], key_selection=_FORMS["many"], sinks=True)
    yield CheckCase("sinks-many", partial(_check, target, sinks_split), sinks_split)
    empty = target.case(batch="q1s150_q1s70", key_selection=_FORMS["blocks"])
    yield CheckCase("empty-list", partial(_check_empty_list, target, empty), empty)
    padded = target.case(batch="q1s40_q5s33_q0s0_pad3", key_selection=_FORMS["blocks"])
    yield CheckCase("padding", partial(_check, target, padded), padded)
    batch = _BATCHES["decode" if target.quick else "mixed"]
    for form in ("tokens",) if target.quick else ("tokens", "shared"):
        order = target.case(batch=batch, key_selection=_FORMS[form])
        yield CheckCase(f"order-{form}", partial(_check_order, target, order), order)
    for form, selection in {
        "tokens": ("all_heads", 1, 90, 1),
        "blocks": ("kv_head", 16, 6, 1),
        "shared": ("query_head", 16, 6, 8),
    }.items():
        if target.quick and form != "blocks":
            continue
        batch = "q1s90_q3s44_q2s2" if target.quick else _BATCHES["mixed"]  # at most 90 keys
        case = target.case(batch=batch, key_selection=selection, selects_everything=True)
        yield CheckCase(f"everything-{form}", partial(_check_everything, target, case), case)


CHECKS = (Check("S2", "queries attend to the selected keys only", _cases),)
