"""Rows of the second seed: `vllm.attention`."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import attnlib
from attnlib.backends.torch import TorchBackend
from attnlib.backends.triton import TritonBackend
from attnlib.compat import vllm
from tests.compat.seeds import attention_api_original as original
from tests.compat.seeds.table import Seed
from tests.fresh_process import run_program

__all__ = ["SEED"]

SEED = Seed(2, "vllm-attention-api", "attnlib.compat.vllm", original)
row = SEED.row

SIZES = {"num_heads": 4, "head_size": 32, "scale": 0.2, "num_kv_heads": 2}
TABLES = [[3, 1], [6, 0]]
NAMES = (
    *("Attention", "AttentionBackend", "AttentionMetadata", "AttentionType"),
    *("AttentionMetadataBuilder", "AttentionState", "get_attn_backend"),
)


def tokens(count: int = 12) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, flat as a model passes them."""
    return torch.randn(count, 128), torch.randn(count, 64), torch.randn(count, 64)


def empty_cache() -> Tensor:
    return torch.zeros(2, 8, 16, 2, 32)


def program(lib: Any) -> Any:
    """The classes of a backend that a program of the seed defines.

    Its impl keeps its arguments and the last call, and returns queries plus the mean of the values.
    """

    class Impl:
        def __init__(
            self,
            num_heads: int,
            head_size: int,
            scale: float,
            num_kv_heads: int,
            alibi_slopes: list[float] | None,
            sliding_window: int | None,
            kv_cache_dtype: str,
            logits_soft_cap: float | None,
            attn_type: str,
            kv_sharing_target_layer_name: str | None,
            **extra_impl_args: Any,
        ) -> None:
            self.arguments = {name: x for name, x in locals().items() if name[:2] != "__"}
            del self.arguments["self"]
            self.scale, self.loaded = scale, None

        def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
            self.loaded = act_dtype

        def forward(
            self,
            layer: Any,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            kv_cache: Tensor,
            attn_metadata: Any,
            output: Tensor,
        ) -> Tensor:
            self.call = (layer, kv_cache, attn_metadata)
            kv_cache[0].view(-1, 2, 32)[attn_metadata.slot_mapping] = key
            return output.copy_(query * self.scale + value.mean())

    @dataclasses.dataclass
    class Metadata(lib.AttentionMetadata):
        own: int = 0

        @property
        def prefill_metadata(self) -> Any:
            return self if self.num_prefills else None

        @property
        def decode_metadata(self) -> Any:
            return self if self.num_decode_tokens else None

    class Builder(lib.AttentionMetadataBuilder[Metadata]):
        def __init__(self, input_builder: Any) -> None:
            self.input_builder = input_builder

        def prepare(self) -> None:
            self.prepared = True

        def build(
            self, seq_lens: list[int], query_lens: list[int], graph_size: int, batch_size: int
        ) -> Any:
            slots = torch.arange(sum(query_lens)) + 16
            return Metadata(len(seq_lens), sum(query_lens), 0, slots, None, False, own=batch_size)

    class State(lib.AttentionState[Metadata]):
        def __init__(self, runner: Any) -> None:
            self.runner, self.begun = runner, []

        def begin_forward(self, model_input: Any) -> None:
            self.begun.append(model_input.attn_metadata)

        def get_graph_input_buffers(
            self, attn_metadata: Any, is_encoder_decoder_model: bool = False
        ) -> dict[str, Any]:
            return {"slot_mapping": attn_metadata.slot_mapping}

        def graph_capture_get_metadata_for_batch(
            self, batch_size: int, is_encoder_decoder_model: bool = False
        ) -> Any:
            return Metadata(0, 0, batch_size, torch.zeros(batch_size).long(), None, False)

        def graph_clone(self, batch_size: int) -> Any:
            return State(self.runner)

    class Backend(lib.AttentionBackend):
        @staticmethod
        def get_name() -> str:
            return "program"

        @staticmethod
        def get_impl_cls() -> Any:
            return Impl

        @staticmethod
        def get_metadata_cls() -> Any:
            return Metadata

        @staticmethod
        def get_builder_cls() -> Any:
            return Builder

        @staticmethod
        def get_state_cls() -> Any:
            return State

        @staticmethod
        def get_kv_cache_shape(
            num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
        ) -> tuple[int, ...]:
            return (2, num_blocks, block_size, num_kv_heads, head_size)

        @staticmethod
        def swap_blocks(src_kv_cache: Tensor, dst_kv_cache: Tensor, src_to_dst: Tensor) -> None:
            dst_kv_cache[:, src_to_dst[:, 1]] = src_kv_cache[:, src_to_dst[:, 0]]

        @staticmethod
        def copy_blocks(kv_caches: list[Tensor], src_to_dists: Tensor) -> None:
            for cache in kv_caches:
                Backend.swap_blocks(cache, cache, src_to_dists)

    return SimpleNamespace(
        Impl=Impl, Metadata=Metadata, Builder=Builder, State=State, Backend=Backend
    )


