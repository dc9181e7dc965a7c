"""Originals with one wrong function or class each, and the row that must notice it."""

from __future__ import annotations

import enum
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from tests.compat.seeds import (
    attention_api_original,
    minivllm_original,
    paged_ops_original,
    triton_prefill_original,
    v1_utils_original,
)

__all__ = ["WRONG", "Wrong"]


class Wrong(NamedTuple):
    """A wrong original.

    Attributes:
        row: number of the row.
        what: what is wrong.
        module: the original.
        names: what replaces its names.
    """

    row: str
    what: str
    module: ModuleType
    names: dict[str, Any]

    @property
    def namespace(self) -> SimpleNamespace:
        """The names of the wrong original."""
        return SimpleNamespace(**{**vars(self.module), **self.names})


def changed(function: Callable[..., Any], **changes: Callable[[Any], Any]) -> Callable[..., Any]:
    """The function with some arguments changed."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def wrong(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        for name, change in changes.items():
            given.arguments[name] = change(given.arguments[name])
        return function(*given.args, **given.kwargs)

    return wrong


def methods(**replaced: Any) -> dict[str, Any]:
    """PagedAttention with other methods."""
    static = {name: staticmethod(function) for name, function in replaced.items()}
    return {"PagedAttention": type("PagedAttention", (paged_ops_original.PagedAttention,), static)}


class WithoutRoot(minivllm_original.Attention):
    """The scale as given."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scale *= self.head_dim**0.5


class LostArguments(attention_api_original.Attention):
    """Extra arguments are lost."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        known = inspect.signature(attention_api_original.Attention).parameters
        super().__init__(*args, **{name: x for name, x in kwargs.items() if name in known})


class AttentionKind(str, enum.Enum):
    """Formatted as a member of an enumeration before Python 3.12."""

    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"

    def __format__(self, spec: str) -> str:
        return f"AttentionType.{self.name}"


class CopiedSlots(v1_utils_original.CommonAttentionMetadata):
    """The caller's tensor keeps its values."""

    def __post_init__(self) -> None:
        self.slot_mapping = self.slot_mapping.clone()
        super().__post_init__()


@dataclass(frozen=True)
class FrozenParameters:
    window_left: int
    logits_soft_cap: float | None
    sm_scale: float


def swap_keys(source: Any, target: Any, pairs: Any) -> None:
    """Values are forgotten."""
    for one, other in pairs.tolist():
        target[0][other] = source[0][one]


def untimely_layout() -> str:
    """The present override and variable."""
    return str(v1_utils_original.get_kv_cache_layout.__wrapped__())


untimely_layout.cache_clear = lambda: None  # type: ignore[attr-defined]


def without_gaps(q: Any, k: Any, v: Any, o: Any, *args: Any, **kwargs: Any) -> None:
    """Rows of no sequence become 0."""
    o.zero_()
    triton_prefill_original.context_attention_fwd(q, k, v, o, *args, **kwargs)


def unchecked(common: Any, decode_threshold: int = 1) -> tuple[int, ...]:
    """No assertion."""
    return (0, 0, 0, 0)


_mini, _paged = minivllm_original, paged_ops_original.PagedAttention
_prefill = triton_prefill_original.context_attention_fwd
_local = v1_utils_original.make_local_attention_virtual_batches
_reorder = v1_utils_original.reorder_batch_to_split_decodes_and_prefills

WRONG = (
    Wrong("1.07", "scale without 1 / sqrt(head_dim)", _mini, {"Attention": WithoutRoot}),
    Wrong("1.10", "scale ignored", _mini, {"flash_attention_prefill": changed(
        _mini.flash_attention_prefill, scale=lambda scale: 1.0)}),
    Wrong("1.11", "heads of another KV head", _mini, {"flash_attention_prefill": changed(
        _mini.flash_attention_prefill, k=lambda k: k.flip(1))}),
    Wrong("1.15", "the last key is not seen", _mini, {"paged_attention_decode": changed(
        _mini.paged_attention_decode, context_lens=lambda lens: (lens - 1).clamp(min=1))}),
    Wrong("1.20", "slot -1 is the last slot", _mini, {"store_kvcache": changed(
        _mini.store_kvcache, slot_mapping=lambda slots: slots.where(slots >= 0, 127))}),
    Wrong("2.06", "extra arguments are lost", attention_api_original, {"Attention": LostArguments}),
    Wrong("2.36", "names of members", attention_api_original, {"AttentionType": AttentionKind}),
    Wrong("3.08", "values twice as large", paged_ops_original, methods(write_to_paged_cache=changed(
        _paged.write_to_paged_cache, value=lambda value: value * 2))),
    Wrong("3.09", "another format", paged_ops_original, methods(write_to_paged_cache=changed(
        _paged.write_to_paged_cache, kv_cache_dtype=lambda name: name.replace("e5m2", "e4m3")))),
    Wrong("3.10", "slopes of the other sign", paged_ops_original, methods(forward_decode=changed(
        _paged.forward_decode, alibi_slopes=lambda x: None if x is None else -x))),
    Wrong("3.16", "the first rank", paged_ops_original, methods(forward_decode=changed(
        _paged.forward_decode, tp_rank=lambda rank: 0))),
    Wrong("3.17", "no check", paged_ops_original, methods(forward_decode=changed(
        _paged.forward_decode, blocksparse_block_size=lambda size: 16))),
    Wrong("3.18", "a window of one more key", paged_ops_original, methods(forward_prefix=changed(
        _paged.forward_prefix, sliding_window=lambda n: n + 1 if n else n))),
    Wrong("3.20", "values are not copied", paged_ops_original, methods(swap_blocks=swap_keys)),
    Wrong("4.03", "slots of a copy", v1_utils_original, {"CommonAttentionMetadata": CopiedSlots}),
    Wrong("4.14", "frozen", v1_utils_original, {"PerLayerParameters": FrozenParameters}),
    Wrong("4.19", "not cached", v1_utils_original, {"get_kv_cache_layout": untimely_layout}),
    Wrong("4.22", "chunks of the next size", v1_utils_original,
          {"make_local_attention_virtual_batches": changed(
              _local, attn_chunk_size=lambda size: 2 * size)}),
    Wrong("4.27", "threshold ignored", v1_utils_original,
          {"reorder_batch_to_split_decodes_and_prefills": changed(
              _reorder, decode_threshold=lambda n: 1)}),
    Wrong("4.29", "no assertion", v1_utils_original, {"split_decodes_and_prefills": unchecked}),
    Wrong("5.03", "gaps are cleared", triton_prefill_original,
          {"context_attention_fwd": without_gaps}),
    Wrong("5.06", "no default scale", triton_prefill_original, {"context_attention_fwd": changed(
        _prefill, softmax_scale=lambda scale: 1.0 if scale is None else scale)}),
    Wrong("5.07", "the window counts keys", triton_prefill_original,
          {"context_attention_fwd": changed(
              _prefill, sliding_window_q=lambda n: max(1, n - 1) if n else n)}),
    Wrong("5.08", "0 is no key", triton_prefill_original, {"context_attention_fwd": changed(
        _prefill, sliding_window_k=lambda n: 1 if n == 0 else n)}),
)  # fmt: skip
