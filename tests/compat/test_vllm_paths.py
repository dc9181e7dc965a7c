"""Names live where vLLM and MinivLLM have them."""

from __future__ import annotations

import importlib

import pytest

import attnlib
from attnlib.compat import minivllm, vllm
from attnlib.compat.vllm import backend_utils
from attnlib.ops import context_attention, paged_attention

API = (
    "Attention", "AttentionBackend", "AttentionMetadata", "AttentionType",
    "AttentionMetadataBuilder", "AttentionState", "get_attn_backend",
)  # fmt: skip
ABSTRACT = tuple(name for name in API if name not in ("Attention", "get_attn_backend"))


@pytest.mark.parametrize(
    ("path", "names", "source"),
    [
        ("attnlib.attention", API, attnlib),
        ("attnlib.selector", ("get_attn_backend",), attnlib),
        ("attnlib.backends", ("AttentionBackend", "AttentionImpl"), attnlib),
        (
            "attnlib.metadata",
            (
                "AttentionMetadata", "AttentionMetadataBuilder", "AttentionState",
                "CommonAttentionMetadata",
            ),
            attnlib,
        ),
        ("attnlib.layers.attention", tuple(minivllm.__all__), minivllm),
        ("attnlib.compat.vllm.attention", API, vllm),
        ("attnlib.compat.vllm.layer", ("Attention",), vllm),
        ("attnlib.compat.vllm.selector", ("get_attn_backend",), vllm),
        ("attnlib.compat.vllm.backends.abstract", ABSTRACT, vllm),
        (
            "attnlib.compat.vllm.ops.paged_attn",
            ("PagedAttention", "PagedAttentionMetadata", "_PARTITION_SIZE"),
            paged_attention,
        ),
        (
            "attnlib.compat.vllm.v1.attention.backends.utils",
            (*backend_utils.__all__, "_KV_CACHE_LAYOUT_OVERRIDE"),
            backend_utils,
        ),
        (
            "attnlib.compat.vllm.v1.attention.ops.triton_prefill_attention",
            ("context_attention_fwd", "get_block_size"),
            context_attention,
        ),
    ],
)  # fmt: skip
def test_a_path_has_its_names(path: str, names: tuple[str, ...], source: object) -> None:
    module = importlib.import_module(path)
    for name in names:
        assert getattr(module, name) is getattr(source, name), name
        assert name.startswith("_") or name in module.__all__


@pytest.mark.parametrize("name", ["backends", "layers", "ops", "utils", "v1.attention.ops"])
def test_packages_of_vllm_can_be_imported(name: str) -> None:
    assert importlib.import_module(f"attnlib.compat.vllm.{name}").__doc__


def test_types_are_formatted_as_their_strings() -> None:
    assert [f"{kind}" for kind in vllm.AttentionType] == [kind.value for kind in vllm.AttentionType]
    assert f"{vllm.AttentionType.DECODER:>8}" == " decoder"
