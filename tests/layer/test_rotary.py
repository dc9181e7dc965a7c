"""`Attention.rotate_and_write_kv`: one call in place of a rotation and a cache write."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import attnlib
from attnlib.backends.torch import TorchBackend
from attnlib.backends.torch.impl import TorchImpl
from attnlib.errors import ContractError
from attnlib.kv_dtype import PAGE_FORMATS
from attnlib.ops import HeadNorm
from attnlib.ops.torch.rotary_write import rotate

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

SPEC = attnlib.AttentionSpec(
    num_heads=4, num_kv_heads=2, head_size=16, dtype=torch.float32, block_size=4
)
BACKENDS = ["torch", "triton", "prefill:torch,decode:triton", "prefix:torch,suffix:torch"]


class Call:
    """A layer, its cache and one batch: a decode and a prefill, with random tensors."""

    def __init__(self, backend: Any = "torch", spec: Any = SPEC, **layer: Any) -> None:
        torch.manual_seed(0)
        self.layer = attnlib.Attention(spec, backend=backend, device=DEVICE, **layer)
        self.cache = attnlib.PagedKVCache.allocate(spec, 8, DEVICE)
        self.cache.key_cache.copy_(torch.rand(8, 4, 2, 16))
        self.cache.value_cache.copy_(torch.rand(8, 4, 2, 16))
        common = attnlib.CommonAttentionMetadata.from_lengths(
            [1, 3], [6, 3], [[2, 5], [1]], 4, DEVICE
        )
        self.metadata: Any = self.layer.backend.make_builder(spec, DEVICE).build(0, common)
        self.q, self.k, self.v = (torch.randn(4, heads, 16, device=DEVICE) for heads in (4, 2, 2))
        angles = torch.randn(4, 8, device=DEVICE)
        self.cos, self.sin = angles.cos(), angles.sin()
        self.norm = HeadNorm(torch.randn(16, device=DEVICE))

    def run(self, *new: torch.Tensor | None) -> torch.Tensor:
        """Rotate and write, then attend."""
        query, *rest = new or (self.q, self.k, self.v)
        rotated = self.layer.rotate_and_write_kv(
            query, *rest, self.cache, self.metadata, self.cos, self.sin, q_norm=self.norm,
            k_norm=self.norm,
        )  # fmt: skip
        out: torch.Tensor = self.layer(rotated, None, None, self.cache, self.metadata)
        return out

    def separate(self) -> torch.Tensor:
        """Rotate with an operation, then write and attend in the call of the layer."""
        q, k = (rotate(x, self.cos, self.sin, norm=self.norm) for x in (self.q, self.k))
        out: torch.Tensor = self.layer(q, k, self.v, self.cache, self.metadata)
        return out


@pytest.mark.parametrize("backend", BACKENDS)
def test_equals_separate_operations_on_every_backend(backend: str) -> None:
    """P11: same output, same cache, also in the second call; tensors may be flat."""
    one, other = Call(backend), Call(backend)
    wanted = other.separate()
    for query, key, value in ((one.q, one.k, one.v), (one.q, one.k, one.v)):
        assert torch.equal(one.run(query, key, value), wanted)
    flat = one.run(one.q.flatten(1), one.k.flatten(1), one.v.flatten(1))
    assert flat.shape == (4, 64) and torch.equal(flat.view(4, 4, 16), wanted)
    assert torch.equal(one.cache.key_cache, other.cache.key_cache)
    assert torch.equal(one.cache.value_cache, other.cache.value_cache)


def test_a_layer_that_shares_a_cache_rotates_queries_only() -> None:
    """P8"""
    call = Call(kv_sharing_target_layer_name="layers.0")
    before = call.cache.key_cache.clone()
    assert torch.equal(call.run(), call.run(call.q, None, None))
    assert torch.equal(call.cache.key_cache, before)


class ScaledImpl(TorchImpl):
    """Stores keys times two: a write of its own."""

    def write_kv(self, key: Any, value: Any, cache: Any, slot_mapping: Any) -> None:
        super().write_kv(key * 2, value, cache, slot_mapping)


def test_a_write_of_a_subclass_is_not_bypassed() -> None:
    """A backend that inherits from one with a fused write, and replaces `write_kv` alone."""
    from attnlib.backends.triton import TritonBackend
    from attnlib.backends.triton.impl import TritonImpl

    class Impl(TritonImpl):
        def write_kv(self, key: Any, value: Any, cache: Any, slot_mapping: Any) -> None:
            super().write_kv(key * 2, value, cache, slot_mapping)

    class Backend(TritonBackend):
        @staticmethod
        def get_impl_cls() -> Any:
            return Impl

    class Scaled(TorchBackend):
        @staticmethod
        def get_impl_cls() -> Any:
            return ScaledImpl

    one, other = Call(Backend), Call(Scaled)
    one.run(), other.run()
    assert torch.equal(one.cache.key_cache, other.cache.key_cache)
    plain = Call()
    plain.run()
    assert not torch.equal(one.cache.key_cache, plain.cache.key_cache)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_scales_of_the_layer_and_new_scales(backend: str) -> None:
    """M9: the layer's scales reach its cache before the write; new ones are those of the rotated
    keys."""
    spec = SPEC.replace(kv_cache_dtype="fp8_e4m3")
    for options in ({"k_scale": 0.5, "v_scale": 0.25}, {}):
        one, other = (Call(backend, spec, **options) for _ in range(2))
        if not options:
            one.metadata.enable_kv_scales_calculation = True
            other.metadata.enable_kv_scales_calculation = True
        wanted = other.separate()
        assert torch.equal(one.run(), wanted)
        assert float(one.cache.k_scale) == float(other.cache.k_scale) != 1.0
        bytes_of = one.cache.key_cache.view(torch.uint8)
        assert torch.equal(bytes_of, other.cache.key_cache.view(torch.uint8))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cos": None}, "cos is None and the other is not"),
        ({"cos": torch.ones(3, 8)}, "a row for each of the 4 rows"),
        ({"q": torch.ones(4, 3, 16)}, "query"),
        ({"k": torch.ones(5, 2, 16), "v": torch.ones(5, 2, 16)}, "each token has one row"),
        ({"norm": HeadNorm(torch.ones(8, device=DEVICE))}, "must be \\[16\\]"),
        ({"cache": None}, "pass a PagedKVCache"),
        ({"cache": 3}, "wrap existing tensors"),
        ({"cos": [1.0]}, r"cos is a list; pass a tensor \[T, half\]"),
    ],
)
def test_bad_calls_are_refused_and_write_nothing(change: dict[str, Any], message: str) -> None:
    """P11"""
    call = Call("triton")
    cache, before = call.cache, call.cache.key_cache.clone()
    for name, value in change.items():
        if isinstance(value, torch.Tensor):
            value = value.to(DEVICE)
        setattr(call, name, value)
    with pytest.raises(ContractError, match=message):
        call.run()
    assert torch.equal(cache.key_cache, before)


@pytest.mark.skipif(DEVICE != "cpu", reason="reading slots would synchronize")
def test_slots_outside_the_cache_are_refused() -> None:
    """P4: on a CPU, where reading them costs no synchronization."""
    call = Call("triton")
    call.metadata.slot_mapping = torch.tensor([0, 1, 2, 99])
    with pytest.raises(ContractError, match=r"slot_mapping\[3\]=99"):
        call.run()


def test_encoders_and_latents_have_no_keys_to_rotate() -> None:
    spec = SPEC.replace(attn_type="encoder_only", mask_kind="bidirectional")
    layer = attnlib.Attention(spec, device=DEVICE)
    common = attnlib.CommonAttentionMetadata.from_lengths([2], [2], device=DEVICE)
    metadata = layer.backend.make_builder(spec, DEVICE).build(0, common)
    q, k = torch.randn(2, 4, 16, device=DEVICE), torch.randn(2, 2, 16, device=DEVICE)
    with pytest.raises(ContractError, match="attn_type=encoder_only"):
        layer.rotate_and_write_kv(q, k, k, None, metadata, None, None)


def test_gradients_are_refused() -> None:
    call = Call()
    call.q.requires_grad_()
    with pytest.raises(ContractError, match="computes no gradients"):
        call.run()


@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_tangents_are_refused_after_calls_without(which: str) -> None:
    """A rotation by kernels would lose them."""
    call = Call("triton")
    with torch.no_grad(), forward_ad.dual_level():
        call.run()
        tensor = getattr(call, which)
        setattr(call, which, forward_ad.make_dual(tensor, torch.ones_like(tensor)))
        with pytest.raises(ContractError, match="has a tangent of forward-mode gradients"):
            call.run()


@pytest.mark.slow
def test_torch_compile_sees_one_operator() -> None:
    """A compiled function has the results of an eager call, and its write is not removed."""
    one, other = Call(), Call()
    wanted = other.run()
    compiled = torch.compile(one.run, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(one.q, one.k, one.v), wanted)
    assert torch.equal(one.cache.key_cache, other.cache.key_cache)


def test_explain_states_the_fused_write() -> None:
    """Only for backends that declare it, and for layers that write rotated keys."""
    line = "write:   one launch, with q/k norm and rotation"
    assert line in str(attnlib.explain(SPEC, backend="triton", device=DEVICE))
    assert line not in str(attnlib.explain(SPEC, backend="torch", device=DEVICE))
    assert line not in str(
        attnlib.explain(SPEC, backend="prefill:triton,decode:torch", device=DEVICE)
    )


@pytest.mark.parametrize("name", PAGE_FORMATS)
def test_explain_states_one_launch_for_pages_with_scales(name: str) -> None:
    """P11, P15: the kernel that quantizes also normalizes and rotates."""
    for rotation in (None, "hadamard"):
        spec = SPEC.replace(kv_cache_dtype=name, head_size=64, head_size_v=64, kv_rotation=rotation)
        text = " ".join(str(attnlib.explain(spec, backend="triton", device="sm_90")).split())
        assert "write: one launch, with q/k norm and rotation" in text


def test_explain_states_separate_launches_for_rotated_heads_without_scales() -> None:
    spec = SPEC.replace(kv_rotation="hadamard")
    text = " ".join(str(attnlib.explain(spec, backend="triton", device="sm_90")).split())
    assert "write: one launch; q/k norm and rotation take separate ones" in text
    assert "with q/k norm" not in text
