"""Rows of the fourth seed: vLLM's v1 backend utilities."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

import numpy as np
import torch
from torch import Tensor

import attnlib
from attnlib.backends.torch import TorchBackend
from attnlib.compat import vllm
from attnlib.compat.vllm import backend_utils
from attnlib.selection import unregister_backend
from tests.compat.seeds import attention_api_original, minivllm_original, v1_utils_original
from tests.compat.seeds.table import Seed

__all__ = ["SEED"]

SEED = Seed(
    4, "vllm-v1-backend-utils", "attnlib.compat.vllm.v1.attention.backends.utils", v1_utils_original
)
row = SEED.row

DEVICE = torch.device("cpu")
FIELDS = (
    *("query_start_loc", "query_start_loc_cpu", "seq_lens", "seq_lens_cpu"),
    *("num_computed_tokens_cpu", "num_reqs", "num_actual_tokens", "max_query_len"),
    *("block_table_tensor", "slot_mapping"),
)


def batch_values(
    queries: tuple[int, ...] = (1, 1, 5), kind: torch.dtype = torch.int32, padding: int = 2
) -> dict[str, Any]:
    """The ten arguments for requests with these new tokens; slots are padded."""
    new = torch.tensor(queries)
    starts = torch.tensor([0, *queries]).cumsum(0).to(kind)
    computed = torch.arange(len(queries)) * 3 + 2
    lens = (computed + new).int()
    total, tables = int(new.sum()), torch.arange(len(queries) * 4).view(-1, 4).int()
    values = (starts, starts.clone(), lens, lens.clone(), computed.int(), len(queries), total)
    slots = torch.arange(total + padding)
    return dict(zip(FIELDS, (*values, max(queries), tables, slots), strict=True))


def common(lib: Any, *queries: int, **more: Any) -> Any:
    return lib.CommonAttentionMetadata(**batch_values(queries or (1, 1, 5), **more))


def builder_class(lib: Any, **attributes: Any) -> Any:
    """A builder as a program of the seed writes it: `build` takes keywords only."""

    class Builder(lib.AttentionMetadataBuilder):
        def __init__(self, kv_cache_spec: Any, vllm_config: Any, device: torch.device) -> None:
            super().__init__(kv_cache_spec, vllm_config, device)
            self.own = (vllm_config, device)

        def build(
            self, *, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
        ) -> Any:
            return common_prefix_len, common_attn_metadata.num_actual_tokens, fast_build

    return type("Builder", (Builder,), attributes)


SPEC = SimpleNamespace(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32)


def config(layers: dict[str, Any] | None = None) -> Any:
    """What the seed's functions read of a `VllmConfig`, and its model."""
    model = SimpleNamespace(get_num_attention_heads=lambda parallel: 4, dtype=torch.float32)
    compilation = SimpleNamespace(static_forward_context=layers or {})
    return SimpleNamespace(model_config=model, compilation_config=compilation)


def make(lib: Any, **attributes: Any) -> Any:
    return builder_class(lib, **attributes)(SPEC, config(), DEVICE)


def raises_assertion(call: Callable[[], Any]) -> bool:
    """Whether a program that catches the original's AssertionError goes on."""
    try:
        call()
    except AssertionError:
        return True
    return False


@row("`CommonAttentionMetadata` with its ten fields")
def _(lib: Any) -> Any:
    made = common(lib)
    return {name: getattr(made, name) for name in FIELDS}


@row("its constructor", note="also int64 starts, int32 slots, longer buffers")
def _(lib: Any) -> Any:
    values = batch_values()
    made = lib.CommonAttentionMetadata(*values.values())
    kept = [getattr(made, name) is value for name, value in values.items()]
    wide = common(lib, kind=torch.int64)
    values["slot_mapping"] = values["slot_mapping"].int()
    values["block_table_tensor"] = torch.zeros(8, 9, dtype=torch.int32)
    buffers = lib.CommonAttentionMetadata(**values)
    return kept, wide.query_start_loc, buffers.slot_mapping, buffers.block_table_tensor


