"""A backend outside attnlib with a tunable parameter: how often it computes its output."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from attnlib.backends.torch import TorchBackend
from attnlib.bench.case import BenchCase
from attnlib.bench.inputs import CaseInputs
from attnlib.device import DeviceInfo
from attnlib.tuning import tuning_for
from attnlib.tuning.tuner import Parameters, Tuner

_TorchImpl: Any = TorchBackend.get_impl_cls()
current = {"passes": 3}


class ToyImpl(_TorchImpl):
    def forward(
        self, query: Any, cache: Any, metadata: Any, output: torch.Tensor, lse: Any = None
    ) -> None:
        output.zero_()
        for _ in range(current["passes"]):
            super().forward(query, cache, metadata, output, lse)


class ToyTuner(Tuner):
    operations = ("attend",)

    def group(self, case: BenchCase, operation: str) -> str | None:
        return None if case.kind == "mixed" else f"{case.kind} of head size {case.head_size}"

    def candidates(self, case: BenchCase, operation: str) -> Sequence[Parameters]:
        return [dict(current), {"passes": 0}, {"passes": 1}, {"passes": "many"}]

    @contextmanager
    def bind(
        self, inputs: CaseInputs, operation: str, parameters: Parameters
    ) -> Iterator[Callable[[int], object]]:
        backend, before = ToyBackend, dict(current)
        impl = backend.get_impl_cls()(inputs.spec)
        metadata = backend.make_builder(inputs.spec, inputs.device).build(0, inputs.common)
        current.update(parameters)
        try:
            yield lambda copy: impl.forward(
                inputs.query, inputs.caches[copy], metadata, inputs.output
            )
        finally:
            current.update(before)


class ToyBackend(TorchBackend):
    @staticmethod
    def get_name() -> str:
        return "toy"

    @staticmethod
    def get_impl_cls() -> type[Any]:
        return ToyImpl

    @classmethod
    def tuner(cls, device: torch.device) -> Tuner:
        return ToyTuner()

    @staticmethod
    def tuned_parameters(device: DeviceInfo) -> Mapping[str, Any]:
        """Group -> parameters, as such a backend reads them when it makes a builder."""
        tuning = tuning_for(device)
        lines = tuning.parameters.get("toy", ()) if tuning else ()
        return {line["group"]: line["parameters"] for line in lines}