def layer_of(lib: Any, **changes: Any) -> Any:
    """A layer on the program's backend, with a cache."""
    layer = lib.Attention(**{**SIZES, "attn_backend": program(lib).Backend, **changes})
    layer.kv_cache = [empty_cache()]
    return layer


def metadata_for(layer: Any, count: int = 12, scales: bool = False) -> Any:
    make = layer.get_attn_backend().make_metadata
    return make(
        num_prefills=2,
        num_prefill_tokens=count,
        num_decode_tokens=0,
        slot_mapping=torch.arange(count) + 16,
        multi_modal_placeholder_index_maps=None,
        enable_kv_scales_calculation=scales,
    )


def run(lib: Any, layer: Any, metadata: Any = None, **shape: Any) -> Tensor:
    with lib.set_forward_context(metadata_for(layer) if metadata is None else metadata, None):
        return layer(*tokens(), **shape)


CACHE_CONFIG = SimpleNamespace(cache_dtype="fp8", block_size=32, calculate_kv_scales=True)


@row("`__all__` of seven names", note="also below vLLM's paths")
def _(lib: Any) -> Any:
    return [(name in lib.__all__, callable(getattr(lib, name))) for name in NAMES]


@row(
    "`Attention(num_heads, head_size, scale, num_kv_heads, alibi_slopes, cache_config, "
    "quant_config, logits_soft_cap, per_layer_sliding_window, use_mla, prefix, attn_type, "
    "kv_sharing_target_layer_name, attn_backend)`"
)
def _(lib: Any) -> Any:
    given = inspect.signature(lib.Attention).parameters.values()
    return [(p.name, str(p.kind), p.default is p.empty or p.default) for p in given]


@row("`quant_config`")
def _(lib: Any) -> Any:
    calls: list[Any] = []

    class Method:
        def create_weights(self, layer: Any) -> None:
            calls.append(layer)

    def get_quant_method(layer: Any, prefix: str) -> Method:
        calls.append((layer, prefix))
        return Method()

    quant = SimpleNamespace(get_quant_method=get_quant_method)
    layer = layer_of(lib, quant_config=quant, prefix="layers.0")
    return calls[0] == (layer, "layers.0"), calls[1] is layer, len(calls)


@row("`cache_config.cache_dtype`, `.block_size`")
def _(lib: Any) -> Any:
    layers = [layer_of(lib, cache_config=config) for config in (CACHE_CONFIG, None)]
    return [layer.impl.arguments["kv_cache_dtype"] for layer in layers]


@row("`cache_config.calculate_kv_scales`")
def _(lib: Any) -> Any:
    return [
        layer_of(lib, cache_config=config).calculate_kv_scales for config in (CACHE_CONFIG, None)
    ]


@row("`**extra_impl_args`", note="all of them, to an impl in vLLM's style")
def _(lib: Any) -> Any:
    return layer_of(lib, kv_lora_rank=32, own=[1]).impl.arguments["extra_impl_args"]


@row("`alibi_slopes: list[float]`")
def _(lib: Any) -> Any:
    return layer_of(lib, alibi_slopes=[0.5, 0.25, 0.125, 0.0625]).impl.arguments["alibi_slopes"]


@row("`attn_backend` attribute")
def _(lib: Any) -> Any:
    backend = program(lib).Backend
    layer = lib.Attention(4, 32, 0.2, attn_backend=backend)
    selected = lib.Attention(4, 32, 0.2).attn_backend
    return layer.attn_backend is backend, isinstance(selected.get_name(), str)


