"""Calls of state layers for `recorded_launches`: decodes, steps to the norm, prefills."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import attnlib
from attnlib.bench.state_case import StateCase
from attnlib.bench.state_inputs import draw_tokens, draw_weight, step_batch
from attnlib.layer import state
from attnlib.ops.triton.states import fused_step, state_step, step_parts

__all__ = ["KINDS", "StateCall", "scratch_is_kept"]

KINDS = (("decode", 1), ("verify", 4), ("prefill", 40), ("step", 1), ("separate", 1))
"""(work, new tokens of a request) of the calls."""


class StateCall:
    """A call of a layer over two requests: `call()` runs it.

    Args:
        backend: of the layer.
        work, query_len: of the case.
        model: of the case.
    """

    def __init__(self, backend: Any, work: str, query_len: int, model: str = "kimi-linear") -> None:
        self.case = StateCase(model=model, work=work, num_reqs=2, query_len=query_len)
        draw = torch.Generator().manual_seed(0)
        spec, cpu = self.case.spec, torch.device("cpu")
        self.layer = attnlib.StateLayer(
            spec, backend=backend, device="cpu", conv_weight=draw_weight(spec, draw)
        )
        self.cache = attnlib.StateCache.allocate(self.layer.spec, 2, device="cpu")
        self.tokens = draw_tokens(self.case, draw)
        heads, size = spec.num_heads, spec.value_size
        shape = (heads * size,) if self.case.is_step else (heads, size)
        self.output = torch.zeros(self.case.batch.num_tokens, *shape, dtype=spec.dtype)
        builder: Any = self.layer.backend.make_builder(self.layer.spec, cpu)
        common = step_batch(self.case, self.case.context, range(2), cpu)
        self.new_batch: Callable[[], Any] = lambda: builder.build(0, common)
        self.batch = self.new_batch()

    def __call__(self) -> None:
        self.tokens.run(self.layer, self.cache, self.batch, self.output)


class _KeptScratch:
    """torch, but scratch memory of one size is one tensor: launches can then be compared."""

    def __init__(self) -> None:
        self._kept: dict[Any, torch.Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, shape: Any, **options: Any) -> torch.Tensor:
        """The tensor of this shape."""
        key = (tuple(shape) if isinstance(shape, tuple) else shape, options["dtype"])
        return self._kept.setdefault(key, torch.empty(shape, **options))


@contextmanager
def scratch_is_kept() -> Iterator[None]:
    """Inside, calls of state layers use the same scratch memory."""
    modules, kept = (state, state_step, fused_step, step_parts), _KeptScratch()
    for module in modules:
        module.__dict__["torch"] = kept
    try:
        yield
    finally:
        for module in modules:
            module.__dict__["torch"] = torch
