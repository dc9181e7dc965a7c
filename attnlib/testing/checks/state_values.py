"""ST7 and ST14: extreme gates and keys, and drift over many decodes (T4, T5, T13)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from attnlib.spec import StateSpec
from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.budget import relative_error
from attnlib.testing.check import Check, CheckCase
from attnlib.testing.states.cases import over_kinds, recurrent_kinds
from attnlib.testing.states.inputs import TokenInputs
from attnlib.testing.states.layers import (
    LayerUnderTest,
    compare_results,
    drawn,
    expected,
    part_of,
)
from attnlib.testing.states.serving import Part, Server, Step

__all__ = ["CHECKS"]

_SCALE = 0.3


def _extremes(tokens: TokenInputs, spec: StateSpec) -> Iterator[tuple[str, TokenInputs]]:
    """Inputs that no trained model has to have, and every backend must serve."""
    rows, decay, beta = torch.arange(len(tokens)), tokens.log_decay, tokens.beta
    if decay is not None:
        yield "decays of e^-6", replace(tokens, log_decay=torch.full_like(decay, -6.0))
        yield "no decay", replace(tokens, log_decay=torch.zeros_like(decay))
        third = (rows % 3 == 0).reshape(-1, *[1] * (decay.dim() - 1))
        mixed = torch.where(third, -6.0, decay * 0.01)
        yield "decays of e^-6 and of almost 1", replace(tokens, log_decay=mixed)
        forgets = torch.full_like(decay, torch.finfo(torch.float32).min)
        yield "decays of 0, whose logarithms have no sum", replace(tokens, log_decay=forgets)
    assert tokens.key is not None  # the layer has a recurrence
    zero = (rows % 3 == 0).reshape(-1, 1, 1)
    yield "keys of zeros", replace(tokens, key=tokens.key.masked_fill(zero, 0.0))
    if beta is not None:
        most = 2.0 if spec.update == "delta" and spec.qk_norm else 1.0
        steps = torch.tensor([0.0, 1.0, most])[rows % 3].unsqueeze(1)
        yield "beta of 0, 1 and 2", replace(tokens, beta=steps.expand_as(beta).contiguous())


def _extreme_values(target: BackendUnderTest, spec: StateSpec) -> str:
    """One prompt, with a given scale."""
    layer = LayerUnderTest(target, spec, scale=_SCALE)
    count = 40 if target.quick else 70
    for what, tokens in _extremes(drawn(spec, count, target.seed + 8), spec):
        got = layer.run(tokens, Step([count], [count], [1]))
        wanted = expected(spec, layer.tensors, tokens)
        if message := compare_results(spec, got, wanted, what):
            return message
    return ""


def _drift(target: BackendUnderTest, spec: StateSpec) -> str:
    """The last outputs of many decodes with decays near 1: roundings of every step add up."""
    count, last = (160, 32) if target.quick else (384, 64)
    tokens = drawn(spec, count, target.seed + 8)
    if tokens.log_decay is not None:
        tokens = replace(tokens, log_decay=tokens.log_decay * 1e-3)
    layer = LayerUnderTest(target, spec)
    server = Server(spec, layer, [tokens], [3])
    server.step([Part(0, 3)])
    while server.done[0] < count:
        server.step([Part(0, 1)])
    exact, rounded = expected(spec, layer.tensors, tokens)
    rows, got = slice(count - last, count), server.result(0)
    if spec.state_dtype == torch.float32:
        what, wanted = f"after {count} decodes", (exact, rounded)
        return compare_results(spec, part_of(got, rows), wanted, what, rows)
    assert got.out is not None and exact.out is not None  # the layer has a recurrence
    error = relative_error(got.out[rows], exact.out[rows])
    limit = _DRIFT * count**0.5
    return "" if error < limit else f"error {error:.2g} after {count} decodes (allowed {limit:.2g})"


_DRIFT = 2.0**-9
"""Half a unit of bfloat16. A state that is rounded once per token has at most the sum of that many
independent errors, each relative to the state."""


_extreme_cases = partial(over_kinds, body=_extreme_values, names=recurrent_kinds())


def _drift_cases(target: BackendUnderTest) -> Iterator[CheckCase]:
    names = ("gated delta",) if target.quick else ("gated delta", "mamba2")
    few = {"num_heads": 2, "num_key_heads": 1}  # of many steps; heads drift alike
    for dtype in (torch.float32, torch.bfloat16):
        text = str(dtype).removeprefix("torch.")
        for each in over_kinds(target, _drift, names=names, state_dtype=dtype, **few):
            yield CheckCase(f"{each.id}-{text}", each.run, state_spec=each.state_spec)


CHECKS = (
    Check("ST7", "states: extreme gates and keys", _extreme_cases, kind="state"),
    Check("ST14", "states: drift over many decodes", _drift_cases, kind="state"),
)