@row(
    "`impl = impl_cls(num_heads, head_size, scale, ...)`, `kv_sharing_target_layer_name` attributes"
)
def _(lib: Any) -> Any:
    given = {
        "alibi_slopes": [1.0, 0.5, 0.25, 0.125],
        "logits_soft_cap": 30.0,
        "per_layer_sliding_window": 64,
        "attn_type": lib.AttentionType.DECODER,
        "kv_sharing_target_layer_name": "layers.0",
    }
    layer, plain = layer_of(lib, **given), layer_of(lib, num_kv_heads=None)
    arguments = [{**made.impl.arguments, "attn_type": str(made.impl.arguments["attn_type"])}
                 for made in (layer, plain)]  # fmt: skip
    return arguments, layer.kv_sharing_target_layer_name, plain.kv_sharing_target_layer_name


@row("`kv_cache` attribute")
def _(lib: Any) -> Any:
    layer = lib.Attention(**SIZES, attn_backend=program(lib).Backend)
    before = layer.kv_cache[0].numel()
    layer.kv_cache = [empty_cache()]
    run(lib, layer)
    return before, layer.impl.call[1] is layer.kv_cache[0], layer.kv_cache[0]


@row("`forward(query, key, value, output_shape=None)`")
def _(lib: Any) -> Any:
    given = inspect.signature(lib.Attention.forward).parameters.values()
    names = [(p.name, p.default is p.empty or p.default) for p in given]
    shapes: list[Any] = [{}, {"output_shape": None}, {"output_shape": torch.Size([12, 4, 32])}]
    return names, [run(lib, layer_of(lib), **shape) for shape in shapes]


@row("metadata from a forward context", note="one object, or one per layer")
def _(lib: Any) -> Any:
    layer = layer_of(lib, prefix="layers.3")
    other, own = metadata_for(layer, 5), metadata_for(layer)
    found = []
    for given in (own, {"layers.1": other, "layers.3": own}):
        out = run(lib, layer, given)
        found.append((layer.impl.call[0] is layer, layer.impl.call[2] is own, out))
    return found


OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]},
    {"logits_soft_cap": 5.0, "per_layer_sliding_window": 3},
    {"num_kv_heads": 4},
)
STEPS = (([5, 7], [5, 7]), ([3, 1], [8, 8]), ([1, 1], [9, 9]), ([4, 2], [20, 11]))


def served_by_attnlib() -> list[Any]:
    """The steps of the next row on a backend of attnlib."""

    def metadata_of(layer: Any, *lengths: list[int]) -> Any:
        common = attnlib.CommonAttentionMetadata.from_lengths(*lengths, TABLES, 16, "cpu")
        return TorchBackend.make_builder(layer.layer.spec, "cpu").build(0, common)

    return served(vllm, TorchBackend, metadata_of)


def served(lib: Any, backend: Any, metadata_of: Callable[..., Any]) -> list[Any]:
    """Outputs of four steps with each kind of layer, and its cache."""
    found = []
    for options in OPTIONS:
        layer = lib.Attention(**{**SIZES, **options}, attn_backend=backend)
        kv_heads = options.get("num_kv_heads", 2)
        layer.kv_cache = [torch.zeros(backend.get_kv_cache_shape(8, 16, kv_heads, 32))]
        for lengths in STEPS:
            q, k, v = (torch.randn(sum(lengths[0]), n * 32) for n in (4, kv_heads, kv_heads))
            with lib.set_forward_context(metadata_of(layer, *lengths)):
                found.append(layer(q, k, v))
        found.append(layer.kv_cache[0])
    return found


@row("stores, attends, returns", ours=served_by_attnlib)
def _(lib: Any) -> Any:
    return served(
        lib, lib.ReferenceBackend, lambda layer, *lengths: lib.metadata_of(*lengths, TABLES)
    )


def scales_of(layer: Any) -> list[float]:
    """Scales of keys and values, under the names of vLLM or of attnlib."""
    owner = layer if hasattr(layer, "_k_scale") else layer.layer
    names = ("_k_scale", "_v_scale") if owner is layer else ("k_scale", "v_scale")
    return [round(float(getattr(owner, name)), 6) for name in names]


