"""The operator that stands for attention in compiled models."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from attnlib.integrations.transformers import (
    decode_batch,
    decode_on_device,
    devices,
    masks,
    opaque,
    plain,
)
from attnlib.integrations.transformers.described_mask import describe_tensor
from attnlib.integrations.transformers.layers import Call, builder_for, transient
from attnlib.integrations.transformers.opaque import attend_opaquely
from attnlib.integrations.transformers.plain import attend_plain
from attnlib.selection import get_attn_backend
from tests.integrations.transformers.host_reads import HostReads
from tests.integrations.transformers.launched_operations import LaunchedOperations

BATCH, HEADS, KV_HEADS, SIZE, KEYS = 3, 4, 2, 16, 21


def states(queries: int = 1) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = (HEADS, queries), (KV_HEADS, KEYS), (KV_HEADS, KEYS)
    return tuple(torch.randn(BATCH, *shape, SIZE, generator=generator) for shape in shapes)


def mask_with_holes() -> torch.Tensor:
    """`[B, 1, 1, S]` as over a static cache: padding, a hole, and keys that are not written."""
    mask = torch.zeros(BATCH, 1, 1, KEYS, dtype=torch.bool)
    mask[0, ..., 2:17] = True
    mask[1, ..., :17] = True
    mask[1, ..., 5:9] = False
    mask[2, ..., 16] = True
    return mask


def expected(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, cap: float
) -> torch.Tensor:
    groups = HEADS // KV_HEADS
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = torch.tanh(query @ key.mT * 0.3 / cap) * cap
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return (weights @ value).transpose(1, 2)


def arguments(mask: torch.Tensor | None, cap: float | None = 2.0) -> tuple[Any, ...]:
    return (*states(), mask, None, None, 0.3, cap, None, True, "Layer")


def test_the_declaration_holds() -> None:
    """Schema, fake result and gradients, as torch checks them."""
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(attend_opaquely, arguments(mask_with_holes()), test_utils=checks)
    torch.library.opcheck(attend_opaquely, arguments(None), test_utils=checks)


def test_values_with_a_mask_of_single_queries() -> None:
    mask = mask_with_holes()
    found = attend_opaquely(*arguments(mask))
    assert float((found - expected(*states(), mask, 2.0)).abs().max()) < 1e-5


def test_layers_share_what_stands_for_them_except_sinks() -> None:
    """The operator knows no module; a layer with sinks holds a copy of its own."""
    first, second = torch.zeros(HEADS), torch.ones(HEADS)
    stands = [opaque._stand("Layer", True, sinks) for sinks in (None, None, first, second, first)]
    assert stands[0] is stands[1] and stands[2] is stands[4]
    assert len({id(stand) for stand in stands}) == 3
    assert type(stands[2]).__name__ == "Layer"
    kept = len(opaque._stands_with_sinks)
    del first, stands
    gc.collect()
    assert len(opaque._stands_with_sinks) == kept - 1


def test_a_transient_call_has_a_builder_of_its_own() -> None:
    """Its workspace belongs to the graph that is recorded."""
    call = Call(torch.nn.Identity(), *states(), 0.3, None, None, None, True)
    spec, device = call.spec(block_size=1), torch.device("cpu")
    backend = get_attn_backend(spec, None, device)
    kept = builder_for(backend, spec, device)
    assert builder_for(backend, spec, device) is kept
    with transient():
        assert builder_for(backend, spec, device) is not kept
    assert builder_for(backend, spec, device) is kept


def test_a_batch_is_made_without_launches() -> None:
    """Every layer of a graph makes one: what its lister writes is not written before."""
    with LaunchedOperations() as operations:
        made = decode_batch._make(BATCH, KEYS, KEYS, torch.device("cpu"))
    assert not operations.names and made.table.shape == (BATCH, KEYS)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["plain", "recorded", "described"])
def test_decodes_on_a_gpu_read_no_mask(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With interpreted kernels: the mask's values are used where they are, so that a graph that
    records the call serves other masks."""
    pytest.importorskip("triton")
    monkeypatch.setenv("ATTNLIB_BACKEND", "triton")
    monkeypatch.setenv("ATTNLIB_VALIDATE", "0")
    monkeypatch.setattr(devices, "kind_of", lambda device: "cuda")
    reads, run_layer = HostReads(), decode_on_device.run_layer

    def interpreted(*given: Any) -> Any:
        with reads.paused():
            return run_layer(*given)

    monkeypatch.setattr(decode_on_device, "run_layer", interpreted)
    monkeypatch.setattr(plain, "attend_dense", None)
    call = Call(torch.nn.Identity(), *states(), 0.3, 2.0, None, None, True)
    for mask in (mask_with_holes(), mask_with_holes().flip(3)):
        reads.follow(mask)
        with reads, torch.no_grad():
            if form == "described":  # as `attnlib_mask` returns it on a GPU
                described = describe_tensor(mask, masks._shown(mask))
                for _ in range(2):  # two layers
                    found = attend_plain(call, described, None, {})
            elif form == "recorded":
                with transient():
                    found = attend_plain(call, mask, None, {})
            else:
                found = attend_plain(call, mask, None, {})
        assert float((found - expected(*states(), mask, 2.0)).abs().max()) < 1e-5
    assert not reads.reads
