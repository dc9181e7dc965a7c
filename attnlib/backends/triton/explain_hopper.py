"""The lines that `explain` prints about the Hopper kernels of prefills and decodes.

Imports no triton: the answer follows from the layer and the compute capability.
"""

from __future__ import annotations

from typing import NamedTuple

from attnlib.backends.triton.spec_shape import call_features, layer_shape
from attnlib.kv_dtype import format_pair
from attnlib.ops.triton.heuristics.splits import visible_bound
from attnlib.ops.triton.hopper.preference import (
    LATENT_KEYS_PER_SM,
    LATENT_KEYS_PER_SM_ONE_REQUEST,
    LATENT_PREFILL_KEYS,
    PAIRS_PER_SM,
    SHORT_DECODE_KEYS,
    decode_keys,
    reads_short_decodes,
)
from attnlib.ops.triton.hopper.sizes import (
    BLOCK_SIZES,
    COPIED_GROUP,
    COPIED_TOKENS,
    copied_tokens,
    decode_rows,
    gathers,
    latent_head_blocks,
    only_copies,
)
from attnlib.ops.triton.hopper.support import (
    decode_unsupported_reasons,
    latent_unsupported_reasons,
    prefill_unsupported_reasons,
)
from attnlib.spec import AttentionSpec

__all__ = ["HopperChip", "copies_note", "hopper_lines", "no_float8_products"]

NUM_SMS = 132
"""Multiprocessors of an H100 SXM, an H200 and a GH200. Other Hopper GPUs have fewer (114 on an
H100 PCIe, 78 on an H20): there the batch size from which longer sequences are required is lower,
and layers with more KV heads than multiprocessors use the portable decode kernel."""

_UNBOUNDED = 1 << 30


class HopperChip(NamedTuple):
    """A chip of which the compute capability is known."""

    capability: tuple[int, int]
    num_sms: int = NUM_SMS


def copies_note(spec: AttentionSpec, capability: tuple[int, int]) -> str:
    """How the prefill reads long prompts, if it copies their keys first; else nothing."""
    small, only = gathers(spec.block_size), _only_copies(spec)
    if spec.group_size < COPIED_GROUP and not only or not (spec.is_kv_quantized or small):
        return ""
    if spec.score_function is not None or spec.use_mla or spec.dtype.itemsize != 2:
        return ""
    shape = layer_shape(spec)._replace(cache_dtype=spec.dtype, block_size=BLOCK_SIZES[-1])
    features = call_features(spec)
    if prefill_unsupported_reasons(shape, features, HopperChip(capability)):
        return ""
    form = spec.kv_dtype.itemsize, spec.block_size, spec.scales_in_page
    seen = spec.visible_window.as_kernel_args()[0], spec.attention_chunk_size or 0
    one, several = (copied_tokens(*form, requests, *seen) for requests in (1, 2))
    tokens = f"{one} query tokens" + (f" of one request, {several} of several" * (one < several))
    elements = str(spec.dtype).removeprefix("torch.")
    found = f"; from {tokens} on: Hopper kernel over {elements} copies"
    if spec.allow_fp8_queries and not no_float8_products(spec):
        found += f", from {COPIED_TOKENS} on e4m3 copies"
    return found


def _only_copies(spec: AttentionSpec) -> bool:
    """Whether prefills read copies or use the portable kernel (`sizes.only_copies`)."""
    return not spec.scales_in_page and only_copies(spec.kv_dtype.itemsize, spec.block_size)


def no_float8_products(spec: AttentionSpec) -> list[str]:
    """Why prefills have no float8 products (`converted_prefill.copied_rows`, `multiplies_float8`);
    empty if those over copies have them."""
    group, sizes = spec.group_size, sorted({spec.head_size, spec.head_size_v})
    against = [
        (sizes != [128], f"head size {' and '.join(map(str, sizes))}, not 128"),
        (group < COPIED_GROUP, f"fewer than {COPIED_GROUP} query heads per KV head"),
        (64 % group != 0, f"{group} query heads per KV head, which do not divide 64"),
        (spec.has_sink, "sinks"),
        (spec.logits_soft_cap is not None, "soft cap"),
        (spec.score_function is not None, "score function"),
    ]
    return [reason for applies, reason in against if applies]