@row("`calc_kv_scales(query, key, value)`", note="queries are not quantized")
def _(lib: Any) -> Any:
    found = []
    for factor in (1.0, 3.0):
        layer = layer_of(lib, cache_config=CACHE_CONFIG)
        q, k, v = tokens()
        assert layer.calc_kv_scales(q, k, factor * v) is None
        found.append((scales_of(layer), layer.calculate_kv_scales))
    return found


@row("`enable_kv_scales_calculation` makes the step compute them", note="once")
def _(lib: Any) -> Any:
    found = []
    for config in (CACHE_CONFIG, None):
        layer = layer_of(lib, cache_config=config)
        for scales in (False, True, True):
            run(lib, layer, metadata_for(layer, scales=scales))
            found.append((scales_of(layer), layer.calculate_kv_scales))
    return found


@row("`process_weights_after_loading(act_dtype)`")
def _(lib: Any) -> Any:
    layer = layer_of(lib)
    names = list(inspect.signature(layer.process_weights_after_loading).parameters)
    returned = layer.process_weights_after_loading(torch.bfloat16)
    return names, returned, layer.impl.loaded, scales_of(layer)


@row("`extra_repr`, `get_attn_backend`", note="a string of the layer's sizes")
def _(lib: Any) -> Any:
    layer = layer_of(lib)
    text = layer.extra_repr()
    sizes = ("num_heads=4", "num_kv_heads=2", "head_size=32")
    shown = [size in text for size in sizes]
    return type(text), shown, text in repr(layer), layer.get_attn_backend() is layer.attn_backend


LATENTS = ((5, 48), (7, 48))


def latent_layer_of_attnlib() -> Tensor:
    layer = vllm.Attention(
        4, 48, 0.1, 1, use_mla=True, kv_lora_rank=32, qk_rope_head_dim=16,
        attn_backend=TorchBackend,
    )  # fmt: skip
    layer.kv_cache = [torch.zeros(8, 16, 48)]
    common = attnlib.CommonAttentionMetadata.from_lengths([5, 7], [5, 7], TABLES, 16, "cpu")
    metadata = TorchBackend.make_builder(layer.layer.spec, "cpu").build(0, common)
    q, latents = torch.randn(12, 4, 48), torch.randn(12, 1, 48)
    with vllm.set_forward_context(metadata):
        out: Tensor = layer(q, latents, latents[..., :32])
    return out.view(12, 4, 32)


@row("MLA through the layer (`use_mla`)", ours=latent_layer_of_attnlib, note="over latents")
def _(lib: Any) -> Any:
    q, latents = torch.randn(12, 4, 48), torch.randn(12, 1, 48)
    prompts = (slice(0, 5), slice(5, 12))
    return torch.cat([lib.dense(q[p], latents[p], latents[p, :, :32], 0.1) for p in prompts])


@row("`AttentionBackend` ABC", note="subclasses in vLLM's style run in layers")
def _(lib: Any) -> Any:
    try:
        lib.AttentionBackend()
        abstract = False
    except TypeError:
        abstract = True
    return abstract, issubclass(program(lib).Backend, lib.AttentionBackend), run(lib, layer_of(lib))


def selected(lib: Any) -> Any:
    return lib.get_attn_backend(32, torch.float32, "auto", 16)


def constructed(cls: type, *arguments: Any) -> bool:
    """Whether the arguments of the seed construct a class of the selected backend."""
    try:
        return isinstance(cls(*arguments), cls)
    except TypeError:
        return False


@row(
    "`get_name`, `get_impl_cls`, `get_metadata_cls`, `get_builder_cls`",
    differs="impls and builders of attnlib's backends take specs: construct `Attention` and "
    "`AttentionMetadataBuilder`",
)
def _(lib: Any) -> Any:
    backend, own = selected(lib), program(lib)
    classes = (own.Backend.get_metadata_cls(), own.Backend.get_builder_cls())
    input_builder = SimpleNamespace(runner=runner_of(lib), inter_data_list=[])
    sizes = (4, 32, 0.2, 2, None, None, "auto", None, "decoder", None)
    return (
        isinstance(backend.get_name(), str),
        issubclass(backend.get_metadata_cls(), lib.AttentionMetadata),
        issubclass(backend, lib.AttentionBackend),
        (classes == (own.Metadata, own.Builder), own.Backend.get_impl_cls() is own.Impl),
        issubclass(backend.get_builder_cls(), lib.AttentionMetadataBuilder),
        constructed(backend.get_builder_cls(), input_builder),
        constructed(backend.get_impl_cls(), *sizes),
    )


