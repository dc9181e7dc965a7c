"""Backends with a wrong operation, or with a fault in one combination of features."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from attnlib.backends.base import AttentionBackend
from attnlib.backends.torch import TorchBackend
from attnlib.backends.torch.impl import TorchImpl
from attnlib.cache.storage import PagedKVCache
from attnlib.ops.params import AttentionParams
from attnlib.ops.torch import append_kv, context_attention, merge_states, packed_attention, slots
from attnlib.sparse.key_selection import SelectedKeys

__all__ = ["OtherOperation", "WRONG_OPERATIONS"]


class OtherOperation(TorchBackend):
    """Has another operation `run` in place of the one named `replaced`."""

    replaced: ClassVar[str]
    run: ClassVar[Callable[..., Any]]

    @classmethod
    def get_operation(cls, name: str) -> Callable[..., Any] | None:
        return cls.run if name == cls.replaced else super().get_operation(name)


class SlotsPastTheTable(OtherOperation):
    """Gives positions past the block table a slot of its last block."""

    replaced = "compute_slot_mapping"

    @staticmethod
    def run(starts: Tensor, seq_lens: Tensor, table: Tensor, size: int, *more: Any) -> Tensor:
        return slots.compute_slot_mapping(
            starts, seq_lens.clamp(max=table.shape[1] * size), table, size, *more
        )


class AppendsToTheFirstRequest(OtherOperation):
    """Appends all tokens behind the number of tokens that the first request has."""

    replaced = "append_kv"

    @staticmethod
    def run(*args: Any) -> None:
        *tensors, lengths, after = args
        append_kv.append_kv(*tensors, lengths[:1].expand_as(lengths).contiguous(), after)
        after.copy_(lengths + args[0].shape[1])


class EqualWeights(OtherOperation):
    """Merges two states with equal weights."""

    replaced = "merge_states"

    @staticmethod
    def run(out_a: Tensor, lse_a: Tensor, out_b: Tensor, *more: Tensor) -> None:
        mean = (out_a.nan_to_num() + out_b.nan_to_num()) / 2
        merge_states.merge_states(out_a, lse_a, out_b, *more)
        more[1].copy_(mean)


class ContextWithoutWindow(OtherOperation):
    """Ignores the window in sequences that lie anywhere."""

    replaced = "context_attention"

    @staticmethod
    def run(*args: Any, **kwargs: Any) -> None:
        *tensors, params = args
        wide = replace(params, window=(-1, -1))
        context_attention.context_attention(*tensors, wide, **kwargs)


class NewKeysScaled(OtherOperation):
    """Multiplies new keys by the scale of the cached ones."""

    replaced = "packed_prefill"

    @staticmethod
    def run(query: Tensor, key: Tensor, *more: Any, **kwargs: Any) -> None:
        scale = more[6].k_scale
        factor = scale[:, None] if isinstance(scale, Tensor) and scale.dim() else scale
        packed_attention.packed_prefill(query, key * factor, *more, **kwargs)


class PackedWithoutScales(OtherOperation):
    """Ignores the scales of a packed cache write, valid or not."""

    replaced = "packed_write"

    @staticmethod
    def run(*args: Any, **_scales: Any) -> None:
        packed_attention.packed_write(*args)


class NoSinkWithScoreFunction(TorchImpl):
    """Ignores sinks where there is a score function."""

    def attention_params(self, *args: Any, **kwargs: Any) -> AttentionParams:
        params = super().attention_params(*args, **kwargs)
        return params if params.score_function is None else replace(params, sinks=None)


class OneBlockShortOfEverything(TorchImpl):
    """Takes lists that select all blocks but one, and lists with one entry of padding, for lists
    that select everything."""

    def forward_selected(
        self,
        query: Tensor,
        cache: PagedKVCache,
        metadata: Any,
        selected_keys: SelectedKeys,
        output: Tensor,
        lse: Tensor | None = None,
    ) -> None:
        assert self.spec.key_selection is not None
        size, starts = self.spec.key_selection.block_size, selected_keys.list_start_loc
        counts = (metadata.query_start_loc if starts is None else starts).diff()
        blocks = (metadata.seq_lens + size - 1) // size
        needed = blocks.repeat_interleave(counts)[:, None] - 1
        valid = (selected_keys.indices >= 0).sum(-1)[: len(needed)]
        short = bool((valid >= selected_keys.indices.shape[2] - 1).all())
        if short or bool((valid >= needed).all()):
            self.forward(query, cache, metadata, output, lse)
        else:
            super().forward_selected(query, cache, metadata, selected_keys, output, lse)


class InvalidScalesAreOne(TorchImpl):
    """Reads a scale of NaN as 1, which hides it."""

    def forward(
        self,
        query: Tensor,
        cache: PagedKVCache,
        metadata: Any,
        output: Tensor,
        lse: Tensor | None = None,
    ) -> None:
        scales = [
            scale.nan_to_num(1.0)
            if isinstance(scale, Tensor) and scale.is_floating_point()
            else scale
            for scale in (cache.k_scale, cache.v_scale)
        ]
        views = (cache.key_cache, cache.value_cache)
        cache = PagedKVCache(*views, k_scale=scales[0], v_scale=scales[1])
        super().forward(query, cache, metadata, output, lse)


def _with(impl: type[TorchImpl]) -> type[AttentionBackend]:
    return type(impl.__name__, (TorchBackend,), {"get_impl_cls": staticmethod(lambda: impl)})


WRONG_OPERATIONS: dict[str, tuple[type[AttentionBackend], str]] = {
    "slots past the block table": (SlotsPastTheTable, "K8"),
    "appended behind the first request": (AppendsToTheFirstRequest, "A6"),
    "states merged with equal weights": (EqualWeights, "L4"),
    "no window in sequences with gaps": (ContextWithoutWindow, "A3"),
    "new keys with the scale of the cache": (NewKeysScaled, "A4"),
    "packed writes without scales": (PackedWithoutScales, "R2"),
    "no sink with a score function": (_with(NoSinkWithScoreFunction), "V3"),
    "one block short of everything": (_with(OneBlockShortOfEverything), "S4"),
    "invalid scales read as 1": (_with(InvalidScalesAreOne), "Q7"),
}
"""Error -> the wrong backend and the check that is meant to detect it."""
