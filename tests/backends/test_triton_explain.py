"""The lines that `explain` prints for the `triton` backend."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from attnlib import AttentionSpec, explain
from attnlib.backends.base import AttentionBackend
from attnlib.backends.loading import configured
from attnlib.backends.triton import TritonBackend
from attnlib.device import DeviceInfo, resolve_device
from attnlib.ops.triton.hopper.preference import hopper_decode_keys
from attnlib.ops.triton.hopper.sizes import CHUNK_TOKENS, COPIED_TOKENS, SCALED_TOKENS
from attnlib.score_functions.builtin import documents, relative_logits
from attnlib.sparse.compressed_entries import CompressedEntries
from attnlib.sparse.key_selection import KeySelection
from attnlib.spec import MaskKind

DECODE = (
    "decode:  Hopper kernel from sequence length 256 (128 from 17 to 132 requests, 2048 above) and "
    "up to 8 query tokens; else portable Triton kernel"
)


def _lines(
    device: str | DeviceInfo = "sm_90",
    backend: type[AttentionBackend] = TritonBackend,
    **features: Any,
) -> list[str]:
    layer = {
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_size": 128,
        "dtype": torch.bfloat16,
        "block_size": 16,
        **features,
    }
    lines = backend.explain_lines(AttentionSpec(**layer), resolve_device(device))
    # The others have tests of their own, `tiles:` in test_triton_explain_tiles.
    return [line for line in lines if not line.startswith(("tiles:", "splits:"))]


def test_the_kernels_of_both_phases_with_their_limits() -> None:
    assert _lines() == ["prefill: Hopper kernel", DECODE]
    assert "up to 4 query tokens" in _lines(num_heads=128)[1]
    few_heads = _lines(num_heads=8, num_kv_heads=1)[1]
    assert "(128 from 132 to 1056 requests, 2048 above)" in few_heads


@pytest.mark.parametrize(
    ("changes", "on_hopper", "elsewhere"),
    [
        ({}, True, True),
        ({"sliding_window": 2048}, True, True),
        ({"sliding_window": 1024}, False, False),
        ({"attention_chunk_size": 1024}, False, False),
        ({"block_size": 1}, False, True),
        ({"block_size": 24}, True, True),
        ({"kv_cache_dtype": "fp8_e4m3"}, False, True),
        ({"kv_cache_dtype": "int4_per_group"}, True, True),
        ({"score_function": documents()}, False, True),
        ({"batch_invariant": True}, False, False),
        ({"attn_type": "encoder_only"}, False, False),
        ({"key_selection": KeySelection(max_blocks=16)}, False, False),
    ],
)
def test_layers_whose_prefills_divide_keys(
    changes: dict[str, Any], on_hopper: bool, elsewhere: bool
) -> None:
    """`select_prefills` and `PlainPrefill` decide so; see tests/ops/triton/hopper/test_dispatch."""
    for device, divides in {"sm_90": on_hopper, "sm_80": elsewhere, "cpu": False}.items():
        layer = {"num_heads": 32, "num_kv_heads": 8, "head_size": 128, "block_size": 16, **changes}
        spec = AttentionSpec(dtype=torch.bfloat16, **layer)
        lines = TritonBackend.explain_lines(spec, resolve_device(device))
        found = [line for line in lines if line.startswith("splits:")]
        assert len(found) == divides, device
        assert all("from sequence length 2049 on" in line for line in found)


def test_layers_with_selected_keys_use_one_kernel() -> None:
    selection = KeySelection(max_blocks=16, block_size=128, scope="kv_head")
    lines = ["prefill, decode: portable Triton kernel over selected keys"]
    assert _lines(key_selection=selection) == lines
    assert _lines("sm_80", key_selection=selection) == lines


def test_selected_latents_have_a_hopper_kernel() -> None:
    """M11, P10: with one list for all heads of a token."""
    tokens = {"key_selection": KeySelection(max_blocks=2048)}
    latent = {"num_kv_heads": 1, "head_size": 576, "head_size_v": 512, "use_mla": True}
    portable = "prefill, decode: portable Triton kernel over selected keys"
    assert _lines(**latent, **tokens) == ["prefill, decode: Hopper kernel over selected latents"]
    assert _lines("sm_80", **latent, **tokens) == [portable]
    (line,) = _lines(**{**latent, "num_heads": 97}, **tokens)
    assert line.startswith(f"{portable} (97 query heads")
    shared = KeySelection(max_blocks=16, query_block_size=4)
    (line,) = _lines(**latent, key_selection=shared)
    assert "lists per query head or shared by query tokens" in line


def test_batch_invariant_layers() -> None:
    lines = ["prefill, decode: portable batch-invariant Triton kernel"]
    assert _lines("sm_80", batch_invariant=True) == lines
    assert _lines(batch_invariant=True) == ["prefill, decode: batch-invariant Hopper kernels"]
    (line,) = _lines(batch_invariant=True, head_size=320)
    assert line.startswith(lines[0]) and "head size 320" in line
    portable = configured(TritonBackend, {"kernels": "portable"})
    assert _lines(backend=portable, batch_invariant=True) == [
        f"{lines[0]} (configured: kernels=portable)"
    ]


def test_latents() -> None:
    """P10: the Hopper kernels over heads are not mentioned."""
    latent = {"num_kv_heads": 1, "head_size": 576, "head_size_v": 512, "use_mla": True}
    prefill, decode = _lines(num_heads=16, **latent)
    assert prefill == (
        "prefill: Hopper kernel over latents from sequence length 513; else portable Triton kernel"
    )
    assert decode == (
        "decode:  Hopper kernel over latents in batches of 8448 keys and more (one request: "
        "1056); else portable Triton kernel"
    )
    assert "in batches of 4224 keys" in _lines(num_heads=128, **latent)[1]
    for line in _lines(num_heads=97, **latent):
        assert "97 query heads; the Hopper kernel over latents takes up to 64" in line
    assert _lines(num_heads=16, kv_cache_dtype="fp8", **latent)[1] == decode
    assert _lines("sm_80", num_heads=16, **latent) == ["prefill, decode: portable Triton kernels"]


def test_the_stated_limits_are_those_of_the_dispatch() -> None:
    """On both sides of each number of requests, with 8 KV heads and 132 multiprocessors."""
    few, short, least, most, many = (int(word) for word in re.findall(r"\d+", DECODE)[:5])
    numbers = (least - 1, least, most, most + 1)
    found = [hopper_decode_keys(requests, 8, 132) for requests in numbers]
    assert found == [few, short, short, many]


def test_a_window_that_never_shows_enough_keys() -> None:
    prefill, decode = _lines(sliding_window=128, head_size=64)
    assert prefill == "prefill: Hopper kernel"
    assert decode == (
        "decode:  portable Triton kernel (at most 135 keys are visible; the Hopper kernel is used "
        "from 256 on)"
    )
    assert "(at most 135 keys" in _lines(attention_chunk_size=128, head_size=64)[1]
    assert "(at most 255 keys" in _lines(sliding_window=248, head_size=64)[1]
    assert "from sequence length 256 (2048 above" in _lines(sliding_window=249, head_size=64)[1]
    assert "(at most 127 keys" in _lines(sliding_window=120)[1]
    assert _lines(sliding_window=121)[1] == DECODE
    assert _lines(window=(64, None), mask_kind="bidirectional")[1] == DECODE, "no right bound"


def test_the_reasons_against_the_hopper_kernels() -> None:
    """The phase, the value, and the limit."""
    prefill, decode = _lines(block_size=24)
    assert prefill.startswith("prefill: portable Triton kernel (block_size 24")
    assert "16, 32, 64, 128, 256" in prefill
    assert decode.startswith("decode:  portable Triton kernel (block_size 24")
    assert "multiples of 16" in _lines(kv_cache_dtype=torch.float8_e4m3fn, head_size=72)[0]
    prefill, decode = _lines(num_heads=96, num_kv_heads=1)
    assert prefill == "prefill: Hopper kernel" and "96 query heads" in decode


@pytest.mark.parametrize("device", ["sm_80", "sm_120", DeviceInfo("cuda", is_rocm=True)], ids=str)
def test_other_gpus_use_the_portable_kernels(device: str | DeviceInfo) -> None:
    assert _lines(device) == ["prefill, decode: portable Triton kernels"]


def test_a_cpu_interprets_them() -> None:
    assert "interpreted on the CPU" in _lines("cpu")[0]


def test_layers_without_a_cache() -> None:
    assert _lines(attn_type="encoder_only") == ["prefill: Hopper kernel, no KV cache"]
    assert _lines("sm_80", attn_type="encoder_only") == [
        "prefill: portable Triton kernel, no KV cache"
    ]
    (line,) = _lines(attn_type="encoder_only", head_size=32)
    assert line.startswith("prefill: portable Triton kernel (keys have head size 32")


def test_a_configuration_for_portable_kernels_is_named() -> None:
    class Portable(TritonBackend):
        config = {"kernels": "portable"}

    assert _lines(backend=Portable) == [
        "prefill, decode: portable Triton kernels (configured: kernels=portable)"
    ]


def test_explain_prints_them_for_the_chosen_backend() -> None:
    pytest.importorskip("triton")
    spec = AttentionSpec(
        num_heads=32, num_kv_heads=8, head_size=128, dtype=torch.bfloat16, block_size=16
    )
    text = str(explain(spec, device="sm_90", backend="triton"))
    assert re.search(r"^  triton +chosen +prefill: Hopper kernel$", text, re.M)
    assert re.search(r"^ +decode:  Hopper kernel from sequence length 256", text, re.M)


OVER_COPIES = " on: Hopper kernel over bfloat16 copies"
COPIES = (
    f"; from {CHUNK_TOKENS} query tokens of one request, {COPIED_TOKENS} of several{OVER_COPIES}"
)


@pytest.mark.parametrize(
    ("changes", "copies"),
    [
        ({"kv_cache_dtype": "int4_per_group"}, True),
        ({"kv_cache_dtype": "nvfp4"}, True),
        ({"kv_cache_dtype": "int4_per_group", "num_kv_heads": 32}, False),
        ({"kv_cache_dtype": "int4_per_group", "dtype": torch.float32}, False),
        ({"kv_cache_dtype": "fp8_e4m3", "mask_kind": MaskKind.QUERY_BIAS}, False),
        ({"block_size": 1}, True),
        ({"kv_cache_dtype": "fp8_e4m3", "block_size": 24, "num_kv_heads": 32}, True),
        ({}, False),
    ],
)
def test_prefills_of_long_prompts_over_copies(changes: dict[str, Any], copies: bool) -> None:
    prefill = _lines(**changes)[0]
    if changes.get("block_size") == 24:
        assert prefill.endswith(f"); from 256 query tokens{OVER_COPIES}"), prefill
        return
    least = COPIED_TOKENS if "block_size" in changes else SCALED_TOKENS
    assert prefill.endswith(f"; from {least} query tokens{OVER_COPIES}" if copies else "")
    assert (OVER_COPIES in prefill) == copies, prefill


def test_float8_caches_and_the_hopper_kernels() -> None:
    for name, dtype in (("fp8_e4m3", "float8_e4m3fn"), ("fp8_e5m2", "float8_e5m2")):
        prefill, decode = _lines(kv_cache_dtype=name)
        converts = f"Hopper kernel (products in float16, to which {dtype} is converted)"
        assert prefill == f"prefill: {converts}{COPIES}"
        bounds = (
            "(128 from 17 to 132 requests, 2048 above)",
            "(128 from 17 to 132 requests, 64 above)",
        )
        assert decode == DECODE.replace("Hopper kernel", converts).replace(*bounds)


def test_score_functions_and_the_hopper_kernels() -> None:
    """M10: the Gluon kernels take them; another property against it is the reason."""
    assert _lines(score_function=documents()) == ["prefill: Hopper kernel", DECODE]
    for line in _lines(score_function=documents(), block_size=24):
        assert "portable Triton kernel (block_size 24" in line
    assert _lines("sm_80", score_function=documents()) == [
        "prefill, decode: portable Triton kernels"
    ]
    prefill, decode = _lines(score_function=documents(), head_size=512)
    assert "score function: the Hopper prefill takes none with head sizes above 256" in prefill
    assert decode.startswith("decode:  Hopper kernel")
    (line,) = _lines(score_function=documents(), batch_invariant=True)
    assert "portable batch-invariant Triton kernel (score function: not supported by" in line


def test_tensors_and_sinks_of_query_tokens() -> None:
    """M21, M22: each is the reason against the kernel that does not take it."""
    prefill, decode = _lines(score_function=relative_logits())
    assert "portable Triton kernel (tensors of query tokens: the Hopper prefill" in prefill
    assert decode == DECODE
    for line in _lines(token_sinks=True):
        assert "portable Triton kernel (sinks of query tokens: not supported by" in line


USED = (
    "float8 queries: prefills from 4096 query tokens on round queries and weights to e4m3; other "
    "calls do not"
)


@pytest.mark.parametrize(
    ("device", "changes", "reason"),
    [
        ("sm_90", {}, ""),
        ("sm_90", {"sliding_window": 4096, "block_size": 128}, ""),
        ("sm_90", {"has_sink": True}, "sinks"),
        ("sm_90", {"head_size": 64}, "head size 64, not 128"),
        ("sm_90", {"head_size": 64, "has_sink": True}, "head size 64, not 128; sinks"),
        ("sm_90", {"logits_soft_cap": 50.0}, "soft cap"),
        ("sm_90", {"score_function": documents()}, "score function"),
        ("sm_90", {"num_kv_heads": 32}, "fewer than 2 query heads per KV head"),
        ("sm_90", {"num_heads": 56}, "7 query heads per KV head, which do not divide 64"),
        ("sm_90", {"mask_kind": MaskKind.QUERY_BIAS}, "portable prefill kernel"),
        ("sm_90", {"attn_type": "encoder_only"}, "no KV cache"),
        ("sm_80", {}, "only Hopper kernels have float8 products"),
        ("sm_100", {"head_size": 64}, "only Hopper kernels have float8 products"),
        ("cpu", {}, "only Hopper kernels have float8 products"),
    ],
)
def test_float8_queries(device: str, changes: dict[str, Any], reason: str) -> None:
    """M19: every layer with the permission says whether its prefills use it, and why not."""
    lines = _lines(device, **{"kv_cache_dtype": "fp8_e4m3", "allow_fp8_queries": True, **changes})
    found = [line for line in lines if line.startswith("float8 queries: ")]
    assert found == [f"float8 queries: not used ({reason})" if reason else USED]
    assert any("4096 on e4m3 copies" in line for line in lines) == (not reason)
    without = _lines(device, **{"kv_cache_dtype": "fp8_e4m3", **changes})
    assert not any("float8 queries" in line for line in without)


def test_float8_queries_and_configured_kernels() -> None:
    portable = configured(TritonBackend, {"kernels": "portable"})
    lines = _lines(backend=portable, kv_cache_dtype="fp8_e4m3", allow_fp8_queries=True)
    assert lines[-1] == "float8 queries: not used (configured: kernels=portable)"


LATENTS: dict[str, Any] = {
    "num_kv_heads": 1,
    "head_size": 512,
    "use_mla": True,
    "sliding_window": 128,
}


@pytest.mark.parametrize(
    ("changes", "selection", "reason"),
    [
        ({}, None, ""),
        ({}, KeySelection(max_blocks=128), ""),
        ({}, KeySelection(max_blocks=16, scope="query_head"), "per query head"),
        ({"sliding_window": 4096}, None, "windows of up to 1024"),
        ({"sliding_window": None}, None, "windows of up to 1024"),
        ({"num_heads": 97}, None, "97 query heads"),
    ],
)
def test_layers_over_two_key_streams(
    changes: dict[str, Any], selection: KeySelection | None, reason: str
) -> None:
    """One Hopper kernel, or the reason against it; elsewhere one kernel for each stream."""
    layer = (
        LATENTS
        | {"compressed_entries": CompressedEntries(compress_rate=4, selection=selection)}
        | changes
    )
    lines = _lines(**layer)
    assert (lines[0].startswith("prefill, decode: Hopper kernel over own latents")) == (not reason)
    assert len(lines) == 1 or (reason in lines[-1] and lines[-1].startswith("entries: "))
    assert _lines("sm_80", **layer)[-1].endswith("the sink counts once")
