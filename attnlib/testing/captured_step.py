"""A step captured at a padded size, to be replayed for other batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from attnlib.backends.base import AttentionBackend
from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.case import Case
from attnlib.testing.layouts import allocate_views
from attnlib.testing.materialized_case import MaterializedCase
from attnlib.testing.runner import make_impl
from attnlib.workspace import BatchLimits

__all__ = ["CapturedStep"]


class CapturedStep:
    """A captured step with its static tensors.

    Args:
        target: the backend under test.
        case: the configuration; its batch is not read.
        query_len: query tokens of each captured request.
        num_blocks: blocks of the cache.
        num_reqs: captured requests.
        max_seq_len: limit of the sequence lengths; None is 6 blocks.
        writer: the backend that writes the keys and values; None is the backend under test.

    Attributes:
        out: [num_reqs * query_len, Hq, Dv], written by `replay`.
        replay: runs the step on a GPU as a CUDA graph, on a CPU by a call with the metadata of the
            capture.
    """

    def __init__(
        self,
        target: BackendUnderTest,
        case: Case,
        query_len: int,
        num_blocks: int,
        num_reqs: int = 6,
        max_seq_len: int | None = None,
        writer: type[AttentionBackend] | None = None,
    ) -> None:
        self.target, self.case, self.query_len, self.num_reqs = target, case, query_len, num_reqs
        tokens, dims, device = num_reqs * query_len, case.dimensions, target.device
        self.limits = BatchLimits(
            max_num_reqs=num_reqs,
            max_num_tokens=tokens,
            max_seq_len=max_seq_len or 6 * case.block_size,
        )
        self.builder = target.backend.make_builder(case.spec, device, limits=self.limits)
        self.state = target.backend.get_state_cls()(self.builder, self.limits)
        self.views = allocate_views(dims, num_blocks, case.layout, device)
        self.query = torch.zeros(
            tokens, dims.num_heads, dims.head_size, dtype=dims.dtype, device=device
        )
        self.key = torch.zeros(
            tokens, dims.num_kv_heads, dims.head_size, dtype=dims.dtype, device=device
        )
        self.value = torch.zeros(
            tokens, dims.num_kv_heads, dims.head_size_v, dtype=dims.dtype, device=device
        )
        self.out = torch.zeros(
            tokens, dims.num_heads, dims.head_size_v, dtype=dims.dtype, device=device
        )
        template = case.replace(batch=f"{num_reqs}q{query_len}").materialize(device)
        self.impl = make_impl(target.backend, template)
        self.writer = self.impl if writer is None else make_impl(writer, template)
        self.cache = replace(template, inputs=replace(template.inputs, cache=self.views)).cache()
        self.metadata = self.state.graph_capture_get_metadata_for_batch(
            num_reqs, query_len=query_len
        )
        self.replay = self._capture()

    def _run(self) -> None:
        self.writer.write_kv(self.key, self.value, self.cache, self.metadata.slot_mapping)
        self.impl.forward(self.query, self.cache, self.metadata, self.out)

    def _capture(self) -> Callable[[], None]:
        if not self.target.on_gpu:
            return self._run
        side = torch.cuda.Stream(device=self.target.device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._run()
            self._run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._run()
        return graph.replay

    def load(self, step: MaterializedCase, *, exact_bound: bool = False) -> Any:
        """Copy a batch into the static tensors, poison the rest, and return the new metadata.

        Args:
            step: the batch.
            exact_bound: build with the longest sequence of the batch as bound, as engines do that
                pad batches themselves, instead of with the limit.
        """
        rows = step.inputs.query.shape[0]
        for static, live in (
            (self.query, step.inputs.query),
            (self.key, step.inputs.key),
            (self.value, step.inputs.value),
        ):
            static.fill_(float("nan"))
            static[:rows].copy_(live)
        self.out.fill_(float("nan"))
        blocks = step.inputs.placement.num_blocks
        for static, live in (
            (self.views.key, step.inputs.cache.key),
            (self.views.value, step.inputs.cache.value),
        ):
            static[:blocks].copy_(live)
        padded = self.state.begin_forward(step.common(), self.num_reqs, self.query_len)
        if exact_bound:
            padded = padded.replace(max_seq_len=step.common().max_seq_len)
        return self.builder.build(0, padded)
