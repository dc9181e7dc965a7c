"""Capabilities: one check for each field of a spec, all reasons, and fail-closed defaults."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
import torch

from attnlib.capabilities import (
    CHECKS,
    NOT_STATED,
    Capabilities,
    Sizes,
    StateCapabilities,
    unsupported_device_reasons,
    unsupported_reasons,
)
from attnlib.device import DeviceInfo
from attnlib.errors import RegistrationError
from attnlib.kv_dtype import KV_FORMAT_PAIRS, PAGE_FORMATS
from attnlib.score_functions.builtin import alibi_sqrt
from attnlib.selection import load_backend
from attnlib.sparse.compressed_entries import CompressedEntries
from attnlib.sparse.key_selection import KeySelection
from attnlib.spec import AttentionSpec, AttentionType, CudaGraphSupport, MaskKind, Window

CPU = DeviceInfo("cpu")

H200 = DeviceInfo("cuda", 0, (9, 0), name="H200")

BASE = {"num_heads": 8, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}

EVERYTHING = Capabilities(
    devices=("cpu", "cuda"),
    dtypes=(torch.bfloat16, torch.float16, torch.float32),
    kv_cache_dtypes=(torch.bfloat16, torch.float8_e4m3fn),
    kv_format_pairs=KV_FORMAT_PAIRS,
    kv_scale_kinds=("tensor", "head"),
    head_sizes=Sizes(1),
    head_size_v_may_differ=True,
    block_sizes=Sizes(1),
    kv_cache_layouts=("NHD", "HND"),
    group_sizes=Sizes(1),
    attn_types=tuple(AttentionType),
    mask_kinds=tuple(MaskKind),
    sliding_window=True,
    attention_chunks=True,
    logits_soft_cap=True,
    alibi=True,
    sink=True,
    token_sinks=True,
    score_function=True,
    key_selection=True,
    compressed_entries=True,
    mla=True,
    lse=True,
    kv_sharing=True,
    batch_invariant=True,
    cudagraph=CudaGraphSupport.ALWAYS,
)

CASES = {
    "num_kv_heads": (
        {"num_kv_heads": 1},
        {"group_sizes": Sizes(exactly=(1, 2, 4))},
        "num_heads/num_kv_heads=8 not supported (supported: 1, 2, 4)",
    ),
    "head_size": (
        {"head_size": 72},
        {"head_sizes": Sizes(16, 256, 16)},
        "head_size=72 not supported (supported: multiples of 16 from 16 to 256)",
    ),
    "head_size_v": (
        {"head_size_v": 32},
        {"head_size_v_may_differ": False},
        "head_size_v=32 must equal head_size=64",
    ),
    "dtype": (
        {"dtype": torch.float32},
        {"dtypes": (torch.float16,)},
        "dtype=float32 not supported (supported: float16)",
    ),
    "kv_cache_dtype": (
        {"kv_cache_dtype": "fp8"},
        {"kv_cache_dtypes": ()},
        "kv_cache_dtype=float8_e4m3fn not supported (supported: none)",
    ),
    "value_cache_dtype": (
        {"kv_cache_dtype": "int8_per_token_head", "value_cache_dtype": "nvfp4"},
        {"kv_format_pairs": ("int8_per_token_head,int4_per_group",)},
        "formats of keys and values=int8_per_token_head,nvfp4 not supported (supported: "
        "int8_per_token_head,int4_per_group)",
    ),
    "kv_scale_kind": (
        {"kv_cache_dtype": "fp8", "kv_scale_kind": "head"},
        {"kv_scale_kinds": ("tensor",)},
        "kv_scale_kind=head not supported (supported: tensor)",
    ),
    "block_size": (
        {"block_size": 24},
        {"block_sizes": Sizes(256, None, 256)},
        "block_size=24 not supported (supported: multiples of 256 from 256 up)",
    ),
    "kv_cache_layout": (
        {"kv_cache_layout": "HND"},
        {"kv_cache_layouts": ("NHD",)},
        "kv_cache_layout=HND not supported (supported: NHD)",
    ),
    "attn_type": (
        {"attn_type": "encoder_only"},
        {"attn_types": (AttentionType.DECODER,)},
        "attn_type=encoder_only not supported (supported: decoder)",
    ),
    "mask_kind": (
        {"mask_kind": "query_bias"},
        {"mask_kinds": (MaskKind.CAUSAL,)},
        "mask_kind=query_bias not supported (supported: causal)",
    ),
    "sliding_window": (
        {"sliding_window": 7},
        {"sliding_window": False},
        "sliding_window=7: not supported",
    ),
    "window": (
        {"window": Window(3, 0)},
        {"sliding_window": False},
        "window=Window(left=3, right=0): not supported",
    ),
    "attention_chunk_size": (
        {"attention_chunk_size": 32},
        {"attention_chunks": False},
        "attention_chunk_size=32: not supported",
    ),
    "logits_soft_cap": (
        {"logits_soft_cap": 30.0},
        {"logits_soft_cap": False},
        "logits_soft_cap=30.0: not supported",
    ),
    "has_alibi": ({"has_alibi": True}, {"alibi": False}, "ALiBi slopes: not supported"),
    "has_sink": ({"has_sink": True}, {"sink": False}, "attention sinks: not supported"),
    "token_sinks": (
        {"token_sinks": True},
        {"token_sinks": False},
        "sinks of query tokens: not supported",
    ),
    "score_function": (
        {"score_function": alibi_sqrt()},
        {"score_function": False},
        "score_function=attnlib.score_functions.biases._alibi_sqrt: not supported",
    ),
    "key_selection": (
        {"key_selection": KeySelection(max_blocks=16, block_size=128, scope="kv_head")},
        {"key_selection": False},
        "key_selection=16 blocks of 128 tokens per kv_head: not supported",
    ),
    "compressed_entries": (
        {"compressed_entries": CompressedEntries(compress_rate=128)},
        {"compressed_entries": False},
        "compressed_entries=all entries of 128 tokens: not supported",
    ),
    "use_mla": (
        {"use_mla": True, "num_kv_heads": 1},
        {"mla": False},
        "multi-head latent attention: not supported",
    ),
    "needs_lse": ({"needs_lse": True}, {"lse": False}, "returning the LSE: not supported"),
    "kv_sharing": (
        {"kv_sharing": True},
        {"kv_sharing": False},
        "sharing another layer's cache: not supported",
    ),
    "batch_invariant": (
        {"batch_invariant": True},
        {"batch_invariant": False},
        "batch_invariant=True: not supported",
    ),
    "cudagraph": (
        {"cudagraph": CudaGraphSupport.ALWAYS},
        {"cudagraph": CudaGraphSupport.UNIFORM_BATCH},
        "cudagraph=ALWAYS not supported (up to UNIFORM_BATCH)",
    ),
}


def test_every_field_has_exactly_one_check() -> None:
    """S5: a field without a check would be a feature that a backend may ignore."""
    assert list(CHECKS) == [field.name for field in dataclasses.fields(AttentionSpec)] or set(
        CHECKS
    ) == {field.name for field in dataclasses.fields(AttentionSpec)}
    # Every backend supports any number of heads and permissions, and the layer rotates.
    anywhere = {"num_heads", "allow_fp8_queries", "kv_rotation"}
    assert set(CASES) == set(CHECKS) - anywhere, "no test here"


@pytest.mark.parametrize("field", CASES)
def test_a_reason_names_the_value_and_the_limit(field: str) -> None:
    needed, limit, message = CASES[field]
    spec = AttentionSpec(**{**BASE, **needed})
    assert unsupported_reasons(spec, CPU, EVERYTHING) == []
    assert unsupported_reasons(spec, CPU, dataclasses.replace(EVERYTHING, **limit)) == [message]


@pytest.mark.parametrize("field", CASES)
def test_what_is_not_stated_is_unsupported(field: str) -> None:
    """S5: fail closed."""
    needed, limit, _ = CASES[field]
    silent = dataclasses.replace(EVERYTHING, **dict.fromkeys(limit, NOT_STATED))
    assert any(
        "not stated" in reason
        for reason in unsupported_reasons(AttentionSpec(**{**BASE, **needed}), CPU, silent)
    )


def test_all_reasons_are_given() -> None:
    spec = AttentionSpec(**{**BASE, "has_sink": True, "has_alibi": True, "head_size": 60})
    limited = dataclasses.replace(
        EVERYTHING, sink=False, alibi=False, head_sizes=Sizes(exactly=(64, 128))
    )
    assert len(unsupported_reasons(spec, CPU, limited)) == 3


def test_device_reasons() -> None:
    caps = dataclasses.replace(EVERYTHING, min_capability=(8, 0), max_capability=(9, 0))
    assert unsupported_device_reasons(H200, caps) == []
    assert unsupported_device_reasons(DeviceInfo("cuda", 0, (7, 5)), caps) == [
        "compute capability 7.5 is below 8.0"
    ]
    assert unsupported_device_reasons(DeviceInfo("cuda", 0, (10, 0)), caps) == [
        "compute capability 10.0 is above 9.0"
    ]
    assert unsupported_device_reasons(DeviceInfo("cuda", 0, None, is_rocm=True), caps) == [
        "ROCm devices: not supported"
    ]
    assert unsupported_device_reasons(DeviceInfo("mps"), caps) == [
        "device mps not supported (supported: cpu, cuda)"
    ]
    assert unsupported_device_reasons(CPU, Capabilities()) == [
        "devices: not stated by this backend, so not assumed"
    ]


def test_not_stated_can_be_pickled() -> None:
    assert pickle.loads(pickle.dumps(Capabilities())).lse is NOT_STATED


@pytest.mark.parametrize("name", list(PAGE_FORMATS))
def test_formats_with_scales_in_the_page_fail_closed(name: str) -> None:
    """M16: `kv_formats` decides, whatever dtypes and scale kinds a backend declares."""
    spec = AttentionSpec(
        num_heads=32, num_kv_heads=8, head_size=128, dtype=torch.bfloat16, kv_cache_dtype=name
    )
    device = DeviceInfo("cuda", 0, (9, 0), is_hypothetical=True)
    for backend in ("flash_attn", "flashinfer"):
        reasons = load_backend(backend).validate_configuration(spec, device)
        assert f"kv_cache_dtype={name} not supported (supported: none)" in reasons, backend
    for backend in ("torch", "triton"):
        assert not load_backend(backend).validate_configuration(spec, device), backend
    lines = load_backend("triton").explain_lines(spec, device)
    assert f"elements and scales of {name} are decoded in registers" in lines[0]
    assert "decode:  Hopper kernel" in lines[1]
    for changes, words in (
        ({"batch_invariant": True}, "batch_invariant=True with"),
        ({"key_selection": KeySelection(max_blocks=4)}, "key_selection with"),
    ):
        reasons = load_backend("triton").validate_configuration(spec.replace(**changes), device)
        assert any(f"{words} kv_cache_dtype={name}" in reason for reason in reasons), reasons
    fp8_only = Capabilities(kv_cache_dtypes=(torch.float8_e4m3fn, torch.int8))
    assert "kv_formats: not stated by this backend, so not assumed" in unsupported_reasons(
        spec, device, fp8_only
    )


@pytest.mark.parametrize(
    ("field", "value", "action"),
    [
        ("head_sizes", 64, "must be an attnlib.Sizes, such as"),
        ("block_sizes", (16, 32), "must be an attnlib.Sizes, such as"),
        ("devices", "cuda", "must be a tuple of str"),
        ("dtypes", [torch.float16], "must be a tuple of dtype"),
        ("dtypes", ("float16",), "must be a tuple of dtype"),
        ("mask_kinds", MaskKind.CAUSAL, "must be a tuple of MaskKind"),
        ("sink", 1, "must be True or False"),
        ("rocm", None, "must be True or False"),
        ("cudagraph", True, "must be a CudaGraphSupport"),
        ("min_capability", 90, "must be a pair of integers"),
        ("max_capability", (9,), "must be a pair of integers"),
    ],
)
def test_a_capability_of_another_type_is_refused(field: str, value: object, action: str) -> None:
    """Not later, as a TypeError or as a feature that is silently unsupported."""
    with pytest.raises(RegistrationError) as caught:
        Capabilities(**{field: value})
    text = str(caught.value)
    assert f"capability {field}={value!r} {action}" in text and f"leave {field} out" in text


def test_a_class_without_capabilities_says_so() -> None:
    """One that serves state layers only, as `fla` does, is not asked to define others."""
    spec = AttentionSpec(**BASE)
    unstated = type("Unstated", (load_backend("torch"),), {"capabilities": Capabilities()})
    assert unstated.validate_configuration(spec, CPU) == ["serves no attention layers"]
    unstated.state_capabilities = StateCapabilities()
    (reason,) = unstated.validate_configuration(spec, CPU)
    assert reason.endswith("define `capabilities`")
