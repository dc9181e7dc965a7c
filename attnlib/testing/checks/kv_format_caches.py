"""KV9 to KV13: a KV format in the caches and layers of a backend (P16)."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from functools import partial

import torch

from attnlib.kv_formats import KVFormat, load_kv_format
from attnlib.ops.torch.merge_states import merge_states
from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.batch_spec import BatchSpec
from attnlib.testing.case import Case
from attnlib.testing.check import Check, CheckCase
from attnlib.testing.checks.kv_format_numbers import head_sizes
from attnlib.testing.checks.page_formats import (
    FEATURES,
    check_attention,
    check_unseen,
    check_visible,
    check_written,
    page_case,
)
from attnlib.testing.page_formats import PAGE_LAYOUT_NAMES
from attnlib.testing.runner import attend, make_impl

__all__ = ["CACHE_CHECKS", "kv_format_case"]


def kv_format_case(target: BackendUnderTest, **changes: object) -> Case:
    """The base case of the format under test: rotated, where the format needs it."""
    stored = _stored(target)
    size = head_sizes(stored, (64,))[0]
    rotation = "hadamard" if stored.rotated else None
    fields = {"head_size": size, "kv_rotation": rotation, **changes}
    return page_case(target, str(fields.pop("name", stored.name)), **fields)


def _stored(target: BackendUnderTest) -> KVFormat:
    assert target.kv_format is not None  # the checks run for a format only
    return load_kv_format(target.kv_format)


def _check_parts(target: BackendUnderTest, case: Case) -> str:
    """The bytes of a token do not depend on how many tokens a call writes."""
    pages = []
    for count in (1, 5, 1000):
        step = case.materialize(target.device, kv_written=False)
        impl, inputs, cache = make_impl(target.backend, step), step.inputs, step.cache()
        rows = range(0, inputs.slot_mapping.shape[0], count)
        for part in (slice(row, row + count) for row in rows):
            impl.write_kv(inputs.key[part], inputs.value[part], cache, inputs.slot_mapping[part])
        pages.append(inputs.cache.storage[0].clone())
    if all(torch.equal(found, pages[0]) for found in pages):
        return ""
    return f"tokens have other bytes if they are written in other calls | case: {case}"


def _written(target: BackendUnderTest) -> Iterator[CheckCase]:
    for batch in ("mixed", "graph_padding", "empty"):
        for layout in PAGE_LAYOUT_NAMES:
            case = kv_format_case(target, batch=batch, layout=layout, kv_rotation=None)
            check = partial(check_written, target, case)
            yield CheckCase(f"bytes-{batch}-{layout}", check, case)
    case = kv_format_case(target, batch="q7s20_q5s37_q1s9", kv_rotation=None)
    yield CheckCase("calls", partial(_check_parts, target, case), case)


def _check_moves(target: BackendUnderTest, case: Case, how: str) -> str:
    """Attention over copied blocks has the bits of attention over the blocks."""
    step = case.materialize(target.device)
    pool, spec = step.cache(), step.spec
    twice = type(pool).allocate(spec, 2 * pool.num_blocks, target.device)
    pairs = [(block, pool.num_blocks + block) for block in range(pool.num_blocks)]
    pool.swap_blocks(twice, [(source, source) for source, _ in pairs])
    if how == "copied":
        twice.copy_blocks(pairs)
    elif how == "pickled":
        twice = pickle.loads(pickle.dumps(twice))
    impl, batch, rows = make_impl(target.backend, step), step.common(), step.inputs.block_table
    offset = pool.num_blocks if how == "copied" else 0
    outputs = []
    for cache, first in ((pool, 0), (twice, offset)):
        table = torch.where(rows >= 0, rows + first, -1)
        moved = batch.replace(block_table_tensor=table)
        metadata = target.backend.make_builder(spec, target.device).build(0, moved)
        out = torch.empty(step.inputs.out.shape, dtype=spec.dtype, device=target.device)
        impl.forward(step.inputs.query, cache, metadata, out)
        outputs.append(out)
    if torch.equal(*outputs):
        return ""
    return f"attention over {how} blocks has other bits | case: {case}"


def _moved(target: BackendUnderTest) -> Iterator[CheckCase]:
    for how in ("swapped", "copied", "pickled"):
        fields: dict[str, object] = {"poison": "zero", "needs_lse": False, "extra_columns": 0}
        case = kv_format_case(target, batch="q7s20_q1s37", **fields)
        yield CheckCase(how, partial(_check_moves, target, case, how), case)


def _attention(target: BackendUnderTest) -> Iterator[CheckCase]:
    stored, cases = _stored(target), {}
    for batch in ("mixed", "decode_long", "chunked", "graph_padding", "empty", "q2s0_q1s3_q0s0"):
        cases[batch] = kv_format_case(target, batch=batch)
    for size in head_sizes(stored, (96, 128, 256)):
        cases[f"head-{size}"] = kv_format_case(target, batch="q7s20_q1s37", head_size=size)
    sizes = dict(zip(("head_size", "head_size_v"), head_sizes(stored, (128, 64)), strict=False))
    cases["value-size"] = kv_format_case(target, batch="q7s20_q1s37", **sizes)
    cases["block-17"] = kv_format_case(target, batch="q3s40_q1s33", block_size=17)
    cases["float16"] = kv_format_case(target, batch="q5s40_q1s33", dtype="float16")
    for layout in PAGE_LAYOUT_NAMES[1:]:
        cases[layout] = kv_format_case(target, batch="mixed", layout=layout)
    for rotation in (None, "hadamard", "hadamard_values@3"):
        fields = {"batch": "q7s20_q1s37", "kv_rotation": rotation}
        cases[f"rotation-{rotation}"] = kv_format_case(target, **fields)
    pairs = [f"auto,{stored.name}", f"{stored.name},{target.base_case.dtype}"]
    for name in (*pairs, f"int8_per_token_head,{stored.name}") if stored.is_open else pairs:
        cases[name] = kv_format_case(target, batch="q7s20_q1s37", name=name)
    for feature, changes in FEATURES.items():
        cases[feature] = kv_format_case(target, batch="q7s40_3q1s33", **changes)
    for label, case in cases.items():
        if not target.quick or label in ("mixed", "decode_long"):
            yield CheckCase(label, partial(check_attention, target, case), case)


def _poison(target: BackendUnderTest) -> Iterator[CheckCase]:
    for kind in ("nan",) if target.quick else ("nan", "inf", "huge"):
        case = kv_format_case(target, batch="mixed", poison=kind)
        yield CheckCase(f"unseen-{kind}", partial(check_unseen, target, case), case)
    for which in ("key", "value"):
        case = kv_format_case(target, batch="2q1s20", poison="zero")
        yield CheckCase(f"visible-{which}", partial(check_visible, target, case, which), case)


def _check_split(target: BackendUnderTest, case: Case) -> str:
    """States over two parts of the keys, merged by their LSE, against all keys in one call."""
    step = case.materialize(target.device)
    impl, batch, cut = make_impl(target.backend, step), step.common(), 2 * case.block_size
    table, lens = step.inputs.block_table, step.inputs.seq_lens.cpu()
    states = []
    for first, count in ((0, lens), (0, lens.clamp(max=cut)), (cut, lens - cut)):
        part = batch.replace(
            block_table_tensor=table[:, first // case.block_size :],
            seq_lens=count.to(target.device),
            seq_lens_cpu=count,
            num_computed_tokens_cpu=count - 1,
            max_seq_len=int(count.max()),
        )
        metadata = target.backend.make_builder(step.spec, target.device).build(0, part)
        found = attend(impl, step, metadata)
        assert found.lse is not None  # the case needs it
        states.append((found.out.float().contiguous(), found.lse.clone()))
    (out, lse), *parts = states
    merged, total = torch.empty_like(out), torch.empty_like(lse)
    merge_states(*parts[0], *parts[1], merged, total)
    limit = 32 * torch.finfo(case.torch_dtype).eps
    off = float((merged - out).abs().max() / out.abs().max()), float((total - lse).abs().max())
    if off[0] <= limit and off[1] <= limit * float(lse.abs().max()):
        return ""
    return f"merged parts differ by {off[0]:.1e}, their LSE by {off[1]:.1e} (M5) | case: {case}"


def _splits(target: BackendUnderTest) -> Iterator[CheckCase]:
    size = target.base_case.block_size
    batch = str(BatchSpec((1, 1, 1), (4 * size + 6, 2 * size + 9, 6 * size + 4)))
    fields: dict[str, object] = {"needs_lse": True, "extra_columns": 0}
    for rotation in (None, "hadamard"):
        case = kv_format_case(target, batch=batch, kv_rotation=rotation, **fields)
        yield CheckCase(f"rotation-{rotation}", partial(_check_split, target, case), case)


CACHE_CHECKS = (
    Check("KV9", "a write stores the bytes of the format, and only these", _written),
    Check("KV10", "copied, swapped and pickled blocks give the same bits", _moved),
    Check("KV11", "attention over stored heads is within the error budget", _attention),
    Check("KV12", "poisoned elements and scales", _poison),
    Check("KV13", "parts of the keys merged by their LSE", _splits),
)
