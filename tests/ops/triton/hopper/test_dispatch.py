"""Which calls the Hopper kernels serve, by strides, and how mixed batches share the chip."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnlib.ops.params import AttentionParams
from attnlib.ops.triton import hopper
from attnlib.ops.triton.heuristics.device import DeviceLimits
from attnlib.ops.triton.hopper.decode_plan import HopperDecode
from attnlib.ops.triton.hopper.dispatch import (
    decode_workspace_bytes,
    select_decode,
    select_packed_decode,
    supports_decode,
    unsupported_strides,
)
from attnlib.ops.triton.launch.attention import BatchTensors
from attnlib.ops.triton.paged_decode import AttentionShape
from attnlib.ops.triton.paged_mixed import concurrent_ctas

BF16 = torch.bfloat16


def test_strides_that_tma_does_not_support() -> None:
    """P1, P9: TMA needs strides that are multiples of 16 bytes."""
    query = torch.empty(4, 8, 128, dtype=BF16)
    cache = torch.empty(3, 16, 2, 132, dtype=BF16)[..., :128]
    first, second = unsupported_strides(query=query, key_cache=cache, value_cache=cache, out=query)
    assert (
        "key_cache has stride 132 in dimension 2" in first
        and "value_cache has stride 132" in second
    )


def test_strides_of_dimensions_of_size_1_are_ignored() -> None:
    """P1: such a dimension may have any stride."""
    query = torch.empty(4, 8, 128, dtype=BF16)
    cache = torch.empty(4096, dtype=BF16).as_strided((1, 16, 1, 128), (3, 128, 7, 1))
    assert unsupported_strides(query=query, key_cache=cache, value_cache=cache, out=query) == []


PACKED = {
    "query": ((3, 8, 128), BF16),
    "key": ((9, 2, 16, 16, 8), BF16),
    "value": ((9, 2, 128, 16), BF16),
    "table": ((3, 4), torch.int32),
    "lens": ((3,), torch.int32),
}


def _packed_decode(params: AttentionParams, **changes: Any) -> HopperDecode | None:
    """The launch over a packed cache with some tensors changed."""
    tensors = {name: torch.empty(x[0], dtype=x[1]) for name, x in {**PACKED, **changes}.items()}
    query, lens = tensors["query"], tensors["lens"]
    batch = BatchTensors(lens, lens, tensors["table"])
    chip = DeviceLimits(132, 227 * 1024, 228 * 1024, (9, 0), True)
    key, value, out = tensors["key"], tensors["value"], torch.empty_like(query)
    return select_packed_decode(query, key, value, out, batch, params, chip, None)


def test_packed_caches_are_read_by_the_hopper_decode() -> None:
    """TMA reads keys in units of 8 positions and values in rows of a page, at most 64 positions."""
    prepared = _packed_decode(AttentionParams(scale=0.1))
    assert prepared is not None and prepared.packed
    keys, values = prepared.views
    assert keys.sizes == ([9, 2, 2, 16, 64], [4096, 2048, 64, 128, 1])
    assert values.sizes == ([9, 2, 128, 16], [4096, 2048, 16, 1])
    shapes = {"key": ((9, 2, 16, 128, 8), BF16), "value": ((9, 2, 128, 128), BF16)}
    wide = _packed_decode(AttentionParams(scale=0.1), **shapes)
    assert wide is not None and [view.rows for view in wide.views] == [64, 64]


@pytest.mark.parametrize(
    "changes",
    [
        {"table": ((3, 4), torch.int64)},
        {"lens": ((3,), torch.int64)},
        {"key": ((9, 2, 16, 8, 8), BF16), "value": ((9, 2, 128, 8), BF16)},
        {"key": ((9, 2, 8, 16, 16), torch.float8_e4m3fn),
         "value": ((9, 2, 128, 16), torch.float8_e4m3fn)},
        {"query": ((3, 8, 32), BF16), "key": ((9, 2, 4, 16, 8), BF16),
         "value": ((9, 2, 32, 16), BF16)},
        {"query": ((3, 66, 128), BF16)},
    ],
)  # fmt: skip
def test_other_packed_caches_are_left_to_the_portable_kernel(changes: dict[str, Any]) -> None:
    """int64 tables and lengths, blocks of 8, float8, heads below 64, 33 heads per KV head."""
    assert _packed_decode(AttentionParams(scale=0.1), **changes) is None


def test_packed_decode_with_alibi_is_left_to_the_portable_kernel() -> None:
    assert _packed_decode(AttentionParams(scale=0.1, alibi_slopes=torch.ones(8))) is None


def test_failed_import_of_gluon_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The portable kernels then serve every call."""

    def fail(name: str) -> Any:
        raise ImportError(f"no {name} in this Triton")

    monkeypatch.setattr(hopper, "import_module", fail)
    hopper._load.cache_clear()
    try:
        assert hopper.load() is None
        assert (
            hopper.import_error()
            == "ImportError: no attnlib.ops.triton.hopper.dispatch in this Triton"
        )
    finally:
        hopper._load.cache_clear()


def test_longer_prefills_get_more_multiprocessors() -> None:
    """60 decodes of 4k keys with a prefill of 8k tokens, and of 2k."""
    shape = AttentionShape(32, 8, 128, 128, BF16, BF16)
    chip = DeviceLimits(132, 227 * 1024, 228 * 1024, (9, 0), True)
    few, many = (
        concurrent_ctas(
            shape, chip, num_decodes=60, decode_visible=4096, prefill_tokens=tokens,
            prefill_visible=tokens, bounds=(tokens, tokens),
        )
        for tokens in (8192, 2048)
    )  # fmt: skip
    assert (few, many) == (48, 88)


def test_latents_have_a_decode_of_their_own() -> None:
    """P10: aliased values select it; separate values of the same sizes select no Hopper kernel."""
    chip = DeviceLimits(132, 227 * 1024, 228 * 1024, (9, 0), True)
    query, key = torch.empty(3, 128, 576, dtype=BF16), torch.empty(4, 64, 1, 576, dtype=BF16)
    out, lengths = torch.empty(3, 128, 512, dtype=BF16), torch.zeros(4, dtype=torch.int32)
    batch = BatchTensors(lengths, lengths[:3], torch.zeros(3, 2, dtype=torch.int32))
    params = AttentionParams(scale=0.1)

    def select(value: torch.Tensor, **changes: Any) -> HopperDecode | None:
        own = AttentionParams(scale=0.1, **changes) if changes else params
        return select_decode(
            query, key, value, out, None, batch, own, chip, 1, None, None, 0
        )  # fmt: skip

    found = select(key[..., :512])
    assert found is not None and found.combine is not None
    assert [view.width for view in found.views] == [64, 256], "the rotary part, half of a value"
    shape = AttentionShape(128, 1, 576, 512, BF16, BF16, latent=True)
    assert supports_decode(shape, chip, 1, 64) and not supports_decode(shape, chip, 2, 64)
    assert found.workspace_bytes == decode_workspace_bytes(shape, chip, 3, 1)
    assert select(torch.empty(4, 64, 1, 512, dtype=BF16)) is None
    assert select(key[..., :512], v_scale=0.5) is None
