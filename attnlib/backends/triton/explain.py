"""Which kernels of the `triton` backend serve a layer: the lines that `explain` prints.

Imports no triton: the answer follows from the layer and the compute capability.
"""

from __future__ import annotations

from typing import Any

from attnlib.backends.triton.explain_tiles import tile_lines
from attnlib.device import DeviceInfo
from attnlib.ops.triton.heuristics.hopper_tiles import key_parts
from attnlib.ops.triton.heuristics.splits import visible_bound
from attnlib.ops.triton.hopper.support import (
    BLOCK_SIZES,
    COPIED_GROUP,
    COPIED_TOKENS,
    HOPPER_DECODE_KEYS,
    LATENT_KEYS_PER_SM,
    LATENT_KEYS_PER_SM_ONE_REQUEST,
    LATENT_ROWS,
    PAIRS_PER_SM,
    SHORT_DECODE_KEYS,
    decode_keys,
    decode_rows,
    decode_unsupported_reasons,
    gathers,
    hopper_reads,
    invariant_unsupported_reasons,
    latent_head_blocks,
    latent_unsupported_reasons,
    prefill_unsupported_reasons,
    reads_short_decodes,
    selected_latents_unsupported_reasons,
)
from attnlib.sparse.key_selection import SelectionScope
from attnlib.spec import AttentionSpec, MaskKind

__all__ = ["kernel_lines"]

_NUM_SMS = 132
"""Multiprocessors of an H100 SXM, an H200 and a GH200. Other Hopper GPUs have fewer (114 on an
H100 PCIe, 78 on an H20): there the batch size from which longer sequences are required is lower,
and layers with more KV heads than multiprocessors use the portable decode kernel."""

_UNBOUNDED = 1 << 30


def kernel_lines(spec: AttentionSpec, device: DeviceInfo, kernels: str = "auto") -> list[str]:
    """The kernels of a layer (`_kernel_lines`), what they do with a threshold of weights and with
    the permission of float8 queries, and where their tiles come from."""
    lines = _kernel_lines(spec, device, kernels)
    notes = []
    if spec.skip_softmax_threshold is not None:
        notes.append(_threshold_line(spec, lines))
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
        own = _kernel_lines(spec.replace(compressed_entries=None), device, kernels)
        return [*own, _entries_line(spec)]
    if spec.key_selection is not None:
        return _selected_lines(spec, device, kernels == "portable")
    if spec.batch_invariant:
        return _invariant_lines(spec, device, kernels)
    not_hopper = device.is_rocm or device.capability is None or device.capability[0] != 9
    if spec.kv_format.scales_in_page:
        return _page_lines(spec, None if not_hopper else device.capability, kernels)
    if kernels == "portable":
        return ["prefill, decode: portable Triton kernels (configured: kernels=portable)"]
    if not_hopper or device.capability is None:
        return ["prefill, decode: portable Triton kernels"]
    return _hopper_lines(spec, device.capability)


def _threshold_line(spec: AttentionSpec, lines: list[str]) -> str:
    """Which prefills of these lines leave keys out (M18)."""
    small = f"leave out key tiles with weights below {spec.skip_softmax_threshold}"
    is_hopper = any(line.startswith("prefill: Hopper kernel") for line in lines)
    has_copies = any(" copies" in line for line in lines)
    # What the Hopper kernel does not leave out, whether it reads the cache or copies of it.
    hopper_exact = (
        spec.score_function is not None
        or spec.visible_window.left is not None
        or spec.attention_chunk_size is not None
        or max(spec.head_size, spec.head_size_v) > 256
        or key_parts(spec.head_size) > 1
    )
    exact = (
        spec.use_mla
        or spec.key_selection is not None
        or spec.compressed_entries is not None
        or spec.kv_format.scales_in_page
        or (is_hopper and (hopper_exact or spec.is_kv_quantized or gathers(spec.block_size)))
    )
    if not exact:
        return f"threshold: prefills {small}; decodes compute all keys"
    if has_copies and not hopper_exact:
        return f"threshold: prefills over copies {small}; other calls compute all keys"
    return "threshold: not used, these kernels compute all keys"


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
        reasons = _no_float8_products(spec) or ["portable prefill kernel"]
    return f"float8 queries: not used ({'; '.join(reasons)})"


