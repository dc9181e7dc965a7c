"""Decodes of a `PagedModel` in CUDA graphs.

A graph replays the launches of a whole forward, so that a decode does not wait for Python. There is
one for each size of a batch, which smaller batches are padded to (M7). All read the same buffers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from attnlib import env
from attnlib.errors import ContractError
from attnlib.instrumentation import OBSERVERS, STATE_OBSERVERS
from attnlib.integrations.transformers import devices
from attnlib.integrations.transformers.decode_buffers import CapturedStep, DecodeBuffers
from attnlib.integrations.transformers.paged_batches import StepBatch
from attnlib.integrations.transformers.paged_calls import LOCAL
from attnlib.integrations.transformers.paged_forward import run_model
from attnlib.metadata.common import CommonAttentionMetadata
from attnlib.metadata.groups import StateGroupBatch
from attnlib.workspace import BatchLimits

if TYPE_CHECKING:
    from attnlib.integrations.transformers.paged_model import PagedModel

__all__ = ["DecodeGraphs"]

logger = logging.getLogger("attnlib")


class DecodeGraphs:
    """The graphs of a model. The first decodes of a size run without one, which compiles kernels
    and finds layers; the second are captured.

    Args:
        paged: the model.
        limits: of the model.

    Attributes:
        sizes: requests of the graphs: the powers of two, and the most.
        captured: the sizes that have a graph.

    Raises:
        ContractError: no limits.
    """

    def __init__(self, paged: PagedModel, limits: BatchLimits | None) -> None:
        if limits is None:
            raise ContractError(
                "cuda_graphs=True needs limits=BatchLimits(...): graphs are captured for sequences "
                "of max_seq_len tokens, and for up to max_num_reqs requests"
            )
        most = min(limits.max_num_reqs, limits.max_num_tokens)
        self.sizes = [*(1 << n for n in range(most.bit_length()) if 1 << n < most), most]
        self._paged, self._limits = paged, limits
        self._seen: set[int] = set()
        self._graphs: dict[int, _Graph] = {}
        self._buffers: DecodeBuffers | None = None
        self._failed: set[int] = set()

    @property
    def captured(self) -> list[int]:
        """The sizes that have a graph."""
        return sorted(self._graphs)

    def logits(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        batch: StepBatch,
        one: CommonAttentionMetadata,
    ) -> torch.Tensor | None:
        """The logits `[T, vocabulary]` of a step, or None for one that runs without a graph.

        Args:
            input_ids, position_ids, batch: as in `PagedModel.step`.
            one: a batch with the lengths of the step.
        """
        if not self._is_served(input_ids, batch, one):
            return None
        size = next(size for size in self.sizes if size >= one.num_reqs)
        if size in self._failed:
            return None
        if size not in self._graphs:
            if size not in self._seen:
                self._seen.add(size)
                return None
            if self._buffers is None:
                self._buffers = DecodeBuffers(self._paged, self._limits, input_ids.device)
            try:
                self._graphs[size] = _Graph(self._buffers, size)
            except Exception as error:
                self._failed.add(size)
                logger.warning(
                    "%s: decodes of %s requests run without a CUDA graph, because the capture "
                    "failed: %s",
                    *(type(self._paged.model).__name__, size, error),
                )
                return None
        return self._graphs[size].replay(input_ids, position_ids, batch)

    def _is_served(
        self, input_ids: torch.Tensor, batch: StepBatch, one: CommonAttentionMetadata
    ) -> bool:
        """Whether a step has one token of each request, and nothing that a graph would not see."""
        device = input_ids.device
        counts = {one.num_reqs, one.num_actual_tokens, input_ids.shape[0]}
        return (
            devices.kind_of(device) == "cuda"
            and one.max_query_len == 1
            and len(counts) == 1
            and one.num_reqs <= self.sizes[-1]
            and one.max_seq_len <= self._limits.max_seq_len
            and all(map(_is_plain, batches_of(batch)))
            and self._is_complete(batch)
            and not self._paged.shares
            and self._paged.is_attached
            and not torch.is_autocast_enabled(device.type)
            and not (OBSERVERS or STATE_OBSERVERS or env.read("ATTNLIB_VALIDATE"))
        )

    def _is_complete(self, batch: StepBatch) -> bool:
        """Whether the batch has what its layers need; a step without a graph says what is missing,
        and a replay would use that of the batch before."""
        paged = self._paged
        if not isinstance(batch, CommonAttentionMetadata):
            return all(
                _has_slots(one.batch) if isinstance(one, StateGroupBatch) else _has_blocks(one)
                for one in batch.values()
            )
        has_keys, has_states = bool(paged.attention.by_module), bool(paged.states.modules)
        return (_has_blocks(batch) or not has_keys) and (_has_slots(batch) or not has_states)


def _has_blocks(one: CommonAttentionMetadata) -> bool:
    return one.block_table_tensor is not None and one.slot_mapping is not None


def _has_slots(one: CommonAttentionMetadata) -> bool:
    return one.state_slots is not None


def batches_of(batch: StepBatch) -> list[CommonAttentionMetadata]:
    """The batches of all groups."""
    if isinstance(batch, CommonAttentionMetadata):
        return [batch]
    return [one.batch if isinstance(one, StateGroupBatch) else one for one in batch.values()]


def _is_plain(one: CommonAttentionMetadata) -> bool:
    return (
        (one.causal is None or one.causal is True)
        and one.query_bias is None
        and one.score_tensors is None
        and not one.is_cross_attention
        and one.shared_prefixes is None
    )


class _Graph:
    """The forward of a model for a number of requests, captured."""

    def __init__(self, buffers: DecodeBuffers, size: int) -> None:
        self._buffers, self._size = buffers, size
        self._step = CapturedStep(buffers, size)
        buffers.positions.zero_()
        self._replay, self._logits = capture(self._forward, buffers)

    def _forward(self) -> torch.Tensor:
        held, size = self._buffers, self._size
        self._step.reached.clear()
        LOCAL.in_graph = True
        try:
            return run_model(self._step, held.ids[:size], held.positions[:size])
        finally:
            LOCAL.in_graph = False

    def replay(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, batch: StepBatch
    ) -> torch.Tensor:
        """The logits of a batch of at most the captured size."""
        held, count = self._buffers, input_ids.shape[0]
        held.ids[:count].copy_(input_ids)
        held.positions[:count].copy_(position_ids)
        held.positions[count:].zero_()  # some rotations depend on the largest position
        for group in self._step.groups:
            group.fill(batch, self._size)
        self._replay()
        return self._logits[:count].clone()  # the next replay of any graph may overwrite them


def capture(
    forward: Callable[[], torch.Tensor], buffers: DecodeBuffers
) -> tuple[Callable[[], None], torch.Tensor]:
    """A graph of a function, and the tensor that its replays write.

    Args:
        forward: runs twice, the first time without a capture, to compile and to prepare.
        buffers: with the stream and the memory of all graphs.
    """
    device, stream, pool = buffers.device, buffers.stream, buffers.pool
    stream.wait_stream(torch.cuda.current_stream(device))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        forward()
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        out = forward()
    torch.cuda.current_stream(device).wait_stream(stream)
    return graph.replay, out
