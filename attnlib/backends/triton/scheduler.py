"""Splits and scratch memory of a step, from upper bounds of its lengths."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import torch

from attnlib.backends.triton.spec_shape import layer_shape
from attnlib.ops.layer_shape import LayerShape
from attnlib.ops.triton import hopper
from attnlib.ops.triton.decode_schedule import DecodeSchedule, decode_schedules
from attnlib.ops.triton.heuristics.device import DeviceLimits, device_limits
from attnlib.ops.triton.heuristics.splits import paged_decode_workspace_bytes, visible_bound
from attnlib.ops.triton.hopper.sizes import hopper_reads
from attnlib.spec import AttentionSpec

__all__ = ["Scheduler"]

_UNBOUNDED = 1 << 62
"""More than any sequence length."""


class Scheduler(NamedTuple):
    """Chooses splits from upper bounds; one per builder.

    Attributes:
        shape: sizes and dtypes of the layers.
        limits: the chip.
        window: (left, right), -1 unbounded.
        chunk: positions per attention chunk, 0 for none.
        kernels: "auto", "hopper" or "portable".
        hopper_query_lens: query lengths of decodes that the Hopper decode supports.
        batch_invariant: whether keys are divided into segments of fixed size (M15).
    """

    shape: LayerShape
    limits: DeviceLimits
    window: tuple[int, int]
    chunk: int
    kernels: str
    hopper_query_lens: frozenset[int] = frozenset()
    batch_invariant: bool = False

    @classmethod
    def of(
        cls, spec: AttentionSpec, device: torch.device, kernels: str, longest_decode: int
    ) -> Scheduler:
        """The scheduler of layers with this spec, for decodes of up to `longest_decode` tokens."""
        shape = layer_shape(spec)
        if not hopper_reads(shape.page_format, shape.value_format):
            kernels = "portable"  # the only ones that read these pages
        window, chunk = spec.visible_window.as_kernel_args(), spec.attention_chunk_size or 0
        limits = device_limits(device)
        scheduler = cls(shape, limits, window, chunk, kernels)
        if spec.batch_invariant:
            return scheduler._replace(batch_invariant=True)
        dispatch = scheduler.dispatch()
        supported = frozenset(
            query_len
            for query_len in range(1, longest_decode + 1)
            if dispatch is not None and dispatch.supports_decode(shape, limits, query_len)
        )
        return scheduler._replace(hopper_query_lens=supported)

    def visible(self, max_query_len: int, max_seq_len: int, causal: bool) -> int:
        """The most keys that the queries of one request see."""
        return visible_bound(max_query_len, max_seq_len, self.window, causal, self.chunk)

    def decode(
        self, num_reqs: int, max_query_len: int, max_seq_len: int, causal: bool
    ) -> DecodeSchedule:
        """Splits of a decode by its bounds; in batch-invariant layers its segments."""
        return self.decodes(num_reqs, max_query_len, causal)(max_seq_len)

    def decodes(
        self, num_reqs: int, max_query_len: int, causal: bool
    ) -> Callable[[int], DecodeSchedule]:
        """`decode` as a function of the longest sequence."""
        if self.batch_invariant:
            segments = _invariant().visible_segments

            def schedule(max_seq_len: int) -> DecodeSchedule:
                bounds = (max_query_len, max_seq_len, self.window, causal, self.chunk)
                count = segments(*bounds, self.limits)
                return DecodeSchedule(max(1, max_query_len), count, False, None, False)

            return schedule
        return decode_schedules(
            self.shape,
            self.limits,
            num_reqs=num_reqs,
            max_query_len=max_query_len,
            most_visible=self.visible(max_query_len, _UNBOUNDED, causal),
            kernels=self.kernels,
        )

    def workspace_bytes(self, schedule: DecodeSchedule, num_tokens: int) -> int:
        """Scratch memory of a decode, by whichever kernel serves it."""
        if self.batch_invariant:
            return int(
                _invariant().workspace_bytes(
                    self.shape, self.limits, num_tokens, schedule, self.kernels
                )
            )
        plain = paged_decode_workspace_bytes(
            num_tokens, self.shape.num_heads, self.shape.head_size_v, schedule.num_splits
        )
        return max(plain, self.hopper_bytes(num_tokens, schedule.max_query_len))

    def hopper_bytes(self, num_tokens: int, max_query_len: int) -> int:
        """Scratch memory of the Hopper decode; 0 where it is not used."""
        if max_query_len not in self.hopper_query_lens:
            return 0
        found = hopper.load().decode_workspace_bytes(
            self.shape, self.limits, num_tokens, max_query_len
        )
        return int(found)

    def dispatch(self) -> Any:
        """The module `hopper.dispatch`, where its kernels may be used; None elsewhere."""
        wanted = self.limits.capability[0] == 9 and self.kernels != "portable"
        return hopper.load() if wanted else None


def _invariant() -> Any:
    """The module of batch-invariant launches, which other layers do not import."""
    return import_module("attnlib.ops.triton.invariant_attention")
