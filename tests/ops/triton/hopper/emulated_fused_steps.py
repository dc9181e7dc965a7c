"""Emulate decodes of state layers in one launch, from convolution to norm (`emulate`), and compare
their bits with those of separate launches, and their values with the rules in float64.

`python -m tests.ops.triton.hopper.emulated_fused_steps CASE...` prints one JSON line per case. It
needs a process that does not interpret Triton.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from attnlib.ops.states import RecurrenceParams, StateInputs, Taps
from attnlib.ops.states.step_form import FusedInputs
from attnlib.ops.triton.heuristics import state_tiles
from attnlib.ops.triton.states import fused_step
from attnlib.ops.triton.states.fused_step import PreparedFusedStep
from attnlib.ops.triton.states.short_convolution import short_convolution
from attnlib.ops.triton.states.state_step import state_step
from attnlib.ops.triton.states.step_parts import gated_norm, state_gates
from attnlib.spec import StateSpec
from attnlib.testing.checks.state_fused import drawn_step, expected_step
from attnlib.testing.states.inputs import LayerTensors, draw_layer
from attnlib.testing.states.kinds import KINDS
from attnlib.testing.states.serving import Step
from tests.ops.torch.states.layers import Operations, batch_of
from tests.ops.triton.cross_compile import stub_target
from tests.ops.triton.hopper.emulated_states import CASES as SIZES
from tests.ops.triton.hopper.emulated_states import TILE, counted

__all__ = ["CASES", "emulate_case"]

CASES = ("gated delta", "kimi delta", "mamba2", "gated delta-drafts", "kimi delta-drafts",
         "mamba2-drafts")  # fmt: skip
"""Kinds with gates and a norm; sizes and tiles are those of `emulated_states`. With drafts, steps
of up to four tokens take some of the last one back; the last case has the norm in a launch of its
own."""
_COUNT, _FORK = 36, 20
"""Tokens of a request, and the step that forks it."""


def _spec(name: str) -> StateSpec:
    name, _, drafts = name.partition("-")
    sizes = {**SIZES[name]["spec"], "max_rollback": 3 if drafts else 0}
    spec = KINDS[name].replace(**{"dtype": torch.bfloat16, "conv_width": 4, **sizes})
    channels = 2 * spec.num_key_heads * spec.key_size + spec.num_heads * spec.value_size
    return spec.replace(conv_channels=channels)


def _run_fused(one: Operations, rows: FusedInputs, step: Step, out: Tensor) -> None:
    layer = one.layer
    taps = Taps(layer.conv_weight, layer.conv_bias, one.spec.conv_activation)
    given = (rows, taps, one.slots, batch_of(step))
    prepared = PreparedFusedStep(*given, _params(one.spec, layer), out)
    prepared.run(*given, layer.skip, out)


def _run_separate(one: Operations, rows: FusedInputs, step: Step, out: Tensor) -> None:
    spec, layer, batch, form = one.spec, one.layer, batch_of(step), rows.form
    taps = Taps(layer.conv_weight, layer.conv_bias, spec.conv_activation)
    convolved = torch.empty_like(rows.x)
    short_convolution(rows.x, taps, one.slots, batch, out=convolved)
    keys = spec.num_key_heads * spec.key_size
    sizes = {"q": keys, "k": keys, "v": spec.num_heads * spec.value_size}
    split = convolved.split([sizes[name] for name in form.order], 1)
    parts = dict(zip(form.order, split, strict=True))
    q, k = (parts[name].unflatten(1, (-1, spec.key_size)) for name in "qk")
    v = parts["v"].unflatten(1, (-1, spec.value_size))
    inputs = StateInputs(q, k, v, *state_gates(rows.a, rows.b, form))
    state_step(inputs, one.slots, batch, _params(spec, layer), out=out)
    gated_norm(out, rows.z, form)


def _params(spec: StateSpec, layer: LayerTensors) -> RecurrenceParams:
    return RecurrenceParams(
        scale=layer.scale,
        update=spec.update,
        qk_norm=spec.qk_norm,
        skip=layer.skip,
        is_invariant=False,
    )


def _steps(spec: StateSpec) -> Iterator[tuple[Step, torch.Tensor]]:
    """Steps, and the tokens of their rows: a request in slot 2, which a fork continues in slot 4,
    beside padding and one of the first request's tokens in slot 3, which begins two steps later."""
    done, later, source, rng = 0, -2, 2, random.Random(0)
    while done < _COUNT:
        slot, counts = (4 if done >= _FORK else 2), [1, max(0, min(later + 1, 1))]
        if spec.max_rollback:
            counts = [min(rng.randint(1, 4), _COUNT - done), rng.randint(0, 4) if later >= 0 else 0]
        ends = [done + counts[0], 1, max(later, 0) + counts[1]]
        step = Step([counts[0], 1, counts[1]], ends, [slot, -1, 3], [source, -1, 3])
        first = torch.arange(done, ends[0])
        second = torch.arange(max(later, 0), ends[2])
        yield step, torch.cat([first, torch.tensor([0]), second, torch.tensor([0])])
        done += rng.randint(1, counts[0])
        later += rng.randint(1, counts[1]) if counts[1] else int(later < 0)
        source = slot


def emulate_case(name: str) -> dict[str, Any]:
    """Emulate decodes over two chunks, in one launch and in four.

    Returns:
        differ: steps whose outputs or slots differ.
        error: the largest one of the outputs, relative to the largest output.
        clears: whether rows of nobody become 0.
        launches: of the kernel, and steps.
    """
    spec = _spec(name)
    layer, drawn = draw_layer(spec), drawn_step(spec, _COUNT, 1)
    runs = {
        run: Operations(spec, layer, "tail", 8, "triton") for run in (_run_fused, _run_separate)
    }
    kind = name.partition("-")[0]
    tiles = dict.fromkeys(state_tiles.TILES, SIZES[kind].get("tile", TILE))
    launches, differ, clears = list[str](), list[int](), True
    expected = expected_step(spec, layer, drawn, None)
    error = 0.0
    apart = patch.object(fused_step, "norm_is_apart", lambda *facts: name == "mamba2-drafts")
    with stub_target("sm_90"), patch.object(state_tiles, "TILES", tiles), apart:
        JITFunction.run = counted(launches)
        for number, (step, tokens) in enumerate(_steps(spec)):
            rows = FusedInputs(*(x if x is None else x[tokens] for x in drawn[:4]), drawn.form)
            nobody = [step.query_lens[0], len(tokens) - 1]
            rows.x[nobody] = torch.nan
            outs = []
            for run, one in runs.items():
                shape = (len(tokens), spec.num_heads, spec.value_size)
                outs.append(torch.full(shape, torch.nan, dtype=spec.dtype))
                run(one, rows, step, outs[-1])
            memories = [one.memory for one in runs.values()]
            if not (torch.equal(*outs) and torch.equal(*memories)):
                differ.append(number)
            used = [row for row in range(len(tokens)) if row not in nobody]
            clears &= not outs[0][nobody].any()
            wanted = expected[tokens[used]]
            off = (outs[0][used].flatten(1).double() - wanted).abs().max() / wanted.abs().max()
            error = max(error, off.item())
    return {
        "differ": differ,
        "error": error,
        "clears": bool(clears),
        "launches": launches.count("fused_decode_kernel"),
        "steps": number + 1,
    }


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    for name in names or CASES:
        print(json.dumps({"case": name, **emulate_case(name)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
