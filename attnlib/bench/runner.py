"""A contender at work on one case: its layer, its batch, and the three calls that are timed."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from attnlib.bench.backends import Contender
from attnlib.bench.case import BenchCase
from attnlib.bench.inputs import Material
from attnlib.bench.results import Row
from attnlib.layer import Attention

__all__ = ["Entry", "enter", "told", "unmeasured"]


@dataclass
class Entry:
    """What a contender brings to a case, and its row as far as it is known."""

    label: str
    material: Material
    layer: Attention
    builder: Any
    metadata: Any
    row: Row
    output: torch.Tensor | None = None
    expected_us: float = 0.0

    def attend(self, copy: int) -> None:
        """One forward over one copy of the cache, into the case's own output."""
        material = self.material
        self.layer.impl.forward(
            material.query, material.caches[copy], self.metadata, material.output
        )

    def write(self, copy: int) -> None:
        """One cache write."""
        material = self.material
        self.layer.impl.write_kv(
            material.key, material.value, material.caches[copy], material.slots
        )

    def call(self) -> None:
        """One call of the layer: check, write, attend."""
        m = self.material
        self.layer(m.query, m.key, m.value, m.caches[0], self.metadata, output=m.output)


def unmeasured(case: BenchCase, label: str, status: str, reason: str) -> Row:
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


def told(error: BaseException) -> str:
    """An error's kind and first line."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def enter(case: BenchCase, one: Contender, material: Material) -> Entry:
    """Layer, builder, batch, and the first call, which compiles."""
    backend = one.backend
    assert backend is not None  # it was not turned away
    spec, device = material.spec, material.device
    layer = Attention(
        spec, backend=backend, sinks=material.terms.sinks, prefix="bench", device=device
    )
    builder = backend.make_builder(spec, device)
    metadata = builder.build(0, material.common)
    row = replace(
        unmeasured(case, one.label, "ok", ""), copies=len(material.caches), kernel=_kernel(metadata)
    )
    entry = Entry(one.label, material, layer, builder, metadata, row)
    material.output.fill_(float("nan"))
    start = time.perf_counter()
    entry.attend(0)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    entry.row = replace(row, first_call_s=time.perf_counter() - start)
    entry.output = material.output.clone()
    return entry


def _kernel(metadata: Any) -> str:
    """What the batch says it runs on, where a backend has several kernels (FlashAttention's generations)."""
    kernel = metadata.asdict_zerocopy().get("kernel")
    return str(getattr(kernel, "label", kernel)) if kernel is not None else ""