@row("`__post_init__` fills slots past T with -1")
def _(lib: Any) -> Any:
    values = batch_values(padding=5)
    made = lib.CommonAttentionMetadata(**values)
    return values["slot_mapping"], made.slot_mapping, made.slot_mapping is values["slot_mapping"]


@row("a dataclass", note="with further fields, all by name and with defaults")
def _(lib: Any) -> Any:
    made = common(lib)
    other = dataclasses.replace(made, max_query_len=9, slot_mapping=torch.arange(8))
    made.num_reqs = 2
    return dataclasses.is_dataclass(made), made.num_reqs, other.max_query_len, other.slot_mapping


@row("builder base class, generic over `M`")
def _(lib: Any) -> Any:
    base = lib.AttentionMetadataBuilder
    try:
        base(SPEC, config(), DEVICE)
        abstract = False
    except TypeError:
        abstract = True

    class OfNumbers(base[int]):
        pass

    return abstract, issubclass(OfNumbers, base), inspect.isabstract(base)


@row("`__init__(kv_cache_spec, vllm_config, device)`")
def _(lib: Any) -> Any:
    vllm_config = config()
    made = builder_class(lib)(kv_cache_spec=SPEC, vllm_config=vllm_config, device=DEVICE)
    names = list(inspect.signature(lib.AttentionMetadataBuilder.__init__).parameters)
    return names, made.own[0] is vllm_config, made.own[1]


@row("`kv_cache_spec`")
def _(lib: Any) -> Any:
    return make(lib).kv_cache_spec is SPEC


@row("`full_cudagraph_supported`, a class attribute")
def _(lib: Any) -> Any:
    classes = builder_class(lib), builder_class(lib, full_cudagraph_supported=True)
    return [cls.full_cudagraph_supported for cls in (lib.AttentionMetadataBuilder, *classes)]


@row("`build(common_prefix_len, common_attn_metadata, fast_build)`")
def _(lib: Any) -> Any:
    names = list(inspect.signature(lib.AttentionMetadataBuilder.build).parameters)
    built = make(lib).build(common_prefix_len=0, common_attn_metadata=common(lib), fast_build=True)
    return names, built


@row("`common_prefix_len`")
def _(lib: Any) -> Any:
    batch = common(lib)
    return [make(lib).build(common_prefix_len=n, common_attn_metadata=batch) for n in (0, 2, 16)]


@row("`build_for_cudagraph_capture`, `can_run_in_cudagraph`")
def _(lib: Any) -> Any:
    found = []
    for attributes in ({}, {"full_cudagraph_supported": True}):
        made, batch = make(lib, **attributes), common(lib, 1, 1)
        found.append((made.build_for_cudagraph_capture(batch), made.can_run_in_cudagraph(batch)))
    return found


@row("`use_cascade_attention` with seven arguments")
def _(lib: Any) -> Any:
    call = make(lib).use_cascade_attention
    given = (32, np.array([1, 1, 5]), 4, 2, False, False, 132)
    return list(inspect.signature(call).parameters), call(*given)


@row("`reorder_batch(input_batch, scheduler_output)`")
def _(lib: Any) -> Any:
    batch = InputBatch((9, 1, 9, 1))
    return make(lib).reorder_batch(batch, batch.scheduled), batch.req_ids


@row("`PerLayerParameters(window_left, logits_soft_cap, sm_scale)`")
def _(lib: Any) -> Any:
    cls = lib.PerLayerParameters
    one, other = cls(-1, None, 0.5), cls(window_left=-1, logits_soft_cap=None, sm_scale=0.5)
    equal = [one == other]
    other.window_left = 127
    return [*equal, one == other], dataclasses.asdict(one), dataclasses.asdict(other)


