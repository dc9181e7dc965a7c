"""One backend on one case: its layer, its batch metadata, and the three calls that are timed."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from attnlib.bench.backends import BenchBackend
from attnlib.bench.case import BenchCase
from attnlib.bench.correctness import CorrectnessCheck
from attnlib.bench.inputs import CaseInputs
from attnlib.bench.peaks import Peaks
from attnlib.bench.results import Row
from attnlib.bench.state_case import AnyCase
from attnlib.bench.timer import GraphTimer, synchronize
from attnlib.bench.work import flops, kv_bytes, roofline_us
from attnlib.layer import Attention
from attnlib.metadata import AttentionMetadata
from attnlib.testing.budget import Comparison

__all__ = ["Runner", "error_line", "make_runner", "unmeasured"]


@dataclass
class Runner:
    """The objects of one backend for one case, and its row as far as it is known.

    Attributes:
        label: the name of the backend in the table.
        inputs: the tensors of the case.
        layer, builder, metadata: made by the backend's classes.
        row: results so far.
        output: a copy of the output of the first call, until it is checked.
        expected_us: about how long one call takes, in microseconds.
        check: of the outputs; None without one.
    """

    label: str
    inputs: CaseInputs
    layer: Attention
    builder: Any
    metadata: AttentionMetadata
    row: Row
    output: torch.Tensor | None = None
    expected_us: float = 0.0
    check: CorrectnessCheck | None = None

    can_capture = True

    @property
    def case(self) -> BenchCase:
        """The case of the tensors."""
        return self.inputs.case

    @property
    def copies(self) -> int:
        """Copies of the cache."""
        return len(self.inputs.caches)

    @property
    def writes_apart(self) -> bool:
        """Whether the cache write is a call of its own."""
        return not self.case.unpaged

    def attend(self, copy: int) -> None:
        """One forward over copy `copy` of the cache, into the output of the case."""
        inputs, impl = self.inputs, self.layer.impl
        if inputs.query_tensors is not None:
            impl = impl.of_call(inputs.query_tensors)
        if inputs.case.unpaged:
            keys = inputs.key, inputs.value
            impl.forward_unpaged(inputs.query, *keys, self.metadata, inputs.output)
            return
        given = inputs.query, inputs.caches[copy], self.metadata
        if inputs.selected_keys:
            impl.forward_selected(*given, inputs.selected_keys[copy], inputs.output)
        elif inputs.compressed_keys:
            impl.forward_compressed(*given, inputs.compressed_keys[copy], inputs.output)
        else:
            impl.forward(*given, inputs.output)

    def write(self, copy: int) -> None:
        """One cache write to copy `copy`."""
        inputs = self.inputs
        self.layer.impl.write_kv(inputs.key, inputs.value, inputs.caches[copy], inputs.slots)

    def call(self) -> None:
        """One call of the layer: check, write, attend."""
        m = self.inputs
        selected = m.selected_keys[0] if m.selected_keys else None
        entries = m.compressed_keys[0] if m.compressed_keys else None
        self.layer(
            m.query,
            m.key,
            m.value,
            None if m.case.unpaged else m.caches[0],
            self.metadata,
            output=m.output,
            selected_keys=selected,
            compressed_keys=entries,
            query_tensors=m.query_tensors,
        )

    def build(self) -> None:
        """Build the metadata of the batch."""
        self.builder.build(0, self.inputs.common)

    def replayed(self, timer: GraphTimer) -> Comparison:
        """Check the output of a graph, which is what will be timed."""
        if self.check is None:
            return Comparison("out", True)
        self.inputs.output.fill_(float("nan"))
        timer.replay()
        return self.check.output(self.inputs.output)

    def rated(self, row: Row, peaks: Peaks) -> Row:
        """A row with its rates, and its share of the time at the peak rates."""
        if not row.us:
            return row
        return replace(
            row,
            gbps=kv_bytes(self.case) / row.us / 1e3,
            tflops=flops(self.case) / row.us / 1e6,
            share=roofline_us(self.case, peaks.read_gbps, peaks.matmul_tflops) / row.us,
        )


def unmeasured(case: AnyCase, label: str, status: str, reason: str) -> Row:
    """A row without times."""
    return Row(
        case=case.name,
        kind=case.kind,
        batch=str(case.batch),
        shape=case.shape,
        settings=case.to_json(),
        backend=label,
        status=status,
        reason=reason,
    )


def error_line(error: BaseException) -> str:
    """The type of an error and the first line of its message."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def make_runner(case: BenchCase, one: BenchBackend, inputs: CaseInputs) -> Runner:
    """Make layer, builder and metadata, and make the first call, which compiles."""
    backend = one.backend
    assert backend is not None  # the caller has checked that it is available
    spec, device = inputs.spec, inputs.device
    layer = Attention(
        spec,
        backend=backend,
        scale=inputs.params.scale,
        sinks=inputs.params.sinks,
        score_tensors=inputs.score_tensors,
        prefix="bench",
        device=device,
    )
    builder = backend.make_builder(spec, device)
    metadata = builder.build(0, inputs.common)
    row = replace(
        unmeasured(case, one.label, "ok", ""), copies=len(inputs.caches), kernel=_kernel(metadata)
    )
    runner = Runner(one.label, inputs, layer, builder, metadata, row)
    inputs.output.fill_(float("nan"))
    start = time.perf_counter()
    runner.attend(0)
    synchronize(device)
    runner.row = replace(row, first_call_s=time.perf_counter() - start)
    runner.output = inputs.output.clone()
    return runner


def _kernel(metadata: AttentionMetadata) -> str:
    """The kernel that the metadata names, for backends with several (FlashAttention 2, 3 and 4).

    Else "".
    """
    kernel = metadata.asdict_zerocopy().get("kernel")
    return str(getattr(kernel, "label", kernel)) if kernel is not None else ""
