"""Which kernels of the `triton` backend serve a layer: the lines that `explain` prints.

Imports no triton: the answer follows from the layer and the compute capability.
"""

from __future__ import annotations

from attnlib.backends.triton.explain_hopper import (
    HopperChip,
    copies_note,
    hopper_lines,
    no_float8_products,
)
from attnlib.backends.triton.explain_tiles import tile_lines
from attnlib.backends.triton.spec_shape import call_features, layer_shape
from attnlib.device import DeviceInfo
from attnlib.kv_dtype import format_pair
from attnlib.ops.triton.heuristics.splits import LEAST_DIVIDED_KEYS, visible_bound
from attnlib.ops.triton.hopper.sizes import BLOCK_SIZES, COPIED_TOKENS, gathers, hopper_reads
from attnlib.ops.triton.hopper.streams_support import streams_unsupported_reasons
from attnlib.ops.triton.hopper.support import (
    invariant_unsupported_reasons,
    prefill_unsupported_reasons,
    selected_latents_unsupported_reasons,
)
from attnlib.sparse.key_selection import SelectionScope
from attnlib.spec import AttentionSpec

__all__ = ["kernel_lines"]


def kernel_lines(spec: AttentionSpec, device: DeviceInfo, kernels: str = "auto") -> list[str]:
    """The kernels of a layer (`_kernel_lines`), what they do with the permission of float8 queries,
    and where their tiles come from."""
    lines = _kernel_lines(spec, device, kernels)
    notes = _splits_lines(spec, device, lines)
    if spec.allow_fp8_queries:
        notes.append(_float8_queries_line(spec, device, kernels, lines))
    return [*lines, *notes, *tile_lines(spec, device, lines)]


def _kernel_lines(spec: AttentionSpec, device: DeviceInfo, kernels: str) -> list[str]:
    """The kernels for prefill and for decode, with the reasons why a Hopper kernel is not used.

    Args:
        spec: what the layer needs.
        device: facts about the device.
        kernels: "auto", "hopper" or "portable", as the backend is configured.
    """
    if device.type == "cpu":
        return ["prefill, decode: portable Triton kernels, interpreted on the CPU (for tests)"]
    if not spec.is_paged:
        return [f"prefill: {_unpaged_kernel(spec, device, kernels)}, no KV cache"]
    if spec.compressed_entries is not None:
        return _stream_lines(spec, device, kernels)
    if spec.key_selection is not None:
        return _selected_lines(spec, device, kernels == "portable")
    if spec.batch_invariant:
        return _invariant_lines(spec, device, kernels)
    not_hopper = device.is_rocm or device.capability is None or device.capability[0] != 9
    if spec.scales_in_page:
        return _page_lines(spec, None if not_hopper else device.capability, kernels)
    if kernels == "portable":
        return ["prefill, decode: portable Triton kernels (configured: kernels=portable)"]
    if not_hopper or device.capability is None:
        return ["prefill, decode: portable Triton kernels"]
    return hopper_lines(spec, device.capability)


def _splits_lines(spec: AttentionSpec, device: DeviceInfo, lines: list[str]) -> list[str]:
    """Which prefills divide their keys over programs (`splits.prefill_splits`); nothing for layers
    of which none does."""
    if device.type == "cpu" or not spec.is_paged or spec.batch_invariant:
        return []
    if spec.key_selection is not None or spec.compressed_entries is not None:
        return []
    if "Hopper kernel" in lines[0].partition(";")[0] and (
        spec.is_kv_quantized or gathers(spec.block_size) or spec.score_function is not None
    ):
        return []
    chunk = spec.attention_chunk_size or 0
    most = LEAST_DIVIDED_KEYS
    mask = (spec.visible_window.as_kernel_args(), spec.is_causal, chunk)
    if visible_bound(1, most, *mask) < most:
        return []
    return [f"splits:  prefills of few query tiles from sequence length {most + 1} on"]


def _float8_queries_line(
    spec: AttentionSpec, device: DeviceInfo, kernels: str, lines: list[str]
) -> str:
    """Which calls use the permission of float8 queries (M19), or why none does."""
    if any("e4m3 copies" in line for line in lines):
        return (
            f"float8 queries: prefills from {COPIED_TOKENS} query tokens on round queries and "
            "weights to e4m3; other calls do not"
        )
    if not spec.is_paged:
        reasons = ["no KV cache"]
    elif device.is_rocm or (device.capability or (0, 0))[0] != 9:
        reasons = ["only Hopper kernels have float8 products"]
    elif kernels == "portable":
        reasons = ["configured: kernels=portable"]
    elif spec.use_mla or spec.key_selection is not None:
        reasons = ["latents" if spec.use_mla else "selected keys"]
    else:
        reasons = no_float8_products(spec) or ["portable prefill kernel"]
    return f"float8 queries: not used ({'; '.join(reasons)})"