class Impl:
    """An implementation as a program of the seed has it."""

    def __init__(self, scale: float = 0.5, **attributes: Any) -> None:
        self.scale = scale
        vars(self).update(attributes)


def parameters(lib: Any, *impls: Any) -> dict[str, Any]:
    layers = {f"layers.{i}": SimpleNamespace(impl=impl) for i, impl in enumerate(impls)}
    return lib.get_per_layer_parameters(config({**layers, "mlp": object()}), Impl)


IMPLS = (
    Impl(),
    Impl(sliding_window=(127, 0), logits_soft_cap=30.0),
    Impl(0.25, sliding_window=(-1, -1), logits_soft_cap=None),
    Impl(sliding_window=None, logits_soft_cap=0.0),
)


@row("`get_per_layer_parameters(vllm_config, cls_)`")
def _(lib: Any) -> Any:
    return {name: dataclasses.asdict(one) for name, one in parameters(lib, *IMPLS).items()}


@row("wrong impl")
def _(lib: Any) -> Any:
    wrong = SimpleNamespace(scale=1.0)
    return raises_assertion(lambda: parameters(lib, Impl(), wrong)), len(parameters(lib, Impl()))


@row("`infer_global_hyperparameters`")
def _(lib: Any) -> Any:
    infer = lib.infer_global_hyperparameters
    equal = infer(parameters(lib, IMPLS[1], Impl(sliding_window=(127, 0), logits_soft_cap=30.0)))
    mixed = [
        raises_assertion(lambda other=other: infer(parameters(lib, IMPLS[0], other)))
        for other in (Impl(0.25), Impl(sliding_window=(9, 0)), Impl(logits_soft_cap=1.0), Impl())
    ]
    return dataclasses.asdict(equal), mixed, raises_assertion(lambda: infer({}))


@contextmanager
def layout_variable(lib: Any, value: str | None = None) -> Iterator[None]:
    """The variable of the original and of attnlib has this value; nothing stays cached."""
    names = "VLLM_KV_CACHE_LAYOUT", "ATTNLIB_KV_CACHE_LAYOUT"
    values = {} if value is None else dict.fromkeys(names, value)
    try:
        with mock.patch.dict(os.environ, values):
            lib.get_kv_cache_layout.cache_clear()
            yield
    finally:
        lib.set_kv_cache_layout(None)
        getattr(lib.get_kv_cache_layout, "cache_clear", lambda: None)()


@row("`get_kv_cache_layout()`", note="the default is NHD")
def _(lib: Any) -> Any:
    with layout_variable(lib):
        return lib.get_kv_cache_layout()


@row("cached", note="`cache_clear` as in the original")
def _(lib: Any) -> Any:
    with layout_variable(lib):
        found = [lib.get_kv_cache_layout()]
        with layout_variable(lib, "HND"):
            found.append(lib.get_kv_cache_layout())
            lib.set_kv_cache_layout("NHD")
            found.append(lib.get_kv_cache_layout())
    return found


@row("`VLLM_KV_CACHE_LAYOUT`", other_name="`ATTNLIB_KV_CACHE_LAYOUT`")
def _(lib: Any) -> Any:
    found = []
    for value in ("HND", "NHD"):
        with layout_variable(lib, value):
            found.append(lib.get_kv_cache_layout())
    return found


@row("`set_kv_cache_layout` overrides the variable")
def _(lib: Any) -> Any:
    found = []
    for value in (None, "NHD"):
        with layout_variable(lib, value):
            assert lib.set_kv_cache_layout(cache_layout="HND") is None
            found.append((lib.get_kv_cache_layout(), lib._KV_CACHE_LAYOUT_OVERRIDE))
    return found, lib._KV_CACHE_LAYOUT_OVERRIDE


