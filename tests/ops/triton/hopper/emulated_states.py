"""Emulate decodes of state layers that copy states to shared memory (`emulate`), and compare them
with the rules in float64.

`python -m tests.ops.triton.hopper.emulated_states CASE...` prints one JSON line per case. It needs
a process that does not interpret Triton.
"""

from __future__ import annotations

import random
import sys
from typing import Any
from unittest.mock import patch

import torch
from triton.runtime.jit import JITFunction

from attnlib.ops.triton.heuristics import state_tiles
from attnlib.ops.triton.heuristics.state_tiles import StateChoice
from attnlib.spec import StateSpec
from attnlib.testing.states.inputs import draw_layer, draw_tokens
from attnlib.testing.states.kinds import KINDS
from attnlib.testing.states.serving import Part, Server
from tests.ops.torch.states.layers import Operations, forgetting, largest_error, wanted
from tests.ops.triton.cross_compile import stub_target
from tests.ops.triton.hopper.emulate import print_cases, run_emulated

__all__ = ["CASES", "TILE", "counted", "emulate_case"]

_LARGE: dict[str, Any] = {"key_size": 64, "value_size": 64}
TILE = StateChoice(32, 2, group=4, copies=True)

CASES: dict[str, dict[str, Any]] = {
    "gated delta": {"spec": {**_LARGE, "num_heads": 2, "num_key_heads": 1}},
    "kimi delta": {"spec": {**_LARGE, "num_heads": 2}},
    "mamba2": {
        "spec": {"key_size": 128, "value_size": 64, "num_heads": 2},
        "tile": TILE._replace(rows=64, group=8),
    },
    "lightning": {"spec": _LARGE, "tile": TILE._replace(rows=64, num_warps=4)},
    "gla": {"spec": {**_LARGE, "num_heads": 1, "num_key_heads": 1, "dtype": torch.float16}},
}
"""Kind -> sizes, and the tile."""


def _spec(name: str, sizes: dict[str, Any]) -> StateSpec:
    given = {"conv_channels": 0, "conv_width": 0, "has_conv_bias": False, "dtype": torch.bfloat16}
    return KINDS[name].replace(**{**given, **sizes})


def counted(names: list[str]) -> Any:
    """`run_emulated` that adds the name of each kernel."""

    def run(self: Any, *args: Any, **options: Any) -> None:
        names.append(self.fn.__name__)
        run_emulated(self, *args, **options)

    return run


def emulate_case(name: str) -> dict[str, Any]:
    """Emulate three requests from their first tokens on, beside padding, and forks of them. Some
    tokens of one of them forget all before.

    Returns:
        errors: the largest ones of outputs, relative to the largest output: of the requests, and of
            the forks.
        changed: slots that a step of the last two requests changes.
        clears: whether rows of nobody become 0.
        keeps: whether forks keep the slots of their sources.
        launches: of the kernel.
    """
    spec = _spec(name, CASES[name]["spec"])
    requests = [draw_tokens(spec, n, n) for n in (34, 19, 17)]
    if spec.decay != "constant":
        requests[1] = forgetting(requests[1], 5)
    layer = draw_layer(spec)
    runner = Operations(spec, layer, "tail", 8, "triton")
    tiles = dict.fromkeys(state_tiles.TILES, CASES[name].get("tile", TILE))
    launches = list[str]()
    with stub_target("sm_90"), patch.object(state_tiles, "TILES", tiles):
        JITFunction.run = counted(launches)
        server = Server(spec, runner, requests, [6, 2, 3], extra_rows=2)
        for _ in range(15):
            server.step([Part(0, 1), Part(1, 1)])
        for _ in range(16):
            server.step([Part(0, 1), Part(2, 1)])
        before = runner.memory.clone()
        last = server.step([Part(-1, 1), Part(0, 0), Part(1, 1), Part(2, 1)]).out
        changed = (runner.memory != before).any(1).nonzero().flatten().tolist()
        fork = Server(spec, runner, requests, [0, 4, 5])
        fork.done, kept = list(server.done), runner.memory[[6, 2, 3]].clone()
        fork.step([Part(0, 1), Part(1, 1)], sources=[6, 2])
        keeps = torch.equal(runner.memory[[6, 2, 3]], kept)
        fork.step([Part(0, 1), Part(1, 1)])
    assert last is not None
    errors = []
    for one, known in ((server, (0, 1, 2)), (fork, (0, 1))):
        for place in known:
            expected, got = wanted(spec, layer, requests[place]), one.result(place)
            assert got.out is not None and expected.out is not None
            rows = slice(one.done[place] - len(got.out), one.done[place])
            errors.append(largest_error(got, type(expected)(None, expected.out[rows])))
    return {
        "errors": [torch.tensor(part).max().item() for part in (errors[:3], errors[3:])],
        "changed": changed,
        "clears": not last[0].any() and not last[3:].any(),
        "keeps": keeps,
        "launches": launches.count("copied_decode_kernel"),
    }


def emulate_drafts(name: str) -> dict[str, Any]:
    """Emulate steps of up to four or eight tokens of two requests, some of which are taken back,
    beside padding, and forks of them in the middle of a chunk and at its end.

    Returns:
        errors, keeps, launches: as above; `keeps` also says that padding gets 0.
    """
    most = 8 if name in ("kimi delta", "mamba2") else 4
    spec = _spec(name, {**CASES[name]["spec"], "max_rollback": most - 1})
    requests = [draw_tokens(spec, n, n) for n in (39, 35)]
    layer, rng = draw_layer(spec), random.Random(len(name))
    runner = Operations(spec, layer, "tail", 8, "triton")
    tiles = dict.fromkeys(state_tiles.TILES, CASES[name].get("tile", TILE))
    launches, keeps, servers = list[str](), True, list[Server]()
    with stub_target("sm_90"), patch.object(state_tiles, "TILES", tiles):
        JITFunction.run = counted(launches)
        for slots, ends in (([6, 2], (15, 17)), ([0, 4], (31,)), ([1, 5], (35,))):
            server = Server(spec, runner, requests, slots, extra_rows=1)
            sources = None
            if servers:
                # The first fork fills a chunk that its source could have continued in, and keeps
                # a token of the next one; the second fork continues from the end of a chunk.
                source = servers[-1]
                server.done, sources = list(source.done), [-1, *source.slots]
            kept = runner.memory[sources[1:]].clone() if sources else None
            while min(server.done) < ends[-1]:
                until = next(end for end in ends if min(server.done) < end)
                parts = [Part(-1, 2)]
                for request, done in enumerate(server.done):
                    left = until - done
                    stay = left if left <= 2 else min(rng.randint(1, most), left)
                    parts.append(Part(request, stay, rng.randint(0, most - stay) if stay else 0))
                out = server.step(parts, sources).out
                assert out is not None
                keeps &= not out[:2].any() and not out[-1:].any()
                if kept is not None and sources:
                    keeps &= torch.equal(runner.memory[sources[1:]], kept)
                sources = None
            servers.append(server)
    errors = []
    for one in servers:
        for place, tokens in enumerate(requests):
            expected, got = wanted(spec, layer, tokens), one.result(place)
            assert got.out is not None and expected.out is not None
            rows = slice(one.done[place] - len(got.out), one.done[place])
            errors.append(largest_error(got, type(expected)(None, expected.out[rows])))
    used = launches.count("copied_decode_kernel")
    return {"errors": errors, "keeps": bool(keeps), "launches": used, "all": len(launches)}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--drafts"]:
        sys.argv.pop(1)
        print_cases(CASES, emulate_drafts)
    else:
        print_cases(CASES, emulate_case)