def _unpaged_kernel(spec: AttentionSpec, device: DeviceInfo, kernels: str) -> str:
    """The kernel over packed keys, with the reasons why it is not the Hopper kernel."""
    portable = "portable Triton kernel"
    if kernels == "portable" or device.is_rocm or (device.capability or (0, 0))[0] != 9:
        return portable
    assert device.capability is not None
    reasons = prefill_unsupported_reasons(
        device.capability, spec.dtype, spec.dtype, (spec.head_size, spec.head_size_v),
        BLOCK_SIZES[-1], spec.group_size,
        causal_per_request=spec.mask_kind is MaskKind.PER_REQUEST, alibi=spec.has_alibi,
        bias=spec.mask_kind is MaskKind.QUERY_BIAS,
    )  # fmt: skip
    if spec.score_function is not None:
        reasons.append(f"score_function={spec.score_function}: portable kernel only")
    if spec.batch_invariant:
        reasons.append("batch_invariant: portable kernel only")
    return f"{portable} ({'; '.join(reasons)})" if reasons else "Hopper kernel"


def _entries_line(spec: AttentionSpec) -> str:
    """The line of the second key stream."""
    entries = spec.compressed_entries
    assert entries is not None
    kernel = (
        "decode kernel, one query at a time"
        if entries.selection is None
        else ("portable kernel over selected keys")
    )
    return f"entries: {kernel}, over {entries}; merged by the LSE, the sink counts once"


def _page_lines(spec: AttentionSpec, capability: tuple[int, int] | None, kernels: str) -> list[str]:
    """The lines of layers whose pages hold their scales (M16); `capability` of Hopper GPUs only."""
    stored = spec.kv_format
    how = f"elements and scales of {stored.name} are decoded in registers"
    if capability is None or kernels == "portable":
        configured = "; configured: kernels=portable" if kernels == "portable" else ""
        return [f"prefill, decode: portable Triton kernels ({how}{configured})"]
    prefill = f"prefill: portable Triton kernel ({how}){_copies(spec, capability)}"
    if not hopper_reads(stored):
        return [prefill, "decode:  portable Triton kernel"]
    return [prefill, _hopper_lines(spec, capability)[1]]


def _copies(spec: AttentionSpec, capability: tuple[int, int]) -> str:
    """How the prefill reads long prompts, if it copies their keys first; else nothing."""
    small = gathers(spec.block_size)
    if spec.group_size < COPIED_GROUP or not (spec.is_kv_quantized or small):
        return ""
    if spec.score_function is not None or spec.use_mla or spec.dtype.itemsize != 2:
        return ""
    if spec.kv_format.elements_per_group:  # portable kernels only
        return ""
    if prefill_unsupported_reasons(
        capability, spec.dtype, spec.dtype, (spec.head_size, spec.head_size_v), BLOCK_SIZES[-1],
        spec.group_size, causal_per_request=spec.mask_kind is MaskKind.PER_REQUEST,
        alibi=spec.has_alibi, bias=spec.mask_kind is MaskKind.QUERY_BIAS,
    ):  # fmt: skip
        return ""
    copies = f"{str(spec.dtype).removeprefix('torch.')} copies"
    if spec.allow_fp8_queries and not _no_float8_products(spec):
        copies = "e4m3 copies"
    return f"; from {COPIED_TOKENS} query tokens on: Hopper kernel over {copies}"


def _no_float8_products(spec: AttentionSpec) -> list[str]:
    """Why prefills have no float8 products (`converted_prefill.copied_rows`, `multiplies_float8`);
    empty if those over copies have them."""
    group, sizes = spec.group_size, sorted({spec.head_size, spec.head_size_v})
    against = [
        (sizes != [128], f"head size {' and '.join(map(str, sizes))}, not 128"),
        (group < COPIED_GROUP, f"fewer than {COPIED_GROUP} query heads per KV head"),
        (64 % group != 0, f"{group} query heads per KV head, which do not divide 64"),
        (spec.has_sink, "sinks"),
        (spec.logits_soft_cap is not None, "soft cap"),
        (spec.skip_softmax_threshold is not None, "threshold of weights"),
        (spec.score_function is not None, "score function"),
    ]
    return [reason for applies, reason in against if applies]


def _selected_lines(spec: AttentionSpec, device: DeviceInfo, portable_only: bool) -> list[str]:
    """The line of layers that attend to selected keys."""
    selection, portable = spec.key_selection, "prefill, decode: portable Triton kernel"
    assert selection is not None
    if device.is_rocm or device.capability is None or device.capability[0] != 9:
        return [f"{portable} over selected keys"]
    if portable_only or not spec.use_mla:
        return [f"{portable} over selected keys"]
    reasons = selected_latents_unsupported_reasons(
        device.capability, spec.dtype, spec.kv_dtype, (spec.head_size, spec.head_size_v),
        spec.num_heads,
        one_list_per_token=selection.query_block_size == 1
        and selection.scope != SelectionScope.QUERY_HEAD,
        causal_per_request=spec.mask_kind is MaskKind.PER_REQUEST, alibi=spec.has_alibi,
    )  # fmt: skip
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
    reasons = invariant_unsupported_reasons(
        device.capability, spec.dtype, spec.kv_dtype, (spec.head_size, spec.head_size_v),
        spec.block_size, spec.group_size, spec.num_kv_heads, _NUM_SMS,
        causal_per_request=spec.mask_kind is MaskKind.PER_REQUEST, alibi=spec.has_alibi,
        bias=spec.mask_kind is MaskKind.QUERY_BIAS, score=spec.score_function is not None,
        latent=spec.use_mla,
    )  # fmt: skip
    if reasons:
        return [f"{portable} ({'; '.join(reasons)})"]
    return ["prefill, decode: batch-invariant Hopper kernels"]


