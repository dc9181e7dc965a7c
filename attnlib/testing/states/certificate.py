"""State layers in certificates of batch invariance (T18): a request alone in one step, against
random steps, drafts, other requests, forks and checkpoints."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from attnlib.device import resolve_device
from attnlib.spec import StateSpec
from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.certified_spec import CertifiedSpec, hash_of
from attnlib.testing.states.cases import adapted
from attnlib.testing.states.inputs import TokenInputs
from attnlib.testing.states.kinds import KINDS
from attnlib.testing.states.layers import LayerUnderTest, compare_result_bits, drawn, part_of
from attnlib.testing.states.serving import Part, Results, Server, Step

__all__ = ["STATE_KINDS", "certify_states", "declares_invariance"]

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


def certify_states(target: BackendUnderTest) -> Iterator[CertifiedSpec]:
    """The comparisons of all kinds of state layers; none for a backend without them."""
    if "state" not in target.kinds:
        return
    names = ("gated delta", "short convolution") if target.quick else tuple(KINDS)
    for name in names:
        base = adapted(target, KINDS[name])
        dtypes = [base.dtype] if target.quick else [torch.float32, torch.bfloat16]
        for dtype in dtypes:
            drafts = min(_DRAFTS, target.backend.state_capabilities.max_rollback or 0)
            spec = base.replace(
                dtype=dtype, state_dtype=dtype, max_rollback=drafts, batch_invariant=True
            )
            text = str(dtype).removeprefix("torch.")
            yield _certify(target, f"{name} states, {text}", spec)


def _certify(target: BackendUnderTest, name: str, spec: StateSpec) -> CertifiedSpec:
    """All variants of one kind of layer."""
    info = resolve_device(target.device)
    reasons = target.backend.state_reasons(spec, info)
    batch = "_".join(f"q{length}" for length in _LENGTHS)
    if reasons:
        return CertifiedSpec(name, str(spec), (), batch, unsupported=tuple(reasons))
    requests = [drawn(spec, n, target.seed + place) for place, n in enumerate(_LENGTHS)]
    alone = [_alone(target, spec, tokens) for tokens in requests]
    compared: Counter[str] = Counter()
    different: Counter[str] = Counter()
    failures: list[str] = []
    for kind, run in (
        ("single tokens", _single_tokens),
        ("steps", _random_steps),
        ("rejected drafts", _rejected_drafts),
        ("other requests", _other_requests),
        ("sources of states", _sources),
    ):
        for request, first, got in run(target, spec, requests):
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


def _alone(target: BackendUnderTest, spec: StateSpec, tokens: TokenInputs) -> Results:
    layer = LayerUnderTest(target, spec, num_slots=1, used=False)
    return layer.run(tokens, Step([len(tokens)], [len(tokens)], [0]))


def _single_tokens(
    target: BackendUnderTest, spec: StateSpec, requests: Sequence[TokenInputs]
) -> Found:
    server = Server(spec, LayerUnderTest(target, spec), requests[:1], [3])
    for _ in range(len(requests[0])):
        server.step([Part(0, 1)])
    yield 0, 0, server.result(0)


def _random_steps(
    target: BackendUnderTest, spec: StateSpec, requests: Sequence[TokenInputs]
) -> Found:
    for request, tokens in enumerate(requests):
        rng = random.Random(target.seed + request)
        server = Server(spec, LayerUnderTest(target, spec), [tokens], [request])
        while server.done[0] < len(tokens):
            server.step([Part(0, min(len(tokens) - server.done[0], rng.choice((1, 5, 16, 33))))])
        yield request, 0, server.result(0)


def _rejected_drafts(
    target: BackendUnderTest, spec: StateSpec, requests: Sequence[TokenInputs]
) -> Found:
    for request, tokens in enumerate(requests):
        rng = random.Random(target.seed + request)
        server = Server(spec, LayerUnderTest(target, spec), [tokens], [request])
        while server.done[0] < len(tokens):
            stay = min(len(tokens) - server.done[0], rng.choice((1, 2, 9)))
            server.step([Part(0, stay, rng.randint(0, spec.max_rollback))])
        yield request, 0, server.result(0)


def _other_requests(
    target: BackendUnderTest, spec: StateSpec, requests: Sequence[TokenInputs]
) -> Found:
    for trial in range(2):
        rng = random.Random(target.seed + trial)
        layer = LayerUnderTest(target, spec, num_slots=7)
        server = Server(spec, layer, requests, rng.sample(range(7), 3), extra_rows=trial)
        while any(done < len(x) for done, x in zip(server.done, requests, strict=True)):
            parts = [Part(-1, rng.randint(0, 2))]
            for request, tokens in enumerate(requests):
                stay = min(len(tokens) - server.done[request], rng.choice((0, 1, 1, 3, 16, 25)))
                parts.append(Part(request, stay, rng.randint(0, spec.max_rollback) * bool(stay)))
            rng.shuffle(parts)
            server.step(parts)
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
