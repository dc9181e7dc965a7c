"""F3: layers that share the metadata of a batch give correct results, also with step plans.

An engine builds the metadata once and calls all layers of a group with it. The first call prepares
a step plan (`AttentionImpl.plan`); later calls reuse it with other tensors. The check calls two
layers with different tensors, sinks and caches in turn, and repeats the first call. A plan that
keeps tensors of the call that it was prepared for fails here.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.case import Case
from attnlib.testing.check import Check, CheckCase
from attnlib.testing.runner import AttentionOutput, compare_with_oracle

__all__ = ["CHECKS"]

_CASES: dict[str, dict[str, object]] = {
    "decode": {"batch": "decode_long"},
    "prefill": {"batch": "prefill"},
    "mixed": {"batch": "mixed"},
    "padding": {"batch": "graph_padding"},
    "window": {"batch": "mixed", "sliding_window": 5},
    "sinks": {"batch": "mixed", "sinks": True},
    "alibi": {"batch": "decode_long", "alibi": True},
    "score": {"batch": "mixed", "score": "attnlib.testing.score_functions:REQUESTS"},
    "fp8": {"batch": "mixed", "kv_cache_dtype": "fp8_e4m3", "k_scale": 0.25, "v_scale": 0.5},
}
_QUICK = ("decode", "mixed", "sinks")


def _check(target: BackendUnderTest, case: Case) -> str:
    from attnlib.layer import Attention

    # The placement does not depend on the seed, so that both layers have the same block table.
    cases = [case.replace(placement="reversed", seed=case.seed + layer) for layer in range(2)]
    steps = [case.materialize(target.device, kv_written=False) for case in cases]
    layers = [
        Attention(
            step.spec,
            backend=target.backend,
            scale=step.params.scale,
            alibi_slopes=step.params.alibi_slopes,
            sinks=step.params.sinks,
            score_tensors=step.score_tensors(),
            prefix=f"layers.{index}",
            device=target.device,
        )
        for index, step in enumerate(steps)
    ]
    metadata = target.backend.make_builder(case.spec, target.device).build(0, steps[0].common())
    for call, index in enumerate((0, 1, 0)):
        inputs = steps[index].inputs
        inputs.out.fill_(float("nan"))
        result = layers[index](
            inputs.query,
            inputs.key,
            inputs.value,
            steps[index].cache(),
            metadata,
            return_lse=case.needs_lse,
            output=inputs.out,
        )
        output = AttentionOutput(*result) if case.needs_lse else AttentionOutput(result, None)
        if error := compare_with_oracle(cases[index], output, target.device):
            return f"call {call} over one batch, layer {index}: {error}"
    return ""


def _step_plans(target: BackendUnderTest) -> Iterator[CheckCase]:
    for name, changes in _CASES.items():
        if not target.quick or name in _QUICK:
            case = target.case(**changes)
            yield CheckCase(name, partial(_check, target, case), case)


CHECKS = (Check("F3", "layers share the metadata and step plans of a batch", _step_plans),)