def _latent_lines(spec: AttentionSpec, capability: tuple[int, int]) -> list[str]:
    """The lines of layers over latents, whose prefills have no Hopper kernel."""
    reasons = latent_unsupported_reasons(
        capability, spec.dtype, spec.kv_dtype, (spec.head_size, spec.head_size_v),
        spec.block_size, spec.num_heads, _NUM_SMS,
        causal_per_request=spec.mask_kind is MaskKind.PER_REQUEST, alibi=spec.has_alibi,
        bias=spec.mask_kind is MaskKind.QUERY_BIAS,
    )  # fmt: skip
    if spec.score_function is not None:
        reasons.append(f"score_function={spec.score_function}: portable kernels only")
    prefill, portable = "prefill: portable Triton kernel over latents", "portable Triton kernel"
    if reasons:
        return [prefill, f"decode:  {portable} over latents ({'; '.join(reasons)})"]
    blocks = latent_head_blocks(spec.num_heads)
    one, keys = (
        -(-per_sm * _NUM_SMS // blocks)
        for per_sm in (LATENT_KEYS_PER_SM_ONE_REQUEST, LATENT_KEYS_PER_SM)
    )
    most = min(8, LATENT_ROWS // (spec.num_heads // blocks))
    return [
        prefill,
        f"decode:  Hopper kernel over latents for up to {most} query tokens and batches of {keys} "
        f"keys and more (one request: {one}); else {portable}",
    ]


def _hopper_lines(spec: AttentionSpec, capability: tuple[int, int]) -> list[str]:
    if spec.use_mla:
        return _latent_lines(spec, capability)
    layer = (
        capability,
        spec.dtype,
        spec.kv_dtype,
        (spec.head_size, spec.head_size_v),
        spec.block_size,
        spec.group_size,
    )
    features: dict[str, Any] = {
        "causal_per_request": spec.mask_kind is MaskKind.PER_REQUEST,
        "alibi": spec.has_alibi,
        "bias": spec.mask_kind is MaskKind.QUERY_BIAS,
    }
    prefill = prefill_unsupported_reasons(*layer, **features, score=spec.score_function is not None)
    decode = decode_unsupported_reasons(
        *layer, spec.num_kv_heads, _NUM_SMS, **features
    ) or _window_reasons(spec)
    portable, gluon = "portable Triton kernel", "Hopper kernel"
    if spec.is_kv_quantized:
        paged = spec.kv_format.scales_in_page
        cache = spec.kv_format.name if paged else str(spec.kv_dtype).removeprefix("torch.")
        gluon += f" (products in float16, to which {cache} is converted)"
    return [
        f"prefill: {portable} ({'; '.join(prefill)})"
        if prefill
        else f"prefill: {gluon}{_copies(spec, capability)}",
        f"decode:  {portable} ({'; '.join(decode)})"
        if decode
        else f"decode:  {gluon} {_decode_conditions(spec)}; else {portable}",
    ]


def _decode_conditions(spec: AttentionSpec) -> str:
    few, many = decode_keys(spec.kv_dtype)
    requests = PAIRS_PER_SM * _NUM_SMS // spec.num_kv_heads
    least = -(-_NUM_SMS // spec.num_kv_heads)
    others = f"{many} above {requests} requests"
    if reads_short_decodes(spec.head_size, spec.kv_dtype):
        others = f"{SHORT_DECODE_KEYS} from {least} to {requests} requests, {many} above"
    return f"from sequence length {few} ({others}) and up to {_max_query_len(spec)} query tokens"


def _max_query_len(spec: AttentionSpec) -> int:
    return max(1, min(8, decode_rows(spec.head_size_v, spec.kv_dtype) // spec.group_size))


def _window_reasons(spec: AttentionSpec) -> list[str]:
    """A window or chunk that never shows as many keys as the Hopper decode kernel needs."""
    most = visible_bound(
        _max_query_len(spec),
        _UNBOUNDED,
        spec.visible_window.as_kernel_args(),
        spec.is_causal,
        spec.attention_chunk_size or 0,
    )
    short = reads_short_decodes(spec.head_size, spec.kv_dtype)
    few = SHORT_DECODE_KEYS if short else HOPPER_DECODE_KEYS[0]
    return (
        [f"at most {most} keys are visible; the Hopper kernel is used from {few} on"]
        if most < few
        else []
    )
