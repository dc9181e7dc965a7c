"""`vllm.attention` in plain torch, written from the second seed document.

The document lists signatures and one line about most of them. `ReferenceBackend` is what its
abstract classes leave to backends: dense attention over a cache `(2, B, N, H, D)`.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

__all__ = [
    "Attention",
    "AttentionBackend",
    "AttentionMetadata",
    "AttentionMetadataBuilder",
    "AttentionState",
    "AttentionType",
    "get_attn_backend",
]

T = TypeVar("T")


class AttentionType:
    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


@dataclass
class AttentionMetadata:
    num_prefills: int
    num_prefill_tokens: int
    num_decode_tokens: int
    slot_mapping: Tensor
    multi_modal_placeholder_index_maps: dict[str, Any] | None
    enable_kv_scales_calculation: bool

    @property
    @abstractmethod
    def prefill_metadata(self) -> AttentionMetadata | None: ...

    @property
    @abstractmethod
    def decode_metadata(self) -> AttentionMetadata | None: ...

    def asdict_zerocopy(self, skip_fields: set[str] | None = None) -> dict[str, Any]:
        names = [each.name for each in dataclasses.fields(self)]
        return {name: getattr(self, name) for name in names if name not in (skip_fields or ())}


class AttentionMetadataBuilder(ABC, Generic[T]):
    @abstractmethod
    def __init__(self, input_builder: Any) -> None: ...


class AttentionState(ABC, Generic[T]):
    @abstractmethod
    def __init__(self, runner: Any) -> None: ...

    @abstractmethod
    def begin_forward(self, model_input: Any) -> None: ...

    @abstractmethod
    def get_graph_input_buffers(
        self, attn_metadata: T, is_encoder_decoder_model: bool = False
    ) -> dict[str, Any]: ...

    @abstractmethod
    def graph_capture_get_metadata_for_batch(
        self, batch_size: int, is_encoder_decoder_model: bool = False
    ) -> T: ...

    @abstractmethod
    def graph_clone(self, batch_size: int) -> AttentionState[T]: ...


class AttentionBackend(ABC):
    @staticmethod
    @abstractmethod
    def get_name() -> str: ...

    @staticmethod
    @abstractmethod
    def get_impl_cls() -> type: ...

    @staticmethod
    @abstractmethod
    def get_metadata_cls() -> type[AttentionMetadata]: ...

    @staticmethod
    @abstractmethod
    def get_builder_cls() -> type: ...

    @staticmethod
    @abstractmethod
    def get_state_cls() -> type: ...

    @staticmethod
    @abstractmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]: ...

    @staticmethod
    def get_kv_cache_stride_order() -> tuple[int, ...]:
        raise NotImplementedError

    @staticmethod
    @abstractmethod
    def swap_blocks(src_kv_cache: Tensor, dst_kv_cache: Tensor, src_to_dst: Tensor) -> None: ...

    @staticmethod
    @abstractmethod
    def copy_blocks(kv_caches: list[Tensor], src_to_dists: Tensor) -> None: ...

    @classmethod
    def make_metadata(cls, *args: Any, **kwargs: Any) -> AttentionMetadata:
        return cls.get_metadata_cls()(*args, **kwargs)

    @classmethod
    def full_cls_name(cls) -> tuple[str, str]:
        return (cls.__module__, cls.__qualname__)


_context: list[SimpleNamespace] = []


@contextmanager
def set_forward_context(attn_metadata: Any, vllm_config: Any = None) -> Iterator[None]:
    _context.append(SimpleNamespace(attn_metadata=attn_metadata, virtual_engine=0))
    try:
        yield
    finally:
        _context.pop()


def get_forward_context() -> SimpleNamespace:
    return _context[-1]


class Attention(nn.Module):
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        cache_config: Any = None,
        quant_config: Any = None,
        logits_soft_cap: float | None = None,
        per_layer_sliding_window: int | None = None,
        use_mla: bool = False,
        prefix: str = "",
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        attn_backend: type[AttentionBackend] | None = None,
        **extra_impl_args: Any,
    ) -> None:
        super().__init__()
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        kv_cache_dtype, block_size = "auto", 16
        self.calculate_kv_scales = False
        if cache_config is not None:
            kv_cache_dtype, block_size = cache_config.cache_dtype, cache_config.block_size
            self.calculate_kv_scales = cache_config.calculate_kv_scales
        if attn_backend is None:
            dtype = torch.get_default_dtype()
            attn_backend = get_attn_backend(
                head_size, dtype, kv_cache_dtype, block_size, False, use_mla=use_mla
            )
        self.attn_backend = attn_backend
        self.impl = attn_backend.get_impl_cls()(
            num_heads, head_size, scale, kv_heads, alibi_slopes, per_layer_sliding_window,
            kv_cache_dtype, logits_soft_cap, attn_type, kv_sharing_target_layer_name,
            **extra_impl_args,
        )  # fmt: skip
        self.num_heads, self.num_kv_heads, self.head_size = num_heads, kv_heads, head_size
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.layer_name, self.scale = prefix, scale
        self._k_scale, self._v_scale = torch.tensor(1.0), torch.tensor(1.0)
        self.kv_cache = [torch.tensor([])]
        if quant_config is not None:
            quant_config.get_quant_method(self, prefix=prefix).create_weights(self)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, output_shape: torch.Size | None = None
    ) -> Tensor:
        context = get_forward_context()
        metadata = context.attn_metadata
        if isinstance(metadata, dict):
            metadata = metadata[self.layer_name]
        if self.calculate_kv_scales and metadata.enable_kv_scales_calculation:
            self.calc_kv_scales(query, key, value)
        query = query.view(-1, self.num_heads, self.head_size)
        key, value = (x.reshape(len(query), self.num_kv_heads, -1) for x in (key, value))
        cache = self.kv_cache[context.virtual_engine]
        out = query.new_zeros(query.shape[0], self.num_heads, self.head_size)
        found = self.impl.forward(self, query, key, value, cache, metadata, output=out)
        return found.reshape(output_shape or (query.shape[0], -1))

    def calc_kv_scales(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Once: the largest element becomes the largest number of float8."""
        largest = torch.finfo(torch.float8_e4m3fn).max
        self._k_scale, self._v_scale = key.abs().max() / largest, value.abs().max() / largest
        self.calculate_kv_scales = False

    def extra_repr(self) -> str:
        sizes = ("head_size", "num_heads", "num_kv_heads", "scale")
        return ", ".join(f"{name}={getattr(self, name)}" for name in sizes)

    def get_attn_backend(self) -> type[AttentionBackend]:
        return self.attn_backend

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        if hasattr(self.impl, "process_weights_after_loading"):
            self.impl.process_weights_after_loading(act_dtype)