@row(
    "`get_state_cls`",
    differs="states of attnlib's backends take builders: construct `AttentionState`",
)
def _(lib: Any) -> Any:
    own, cls = program(lib), selected(lib).get_state_cls()
    return own.Backend.get_state_cls() is own.State, constructed(cls, runner_of(lib))


@row("`get_kv_cache_shape`")
def _(lib: Any) -> Any:
    return selected(lib).get_kv_cache_shape(8, 16, num_kv_heads=2, head_size=32)


@row("`get_kv_cache_stride_order`")
def _(lib: Any) -> Any:
    order = selected(lib).get_kv_cache_stride_order()
    return type(order), sorted(order)


@row("`copy_blocks(kv_caches, src_to_dists)`, `swap_blocks(src, dst, src_to_dst)`")
def _(lib: Any) -> Any:
    backend, pairs = selected(lib), torch.tensor([[5, 0], [2, 3]])
    source, target = torch.randn(2, 6, 16, 2, 32), torch.randn(2, 4, 16, 2, 32)
    assert backend.swap_blocks(source, target, pairs) is None
    layers = [torch.randn(2, 6, 16, 2, 32) for _ in range(2)]
    assert backend.copy_blocks(layers, pairs) is None
    return source, target, layers


@row("`make_metadata`, `full_cls_name`")
def _(lib: Any) -> Any:
    own = program(lib)
    made = own.Backend.make_metadata(1, 5, 0, None, None, False, own=3)
    name = own.Backend.full_cls_name()
    backend = selected(lib)
    expected = (backend.__module__, backend.__qualname__)
    return type(made) is own.Metadata, made.own, name, backend.full_cls_name() == expected


@row(
    "`AttentionMetadata(num_prefills, num_prefill_tokens, num_decode_tokens, slot_mapping, "
    "multi_modal_placeholder_index_maps, enable_kv_scales_calculation)`"
)
def _(lib: Any) -> Any:
    slots = torch.arange(5)
    values = (1, 5, 0, slots, {"image": None}, True)
    metadata_cls = program(lib).Metadata
    made = metadata_cls(*values)
    fields = [each.name for each in dataclasses.fields(metadata_cls)]
    by_name = metadata_cls(**dict(zip(fields, values, strict=False)))
    read = [{name: getattr(each, name) for name in fields} for each in (made, by_name)]
    return fields, read, made.slot_mapping is slots


@row("`prefill_metadata`, `decode_metadata`")
def _(lib: Any) -> Any:
    metadata_cls = program(lib).Metadata
    prefills = metadata_cls(1, 5, 0, None, None, False)
    decodes = metadata_cls(0, 0, 3, None, None, False)
    return [
        (made.prefill_metadata is made, made.decode_metadata is made)
        for made in (prefills, decodes)
    ]


@row("`asdict_zerocopy(skip_fields)`")
def _(lib: Any) -> Any:
    slots = torch.arange(5)
    made = program(lib).Metadata(1, 5, 0, slots, None, False)
    found = [made.asdict_zerocopy(skip) for skip in (None, set(), {"slot_mapping", "own"})]
    return found, found[0]["slot_mapping"] is slots


def runner_of(lib: Any, is_encoder_decoder: bool = False) -> Any:
    """The attributes of a v0 model runner."""
    model = SimpleNamespace(
        get_num_attention_heads=lambda parallel: 4,
        get_num_kv_heads=lambda parallel: 2,
        get_head_size=lambda: 32,
        dtype=torch.float32,
        is_encoder_decoder=is_encoder_decoder,
        max_encoder_len=128,
    )
    return SimpleNamespace(
        model_config=model,
        block_size=16,
        attn_backend=getattr(lib, "ReferenceBackend", TritonBackend),
        device="cpu",
        max_batchsize_to_capture=4,
        max_seq_len_to_capture=64,
    )


