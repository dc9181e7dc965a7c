"""ST5: windows of convolutions: short steps, widths, bias, activations, drafts (T6, T10)."""

from __future__ import annotations

import random
from collections.abc import Iterator

from attnlib.spec import StateSpec
from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.check import Check, CheckCase
from attnlib.testing.states.cases import ROLLBACK, adapted, case, forms_of
from attnlib.testing.states.kinds import KINDS
from attnlib.testing.states.layers import LayerUnderTest, compare_results, drawn, expected
from attnlib.testing.states.serving import Part, Server

__all__ = ["CHECKS"]


def _windows(target: BackendUnderTest, spec: StateSpec) -> str:
    """Steps shorter than the window, with drafts in every step where the spec has them."""
    for trial in range(2 if target.quick else 6):
        rng, layer = random.Random(target.seed + trial), LayerUnderTest(target, spec)
        tokens = drawn(spec, 25, target.seed + trial)
        server = Server(spec, layer, [tokens], [trial % 5])
        while server.left(0):
            stay = min(server.left(0), rng.choice((1, 1, 2, 6)))
            server.step([Part(0, stay, rng.randint(0, spec.max_rollback))])
        wanted = expected(spec, layer.tensors, tokens)
        what = f"width {spec.conv_width} in short steps"
        if message := compare_results(spec, server.result(0), wanted, what):
            return message
    return ""


def _cases(target: BackendUnderTest) -> Iterator[CheckCase]:
    base = adapted(target, KINDS["short convolution"])
    for width in (2, 4) if target.quick else (2, 3, 4):
        for activation, bias in ((None, False), ("silu", True)):
            for rollback in (0, ROLLBACK):
                spec = base.replace(
                    conv_width=width,
                    conv_activation=activation,
                    has_conv_bias=bias,
                    max_rollback=rollback,
                )
                for form in forms_of(target, spec):
                    name = f"width-{width}-{activation or 'linear'}-drafts-{rollback}-{form}"
                    yield case(name, target, spec.replace(form=form), _windows)


CHECKS = (Check("ST5", "states: windows of convolutions", _cases, kind="state"),)
