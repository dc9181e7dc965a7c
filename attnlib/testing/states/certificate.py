"""State layers in certificates of batch invariance (T18): a request alone in one step, against
random steps, drafts, other requests, forks and checkpoints."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from attnlib.device import resolve_device
from attnlib.spec import StateSpec
from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.certified_spec import CertifiedSpec, hash_of
from attnlib.testing.states.cases import adapted, with_large_heads
from attnlib.testing.states.inputs import TokenInputs
from attnlib.testing.states.kinds import KINDS
from attnlib.testing.states.layers import LayerUnderTest, compare_result_bits, drawn, part_of
from attnlib.testing.states.serving import Part, Results, Server, Step

__all__ = ["STATE_KINDS", "declares_invariance", "served_alone", "served_together", "state_kinds"]

STATE_KINDS = (
    "single tokens", "steps", "rejected drafts", "other requests", "sources of states",
)  # fmt: skip
"""What is varied for state layers."""

_LENGTHS = (70, 41, 18)
_DRAFTS = 7
_MAX_FAILURES = 5


def declares_invariance(target: BackendUnderTest) -> bool:
    """Whether a backend declares batch-invariant state layers."""
    return target.backend.state_capabilities.batch_invariant is True


def state_kinds(
    target: BackendUnderTest,
) -> Iterator[tuple[str, Callable[[], CertifiedSpec]]]:
    """Name and comparisons of each kind of state layer; none for a backend without them."""
    if "state" not in target.kinds:
        return
    names = ("gated delta", "short convolution") if target.quick else tuple(KINDS)
    drafts = min(_DRAFTS, target.backend.state_capabilities.max_rollback or 0)
    for name in names:
        base = adapted(target, KINDS[name])
        dtypes = [base.dtype] if target.quick else [torch.float32, torch.bfloat16]
        for dtype in dtypes:
            spec = base.replace(
                dtype=dtype, state_dtype=dtype, max_rollback=drafts, batch_invariant=True
            )
            text = str(dtype).removeprefix("torch.")
            title = f"{name} states, {text}"
            yield title, partial(_certify, target, title, spec)
        given = {"max_rollback": drafts, "batch_invariant": True}
        if base.has_recurrence and (large := with_large_heads(target, base.replace(**given))):
            title = f"{name} states of large heads, bfloat16"
            yield title, partial(_certify, target, title, large)


def _certify(target: BackendUnderTest, name: str, spec: StateSpec) -> CertifiedSpec:
    """All variants of one kind of layer."""
    info = resolve_device(target.device)
    reasons = target.backend.state_reasons(spec, info)
    batch = "_".join(f"q{length}" for length in _LENGTHS)
    if reasons:
        return CertifiedSpec(name, str(spec), (), batch, unsupported=tuple(reasons))
    requests = [drawn(spec, n, target.seed + place) for place, n in enumerate(_LENGTHS)]
    alone = [served_alone(target, spec, tokens) for tokens in requests]
    compared: Counter[str] = Counter()
    different: Counter[str] = Counter()
    failures: list[str] = []
    given = target, spec, requests
    variants = (
        _in_steps(target, spec, requests[:1], (1,)),
        _in_steps(*given, (1, 5, 16, 33)),
        _in_steps(*given, (1, 2, 9), spec.max_rollback),
        served_together(*given, trials=2),
        _sources(*given),
    )
    for kind, found in zip(STATE_KINDS, variants, strict=True):
        for request, first, got in found:
            rows = len(next(x for x in got if x is not None))
            compared[kind] += rows
            wanted = part_of(alone[request], slice(first, first + rows))
            if message := compare_result_bits(got, wanted, f"{kind}: request {request}"):
                different[kind] += 1
                failures.append(message)
    return CertifiedSpec(
        name,
        str(spec),
        tuple(target.backend.explain_state_lines(spec, info)),
        batch,
        compared=dict(compared),
        sha256=hash_of(x for results in alone for x in results),
        different=dict(different),
        failures=tuple(failures[:_MAX_FAILURES]),
    )


Found = Iterator[tuple[int, int, Results]]
"""(request, its first token, results)."""


def served_alone(target: BackendUnderTest, spec: StateSpec, tokens: TokenInputs) -> Results:
    """The results of a request in one step."""
    layer = LayerUnderTest(target, spec, num_slots=1, used=False)
    return layer.run(tokens, Step([len(tokens)], [len(tokens)], [0]))


def _in_steps(
    target: BackendUnderTest,
    spec: StateSpec,
    requests: Sequence[TokenInputs],
    sizes: Sequence[int],
    drafts: int = 0,
) -> Found:
    """Each request in steps of its own of random sizes, with drafts that are taken back."""
    for request, tokens in enumerate(requests):
        rng = random.Random(target.seed + request)
        server = Server(spec, LayerUnderTest(target, spec), [tokens], [request])
        while server.left(0):
            stay = min(server.left(0), rng.choice(sizes))
            server.step([Part(0, stay, rng.randint(0, drafts))])
        yield request, 0, server.result(0)


def served_together(
    target: BackendUnderTest, spec: StateSpec, requests: Sequence[TokenInputs], trials: int
) -> Found:
    """The requests in random steps with drafts and padding, as often as `trials` says."""
    for trial in range(trials):
        rng = random.Random(target.seed + trial)
        layer = LayerUnderTest(target, spec, num_slots=7)
        server = Server(spec, layer, requests, rng.sample(range(7), 3), extra_rows=trial)
        server.serve_all(rng)
        for request in range(len(requests)):
            yield request, 0, server.result(request)


def _sources(target: BackendUnderTest, spec: StateSpec, requests: Sequence[TokenInputs]) -> Found:
    """A request that leaves its slot behind in every step, as checkpoints and forks do."""
    tokens, layer = requests[0], LayerUnderTest(target, spec, num_slots=5)
    done, slot = 0, 0
    for count in (19, 1, 1, 12, 16, 1, 20):
        end, other = done + count, (slot + 2) % 5
        step = Step([count], [end], [other], [slot])
        yield 0, done, layer.run(tokens.rows(done, end), step)
        done, slot = end, other