def _latent_lines(spec: AttentionSpec, capability: tuple[int, int]) -> list[str]:
    """The lines of layers over latents."""
    chip = HopperChip(capability)
    reasons = latent_unsupported_reasons(layer_shape(spec), call_features(spec), chip)
    if spec.score_function is not None:
        reasons.append(f"score_function={spec.score_function}: portable kernels only")
    portable = "portable Triton kernel"
    if reasons:
        line = f"{portable} over latents ({'; '.join(reasons)})"
        return [f"prefill: {line}", f"decode:  {line}"]
    blocks = latent_head_blocks(spec.num_heads)
    one, keys = (
        -(-per_sm * NUM_SMS // blocks)
        for per_sm in (LATENT_KEYS_PER_SM_ONE_REQUEST, LATENT_KEYS_PER_SM)
    )
    return [
        f"prefill: Hopper kernel over latents from sequence length {LATENT_PREFILL_KEYS + 1}; else "
        f"{portable}",
        f"decode:  Hopper kernel over latents in batches of {keys} keys and more (one request: "
        f"{one}); else {portable}",
    ]


def hopper_lines(spec: AttentionSpec, capability: tuple[int, int]) -> list[str]:
    """The lines of layers whose prefills and decodes have a Hopper kernel each, with the reasons
    where the portable one serves them."""
    if spec.use_mla:
        return _latent_lines(spec, capability)
    layer = (layer_shape(spec), call_features(spec), HopperChip(capability))
    prefill = prefill_unsupported_reasons(*layer)
    decode = decode_unsupported_reasons(*layer) or _window_reasons(spec)
    portable, gluon = "portable Triton kernel", "Hopper kernel"
    copies = copies_note(spec, capability)
    if spec.is_kv_quantized:
        pair = format_pair(spec.kv_format, spec.value_format)
        paged = spec.kv_format.name if spec.scales_in_page else None
        cache = pair or paged or str(spec.kv_dtype).removeprefix("torch.")
        gluon += f" (products in float16, to which {cache} is converted)"
    return [
        f"prefill: {portable} ({'; '.join(prefill)}){copies if _only_copies(spec) else ''}"
        if prefill
        else f"prefill: {gluon}{copies}",
        f"decode:  {portable} ({'; '.join(decode)})"
        if decode
        else f"decode:  {gluon} {_decode_conditions(spec)}; else {portable}",
    ]


def _decode_conditions(spec: AttentionSpec) -> str:
    few, many = decode_keys(spec.kv_dtype, spec.head_size)
    requests = PAIRS_PER_SM * NUM_SMS // spec.num_kv_heads
    least = -(-NUM_SMS // spec.num_kv_heads)
    others = f"{many} above {requests} requests"
    if reads_short_decodes(spec.head_size):
        others = f"{SHORT_DECODE_KEYS} from {least} to {requests} requests, {many} above"
    return f"from sequence length {few} ({others}) and up to {_max_query_len(spec)} query tokens"


def _max_query_len(spec: AttentionSpec) -> int:
    stored = layer_shape(spec).page_format
    most = decode_rows(spec.head_size_v, spec.value_format.dtype, stored)
    return max(1, min(8, most // spec.group_size))


def _window_reasons(spec: AttentionSpec) -> list[str]:
    """A window or chunk that never shows as many keys as the Hopper decode kernel needs."""
    most = visible_bound(
        _max_query_len(spec),
        _UNBOUNDED,
        spec.visible_window.as_kernel_args(),
        spec.is_causal,
        spec.attention_chunk_size or 0,
    )
    few = min(decode_keys(spec.kv_dtype, spec.head_size))
    if reads_short_decodes(spec.head_size):
        few = min(few, SHORT_DECODE_KEYS)
    return (
        [f"at most {most} keys are visible; the Hopper kernel is used from {few} on"]
        if most < few
        else []
    )
