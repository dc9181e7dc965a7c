"""Cases of divided layers under torch.compile (X9): a model compiles as a whole, and follows other
batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from attnlib.parallel import RankGroup, divided_batch
from tests.parallel import prefill_cases
from tests.parallel.problem import STEPS, Problem, Run


def model_of(layer: torch.nn.Module) -> Callable[..., Any]:
    @torch.compile(backend="eager", fullgraph=True)
    def model(q: Any, k: Any, v: Any, cache: Any, metadata: Any) -> Any:
        out, lse = layer(q * 1.0, k, v, cache, metadata, True)
        return out + 0.0, lse

    return model


def decodes(group: RankGroup) -> str:
    """`ParallelAttention`."""
    run, whole = Run(Problem(), group), Run(Problem(), group)

    model = model_of(run.layer)
    for name in ("prefill", "mixed", "decode", "verification"):
        lengths = STEPS[name]
        query, key, value = run.tensors(sum(pair[0] for pair in lengths))
        parts = [[pair[n] for pair in lengths] for n in (0, 1)]
        outs = []
        for each, call in ((run, model), (whole, whole.layer)):
            built = each.builders[1].build(divided_batch(*parts, each.tables[1], "cpu"))
            more = () if call is model else (True,)
            with torch.no_grad():
                outs.append(call(run.own(query), key, value, each.caches[1], built, *more))
        if not all(torch.equal(a, b) for a, b in zip(*outs, strict=True)):
            return f"{name}: {[float((a - b).abs().max()) for a, b in zip(*outs, strict=True)]}"
    return ""


def prefills(group: RankGroup) -> str:
    """`ParallelPrefill`, around a ring and with gathered keys."""
    for options in (prefill_cases.RING, prefill_cases.GATHER):
        run, whole = (
            prefill_cases.Run(Problem(prefill_cases.FULL, options=options), group) for _ in range(2)
        )
        model = model_of(run.layer)
        run.call = lambda *arguments, model=model: model(*arguments[:5])
        for name in prefill_cases.CHUNKS[:3]:
            with torch.no_grad():
                found, wanted = (
                    each.step(prefill_cases.LENGTHS[name])[:2] for each in (run, whole)
                )
            if not all(map(torch.equal, found, wanted)):
                return f"{options} {name}"
    return ""


CASES: dict[str, Callable[[RankGroup], str]] = {"decodes": decodes, "prefills": prefills}
