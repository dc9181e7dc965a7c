"""The suite `states`: decodes, verification, prefills and steps of state layers; targets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from attnlib.bench.state_case import MODELS, StateCase
from attnlib.bench.targets import Target

__all__ = ["STATES", "STATE_TARGETS"]

_REQUESTS = (1, 32, 64, 256)
_PROMPTS = ((1, 8192), (8, 1024), (1, 32768), (32, 128))


def _cases(model: str) -> tuple[StateCase, ...]:
    def over(work: str, *sizes: tuple[int, int]) -> tuple[StateCase, ...]:
        return tuple(StateCase(model=model, work=work, num_reqs=n, query_len=q) for n, q in sizes)

    prefills = over("prefill", *_PROMPTS)
    return (
        *over("decode", *((n, 1) for n in _REQUESTS)),
        # Peers take no token back: a verification is compared with their decode of as many tokens,
        # which has no target of its own.
        *over("decode", *((n, 4) for n in _REQUESTS)),
        *over("verify", *((n, 4) for n in _REQUESTS)),
        *prefills,
        *(replace(case, batch_invariant=True) for case in prefills),
        *over("step", (1, 1), (64, 1)),
        *over("separate", (1, 1), (64, 1)),
    )


STATES = tuple(case for model in MODELS for case in _cases(model))
"""Batches of 1 to 256 requests and prompts of 128 to 32768 tokens, for each model."""


def _targets(case: StateCase) -> tuple[Target, ...]:
    if case.batch_invariant and case.work == "prefill":
        return (Target(1.4, replace(case, batch_invariant=False).name, of_peers=True),)
    if case.work == "verify":
        return (Target(0.6, replace(case, work="decode").name, of_peers=True),)
    if case.work == "step" and case.num_reqs >= 64:
        return (Target(0.7, replace(case, work="separate").name),)
    if case.is_step or (case.work == "decode" and case.query_len > 1):
        return ()
    if case.work == "decode" and case.num_reqs >= 32:
        return Target(1.0), Target(share=0.75)
    return (Target(1.0),)


STATE_TARGETS: Mapping[str, tuple[Target, ...]] = {
    case.name: targets for case in STATES if (targets := _targets(case))
}
"""Name of a case -> what `triton` must reach on it."""
