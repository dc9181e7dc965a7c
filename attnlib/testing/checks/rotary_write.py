"""K7: heads that the layer normalizes and rotates while it writes the cache (P11), also caches that
rotate heads (P15) and hold their scales (M16).

The rotated queries and the whole cache are compared with a computation of this module: bit for
bit, fp8 elements up to one step of the format. Padding rows, slot -1 and strides are those of the
case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from attnlib.ops.rotary import HeadNorm
from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.case import Case
from attnlib.testing.check import Check, CheckCase
from attnlib.testing.checks.cache_write import compare_storage
from attnlib.testing.inputs import stored_heads
from attnlib.testing.layouts import CACHE_LAYOUTS, write_slots
from attnlib.testing.materialized_case import MaterializedCase
from attnlib.testing.page_formats import PAGE_LAYOUT_NAMES, PAGE_NAMES
from attnlib.testing.runner import find_operation

__all__ = ["CHECKS"]


class _Style(NamedTuple):
    """What is applied to the heads.

    Attributes:
        half: pairs of elements that rotate; 0 for no rotation.
        interleaved: neighbors form pairs.
        norm: "none", "rounded" (Llama) or "float32" (Gemma).
        float32_angles: cos and sin are float32, whatever the heads are.
    """

    half: int
    interleaved: bool = False
    norm: str = "none"
    float32_angles: bool = False


_Tables = tuple[torch.Tensor | None, torch.Tensor | None]
"""Cosines and sines, or None without a rotation."""


def _expected(
    heads: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norm: HeadNorm | None,
    interleaved: bool,
) -> torch.Tensor:
    """P11, element by element where the library works on whole halves."""
    size, dtype = heads.shape[2], heads.dtype
    if norm is not None:
        x = heads.float()
        terms = [x[..., n] * x[..., n] for n in range(size)]
        while len(terms) > 1:
            terms += [torch.zeros_like(terms[0])] * (len(terms) % 2)
            terms = [a + b for a, b in zip(terms[::2], terms[1::2], strict=True)]
        # In float64, because float32 roots of MKL are not correctly rounded on AMD processors.
        root = (terms[0] * (1.0 / size) + norm.eps).double().sqrt().float()
        x = x * (1 / root)[..., None]
        if norm.multiply_in_float32:
            heads = (x * (norm.weight.float() + norm.weight_offset)).to(dtype)
        else:
            heads = x.to(dtype) * norm.weight
    out, half = heads.clone(), cos.shape[1]
    for pair in range(half):
        first, second = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + half)
        a, b, c, s = heads[..., first], heads[..., second], cos[:, pair, None], sin[:, pair, None]
        out[..., first] = ((a * c) - (b * s)).to(dtype)
        out[..., second] = ((b * c) + (a * s)).to(dtype)
    return out


def _run_layer(
    target: BackendUnderTest, step: MaterializedCase, tables: _Tables, options: dict[str, Any]
) -> torch.Tensor:
    from attnlib.layer import Attention

    layer = Attention(
        step.spec, backend=target.backend, scale=step.params.scale, device=target.device
    )
    metadata = target.backend.make_builder(step.spec, target.device).build(0, step.common())
    rows = (step.inputs.query, step.inputs.key, step.inputs.value)
    rotated = layer.rotate_and_write_kv(*rows, step.cache(), metadata, *tables, **options)
    assert isinstance(rotated, torch.Tensor)
    return rotated


def _run_operation(
    target: BackendUnderTest, step: MaterializedCase, tables: _Tables, options: dict[str, Any]
) -> torch.Tensor:
    run, cache = find_operation(target.backend, "rotate_and_write"), step.cache()
    tensors = (step.inputs.query, step.inputs.key, step.inputs.value)
    scales: dict[str, Any] = {}  # defaults are not given
    if step.spec.is_kv_quantized:
        scales = {"k_scale": cache.k_scale, "v_scale": cache.v_scale}
    views = (cache.key_cache, cache.value_cache, step.inputs.slot_mapping)
    rotated = run(*tensors, *views, *tables, **options, **scales)
    assert isinstance(rotated, torch.Tensor)
    return rotated


def _check(
    target: BackendUnderTest, case: Case, style: _Style, run: Callable[..., torch.Tensor]
) -> str:
    actual, expected = (
        case.materialize(target.device, kv_written=False),
        case.materialize(target.device, kv_written=False),
    )
    inputs, generator = actual.inputs, torch.Generator().manual_seed(case.seed)
    tokens, size, dtype = inputs.query.shape[0], case.head_size, case.torch_dtype
    angles = torch.randn(tokens, style.half, generator=generator)
    kind = torch.float32 if style.float32_angles else dtype
    cos, sin = (table.to(kind).to(target.device) for table in (angles.cos(), angles.sin()))
    norms: list[HeadNorm | None] = [None, None]
    if style.norm != "none":
        gemma = style.norm == "float32"
        weights = (torch.randn(size, generator=generator).to(dtype) for _ in norms)
        norms = [HeadNorm(w.to(target.device), 1e-5, float(gemma), gemma) for w in weights]
    tables = (cos, sin) if style.half else (None, None)
    options: dict[str, Any] = {"interleaved": True} if style.interleaved else {}
    if style.norm != "none":
        options |= {"q_norm": norms[0], "k_norm": norms[1]}
    rotated = run(target, actual, tables, options)
    count = case.batch_spec.num_actual_tokens
    query = _expected(inputs.query, cos, sin, norms[0], style.interleaved)
    if not torch.equal(rotated[:count], query[:count]):
        wrong = (rotated[:count] != query[:count]).flatten(1).any(1).nonzero()[0].item()
        return f"the query of token {wrong} has other bits than the rule (P11) | case: {case}"
    slots = inputs.slot_mapping.tolist()
    written = [token for token, slot in enumerate(slots) if slot >= 0]
    key = _expected(expected.inputs.key, cos, sin, norms[1], style.interleaved)
    new_rows = stored_heads(case.dimensions, key, expected.inputs.value)
    for view, new, scale in (
        (expected.inputs.cache.key, new_rows[0], expected.params.k_scale),
        (expected.inputs.cache.value, new_rows[1], expected.params.v_scale),
    ):
        write_slots(view, [slots[token] for token in written], new[written], scale)
    error = compare_storage(actual, expected)
    return f"{error} | case: {case}" if error else ""


_PAGES = (
    ("int8_per_token_head", None, "norm-rotation"),
    ("int8_per_token_head", "hadamard", "gemma"),
    ("int4_per_group", "hadamard_keys", "norm-rotation"),
    ("nvfp4", "hadamard_values@3", "norm"),
    ("fp8_e4m3", "hadamard", "rotation"),
)
"""Formats, rotations for the cache, and styles, of caches that are quantized while they are
written."""


def _cases(target: BackendUnderTest) -> Iterator[CheckCase]:
    # Naming the head size keeps layers over latents out, which are not rotated by the operation.
    size = target.base_case.head_size
    half = size // 2
    styles = {
        "rotation": _Style(half),
        "norm-rotation": _Style(half, norm="rounded"),
        "gemma": _Style(half, norm="float32"),
        "interleaved-partial": _Style(half // 2, True, "rounded", True),
        "norm": _Style(0, norm="rounded"),
    }
    for name, style in styles.items():
        case = target.case(batch="graph_padding", head_size=size)
        yield CheckCase(name, partial(_check, target, case, style, _run_layer), case)
    half_precision = {
        "rotation": _Style(half, float32_angles=True),
        "gemma": _Style(half, norm="float32"),
        "interleaved-partial": styles["interleaved-partial"],
    }
    for name, style in half_precision.items():
        case = target.case(batch="graph_padding", head_size=size, dtype="bfloat16")
        yield CheckCase(f"{name}-bfloat16", partial(_check, target, case, style, _run_layer), case)
    style = styles["norm-rotation"]
    for layout in CACHE_LAYOUTS[1:]:
        case = target.case(batch="q3s20_q1s17", head_size=size, layout=layout)
        yield CheckCase(f"layout-{layout}", partial(_check, target, case, style, _run_layer), case)
    for stored in ("fp8_e4m3", "fp8_e5m2"):
        case = target.case(
            batch="q3s20_q1s17",
            head_size=size,
            kv_cache_dtype=stored,
            k_scale=0.5,
            v_scale=0.25,
            kv_scale_kind="head",
        )
        yield CheckCase(stored, partial(_check, target, case, style, _run_layer), case)
    for stored, rotation, kind in _PAGES:
        case = _page_case(target, stored, rotation)
        name = f"{stored}-{kind}" if rotation is None else f"{stored}-{kind}-{rotation}"
        yield CheckCase(name, partial(_check, target, case, styles[kind], _run_layer), case)
    yield from _operation_cases(target, styles)


def _page_case(target: BackendUnderTest, stored: str, rotation: str | None) -> Case:
    """Pages that hold their scales (M16), or a float8 cache, of heads that the cache rotates
    (P15)."""
    size = target.base_case.head_size
    fields: dict[str, Any] = {"head_size": size if size % 32 == 0 else 64}
    if stored in PAGE_NAMES:
        fields["layout"] = PAGE_LAYOUT_NAMES[0]
    else:
        fields |= {"k_scale": 0.5, "v_scale": 0.25}
    return target.case(batch="graph_padding", kv_cache_dtype=stored, kv_rotation=rotation, **fields)


def _operation_cases(target: BackendUnderTest, styles: dict[str, _Style]) -> Iterator[CheckCase]:
    """The operation by itself, for a backend that has it (`AttentionBackend.get_operation`)."""
    fp8 = {"kv_cache_dtype": "fp8_e4m3", "k_scale": 0.5, "v_scale": 0.25, "kv_scale_kind": "head"}
    variants: dict[str, dict[str, Any]] = {
        "norm-rotation": {},
        "gemma": fp8,
        "rotation": {},
        "interleaved-partial": {},
    }
    for name, fields in variants.items():
        size = {"head_size": target.base_case.head_size}
        case = target.case(batch="graph_padding", **size, **fields)
        check = partial(_check, target, case, styles[name], _run_operation)
        yield CheckCase(f"operation-{name}", check, case)
    # One element more than a power of two is the last one of the sum of squares.
    case = target.case(batch="q3s20_q1s17", head_size=17)
    check = partial(_check, target, case, _Style(8, norm="rounded"), _run_operation)
    yield CheckCase("operation-odd-size", check, case)


CHECKS = (Check("K7", "normalized and rotated keys are written as specified", _cases),)
