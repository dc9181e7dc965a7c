"""One backend on one case of state layers: its layer, its slots, and the calls that are timed.

The calls of a decode continue from all positions of one chunk, each in slots of its own, because
the work depends on the length of the tail. A repeated call finds its slots where it left them: the
state at the beginning of the chunk and the same tail, so that it does the same work. A call that
fills the chunk leaves a later state, and would do nothing if it were repeated. Its positions are
set back before the call, which is one more launch in its time.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch

from attnlib.backends.torch.states import TorchStateImpl
from attnlib.bench import state_inputs as inputs
from attnlib.bench.backends import BenchBackend
from attnlib.bench.peaks import Peaks
from attnlib.bench.results import Row
from attnlib.bench.runner import unmeasured
from attnlib.bench.state_case import StateCase
from attnlib.bench.state_check import ExpectedStep, StateCheck
from attnlib.bench.timer import GraphTimer, synchronize
from attnlib.bench.work import step_bytes, surrounding_bytes
from attnlib.cache.states import StateCache
from attnlib.device import resolve_device
from attnlib.instrumentation import checker_for_level
from attnlib.layer import StateLayer
from attnlib.spec import CudaGraphSupport
from attnlib.testing.budget import Comparison

__all__ = ["StateRunner"]

_SEED = 0


class StateRunner:
    """The layer, slots and batches of one backend for one case, and its row as far as it is known.

    Args:
        case: the case.
        one: the backend, which is available.
        device: where it runs.
        check: of the outputs; None without one.

    Attributes:
        label: the name of the backend in the table.
        tokens, output: of every call.
        common, batches: the batch of each call, and its metadata.
        bytes_per_call: that must be moved.
        can_capture: whether a graph may hold the calls.
        row: results so far.
        expected_us: about how long one call takes, in microseconds.
    """

    writes_apart = False

    def __init__(
        self,
        case: StateCase,
        one: BenchBackend,
        device: torch.device,
        check: StateCheck | None = None,
    ) -> None:
        backend = one.backend
        assert backend is not None  # the caller has checked that it is available
        self.case, self.label, self.check = case, one.label, check
        draw = torch.Generator(device).manual_seed(_SEED)
        weight, self.tokens = inputs.draw_weight(case.spec, draw), inputs.draw_tokens(case, draw)
        self.layer = StateLayer(case.spec, backend=backend, device=device, conv_weight=weight)
        spec, count, copies = self.layer.spec, case.num_reqs, 1
        if case.context:
            copies = spec.chunk_size or 16
        starts = range(case.context, case.context + copies)
        self.cache = StateCache.allocate(spec, copies * count, device=device)
        self.builder: Any = backend.make_builder(spec, device)
        self.common = []
        for copy, start in enumerate(starts):
            slots = range(copy * count, (copy + 1) * count)
            self.common.append(inputs.step_batch(case, start, slots, device))
            if case.context:
                inputs.set_positions(self.cache, self.slots(copy), start)
        if case.context:
            inputs.fill_slots(self.cache, draw)
        self.batches = [self.builder.build(0, each) for each in self.common]
        moved = sum(step_bytes(spec, start, case.query_len) for start in starts) / copies
        if case.is_step:
            moved += surrounding_bytes(spec, case.query_len)
        self.bytes_per_call = count * moved
        shape: tuple[int, ...] = spec.num_heads, spec.value_size
        shape = (shape[0] * shape[1],) if case.is_step else shape
        self.output = torch.empty(case.batch.num_tokens, *shape, dtype=spec.dtype, device=device)
        captured = case.spec.replace(cudagraph=CudaGraphSupport.ALWAYS)
        self.can_capture = not backend.state_reasons(captured, resolve_device(device))
        self.row = replace(unmeasured(case, one.label, "ok", ""), copies=copies)
        self.expected_us = 0.0
        self._first: ExpectedStep | None = None
        self._set_back: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    @property
    def copies(self) -> int:
        """Different calls."""
        return len(self.batches)

    def slots(self, copy: int) -> slice:
        """The slots of a call."""
        return slice(copy * self.case.num_reqs, (copy + 1) * self.case.num_reqs)

    def attend(self, copy: int) -> None:
        """One call of the layer."""
        for positions, before in self._set_back.get(copy, ()):
            positions.copy_(before)
        self.tokens.run(self.layer, self.cache, self.batches[copy], self.output)

    def call(self) -> None:
        """One call, for its time on the host."""
        self.attend(0)

    def build(self) -> None:
        """Build the metadata of a call."""
        self.builder.build(0, self.common[0])

    def first_calls(self) -> Comparison:
        """Make every call once, the first of which compiles, and check it if there is a check."""
        worst = Comparison("out", True)
        for copy in range(self.copies):
            expected = self.check.expect(self, copy) if self.check else None
            self.output.fill_(torch.nan)
            begin = time.perf_counter()
            self.attend(copy)
            synchronize(self.output.device)
            if copy == 0:
                self.row = replace(self.row, first_call_s=time.perf_counter() - begin)
            if self.check is None or expected is None:
                continue
            self._first = self._first or expected
            found = self.check.compare(self, copy, expected)
            if not found.passed:
                return found
            worst = max(worst, found, key=lambda one: one.max_error / (one.max_allowed or 1.0))
        self._keep_positions()
        return worst

    def replayed(self, timer: GraphTimer) -> Comparison:
        """Check the output of a graph, whose last call is number 0."""
        if self.check is None or self._first is None or not self._repeats_itself:
            return Comparison("out", True)
        self.output.fill_(torch.nan)
        timer.replay()
        return self.check.compare_output(self.output, self._first)

    @property
    def _repeats_itself(self) -> bool:
        """Whether call 0 has the same outputs each time: it fills no chunk."""
        return self.layer.spec.form == "tail" or not self.case.context

    def _keep_positions(self) -> None:
        """Set the positions back before calls that would not do the same work again, and before
        every one of a backend that refuses to repeat a step (T8)."""
        layout, tensors = self.cache.layout, self.cache.tensors
        refuses = issubclass(self.layer.backend.get_state_impl_cls(), TorchStateImpl)
        refuses = refuses or checker_for_level() is not None
        for copy in range(self.copies if self.case.context else 0):
            start = self.case.context + copy
            kept = layout.first_kept(start, start + self.case.query_len)
            fills = layout.form == "tail" and layout.chunk_start(kept) > layout.chunk_start(start)
            if not (fills or refuses):
                continue
            views = [tensors.positions] + ([tensors.window_positions] if refuses else [])
            self._set_back[copy] = [
                (view[self.slots(copy)], view.new_full((1,), start))
                for view in views
                if view is not None
            ]

    def rated(self, row: Row, peaks: Peaks) -> Row:
        """A row with its rate, and its share of the time that moving its bytes takes."""
        gbps = self.bytes_per_call / row.us / 1e3 if row.us else None
        return replace(row, gbps=gbps, share=gbps / peaks.copy_gbps if gbps else None)
