"""Run one draw on a backend and compare everything that the call may change."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import attnlib
from attnlib.errors import UnsupportedConfigError
from tests.properties.draw import Draw
from tests.properties.memory import raw_bytes
from tests.properties.reference import (
    Mask,
    Parameters,
    attend_one_head,
    positions_of,
    visible_keys,
)
from tests.properties.rounding import COARSE_EXPONENTIAL, bounds
from tests.properties.step import LayerTensors, Placement, place, tensors_of

__all__ = ["Outcome", "run_draw"]

Tensor = torch.Tensor


@dataclass
class Outcome:
    """The result of one draw.

    Attributes:
        refused: reasons of the backend, if it does not support the spec.
        wrong: every disagreement; empty if the draw agrees.
        share: largest error as a share of its bound.
    """

    refused: str = ""
    wrong: list[str] = field(default_factory=list)
    share: float = 0.0


def run_draw(draw: Draw, backend: Any, device: str) -> Outcome:
    """Run a draw on a backend: two calls of one layer, sometimes one of a second layer."""
    outcome, spec = Outcome(), draw.spec
    try:
        chosen = attnlib.get_attn_backend(spec, backend, device)
    except UnsupportedConfigError as error:
        if not (error.reasons and all(error.reasons)):
            outcome.wrong.append("the backend refuses the spec without a reason")
        outcome.refused = str(error)
        return outcome
    placement = place(draw, device)
    metadata = chosen.make_builder(spec, device).build(0, placement.common)
    for number in range(1 + draw.forms.second_layer):
        tensors = tensors_of(draw, placement, device, number)
        layer = _layer(draw, chosen, tensors, device)
        out, lse = _call(layer, tensors, metadata)
        first = out.clone(), None if lse is None else lse.clone()
        _check_memory(draw, placement, tensors, outcome)
        _compare(draw, placement, tensors, out, lse, chosen.get_name(), outcome)
        again, lse_again = _call(layer, tensors, metadata) if draw.forms.repeated else first
        for name, one, two in (("output", first[0], again), ("LSE", first[1], lse_again)):
            if one is not None and two is not None and not _same_bits(one, two):
                outcome.wrong.append(f"the {name} of the same call differs (M8)")
        if outcome.wrong:
            outcome.wrong = [f"layer {number}: {text}" for text in outcome.wrong]
            break
    return outcome


def _layer(draw: Draw, backend: Any, tensors: LayerTensors, device: str) -> attnlib.Attention:
    spec, on_layer = draw.spec, {}
    if spec.is_kv_quantized and tensors.cache is not None:
        values = {}
        for name, scales in (("k_scale", draw.k_scales), ("v_scale", draw.v_scales)):
            per_head = spec.kv_scale_kind == "head"
            if name == "v_scale" and spec.use_mla:
                values[name] = values["k_scale"]  # one memory, one scale
                continue
            values[name] = (
                torch.tensor(scales if per_head else scales[0], device=device)
                if draw.forms.scales == "tensor"
                else scales[0]
            )
        if draw.forms.scales_on == "layer" and not spec.kv_sharing:
            on_layer = values
        else:
            tensors.cache.k_scale, tensors.cache.v_scale = values["k_scale"], values["v_scale"]
    return attnlib.Attention(
        spec,
        backend=backend,
        scale=draw.scale,
        alibi_slopes=None if tensors.slopes is None else tensors.slopes.to(device),
        sinks=None if tensors.sinks is None else tensors.sinks.to(device),
        device=device,
        **on_layer,
    )


def _call(layer: attnlib.Attention, tensors: LayerTensors, metadata: Any) -> Any:
    """(output [rows, Hq, Dv], LSE or None) of one call."""
    result = layer(
        tensors.query, tensors.key, tensors.value, tensors.cache, metadata,
        layer.spec.needs_lse, output=tensors.output,
    )  # fmt: skip
    out, lse = result if layer.spec.needs_lse else (result, None)
    return out.reshape(out.shape[0], layer.spec.num_heads, layer.spec.head_size_v), lse


def _same_bits(one: Tensor, two: Tensor) -> bool:
    dense = [tensor.clone(memory_format=torch.contiguous_format) for tensor in (one, two)]
    return torch.equal(dense[0].view(torch.uint8), dense[1].view(torch.uint8))


def _check_memory(
    draw: Draw, placement: Placement, tensors: LayerTensors, outcome: Outcome
) -> None:
    """Inputs and metadata are unchanged; of the cache, only the slots of new tokens changed."""
    names = "query", "key", "value"
    for name, passed, given in zip(
        names, (tensors.query, tensors.key, tensors.value), tensors.given, strict=True
    ):
        if passed is not None and not _same_bits(passed.cpu().reshape(given.shape), given):
            outcome.wrong.append(f"the call changed {name}")
    for name, values in placement.ints.items():
        now = getattr(placement.common, name)
        if now is None:
            continue
        if not _same_bits(now.cpu(), values[: now.shape[0]]):
            outcome.wrong.append(f"the call changed {name}")
    output, form = tensors.output, draw.forms.output
    if output is not None and form == "gaps":
        cpu = raw_bytes(output).view(output.dtype).clone()
        cpu.as_strided(output.shape, output.stride(), output.storage_offset()).fill_(math.nan)
        if not bool(cpu.isnan().all()):
            outcome.wrong.append("the call wrote next to the output (P9)")
    if tensors.cache is not None:
        _check_cache(draw, placement, tensors, outcome)


def _check_cache(draw: Draw, placement: Placement, tensors: LayerTensors, outcome: Outcome) -> None:
    spec, cache = draw.spec, tensors.cache
    assert cache is not None and tensors.before is not None
    after, expected = raw_bytes(cache.key_cache), tensors.before.clone()
    writes = tensors.key is not None and not spec.kv_sharing
    tokens = [token for token, slot in enumerate(placement.slots) if slot >= 0] if writes else []
    if tokens:
        slots = torch.tensor(placement.slots)[tokens]
        index = slots // spec.block_size, slots % spec.block_size
        new, old = tensors.cache_on_cpu(after), tensors.cache_on_cpu(expected)
        parts = list(zip(("key", "value"), new, old, (draw.k_scales, draw.v_scales), strict=True))
        for number, (name, found, target, scales) in enumerate(parts[: 1 if spec.use_mla else 2]):
            given = tensors.given[1 + number][tokens]
            if spec.is_kv_quantized:
                stored = found.view(torch.uint8)[index].view(spec.kv_dtype)
                error = _quantization_error(stored, given, scales)
                if error:
                    outcome.wrong.append(f"stored {name}: {error}")
                target.view(torch.uint8)[index] = stored.view(torch.uint8)
            else:
                target[index] = given.to(spec.kv_dtype)
    if not torch.equal(after, expected):
        where = int((after != expected).nonzero()[0])
        outcome.wrong.append(
            f"byte {where} of the cache differs from what the slots say (P4): {int(after[where])} "
            f"where {int(expected[where])} was expected"
        )


def _quantization_error(stored: Tensor, given: Tensor, scales: tuple[float, ...]) -> str:
    """ "" if every stored number is a nearest one of value / scale, saturated (M9)."""
    info = torch.finfo(stored.dtype)
    wanted = given.double() / torch.tensor(scales, dtype=torch.float64)[:, None]
    wanted = wanted.clamp(-info.max, info.max)
    mantissa = 3 if stored.dtype == torch.float8_e4m3fn else 2
    lowest = math.log2(info.tiny)  # exponent of the smallest normal number
    exponent = torch.log2(wanted.abs().clamp(min=info.tiny)).floor().clamp(min=lowest)
    half = 0.5 * 2.0 ** (exponent - mantissa)
    error = (stored.double() - wanted).abs()
    bad = ~(error <= half * (1 + 2.0**-9))
    if not bool(bad.any()):
        return ""
    at = tuple(int(i) for i in bad.nonzero()[0])
    return f"{float(stored.double()[at])} for {float(wanted[at])} at {at}"


def _compare(
    draw: Draw,
    placement: Placement,
    tensors: LayerTensors,
    out: Tensor,
    lse: Tensor | None,
    backend: str,
    outcome: Outcome,
) -> None:
    """Compare output and LSE with the reference."""
    spec, batch = draw.spec, draw.batch
    actual = out.detach().cpu().double().numpy()
    actual_lse = None if lse is None else lse.detach().cpu().double().numpy()
    if lse is not None and (lse.dtype != torch.float32 or not lse.is_contiguous()):
        outcome.wrong.append(f"the LSE is {lse.dtype} with strides {lse.stride()} (M5)")
    rows = batch.num_tokens
    if actual[rows:].any() or np.isnan(actual[rows:]).any():
        outcome.wrong.append("padding rows are not 0 (M6)")
    query = tensors.given[0].double().numpy()
    caches = None
    if tensors.cache is not None:
        caches = tensors.cache_on_cpu(raw_bytes(tensors.cache.key_cache))
    on_cpu = out.device.type == "cpu" and spec.dtype.itemsize == 2
    exponential = COARSE_EXPONENTIAL if on_cpu and "torch" in backend else 0.0
    start = 0
    for request, (length, total) in enumerate(zip(batch.query_lens, batch.seq_lens, strict=True)):
        end = start + length
        if length == 0:
            continue
        if caches is None:
            keys, values = (tensor[start:end].double().numpy() for tensor in tensors.given[1:])
            total = length
        else:
            keys, values = _cached(draw, placement, caches, request, total)
        positions = positions_of(length, total)
        visible = visible_keys(positions, total, _mask(draw, request))
        bias = placement.ints.get("query_bias")
        of_request = None if bias is None else bias[start:end].double().numpy()
        for head in range(spec.num_heads):
            kv = head // (spec.num_heads // spec.num_kv_heads)
            parameters = Parameters(
                scale=spec.head_size**-0.5 if draw.scale is None else draw.scale,
                soft_cap=spec.logits_soft_cap,
                slope=None if tensors.slopes is None else float(tensors.slopes[head]),
                sink=None if tensors.sinks is None else float(tensors.sinks[head]),
            )
            expected = attend_one_head(
                query[start:end, head], keys[:, kv], values[:, kv], visible, positions,
                parameters, of_request,
            )  # fmt: skip
            allowed, allowed_lse = bounds(
                expected, values[:, kv], parameters.soft_cap, parameters.sink, spec.head_size,
                str(spec.dtype).removeprefix("torch."), exponential,
            )  # fmt: skip
            where = f"request {request}, head {head}"
            _judge(f"output of {where}", actual[start:end, head], expected.out, allowed, outcome)
            if actual_lse is not None:
                _judge(f"LSE of {where}", actual_lse[start:end, head], expected.lse,
                       allowed_lse, outcome)  # fmt: skip
        if outcome.wrong:
            return
        start = end


def _cached(
    draw: Draw, placement: Placement, caches: tuple[Tensor, Tensor], request: int, length: int
) -> list[np.ndarray]:
    """Keys and values of a request as real numbers, [length, Hkv, D] each (P3, M9)."""
    position = torch.arange(length)
    size = draw.spec.block_size
    blocks = torch.tensor(placement.rows[request], dtype=torch.long)[position // size]
    found = []
    for view, scales in zip(caches, (draw.k_scales, draw.v_scales), strict=True):
        raw = view.view(torch.uint8) if view.element_size() == 1 else view
        stored = raw[blocks, position % size].view(view.dtype).double()
        found.append((stored * torch.tensor(scales, dtype=torch.float64)[:, None]).numpy())
    return found


def _mask(draw: Draw, request: int) -> Mask:
    spec, causal = draw.spec, draw.batch.causal
    by_spec = spec.mask_kind.value in ("causal", "query_bias")
    if isinstance(causal, tuple):
        by_spec = causal[request]
    elif causal is not None:
        by_spec = causal
    left = right = None
    if spec.sliding_window is not None:
        left, right = spec.sliding_window - 1, spec.sliding_window - 1
    elif spec.window is not None:
        left, right = spec.window
    return Mask(causal=by_spec, left=left, right=right, chunk=spec.attention_chunk_size)


def _judge(
    what: str, actual: np.ndarray, expected: np.ndarray, allowed: np.ndarray, outcome: Outcome
) -> None:
    infinite = np.isneginf(expected)
    with np.errstate(invalid="ignore"):
        error = np.abs(actual - expected)
    good = np.where(infinite, np.isneginf(actual), error <= allowed)
    compared = np.where(infinite | ~np.isfinite(error), 0.0, error)
    share = compared / np.where(allowed > 0, allowed, 1.0)
    outcome.share = max(outcome.share, float(share.max(initial=0.0)))
    if good.all():
        return
    at = tuple(int(i) for i in np.argwhere(~good)[0])
    outcome.wrong.append(
        f"{what} at {at}: {actual[at]!r} where {expected[at]!r} +- {allowed[at]:.3g} was expected"
    )
