"""What one backend refuses, all refuse, adapters and composites included; nothing is written."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import attnlib
from attnlib.backends.composite import make_composite
from attnlib.backends.torch import TorchBackend
from attnlib.backends.torch.impl import TorchImpl
from attnlib.errors import ContractError, UnsupportedConfigError
from attnlib.metadata.parameters import PerLayerParameters
from tests.backends.adapters import install_adapters
from tests.backends.fake_flash_attn import Recorder

SPEC = attnlib.AttentionSpec(
    num_heads=4, num_kv_heads=2, head_size=64, dtype=torch.float16, block_size=16
)
NAMES = ["torch", "triton", "flash_attn", "flashinfer"]
COMPOSITES = [("torch", "triton"), ("flash_attn", "flashinfer"), ("triton", "flashinfer")]
BACKENDS = [*NAMES, *(f"{prefill}+{decode}" for prefill, decode in COMPOSITES)]


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    found: dict[str, Any] = install_adapters(monkeypatch, Recorder())
    for name in ("torch", "triton"):
        found[name] = attnlib.get_attn_backend(SPEC, name, "cpu")
    for prefill, decode in COMPOSITES:
        found[f"{prefill}+{decode}"] = make_composite(found[prefill], found[decode])
    return found


class _Call:
    """A call of one decode and one prefill of 3 tokens over 8 blocks."""

    def __init__(self, backend: Any, **changes: Any) -> None:
        self.spec = SPEC.replace(**changes)
        tensors = {"sinks": torch.zeros(4, device="meta")} if self.spec.has_sink else {}
        self.layer = attnlib.Attention(self.spec, backend=backend, device="cpu", **tensors)
        self.cache: Any = attnlib.PagedKVCache.allocate(self.spec, 8, "cpu", "NHD")
        self.common = attnlib.CommonAttentionMetadata.from_lengths(
            [1, 3], [20, 18], [[1, 2], [3, 4]], 16, "cpu"
        )
        self.builder = backend.make_builder(self.spec, "cpu")
        self.metadata: Any = self.builder.build(0, self.common)
        self.tensors: list[Any] = [
            torch.randn(4, heads, 64, dtype=torch.float16) for heads in (4, 2, 2)
        ]

    def __call__(self) -> torch.Tensor:
        output: torch.Tensor = self.layer(*self.tensors, self.cache, self.metadata)
        return output


def _ids(call: _Call, rows: list[list[int]]) -> None:
    """Block ids that only the cache contradicts; built into the batch as an engine would."""
    table = torch.tensor(rows, dtype=torch.int32)
    slots = call.common.slot_mapping
    call.metadata = call.builder.build(
        0, call.common.replace(block_table_tensor=table, slot_mapping=slots)
    )


def _slots(call: _Call, slots: list[int]) -> None:
    call.metadata = call.builder.build(0, call.common.replace(slot_mapping=torch.tensor(slots)))


def _set(call: _Call, **changes: Any) -> None:
    for name, value in changes.items():
        setattr(call, name, value)


def _tensor(call: _Call, index: int, value: Any) -> None:
    call.tensors[index] = value


def _on_meta(call: _Call) -> Any:
    """The metadata with its lengths on another device."""
    metadata = copy.copy(call.metadata)
    for name in ("query_start_loc", "seq_lens"):
        metadata.__dict__[name] = getattr(metadata, name).to("meta")
    return metadata


def _no_slots(call: _Call) -> None:
    call.metadata = call.builder.build(0, call.common.replace(slot_mapping=None))


HALF = torch.float16
REFUSED: dict[str, tuple[Any, str]] = {
    "the common metadata": (
        lambda call: _set(call, metadata=call.common),
        "metadata is a CommonAttentionMetadata; backend .* needs the",
    ),
    "no metadata": (lambda call: _set(call, metadata=None), "metadata is a NoneType"),
    "no cache": (lambda call: _set(call, cache=None), "pass a PagedKVCache"),
    "a tensor as the cache": (
        lambda call: _set(call, cache=call.cache.key_cache),
        "cache is a Tensor; it must be a PagedKVCache",
    ),
    "block past the pool": (
        lambda call: _ids(call, [[1, 2], [3, 8]]),
        r"block_table\[1\]\[1\]=8 is outside the pool of 8 blocks",
    ),
    "negative block": (
        lambda call: _ids(call, [[1, 2], [-1, 4]]),
        r"block_table\[1\]\[0\]=-1 is outside the pool",
    ),
    "slot past the cache": (
        lambda call: _slots(call, [35, 63, 64, 128]),
        r"slot_mapping\[3\]=128 is outside the cache of 128 slots",
    ),
    "negative slot": (
        lambda call: _slots(call, [35, -2, 64, 65]),
        r"slot_mapping\[1\]=-2 is outside the cache",
    ),
    "no slots": (_no_slots, "the batch has no slot_mapping to write them to"),
    "metadata of another device": (
        lambda call: _set(call, metadata=_on_meta(call)),
        "query_start_loc is on meta, query on cpu: build the batch for that device",
    ),
    "few rows": (
        lambda call: _tensor(call, 0, torch.zeros(3, 4, 64, dtype=HALF)),
        "query has 3 rows, but the batch has 4 tokens",
    ),
    "no value": (lambda call: _tensor(call, 2, None), "value is None and the other is not"),
    "query dtype": (
        lambda call: _tensor(call, 0, call.tensors[0].float()),
        "query is torch.float32, the spec says torch.float16",
    ),
    "gradient": (
        lambda call: _tensor(call, 0, call.tensors[0].requires_grad_()),
        "attnlib computes no gradients",
    ),
    "other block size": (
        lambda call: _set(
            call, cache=attnlib.PagedKVCache.allocate(SPEC.replace(block_size=32), 4, "cpu")
        ),
        "cache has block_size=32, the spec says 16",
    ),
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_refuses_the_same_calls(backend: str, backends: dict[str, Any]) -> None:
    for name, (spoil, message) in REFUSED.items():
        call = _Call(backends[backend])
        cache = call.cache
        before = cache.key_cache.clone(), cache.value_cache.clone()
        spoil(call)
        with pytest.raises(ContractError, match=message):
            call()
            pytest.fail(f"{backend} accepts: {name}")
        assert torch.equal(cache.key_cache, before[0]), name
        assert torch.equal(cache.value_cache, before[1]), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_right_call_writes_and_attends(backend: str, backends: dict[str, Any]) -> None:
    call = _Call(backends[backend])
    output = call()
    assert bool(output.isfinite().all())
    assert torch.equal(call.cache.key_cache[2, 3], call.tensors[1][0])


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "flashinfer"])
def test_sinks_on_another_device_are_refused(backend: str, backends: dict[str, Any]) -> None:
    call = _Call(backends[backend], has_sink=True)
    with pytest.raises(ContractError, match="sinks is on meta, query on cpu"):
        call()
    assert not call.cache.key_cache.any()


@pytest.mark.parametrize("backend", ["flash_attn", "flash_attn+flashinfer"])
def test_flash_attention_refuses_unaligned_caches_before_it_writes(
    backend: str, backends: dict[str, Any]
) -> None:
    call = _Call(backends[backend])
    pool = torch.zeros(8, 16, 2, 133, dtype=HALF)
    call.cache = attnlib.PagedKVCache.from_views(pool[..., :64], pool[..., 64:128])
    with pytest.raises(ContractError, match="FlashAttention needs multiples of 16 bytes"):
        call()
    assert not pool.any()


@pytest.mark.parametrize("backend", ["flashinfer", "triton+flashinfer"])
def test_flashinfer_refuses_caches_and_layers_before_it_writes(
    backend: str, backends: dict[str, Any]
) -> None:
    call = _Call(backends[backend])
    wide = torch.zeros(8, 16, 2, 80, dtype=HALF)
    key = torch.zeros(8, 16, 2, 64, dtype=HALF)
    call.cache = attnlib.PagedKVCache.from_views(key, wide[..., :64])
    with pytest.raises(ContractError, match="flashinfer needs equal strides"):
        call()
    assert not key.any() and not wide.any()
    call = _Call(backends[backend])
    layers = {"layers.0": PerLayerParameters(-1, 30.0, 0.125, 0)}
    builder = call.layer.backend.make_builder(SPEC, "cpu", layers=layers)
    call.metadata = builder.build(0, call.common)
    with pytest.raises(UnsupportedConfigError, match="pass all layers to the builder"):
        call()
    assert not call.cache.key_cache.any()


class _ReturningImpl(TorchImpl):
    def forward(self, query: Any, cache: Any, metadata: Any, output: Any, lse: Any = None) -> Any:
        return torch.zeros_like(output)


class _ReturningBackend(TorchBackend):
    @staticmethod
    def get_name() -> str:
        return "returning"

    @staticmethod
    def get_impl_cls() -> type[TorchImpl]:
        return _ReturningImpl


@pytest.mark.parametrize("composite", [False, True])
def test_an_impl_that_returns_its_result_is_refused(composite: bool) -> None:
    backend: Any = _ReturningBackend
    if composite:
        backend = make_composite(TorchBackend, backend)
    with pytest.raises(ContractError, match=r"_ReturningImpl.forward returned a Tensor; it must"):
        _Call(backend)()
