"""Requests that are served step by step: chunks, drafts that are taken back, padding."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from attnlib.spec import StateSpec
from attnlib.testing.states.inputs import TokenInputs, draw_tokens, joined

__all__ = ["Part", "Results", "Runner", "Server", "Step"]


class Step(NamedTuple):
    """Lengths and slots of a batch; `sources` as in T12."""

    query_lens: list[int]
    seq_lens: list[int]
    slots: list[int]
    sources: list[int] | None = None


class Results(NamedTuple):
    """Outputs of a batch, `[T', C]` and `[T', Hv, Dv]`; None for what the layer does not have."""

    convolved: Tensor | None
    out: Tensor | None


class Runner(Protocol):
    """Runs a layer over slots of its own."""

    def run(self, inputs: TokenInputs, step: Step) -> Results:
        """One step. `inputs` may have more rows than the batch."""


class Part(NamedTuple):
    """What a request does in a step.

    Attributes:
        request: its number.
        stay: tokens that stay.
        drafts: wrong tokens after them, which its next step takes back.
    """

    request: int
    stay: int
    drafts: int = 0


@dataclass
class Server:
    """Serves requests with a runner and keeps the outputs of the tokens that stay.

    Attributes:
        spec: of the layer.
        runner: the layer and its slots.
        requests: the tokens of each request.
        slots: the slot of each request.
        extra_rows: rows past each batch, filled with NaN.
    """

    spec: StateSpec
    runner: Runner
    requests: Sequence[TokenInputs]
    slots: list[int]
    extra_rows: int = 0
    done: list[int] = field(default_factory=list)
    outputs: list[list[Results]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.done = [0] * len(self.requests)
        self.outputs = [[] for _ in self.requests]

    def step(self, parts: Sequence[Part], sources: list[int] | None = None) -> Results:
        """Run one step; a request number of -1 is padding with `stay` tokens and slot -1.

        Args:
            parts: what each request of the batch does.
            sources: the slot that each one reads; None for its own.
        """
        pieces, lengths, totals, slots = [], [], [], []
        for part in parts:
            pieces += self._pieces(part)
            lengths.append(part.stay + part.drafts)
            before = self.done[part.request] if part.request >= 0 else 0
            totals.append(before + lengths[-1])
            slots.append(self.slots[part.request] if part.request >= 0 else -1)
        filler = draw_tokens(self.spec, self.extra_rows, 0)
        for tensor in filler.tensors().values():
            tensor.fill_(torch.nan)
        results = self.runner.run(joined([*pieces, filler]), Step(lengths, totals, slots, sources))
        first = 0
        for part, length in zip(parts, lengths, strict=True):
            if part.request >= 0:
                rows = slice(first, first + part.stay)
                kept = Results(*(None if x is None else x[rows] for x in results))
                self.outputs[part.request].append(kept)
                self.done[part.request] += part.stay
            first += length
        return results

    def left(self, request: int) -> int:
        """The tokens of a request that are not served yet."""
        return len(self.requests[request]) - self.done[request]

    def serve_all(self, rng: random.Random) -> None:
        """Serve all requests in random steps and orders, with drafts, beside padding."""
        numbers, most = range(len(self.requests)), self.spec.max_rollback
        while any(map(self.left, numbers)):
            parts = [Part(-1, rng.randint(0, 2))]
            for request in numbers:
                stay = min(self.left(request), rng.choice((0, 1, 1, 3, 16, 25)))
                parts.append(Part(request, stay, rng.randint(0, most) if stay else 0))
            rng.shuffle(parts)
            self.step(parts)

    def result(self, request: int) -> Results:
        """The outputs of the tokens of a request that stayed."""
        kept = self.outputs[request]
        return Results(
            *(
                None if column[0] is None else torch.cat(column)
                for column in zip(*kept, strict=True)
            )
        )

    def _pieces(self, part: Part) -> list[TokenInputs]:
        wrong = draw_tokens(self.spec, part.drafts, 7919)
        if part.request < 0:
            return [draw_tokens(self.spec, part.stay, 7907), wrong]
        done = self.done[part.request]
        return [self.requests[part.request].rows(done, done + part.stay), wrong]