def virtual(lib: Any, chunk: int, new: list[int], lens: list[int], size: int) -> Any:
    starts = np.cumsum([0, *new]).astype(np.int32)
    table = torch.arange(len(new) * 40, dtype=torch.int32).view(len(new), 40)
    seq_lens = np.array(lens, dtype=np.int32)
    return lib.make_local_attention_virtual_batches(chunk, starts, seq_lens, table, size)


@row(
    "`make_local_attention_virtual_batches(attn_chunk_size, query_start_loc_np, seq_lens_np, "
    "block_table, block_size)`",
    note="the example of its comments",
)
def _(lib: Any) -> Any:
    names = list(inspect.signature(lib.make_local_attention_virtual_batches).parameters)
    return names, virtual(lib, 4, [4, 10, 5], [6, 17, 9], 2)


@row("`block_size` has the default 0", note="an error, as a division by 0 there")
def _(lib: Any) -> Any:
    call = lib.make_local_attention_virtual_batches
    given = (4, np.array([0, 4]), np.array([6]), torch.zeros(1, 10, dtype=torch.int32))
    try:
        found: Any = call(*given)
    except (ArithmeticError, ValueError):
        found = "an error"
    return inspect.signature(call).parameters["block_size"].default, found


@row(
    "batches of any lengths above 0",
    note="requests without new tokens, which the original assumes away, have no virtual request",
)
def _(lib: Any) -> Any:
    draw, found = random.Random(0), []
    for _ in range(200):
        size = draw.choice([1, 2, 4, 16])
        new = [draw.randint(1, 40) for _ in range(draw.randint(1, 6))]
        lens = [n + draw.choice([0, draw.randint(0, 100)]) for n in new]
        found.append(virtual(lib, size * draw.randint(1, 5), new, lens, size))
    return found


@row("dtypes, 4-tuple")
def _(lib: Any) -> Any:
    found = virtual(lib, 4, [4, 10, 5], [6, 17, 9], 2)
    return type(found).__name__, [str(array.dtype) for array in found], found[3].shape[1]


@row("divisibility")
def _(lib: Any) -> Any:
    return [
        raises_assertion(lambda c=chunk, s=size: virtual(lib, c, [4], [6], s))
        for chunk, size in ((5, 2), (4, 3), (4, 4), (16, 2), (2, 4))
    ]


class InputBatch:
    """The part of the original's input batch that reordering uses."""

    def __init__(self, tokens: tuple[int, ...]) -> None:
        self.req_ids = [f"r{number}" for number in range(len(tokens))]
        counts = dict(zip(self.req_ids, tokens, strict=True))
        self.scheduled = SimpleNamespace(num_scheduled_tokens=counts)
        self.swaps: list[tuple[int, int]] = []

    def swap_states(self, one: int, other: int) -> None:
        self.swaps.append((one, other))
        ids = self.req_ids
        ids[one], ids[other] = ids[other], ids[one]


@row(
    "`reorder_batch_to_split_decodes_and_prefills(input_batch, scheduler_output, decode_threshold)`"
)
def _(lib: Any) -> Any:
    call, draw, found = lib.reorder_batch_to_split_decodes_and_prefills, random.Random(0), []
    for number in range(300):
        batch = InputBatch(tuple(draw.randint(1, 6) for _ in range(number % 12)))
        threshold = {} if number % 2 else {"decode_threshold": draw.randint(1, 6)}
        found.append((call(batch, batch.scheduled, **threshold), batch.req_ids, batch.swaps))
    return list(inspect.signature(call).parameters)[:3], found


@row(
    "`split_decodes_and_prefills(common_attn_metadata, decode_threshold)`",
    note="a further argument has a default",
)
def _(lib: Any) -> Any:
    call, draw, found = lib.split_decodes_and_prefills, random.Random(0), []
    for number in range(200):
        lengths = sorted(draw.randint(1, 6) for _ in range(1 + number % 9))
        kind = (torch.int32, torch.int64)[number % 2]
        batch = common(lib, *lengths, kind=kind)
        found.append([call(batch), *(call(batch, decode_threshold=n) for n in range(1, 7))])
    return list(inspect.signature(call).parameters)[:2], found


