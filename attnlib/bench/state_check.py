"""The check of state layers before timing: outputs and slots of some requests after each call.

The expected results are those of the `torch` backend on copies of the slots: in float64, and in the
dtype of the layer for the error budget.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from attnlib.bench.state_case import StateCase
from attnlib.bench.state_inputs import step_batch
from attnlib.cache.states import StateCache
from attnlib.layer import StateLayer
from attnlib.testing.budget import Comparison, compare
from attnlib.testing.states.layers import state_difference

if TYPE_CHECKING:
    from attnlib.bench.state_runner import StateRunner

__all__ = ["ExpectedStep", "StateCheck"]


class ExpectedStep(NamedTuple):
    """What a call must leave.

    Attributes:
        exact: output rows of the chosen requests in float64.
        rounded: in the dtype of the layer.
        slots: of these requests.
    """

    exact: Tensor
    rounded: Tensor
    slots: StateCache


class StateCheck:
    """Checks calls of the backends on one case.

    Args:
        case: the case. The first, the last and some requests between them are checked, and that no
            row of the others holds NaN or infinity.
    """

    def __init__(self, case: StateCase) -> None:
        self._case = case
        count = 8 if case.kind == "decode" else 3
        self._requests = sorted({(case.num_reqs - 1) * n // (count - 1) for n in range(count)})
        rows = [torch.arange(case.query_len) + case.query_len * each for each in self._requests]
        self._rows = torch.cat(rows)
        self._prompts: ExpectedStep | None = None

    def expect(self, runner: StateRunner, copy: int) -> ExpectedStep:
        """What a call must leave, from slots as they are before it. That of prompts is equal for
        all backends, and computed once."""
        if self._prompts is not None:
            return self._prompts
        exact, rounded = (
            self._computed(runner, copy, dtype)
            for dtype in (torch.float64, runner.layer.spec.dtype)
        )
        found = ExpectedStep(exact[0], rounded[0], rounded[1])
        if not self._case.context:
            self._prompts = found
        return found

    def compare(self, runner: StateRunner, copy: int, expected: ExpectedStep) -> Comparison:
        """Compare outputs and slots after a call."""
        found = self.compare_output(runner.output, expected)
        mismatch = self._slot_difference(runner, copy, expected.slots) if found.passed else ""
        if found.passed and not mismatch:
            return found
        after = f"after {self._case.context + copy} tokens"
        return Comparison(after, False, mismatch=mismatch or str(found))

    def compare_output(self, output: Tensor, expected: ExpectedStep) -> Comparison:
        """Compare an output, all of whose rows must be finite."""
        broken = ~torch.isfinite(output).flatten(1).all(dim=1)
        if bool(broken.any()):
            row, count = int(broken.int().argmax()), int(broken.sum())
            mismatch = (
                f"{count} rows hold NaN or infinity, or were never written, the first is {row}"
            )
            return Comparison("out", False, mismatch=mismatch)
        chosen = output[self._rows.to(output.device)]
        return compare(chosen, expected.exact, expected.rounded, output.dtype)

    def _computed(
        self, runner: StateRunner, copy: int, dtype: torch.dtype
    ) -> tuple[Tensor, StateCache]:
        """Output and slots of the chosen requests, by the `torch` backend on copies of the slots.
        Prompts read no slot; the form `plain` takes larger chunks of them."""
        case, layer, device = self._case, runner.layer, runner.output.device
        weight = None if layer.conv_weight is None else layer.conv_weight.to(dtype)
        spec = layer.spec.replace(dtype=dtype)
        if not case.context:
            spec = spec.replace(form="plain", batch_invariant=False)
        reference = StateLayer(spec, backend="torch", device=device, conv_weight=weight)
        count, first = len(self._requests), runner.slots(copy).start
        slots, held = StateCache.allocate(reference.spec, count, device=device), runner.cache
        index = torch.tensor([first + each for each in self._requests], device=device)
        for part in held.layout.fields if case.context else ():
            getattr(slots.tensors, part.name).copy_(getattr(held.tensors, part.name)[index])
        common = step_batch(case, case.context + copy, range(count), device)
        metadata = reference.backend.make_builder(reference.spec, device).build(0, common)
        tokens = runner.tokens.chosen(self._rows.to(device), dtype)
        output = runner.output.new_empty((len(self._rows), *runner.output.shape[1:]), dtype=dtype)
        tokens.run(reference, slots, metadata, output)
        return output, slots

    def _slot_difference(self, runner: StateRunner, copy: int, wanted: StateCache) -> str:
        """How the states or windows of the chosen requests are wrong, or ""."""
        case, count = self._case, len(self._requests)
        end, first = case.context + copy + case.query_len, runner.slots(copy).start
        places = [end] * count
        found = runner.cache.export([first + each for each in self._requests], places)
        expected = wanted.export(range(count), places)
        for name in ("states", "windows"):
            got, other = getattr(found, name), getattr(expected, name)
            for place, request in enumerate(self._requests if got is not None else ()):
                wrong = state_difference(runner.layer.spec, got[place], other[place])
                if wrong:
                    return f"the {name.removesuffix('s')} of request {request} {wrong}"
        return ""
