"""The second key stream of a call: compressed entries (M17)."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from attnlib.ops.latent import values_are_prefix
from attnlib.sparse.key_selection import KeySelection, SelectedKeys, SelectionScope

__all__ = ["EntryStream"]


class EntryStream(NamedTuple):
    """The entries of one layer call.

    Attributes:
        key_cache: `[B, n, Hkv, D]`, blocks of n entries.
        value_cache: the same form, with Dv.
        k_scale, v_scale: of the stored keys and values.
        block_table: `[T, m]` int32, the blocks of the entries of each query token.
        num_entries: `[T]` int32, entries that each query token may see.
        max_entries: an upper bound of `num_entries`.
        selection: the form of the lists; None without lists.
        selected: the lists, exactly with a selection.
    """

    key_cache: Tensor
    value_cache: Tensor
    k_scale: float | Tensor
    v_scale: float | Tensor
    block_table: Tensor
    num_entries: Tensor
    max_entries: int
    selection: KeySelection | None
    selected: SelectedKeys | None

    @property
    def signature(self) -> tuple[object, ...]:
        """What launches follow from, besides addresses and numbers of entries."""
        caches, tables = self[:2], (self.block_table, self.num_entries)
        scales = (self.k_scale, self.v_scale)
        return (
            *((x.dtype, x.shape[1:], x.stride()) for x in caches),
            *((x.dtype, x.stride(-1)) for x in tables),
            *(type(x) if isinstance(x, Tensor) else x for x in scales),
            *(values_are_prefix(*caches), self.selection),
        )

    @property
    def names_single_entries(self) -> bool:
        """Whether a query token has one list, of single entries, for all its heads, or none."""
        form = self.selection
        return form is None or (
            form.block_size == form.query_block_size == 1
            and form.scope != SelectionScope.QUERY_HEAD
        )