@row("unordered batch")
def _(lib: Any) -> Any:
    batches = [common(lib, *lengths) for lengths in ((5, 1), (1, 5, 1), (1, 5), (5, 2))]
    return [
        raises_assertion(lambda b=batch: lib.split_decodes_and_prefills(b)) for batch in batches
    ]


@row("`M`, `logger`", differs="attnlib's logger has no `info_once`")
def _(lib: Any) -> Any:
    # transformers adds `info_once` to logging.Logger itself.
    has_once = hasattr(lib.logger, "info_once") and type(lib.logger) is not logging.Logger
    is_logger = isinstance(lib.logger, logging.Logger), has_once
    return isinstance(lib.M, TypeVar), lib.M.__name__, is_logger


def prompts() -> tuple[Tensor, Tensor, Tensor]:
    """Two prompts of 5 and 7 tokens."""
    k, v = torch.randn(2, 12, 2, 32)
    return torch.randn(12, 4, 32), k, v


def chunked_in_kernel() -> Tensor:
    """Chunks of 4 positions, as a property of the layer."""
    spec = attnlib.AttentionSpec(
        num_heads=4, num_kv_heads=2, head_size=32, dtype=torch.float32, attention_chunk_size=4
    )
    layer = attnlib.Attention(spec, backend="torch", device="cpu")
    batch = attnlib.CommonAttentionMetadata.from_lengths([5, 7], [5, 7], [[3], [6]], 16, "cpu")
    metadata = layer.backend.make_builder(layer.spec, "cpu").build(0, batch)
    cache = attnlib.PagedKVCache.allocate(layer.spec, 8, "cpu")
    out: Tensor = layer(*prompts(), cache, metadata)
    return out.view(12, 4, 32)


@row(
    "chunked attention of such batches",
    ours=chunked_in_kernel,
    note="also in one kernel: `attention_chunk_size` of a layer",
)
def _(lib: Any) -> Any:
    starts = virtual(lib, 4, [5, 7], [5, 7], 4)[1]
    sizes = (4, 2, 32)
    scale = 32**-0.5
    return minivllm_original.flash_attention_prefill(
        *prompts(), torch.from_numpy(starts), scale, *sizes
    )


def planned(lib: Any, base: type) -> tuple[type, Any]:
    """A builder of a program, whose metadata are the batch and its counts; and its metadata."""

    @dataclasses.dataclass
    class Plan(base):  # type: ignore[misc, valid-type]
        starts: Any
        lens: Any
        tables: Any

    class Planner(lib.AttentionMetadataBuilder[Plan]):
        full_cudagraph_supported = True

        def __init__(self, kv_cache_spec: Any, vllm_config: Any, device: torch.device) -> None:
            super().__init__(kv_cache_spec, vllm_config, device)

        def build(
            self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
        ) -> Any:
            given = common_attn_metadata
            decodes, prefills, tokens, rest = lib.split_decodes_and_prefills(given)
            tensors = (given.query_start_loc, given.seq_lens, given.block_table_tensor)
            return Plan(prefills, rest, tokens, given.slot_mapping, None, False, *tensors)

    return Plan, Planner


def attend(q: Tensor, cache: Any, plan: Any) -> Tensor:
    """Attention over a cache `(keys, values)`, `[B, N, H, D]` each, in plain torch."""
    outputs = []
    for row, (first, end) in enumerate(zip(plan.starts, plan.starts[1:], strict=False)):
        blocks, length = plan.tables[row].long(), int(plan.lens[row])
        k, v = (side[blocks].flatten(0, 1)[:length] for side in cache)
        outputs.append(attention_api_original.dense(q[first:end], k, v, 32**-0.5))
    return torch.cat(outputs)