def _unpaged_kernel(spec: AttentionSpec, device: DeviceInfo, kernels: str) -> str:
    """The kernel over packed keys, with the reasons why it is not the Hopper kernel."""
    portable = "portable Triton kernel"
    if kernels == "portable" or device.is_rocm or (device.capability or (0, 0))[0] != 9:
        return portable
    assert device.capability is not None
    shape = layer_shape(spec)._replace(cache_dtype=spec.dtype, block_size=BLOCK_SIZES[-1])
    features = call_features(spec)._replace(score_function=False)
    reasons = prefill_unsupported_reasons(shape, features, HopperChip(device.capability))
    if spec.score_function is not None:
        reasons.append(f"score_function={spec.score_function}: portable kernel only")
    if spec.batch_invariant:
        reasons.append("batch_invariant: portable kernel only")
    return f"{portable} ({'; '.join(reasons)})" if reasons else "Hopper kernel"


def _stream_lines(spec: AttentionSpec, device: DeviceInfo, kernels: str) -> list[str]:
    """The lines of layers with a second key stream: one kernel for both, or one for each."""
    entries = spec.compressed_entries
    assert entries is not None
    form, capability, why = entries.selection, device.capability, ""
    is_hopper = not device.is_rocm and capability is not None and capability[0] == 9
    if is_hopper and capability is not None and spec.use_mla and kernels != "portable":
        one_list = form is None or form.scope != SelectionScope.QUERY_HEAD
        layer = (layer_shape(spec), call_features(spec), HopperChip(capability))
        seen = (spec.visible_window.as_kernel_args(), spec.attention_chunk_size or 0)
        reasons = streams_unsupported_reasons(*layer, *seen, one_list)
        if not reasons:
            return [f"prefill, decode: Hopper kernel over own latents and entries, over {entries}"]
        why = f" ({'; '.join(reasons)})"
    kernel = (
        "decode kernel, one query at a time"
        if form is None
        else "portable kernel over selected keys"
    )
    own = _kernel_lines(spec.replace(compressed_entries=None), device, kernels)
    merged = "merged by the LSE, the sink counts once"
    return [*own, f"entries: {kernel}, over {entries}; {merged}{why}"]


def _page_lines(spec: AttentionSpec, capability: tuple[int, int] | None, kernels: str) -> list[str]:
    """The lines of layers whose pages hold their scales (M16); `capability` of Hopper GPUs only."""
    stored, pair = spec.kv_format, format_pair(spec.kv_format, spec.value_format)
    how = f"elements and scales of {pair or stored.name} are decoded in registers"
    if capability is None or kernels == "portable":
        configured = "; configured: kernels=portable" if kernels == "portable" else ""
        return [f"prefill, decode: portable Triton kernels ({how}{configured})"]
    if pair is not None:
        how = f"keys and values in two formats; {how}"
        if not hopper_reads(stored, spec.value_format):
            return [f"prefill, decode: portable Triton kernels ({how})"]
    elif stored.is_open:
        return [f"prefill, decode: portable Triton kernels (an open format; {how})"]
    prefill = f"prefill: portable Triton kernel ({how}){copies_note(spec, capability)}"
    if not hopper_reads(stored):
        return [prefill, "decode:  portable Triton kernel"]
    return [prefill, hopper_lines(spec, capability)[1]]


def _selected_lines(spec: AttentionSpec, device: DeviceInfo, portable_only: bool) -> list[str]:
    """The line of layers that attend to selected keys."""
    selection, portable = spec.key_selection, "prefill, decode: portable Triton kernel"
    assert selection is not None
    if device.is_rocm or device.capability is None or device.capability[0] != 9:
        return [f"{portable} over selected keys"]
    if portable_only or not spec.use_mla:
        return [f"{portable} over selected keys"]
    one_list = selection.query_block_size == 1 and selection.scope != SelectionScope.QUERY_HEAD
    features = call_features(spec)._replace(query_bias=False)
    chip = HopperChip(device.capability)
    reasons = selected_latents_unsupported_reasons(layer_shape(spec), features, chip, one_list)
    if reasons:
        return [f"{portable} over selected keys ({'; '.join(reasons)})"]
    return ["prefill, decode: Hopper kernel over selected latents"]


def _invariant_lines(spec: AttentionSpec, device: DeviceInfo, kernels: str) -> list[str]:
    """The kernels of batch-invariant layers, which serve all of their batches (M15)."""
    portable = "prefill, decode: portable batch-invariant Triton kernel"
    if kernels == "portable":
        return [f"{portable} (configured: kernels=portable)"]
    if device.is_rocm or device.capability is None or device.capability[0] != 9:
        return [portable]
    chip = HopperChip(device.capability)
    reasons = invariant_unsupported_reasons(layer_shape(spec), call_features(spec), chip)
    if reasons:
        return [f"{portable} ({'; '.join(reasons)})"]
    return ["prefill, decode: batch-invariant Hopper kernels"]
