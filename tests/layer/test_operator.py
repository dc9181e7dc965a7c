"""torch.compile: a layer is one opaque operator; results of a compiled model equal eager ones."""

from __future__ import annotations

import copy
import gc
import pickle
import shutil
from typing import Any

import pytest
import torch
from torch import nn

from attnlib.backends.torch import TorchBackend
from attnlib.cache.storage import PagedKVCache
from attnlib.compile import objects
from attnlib.compile.objects import lookup, register, register_tensor_id
from attnlib.errors import ContractError
from attnlib.layer import Attention
from attnlib.layer.operator import attend
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.spec import AttentionSpec, AttentionType

SPEC = AttentionSpec(
    num_heads=4, num_kv_heads=2, head_size=16, dtype=torch.float32, block_size=16, needs_lse=True
)


class Model(nn.Module):
    """Two layers of fused QKV, attention and an output projection, with a residual."""

    def __init__(self, spec: AttentionSpec, backend: Any = TorchBackend) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.spec = spec
        heads = spec.num_heads + 2 * spec.num_kv_heads
        self.qkv = nn.ModuleList(
            nn.Linear(64, heads * spec.head_size, bias=False, dtype=spec.dtype) for _ in range(2)
        )
        self.attention = nn.ModuleList(
            Attention(spec, backend=backend, device="cpu", prefix=f"layers.{i}") for i in range(2)
        )
        self.out = nn.ModuleList(
            nn.Linear(spec.num_heads * spec.head_size, 64, bias=False, dtype=spec.dtype)
            for _ in range(2)
        )

    def forward(
        self, hidden: torch.Tensor, caches: Any, metadata: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        sizes = [
            self.spec.num_heads * self.spec.head_size,
            *[self.spec.num_kv_heads * self.spec.head_size] * 2,
        ]
        total = hidden.new_zeros(hidden.shape[0], self.spec.num_heads, dtype=torch.float32)
        for i in range(2):
            q, k, v = self.qkv[i](hidden).split(sizes, dim=-1)
            attended, lse = self.attention[i](q, k, v, caches[i], metadata, return_lse=True)
            hidden = hidden + self.out[i](attended)
            total = total + lse
        return hidden, total


def _caches(spec: AttentionSpec) -> list[PagedKVCache]:
    return [PagedKVCache.allocate(spec, 16, "cpu") for _ in range(2)]


def _steps(spec: AttentionSpec, backend: Any = TorchBackend) -> list[Any]:
    """A prefill and two decodes of the same requests, one of another batch size."""
    builder = backend.make_builder(spec, "cpu")
    tables = [[3, 5, 1], [7, 2, 0]]
    batches = [([20, 9], [20, 9], tables), ([1, 1], [21, 10], tables), ([1], [22], tables[:1])]
    return [
        builder.build(0, CommonAttentionMetadata.from_lengths(q, s, t, spec.block_size, "cpu"))
        for q, s, t in batches
    ]


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


BACKENDS = [
    "eager",
    "aot_eager",
    pytest.param(
        "inductor",
        marks=[
            pytest.mark.slow,
            pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs g++"),
        ],
    ),
]


@pytest.mark.parametrize("compiler", BACKENDS)
@torch.inference_mode()
def test_fullgraph_equals_eager(compiler: str) -> None:
    """In every step, outputs and caches of the compiled model equal those of the eager model."""
    model = Model(SPEC)
    compiled = torch.compile(model, backend=compiler, fullgraph=True, dynamic=True)
    plain_caches, caches = _caches(SPEC), _caches(SPEC)
    for step in _steps(SPEC):
        hidden = torch.randn(step.num_actual_tokens, 64)
        expected = model(hidden, plain_caches, step)
        actual = compiled(hidden, caches, step)
        for mine, theirs in zip(actual, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(caches, plain_caches, strict=True):
        torch.testing.assert_close(mine.key_cache, theirs.key_cache, rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def test_another_batch_compiles_nothing() -> None:
    """Metadata and caches are read in every call, so equal shapes need no new graph."""
    graphs: list[torch.fx.GraphModule] = []

    def count(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    model = Model(SPEC)
    compiled = torch.compile(model, backend=count, fullgraph=True, dynamic=True)
    plain_caches, caches = _caches(SPEC), _caches(SPEC)
    prefill, *_ = _steps(SPEC)
    for other in (caches, _caches(SPEC)):
        for step in (prefill, *_steps(SPEC)[:1]):
            hidden = torch.randn(step.num_actual_tokens, 64)
            torch.testing.assert_close(
                compiled(hidden, other, step)[0],
                model(hidden, plain_caches, step)[0],
                rtol=1e-5,
                atol=1e-5,
            )
    assert len(graphs) == 1
    assert (
        sum(
            node.target is torch.ops.attnlib.attend.default or "attend" in str(node.target)
            for node in graphs[0].graph.nodes
        )
        == 2
    )


@torch.inference_mode()
def test_checks_run_inside_the_operator() -> None:
    """An invalid call raises the error message of the layer at run time."""
    layer = Attention(SPEC, backend=TorchBackend, device="cpu")
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    step = _steps(SPEC)[0]
    q, kv = (
        torch.randn(step.num_actual_tokens - 1, 4, 16),
        torch.randn(step.num_actual_tokens, 2, 16),
    )
    with pytest.raises(ContractError, match="query has 28 rows, but the batch has 29 tokens"):
        compiled(q, kv, kv, _caches(SPEC)[0], step)


@torch.inference_mode()
def test_encoders_have_no_cache() -> None:
    spec = SPEC.replace(attn_type=AttentionType.ENCODER_ONLY)
    layer = Attention(spec, backend=TorchBackend, device="cpu")
    step = TorchBackend.make_builder(spec, "cpu").build(
        0, CommonAttentionMetadata.from_lengths([5, 9], [5, 9], device="cpu")
    )
    q, k, v = torch.randn(14, 4, 16), torch.randn(14, 2, 16), torch.randn(14, 2, 16)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v, None, step), layer(q, k, v, None, step))


@torch.inference_mode()
def test_operator_schema() -> None:
    """Schema, fake implementation and mutations pass `torch.library.opcheck`."""
    layer = Attention(SPEC, backend=TorchBackend, device="cpu")
    cache, step = _caches(SPEC)[0], _steps(SPEC)[0]
    q, kv = torch.randn(29, 4, 16), torch.randn(29, 2, 16)
    out, lse = torch.empty(29, 4, 16), torch.empty(29, 4)
    arguments = (q, kv, kv, out, lse, layer.handle, cache.handle, step.handle)
    torch.library.opcheck(attend, arguments, test_utils=("test_schema", "test_faketensor"))


def test_a_copy_of_a_layer_is_another_layer() -> None:
    layer = Attention(SPEC, backend=TorchBackend, device="cpu")
    other = copy.deepcopy(layer)
    assert other.handle != layer.handle
    assert lookup(other.handle, Attention, "layer") is other
    assert lookup(layer.handle, Attention, "layer") is layer


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda thing: pickle.loads(pickle.dumps(thing)),
}


@pytest.mark.parametrize("how", COPIES)
@torch.inference_mode()
def test_copies_of_caches_and_metadata_have_ids_of_their_own(how: str) -> None:
    """A compiled call with copies writes and reads the copies."""
    layer = Attention(SPEC, backend=TorchBackend, device="cpu")
    cache, step = _caches(SPEC)[0], _steps(SPEC)[0]
    layer(torch.randn(29, 4, 16), torch.randn(29, 2, 16), torch.randn(29, 2, 16), cache, step)
    other_cache, other_step = COPIES[how](cache), COPIES[how](step)
    for original, copied in ((cache, other_cache), (step, other_step)):
        assert int(original.handle) != int(copied.handle)
        assert lookup(copied.handle, type(copied), "object") is copied
    assert step.plans and not other_step.plans, "plans belong to one batch"
    if how == "copy":
        return  # shares the tensors
    before = cache.key_cache.clone()
    q, kv = torch.randn(29, 4, 16), torch.randn(29, 2, 16)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    out = compiled(q, kv, kv, other_cache, other_step)
    assert torch.equal(cache.key_cache, before)
    torch.testing.assert_close(out, layer(q, kv, kv, other_cache, other_step))


@torch.inference_mode()
def test_a_layer_whose_output_is_unused_still_writes() -> None:
    layer = Attention(SPEC, backend=TorchBackend, device="cpu")
    cache, step = _caches(SPEC)[0], _steps(SPEC)[0]

    def only_writes(q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        layer(q, kv, kv, cache, step)
        return q + 1

    before = cache.key_cache.clone()
    compiled = torch.compile(only_writes, backend="aot_eager", fullgraph=True)
    compiled(torch.randn(29, 4, 16), torch.randn(29, 2, 16))
    assert not torch.equal(cache.key_cache, before)


def test_ids_keep_nothing_alive_and_are_typed() -> None:
    class Thing: ...

    thing = Thing()
    number, tensor_id = register(thing), register_tensor_id(thing)
    assert lookup(number, Thing, "thing") is thing
    assert lookup(tensor_id, Thing, "thing") is thing and int(tensor_id) != number
    with pytest.raises(
        ContractError, match="the cache of this call is a Thing; it must be a Paged"
    ):
        lookup(number, PagedKVCache, "cache")
    del thing
    gc.collect()
    with pytest.raises(ContractError, match="the thing of this call no longer exists"):
        lookup(tensor_id, Thing, "thing")


def test_an_id_is_used_again_only_if_nobody_knows_it() -> None:
    """A tensor that somebody holds never names another object, whatever is registered later."""

    class Thing:
        def __init__(self) -> None:
            self.handle = register_tensor_id(self)

    things = [Thing() for _ in range(20)]
    known = [thing.handle for thing in things[:5]]
    forgotten = {int(thing.handle) for thing in things[5:]}
    values = {int(handle) for handle in known}
    del things
    gc.collect()
    with torch.inference_mode():
        later = [Thing() for _ in range(300)]
    numbers = {int(thing.handle) for thing in later}
    assert len(numbers) == 300 and forgotten <= numbers and not values & numbers
    assert not any(thing.handle.is_inference() for thing in later)
    assert all(lookup(thing.handle, Thing, "thing") is thing for thing in later)
    for handle in known:
        with pytest.raises(ContractError, match="no longer exists"):
            lookup(handle, Thing, "thing")


def test_an_object_may_outlive_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """At its end the interpreter sets the globals of modules to None."""

    class Thing:
        pass

    thing, failed = Thing(), []
    register_tensor_id(thing)
    monkeypatch.setattr("sys.unraisablehook", failed.append)
    with monkeypatch.context() as cleared:
        cleared.setattr(objects, "_objects", None)
        del thing
        gc.collect()
    assert not failed


@pytest.mark.slow
@pytest.mark.parametrize("which", range(3), ids=["query", "key", "value"])
@pytest.mark.parametrize("method", ["forward", "rotate_and_write_kv"])
def test_compiled_code_refuses_gradients(which: int, method: str) -> None:
    """As eager code does; a graph would return the gradients of the other terms only."""
    layer = Attention(SPEC, backend=TorchBackend, device="cpu")
    (cache, _), step = _caches(SPEC), _steps(SPEC)[0]
    rows = step.num_actual_tokens
    angles = (torch.ones(rows, 8), torch.zeros(rows, 8)) if method != "forward" else ()
    given = [torch.randn(rows, heads, 16) for heads in (4, 2, 2)]
    given[which].requires_grad_()

    def model(query: Any, key: Any, value: Any) -> Any:
        return query + getattr(layer, method)(query, key, value, cache, step, *angles)

    for whole, expected in ((False, ContractError), (True, RuntimeError)):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="eager", fullgraph=whole)
        with pytest.raises(expected, match="query, key or value requires a gradient"):
            compiled(*given)
        with torch.no_grad():
            assert torch.equal(compiled(*given), model(*given))