def steps() -> Iterator[tuple[dict[str, Any], tuple[Tensor, Tensor, Tensor]]]:
    """A prefill of two prompts and a decode of both: lengths, and queries, keys and values."""
    yield {"query_lens": [5, 7], "seq_lens": [5, 7]}, prompts()
    k, v = torch.randn(2, 2, 2, 32)
    yield {"query_lens": [1, 1], "seq_lens": [6, 8]}, (torch.randn(2, 4, 32), k, v)


def run_by_attnlib() -> list[Any]:
    """The builder behind a registered backend: built, captured, in a layer."""
    plan, planner = planned(backend_utils, vllm.AttentionMetadata)

    class Impl(attnlib.AttentionImpl):
        def forward(
            self, query: Any, cache: Any, metadata: Any, output: Any, lse: Any = None
        ) -> None:
            output.copy_(attend(query, (cache.key_cache, cache.value_cache), metadata))

    class Backend(attnlib.AttentionBackend):
        capabilities = TorchBackend.capabilities
        get_name = staticmethod(lambda: "planned")
        get_impl_cls = staticmethod(lambda: Impl)
        get_builder_cls = staticmethod(lambda: planner)
        get_metadata_cls = staticmethod(lambda: plan)

    attnlib.register_backend("planned", Backend)
    try:
        sizes = {"num_heads": 4, "num_kv_heads": 2, "head_size": 32}
        spec = attnlib.AttentionSpec(**sizes, dtype=torch.float32)
        layer = attnlib.Attention(spec, backend="planned", device="cpu")
        cache = attnlib.PagedKVCache.allocate(spec, 8, "cpu")
        limits = attnlib.BatchLimits(max_num_reqs=4, max_num_tokens=4, max_seq_len=64)
        builder = layer.backend.make_builder(spec, "cpu")
        found: list[Any] = []
        for lengths, (q, k, v) in steps():
            batch = attnlib.CommonAttentionMetadata.from_lengths(
                **lengths, block_table=[[3], [6]], block_size=16, device="cpu"
            )
            built = builder.build(0, batch)
            found += [built.num_prefills, built.num_decode_tokens, layer(q, k, v, cache, built)]
        made = layer.backend.make_builder(spec, "cpu", limits=limits)
        state = attnlib.AttentionState(made, limits).graph_clone(2)
        captured = state.graph_capture_get_metadata_for_batch(2)
        padded = state.builder.build(0, state.begin_forward(batch, 2))
        replayed = layer(q, k, v, cache, padded)  # over the buffers of the capture
        assert captured.lens.data_ptr() == padded.lens.data_ptr()
        return [*found, captured.num_decode_tokens, replayed, made.kv_cache_spec is spec]
    finally:
        unregister_backend("planned")


@row("a v1 builder", ours=run_by_attnlib, note="of a registered backend: built, captured, run")
def _(lib: Any) -> Any:
    plan, planner = planned(lib, attention_api_original.AttentionMetadata)
    builder, found, cache = planner(SPEC, config(), DEVICE), [], torch.zeros(2, 8, 16, 2, 32)
    for lengths, (q, k, v) in steps():
        made = attention_api_original.metadata_of(*lengths.values(), [[3], [6]])
        cache.flatten(1, 2)[:, made.slot_mapping] = torch.stack([k, v])
        starts, lens = made.query_start_loc, made.seq_lens_tensor
        batch = lib.CommonAttentionMetadata(
            starts, starts, lens, lens, lens, 2, len(q), max(lengths["query_lens"]),
            made.block_tables, made.slot_mapping,
        )  # fmt: skip
        built = builder.build(0, batch)
        found += [built.num_prefills, built.num_decode_tokens, attend(q, cache, built)]
    captured = builder.build_for_cudagraph_capture(batch)
    return [*found, captured.num_decode_tokens, found[-1], builder.kv_cache_spec is SPEC]