def get_attn_backend(
    head_size: int,
    dtype: torch.dtype,
    kv_cache_dtype: str | None,
    block_size: int,
    is_attention_free: bool = False,
    use_mla: bool = False,
    has_sink: bool = False,
) -> type[AttentionBackend]:
    return ReferenceBackend


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    slopes: list[float] | None = None,
    soft_cap: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Causal attention of the last tokens of one sequence over all of its keys."""
    group, first = q.shape[1] // k.shape[1], k.shape[0] - q.shape[0]
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
    for row in range(q.shape[0]):
        distance = first + row - torch.arange(k.shape[0])
        hidden = (distance < 0) | (distance >= (window or k.shape[0]))
        for head in range(q.shape[1]):
            scores = k[:, head // group] @ q[row, head] * scale
            if soft_cap:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            if slopes is not None:
                scores = scores - slopes[head] * distance
            weights = scores.masked_fill(hidden, -torch.inf).softmax(0)
            out[row, head] = weights @ v[:, head // group]
    return out


class ReferenceImpl:
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
        **extra: Any,
    ) -> None:
        self.scale, self.alibi_slopes = scale, alibi_slopes
        self.sliding_window, self.logits_soft_cap = sliding_window, logits_soft_cap
        self.shares = kv_sharing_target_layer_name is not None

    def forward(
        self,
        layer: Attention,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: ReferenceMetadata,
        output: Tensor,
    ) -> Tensor:
        size, starts = kv_cache.shape[2], attn_metadata.query_start_loc.tolist()
        for side, new in enumerate((key, value)):
            for token, slot in enumerate(attn_metadata.slot_mapping.tolist()):
                if slot >= 0 and not self.shares:
                    kv_cache[side, slot // size, slot % size] = new[token]
        for sequence, length in enumerate(attn_metadata.seq_lens_tensor.tolist()):
            table = attn_metadata.block_tables[sequence]
            places = [(int(table[i // size]), i % size) for i in range(length)]
            keys, values = (torch.stack([side[b, i] for b, i in places]) for side in kv_cache)
            rows = slice(starts[sequence], starts[sequence + 1])
            output[rows] = dense(
                query[rows], keys, values, self.scale, slopes=self.alibi_slopes,
                soft_cap=self.logits_soft_cap, window=self.sliding_window,
            )  # fmt: skip
        return output


@dataclass
class ReferenceMetadata(AttentionMetadata):
    query_start_loc: Tensor
    seq_lens_tensor: Tensor
    block_tables: Tensor
    cross_attention: Any = None

    @property
    def prefill_metadata(self) -> ReferenceMetadata | None:
        return self if self.num_prefills else None

    @property
    def decode_metadata(self) -> ReferenceMetadata | None:
        return self if self.num_decode_tokens else None


def metadata_of(
    query_lens: list[int], seq_lens: list[int], tables: list[list[int]], block_size: int = 16
) -> ReferenceMetadata:
    """The batch of sequences whose last `query_lens` tokens are new."""
    slots = [
        tables[i][position // block_size] * block_size + position % block_size
        for i, (new, length) in enumerate(zip(query_lens, seq_lens, strict=True))
        for position in range(length - new, length)
    ]
    prefills = [n for n in query_lens if n > 1]
    widest = max(map(len, tables))
    return ReferenceMetadata(
        len(prefills), sum(prefills), sum(query_lens) - sum(prefills), torch.tensor(slots), None,
        False, torch.tensor([0, *query_lens]).cumsum(0).int(), torch.tensor(seq_lens).int(),
        torch.tensor([row + [0] * (widest - len(row)) for row in tables]).int(),
    )  # fmt: skip


class ReferenceBuilder(AttentionMetadataBuilder[ReferenceMetadata]):
    def __init__(self, input_builder: Any) -> None:
        self.input_builder = input_builder

    def build(
        self, seq_lens: list[int], query_lens: list[int], cuda_graph_pad_size: int, batch_size: int
    ) -> ReferenceMetadata:
        data = self.input_builder.inter_data_list
        tables = [blocks for each in data for blocks in each.block_tables.values()]
        return metadata_of(query_lens, seq_lens, tables)


class ReferenceState(AttentionState[ReferenceMetadata]):
    """Buffers of the largest graph; the rows past a batch are padding, without keys and slots."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        size, longest = runner.max_batchsize_to_capture, runner.max_seq_len_to_capture
        self.buffers = {
            "slot_mapping": torch.full((size,), -1),
            "seq_lens_tensor": torch.zeros(size, dtype=torch.int32),
            "block_tables": torch.zeros(size, -(-longest // runner.block_size)).int(),
        }
        if runner.model_config.is_encoder_decoder:
            self.buffers["encoder_seq_lens_tensor"] = torch.zeros(size, dtype=torch.int32)

    def begin_forward(self, model_input: Any) -> None:
        metadata = model_input.attn_metadata
        self.buffers["slot_mapping"].fill_(-1)
        self.buffers["seq_lens_tensor"].zero_()
        given = (metadata.slot_mapping, metadata.seq_lens_tensor)
        for name, tensor in zip(("slot_mapping", "seq_lens_tensor"), given, strict=True):
            self.buffers[name][: len(tensor)] = tensor
        rows, columns = metadata.block_tables.shape
        self.buffers["block_tables"][:rows, :columns] = metadata.block_tables
        cross = getattr(model_input, "cross_attn_metadata", None)
        if cross is not None:
            self.buffers["encoder_seq_lens_tensor"][: len(cross.seq_lens)] = cross.seq_lens

    def get_graph_input_buffers(
        self, attn_metadata: Any, is_encoder_decoder_model: bool = False
    ) -> dict[str, Any]:
        return self.buffers

    def graph_capture_get_metadata_for_batch(
        self, batch_size: int, is_encoder_decoder_model: bool = False
    ) -> ReferenceMetadata:
        own = [self.buffers[name][:batch_size] for name in ("seq_lens_tensor", "block_tables")]
        starts = torch.arange(batch_size + 1, dtype=torch.int32)
        slots = self.buffers["slot_mapping"][:batch_size]
        return ReferenceMetadata(
            0, 0, batch_size, slots, None, False, starts, *own,
            cross_attention=SimpleNamespace() if is_encoder_decoder_model else None,
        )  # fmt: skip

    def graph_clone(self, batch_size: int) -> ReferenceState:
        return ReferenceState(self.runner)


class ReferenceBackend(AttentionBackend):
    @staticmethod
    def get_name() -> str:
        return "reference"

    @staticmethod
    def get_impl_cls() -> type[ReferenceImpl]:
        return ReferenceImpl

    @staticmethod
    def get_metadata_cls() -> type[ReferenceMetadata]:
        return ReferenceMetadata

    @staticmethod
    def get_builder_cls() -> type[ReferenceBuilder]:
        return ReferenceBuilder

    @staticmethod
    def get_state_cls() -> type[ReferenceState]:
        return ReferenceState

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        return (2, num_blocks, block_size, num_kv_heads, head_size)

    @staticmethod
    def get_kv_cache_stride_order() -> tuple[int, ...]:
        return (0, 1, 2, 3, 4)

    @staticmethod
    def swap_blocks(src_kv_cache: Tensor, dst_kv_cache: Tensor, src_to_dst: Tensor) -> None:
        for source, target in src_to_dst.tolist():
            dst_kv_cache[:, target] = src_kv_cache[:, source]

    @staticmethod
    def copy_blocks(kv_caches: list[Tensor], src_to_dists: Tensor) -> None:
        for cache in kv_caches:
            ReferenceBackend.swap_blocks(cache, cache, src_to_dists)