def built(lib: Any, seq_lens: list[int], query_lens: list[int]) -> Any:
    """What the module's builder makes of these sequences, in blocks of 16."""
    blocks = [[3, 1, 2, 0], [6, 4, 5, 7]][: len(seq_lens)]
    data = [
        SimpleNamespace(block_tables={i: row[: -(-n // 16)]})
        for i, (row, n) in enumerate(zip(blocks, seq_lens, strict=True))
    ]
    input_builder = SimpleNamespace(runner=runner_of(lib), inter_data_list=data)
    builder = getattr(lib, "ReferenceBuilder", lib.AttentionMetadataBuilder)
    return builder(input_builder).build(seq_lens, query_lens, -1, len(seq_lens))


def state_of(lib: Any, is_encoder_decoder: bool = False) -> Any:
    return getattr(lib, "ReferenceState", lib.AttentionState)(runner_of(lib, is_encoder_decoder))


@row(
    "`AttentionMetadataBuilder(input_builder)`",
    note="generic; short prompts count as decodes",
)
def _(lib: Any) -> Any:
    own = program(lib)
    builder = own.Builder(input_builder=SimpleNamespace())
    builder.prepare()
    made = builder.build([5, 7], [5, 7], -1, 2)
    batches = (([20, 30], [20, 30]), ([40, 64], [30, 25]), ([9], [1]), ([17, 33], [1, 1]))
    found = [built(lib, *lengths) for lengths in batches]
    counts = ("num_prefills", "num_prefill_tokens", "num_decode_tokens", "slot_mapping")
    parts = [(x.prefill_metadata is None, x.decode_metadata is None) for x in found]
    return (
        issubclass(own.Builder, lib.AttentionMetadataBuilder),
        made.asdict_zerocopy(),
        [[getattr(each, name) for name in counts] for each in found],
        parts,
    )


@row("`AttentionState(runner)`", note="generic")
def _(lib: Any) -> Any:
    own, runner = program(lib), runner_of(lib)
    state = own.Backend.get_state_cls()(runner)
    made = state_of(lib)
    return [isinstance(x, lib.AttentionState) for x in (state, made)], state.runner is runner


BUFFERS = ("slot_mapping", "seq_lens_tensor", "block_tables")


@row("`begin_forward(model_input)`", note="takes what the builder made")
def _(lib: Any) -> Any:
    state, found = state_of(lib), []
    for seq_lens in ([40, 9], [17]):
        metadata = built(lib, seq_lens, [1] * len(seq_lens))
        model_input = SimpleNamespace(attn_metadata=metadata, batch_size=4)
        assert state.begin_forward(model_input) is None
        buffers = state.get_graph_input_buffers(metadata)
        used = [buffers["block_tables"][i, : -(-n // 16)] for i, n in enumerate(seq_lens)]
        found.append((*(buffers[name].clone() for name in BUFFERS[:2]), [x.clone() for x in used]))
    return found


@row("`get_graph_input_buffers(attn_metadata, is_encoder_decoder_model)`")
def _(lib: Any) -> Any:
    state = state_of(lib)
    given = inspect.signature(lib.AttentionState.get_graph_input_buffers).parameters.values()
    buffers = state.get_graph_input_buffers(None, is_encoder_decoder_model=False)
    return (
        [(p.name, p.default is p.empty or p.default) for p in given],
        [(list(buffers[name].shape), str(buffers[name].dtype)) for name in BUFFERS],
    )


@row("`graph_capture_get_metadata_for_batch(batch_size, is_encoder_decoder_model)`")
def _(lib: Any) -> Any:
    captured = [state_of(lib).graph_capture_get_metadata_for_batch(n) for n in (1, 2, 4)]
    both = state_of(lib, True).graph_capture_get_metadata_for_batch(2, True)
    return (
        [(each.num_prefills, each.num_decode_tokens) for each in captured],
        [list(each.slot_mapping.shape) for each in captured],
        both.cross_attention is not None,
    )


@row("`graph_clone(batch_size)`", note="own buffers")
def _(lib: Any) -> Any:
    state = state_of(lib)
    clone = state.graph_clone(2)
    buffers = [each.get_graph_input_buffers(None) for each in (state, clone)]
    shared = [buffers[0][name].data_ptr() == buffers[1][name].data_ptr() for name in BUFFERS]
    return isinstance(clone, lib.AttentionState), clone is state, shared


@row("state for encoder-decoder models")
def _(lib: Any) -> Any:
    state = state_of(lib, True)
    encoder = attnlib.CommonAttentionMetadata.from_lengths(
        [1, 1], [30, 7], [[1, 4], [7]], 16, "cpu", is_cross_attention=True
    )
    model_input = SimpleNamespace(
        attn_metadata=built(lib, [40, 9], [1, 1]), cross_attn_metadata=encoder, batch_size=4
    )
    state.begin_forward(model_input)
    buffers = state.get_graph_input_buffers(None, True)
    return buffers["encoder_seq_lens_tensor"], buffers["seq_lens_tensor"]


@row("`AttentionType`, strings")
def _(lib: Any) -> Any:
    kinds = [
        getattr(lib.AttentionType, name)
        for name in ("DECODER", "ENCODER", "ENCODER_ONLY", "ENCODER_DECODER")
    ]
    return (
        [f"{kind}" for kind in kinds],
        [isinstance(kind, str) for kind in kinds],
        [str(kind) + ":" + "".join(["", kind]) for kind in kinds],
        [kind in {"decoder": 0, "encoder": 1, "encoder_only": 2} for kind in kinds],
    )


@row(
    "`get_attn_backend(head_size, dtype, kv_cache_dtype, block_size, is_attention_free, use_mla, "
    "has_sink)`"
)
def _(lib: Any) -> Any:
    given = inspect.signature(lib.get_attn_backend).parameters.values()
    names = [(p.name, p.default is p.empty or p.default) for p in given]
    backends = [
        lib.get_attn_backend(64, torch.float32, None, 16),
        lib.get_attn_backend(64, torch.float32, "auto", 16, False, False, True),
        lib.get_attn_backend(576, torch.float32, "auto", 16, use_mla=True),
    ]
    return names, [issubclass(backend, lib.AttentionBackend) for backend in backends]


@row("... of a model with GQA", note="asked for one head; a layer asks with its own")
def _(lib: Any) -> Any:
    layers = [lib.Attention(heads, 64, 0.125, 1).attn_backend for heads in (1, 8)]
    backend = lib.get_attn_backend(64, torch.get_default_dtype(), "auto", 16)
    return [layer.get_name() == backend.get_name() for layer in layers]


@row("`is_attention_free=True` returns a backend")
def _(lib: Any) -> Any:
    backend = lib.get_attn_backend(64, torch.float32, "auto", 16, is_attention_free=True)
    return issubclass(backend, lib.AttentionBackend), isinstance(backend.get_name(), str)


@row("fp8 names", note="`fp8_inc` (Gaudi) is unknown")
def _(lib: Any) -> Any:
    return [
        issubclass(lib.get_attn_backend(64, torch.float32, name, 16), lib.AttentionBackend)
        for name in (None, "auto", "fp8", "fp8_e4m3", "fp8_e5m2")
    ]


def imported_by_attnlib() -> tuple[bool, bool]:
    """In a fresh process: the kernel package before and after a backend of kernels is chosen."""
    done = run_program(
        "import sys\n"
        f"from {SEED.module} import get_attn_backend\n"
        "before = 'triton' in sys.modules\n"
        "import os, torch\n"
        "os.environ['ATTNLIB_BACKEND'] = 'triton'\n"
        "get_attn_backend(64, torch.float32, 'auto', 16).get_impl_cls()\n"
        "print(before, 'triton' in sys.modules)",
        {"TRITON_INTERPRET": "1"},
    )
    assert done.returncode == 0, done.stderr
    before, after = done.stdout.split()
    return before == "True", after == "True"


@row("lazy import of the chosen backend", ours=imported_by_attnlib)
def _(lib: Any) -> Any:
    kernels = isinstance(lib.get_attn_backend(64, torch.float32, "auto", 16), type)
    return False, kernels
