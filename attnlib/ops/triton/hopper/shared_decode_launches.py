"""The launches of a Hopper decode of shared prefixes, bound to everything but addresses."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from attnlib.ops.params import AttentionParams
from attnlib.ops.shared_decode import DecodeItems
from attnlib.ops.triton.heuristics.device import DeviceLimits, device_guard
from attnlib.ops.triton.hopper.descriptors import (
    CacheView,
    described,
    descriptor_arguments,
    encode_views,
    encoded_descriptors,
)
from attnlib.ops.triton.launch.bound import (
    ALIGNMENT,
    BoundLaunch,
    can_bypass_triton,
    current_stream,
)
from attnlib.ops.triton.launch.cache import LaunchCache
from attnlib.ops.triton.launch.sequence import (
    KEY_CACHE,
    KEY_MAP,
    LSE,
    OUT,
    QUERY,
    SINKS,
    VALUE_CACHE,
    VALUE_MAP,
    Launches,
    Lookup,
    batch_sources,
    bind_step,
)

__all__ = [
    "HopperSharedDecode",
    "SharedDecodeCall",
]


class SharedDecodeCall(NamedTuple):
    """The tensors and parameters of one call, as in `ops.torch.shared_decode`, and its chip."""

    query: Tensor
    key: Tensor
    value: Tensor
    table: Tensor
    out: Tensor
    lse: Tensor | None
    params: AttentionParams
    limits: DeviceLimits


@dataclass(frozen=True, eq=False)
class HopperSharedDecode:
    """The launches of one call signature, without addresses.

    Attributes:
        limits: the chip that the grid was chosen for.
        index: the device index.
        views: the key and value cache as TMA reads them.
        scale: softmax scale times that of the keys.
        soft_cap: 0 is none.
        numbers: B, query tokens, strides of query tokens and heads and of rows of the block table.
        merge_strides: of output tokens and heads, and of the tokens of the LSE.
        num_heads, head_size_v: Hq and Dv.
        attend: the attention kernel.
        merge: the kernel that merges partial results.
    """

    limits: DeviceLimits
    index: int
    views: tuple[CacheView, CacheView]
    scale: float
    soft_cap: float
    numbers: tuple[int, ...]
    merge_strides: tuple[int, int, int]
    num_heads: int
    head_size_v: int
    attend: BoundLaunch
    merge: BoundLaunch

    def launches(self, direct: bool) -> Launches:
        """The launches of both kernels. The order of their arguments is written here.

        Args:
            direct: launch without Triton, on addresses.
        """
        caches, maps = (KEY_CACHE, VALUE_CACHE), (KEY_MAP, VALUE_MAP)
        lookup = described(self.views, caches, maps)
        if direct:
            lookup = Lookup(caches, self._descriptors, self._encode, maps)
        (
            ranges,
            segments,
            items,
            tokens,
            starts,
            rows,
            num_tokens,
            table,
            outputs,
            lses,
        ) = batch_sources(10)
        attend = (
            *descriptor_arguments(self.views, maps, direct),
            QUERY,
            ranges,
            segments,
            items,
            tokens,
            table,
            outputs,
            lses,
            self.scale,
            self.soft_cap,
            *self.numbers,
        )
        merge = outputs, lses, starts, rows, SINKS, OUT, LSE, num_tokens, *self.merge_strides
        return Launches(
            (
                bind_step(self.attend, direct, True, attend),
                bind_step(self.merge, direct, True, merge),
            ),
            (lookup,),
        )

    @cached_property
    def direct(self) -> Launches:
        """The direct launches, made once."""
        return self.launches(True)

    @cached_property
    def _descriptors(self) -> LaunchCache:
        return encoded_descriptors(self.views, self.attend)

    def _encode(self, key: int, value: int) -> tuple[object, ...]:
        return encode_views(self._descriptors, self.attend, self.views, (key, value))

    def workspace(self, items: DecodeItems, device: torch.device) -> Tensor:
        """Memory of the partial results of a batch."""
        elements = items.num_partials * self.num_heads * (self.head_size_v + 1)
        return torch.empty(elements, dtype=torch.float32, device=device)

    def run(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        table: Tensor,
        items: DecodeItems,
        params: AttentionParams,
        out: Tensor,
        lse: Tensor | None,
        workspace: Tensor,
    ) -> bool:
        """Launch on the current stream; False, and no launch, where an address is not a multiple of
        16. Arguments as in `ops.torch.shared_decode`; `workspace` as from the method."""
        pointers = tuple(tensor.data_ptr() for tensor in (query, key, value, out))
        lses = items.num_partials * self.num_heads * self.head_size_v
        addresses = workspace.data_ptr()
        for pointer in pointers:
            addresses |= pointer
        if addresses & ALIGNMENT:
            return False
        integers = (
            items.ranges,
            items.segments,
            items.items,
            items.tokens,
            items.partial_starts,
            items.partial_rows,
        )
        with device_guard(query):
            if can_bypass_triton((self.attend, self.merge)):
                space = workspace.data_ptr()
                self.direct.submit(
                    current_stream(self.index),
                    (
                        *pointers,
                        None if lse is None else lse.data_ptr(),
                        None,
                        None,
                        None,
                        None if params.sinks is None else params.sinks.data_ptr(),
                        None,
                        None,
                    ),
                    (
                        *(tensor.data_ptr() for tensor in integers),
                        items.num_tokens,
                        table.data_ptr(),
                        space,
                        space + 4 * lses,
                    ),
                )
            else:
                self.launches(False).submit(
                    0,
                    (query, key, value, out, lse, None, None, None, params.sinks, None, None),
                    (*integers, items.num_tokens, table, workspace, workspace[lses:]),
                )
        return True
