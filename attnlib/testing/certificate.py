"""Certificates of batch invariance (M15), for any backend.

    certificate = certify_batch_invariance("triton")
    assert certificate.passed, certificate

Requests are computed alone, and again in many other batches (`batch_variants`). Every row must have
the same bits each time. The certificate states what was compared, with which versions and hardware,
and a hash of the results: the hashes of two machines with one kind of GPU must be equal, too.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from attnlib.backends.base import AttentionBackend
from attnlib.device import resolve_device
from attnlib.errors import ContractError
from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.batch_slicing import slice_batch
from attnlib.testing.batch_variants import KINDS, BatchVariant, hidden_memory, variants_of
from attnlib.testing.budget import compare_bits
from attnlib.testing.captured_step import CapturedStep
from attnlib.testing.case import Case
from attnlib.testing.certified_spec import CertifiedSpec, hash_of
from attnlib.testing.conformance import make_target
from attnlib.testing.materialized_case import MaterializedCase
from attnlib.testing.parallel import default_jobs
from attnlib.testing.runner import AttentionOutput, run_materialized_case
from attnlib.testing.states.certificate import STATE_KINDS, declares_invariance, state_kinds

__all__ = ["Certificate", "CertifiedSpec", "certify_batch_invariance"]

Backend = type[AttentionBackend]
_MAX_FAILURES = 5
"""Failures of a spec that are kept; more are counted."""
_CAPTURED_REQUESTS = 7
_OTHER_KERNELS = ("void at::", "at::", "Memcpy", "Memset")
"""Beginnings of the names of torch's own kernels, of copies and of fills."""


@dataclass(frozen=True)
class Certificate:
    """The result of `certify_batch_invariance`.

    Attributes:
        backend: the name as given.
        backend_class: "module:Class".
        declared: whether the backend declares `batch_invariant` for a layer of common sizes.
        device: torch device.
        seed: of all random numbers.
        quick: whether fewer kinds of layers were compared.
        only: which of them were chosen; None for all.
        specs: the kinds of layers.
        provenance: versions, hardware and commit (`bench.provenance`).
        seconds: run time.
    """

    backend: str
    backend_class: str
    declared: bool
    device: str
    seed: int
    quick: bool
    only: str | None
    specs: tuple[CertifiedSpec, ...]
    provenance: dict[str, Any]
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether all chosen kinds were compared, and all bits were equal."""
        return any(spec.compared for spec in self.specs) and not any(
            spec.different or spec.not_run for spec in self.specs
        )

    def to_json(self) -> str:
        """The certificate as JSON; `version` changes with the names and meanings of the keys."""
        facts = {"certificate": "batch-invariance", "rule": "M15", "version": 3}
        data = {**facts, "passed": self.passed, "varied": [*KINDS, *STATE_KINDS]}
        data |= asdict(self)
        return json.dumps(data, indent=1)

    def __str__(self) -> str:
        """One line per kind of layer, the first failures, and PASSED or FAILED."""
        claim = "declares" if self.declared else "does not declare"
        lines = [
            f"batch invariance of {self.backend} ({self.backend_class}) on {self.device}; the "
            f"backend {claim} it"
        ]
        lines += [str(spec) for spec in self.specs]
        lines.append(f"{self.seconds:.0f} s · {'PASSED' if self.passed else 'FAILED'}")
        return "\n".join(lines)


def certify_batch_invariance(
    backend: str | Backend,
    *,
    device: torch.device | str | None = None,
    seed: int = 0,
    quick: bool = False,
    commit: str | None = None,
    jobs: int | None = None,
    only: str | None = None,
    limit_seconds: float = math.inf,
    on_spec: Callable[[CertifiedSpec], object] | None = None,
) -> Certificate:
    """Compare the bits of requests alone with those in many other batches.

    A backend that declares `batch_invariant` is given layers that ask for it; any other backend is
    given layers that do not.

    Args:
        backend: a registered name, a `module:Class` path or a class.
        device: None selects the GPU if torch sees one and the backend declares it.
        seed: seed of all random numbers.
        quick: fewer kinds of layers.
        commit: the commit of attnlib, for copies without history.
        jobs: number of worker processes, of which each compares whole kinds of layers. None selects
            several on a GPU, one elsewhere.
        only: names of kinds of layers with * and ?, such as "* states, *"; None for all.
        limit_seconds: no kind is begun later; the others are listed as not run.
        on_spec: called after each kind of layer, in their order.

    Raises:
        UnknownBackendError, BackendUnavailableError, ContractError: as `run_conformance`, or no
            kind has such a name.
    """
    from attnlib.bench.provenance import provenance

    started = time.monotonic()
    target = make_target(backend, device=device, seed=seed, quick=quick, against=())
    declared = (
        target.supports(target.case(batch_invariant=True, needs_lse=False))
        if "attention" in target.kinds
        else declares_invariance(target)
    )
    names = [name for name, _ in _kinds(target, declared)]
    numbers = [n for n, name in enumerate(names) if only is None or fnmatchcase(name, only)]
    if not numbers:
        raise ContractError(f"no kind of layer is {only!r}; there are: {'; '.join(names)}")
    processes = default_jobs(target) if jobs is None else jobs
    specs = []
    for spec in _specs(target, declared, numbers, processes, started + limit_seconds):
        specs.append(spec)
        if on_spec is not None:
            on_spec(spec)
    facts = provenance(commit=commit, device=target.device)
    return Certificate(
        target.label, ":".join(target.backend.full_cls_name()), declared, str(target.device), seed,
        quick, only, tuple(specs), facts, round(time.monotonic() - started, 1),
    )  # fmt: skip


def _specs(
    target: BackendUnderTest, declared: bool, numbers: Sequence[int], jobs: int, end: float
) -> Iterator[CertifiedSpec]:
    """The comparisons of some kinds of layers, in their order."""
    if jobs <= 1:
        for number in numbers:
            yield _certify_number(target, declared, number, end)
        return
    with ProcessPoolExecutor(min(jobs, len(numbers)), mp_context=get_context("spawn")) as pool:
        given = ((target, declared, number, end) for number in numbers)
        for done in [pool.submit(_certify_number, *each) for each in given]:
            yield done.result()


def _certify_number(
    target: BackendUnderTest, declared: bool, number: int, end: float
) -> CertifiedSpec:
    """The comparisons of one kind of layer; also the task of a worker process. `end` is a time of
    the monotonic clock, which all processes share."""
    name, certify = list(_kinds(target, declared))[number]
    if time.monotonic() > end:
        return CertifiedSpec(name, "", (), "", not_run="no time was left")
    return certify()


def _kinds(
    target: BackendUnderTest, declared: bool
) -> Iterator[tuple[str, Callable[[], CertifiedSpec]]]:
    """Name and comparisons of each kind of layer."""
    if "attention" in target.kinds:
        for name, case in _cases(target, declared):
            yield name, partial(_certify, target, name, case)
    yield from state_kinds(target)


def _cases(target: BackendUnderTest, declared: bool) -> Iterator[tuple[str, Case]]:
    """Name and configuration of each kind of attention layer."""
    base = target.case(batch_invariant=declared, needs_lse=False, extra_columns=0)
    heads = {"num_heads": 8, "num_kv_heads": 2}
    window = 300 if target.on_gpu else 3 * base.block_size + 2
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("plain", heads),
        ("log-sum-exp", {**heads, "needs_lse": True}),
        ("window and sinks", {**heads, "sliding_window": window, "sinks": True}),
        ("soft cap", {**heads, "logits_soft_cap": 30.0}),
    ]
    if not target.quick:
        kinds += [
            ("one head per KV head", {"num_heads": 2, "num_kv_heads": 2}),
            ("one KV head", {"num_heads": 16, "num_kv_heads": 1}),
            ("32 heads per KV head", {"num_heads": 32, "num_kv_heads": 1}),
            ("head size 128", {**heads, "head_size": 128, "block_size": 64}),
            ("short window", {**heads, "sliding_window": window // 3}),
            ("head size 256", {"num_heads": 4, "num_kv_heads": 2, "head_size": 256}),
            ("biases by position", {**heads, "alibi": True}),
            ("float8 cache", {**heads, "kv_cache_dtype": "fp8_e4m3", "k_scale": 0.5}),
            ("encoder", {**heads, "attn_type": "encoder", "mask": "bidirectional"}),
        ]
    for name, changes in kinds:
        yield name, base.replace(**changes)


def _batch(target: BackendUnderTest, case: Case) -> str:
    """Decodes and prompts; on a GPU long enough that backends divide the keys of a request."""
    n = case.block_size
    if case.attn_type == "encoder":
        return f"q{n + 3}_q{4 * n + 1}_q5"
    if target.on_gpu:
        return "q1_q1s37_q1s515_q3s1025_q1s2300_q1s8200_q130_q400s1300_q700"
    return f"q1_q1s{n + 5}_q1s{10 * n + 3}_q{2 * n + 5}_q5s{6 * n}"


def _certify(target: BackendUnderTest, name: str, case: Case) -> CertifiedSpec:
    """Compare all variants of one kind of layer."""
    case = case.replace(batch=_batch(target, case))
    info = resolve_device(target.device)
    entry = CertifiedSpec(name, str(case), (), str(case.batch_spec))
    if reasons := target.backend.validate_configuration(case.spec, info):
        return replace(entry, unsupported=tuple(reasons))
    step = case.materialize(target.device)
    alone = [
        _run(target, slice_batch(step, [request])) for request in range(case.batch_spec.num_reqs)
    ]
    compared: Counter[str] = Counter()
    failures: list[str] = []
    chunks: tuple[int, ...] = (
        (9, 64, 129) if target.on_gpu else (case.block_size, case.block_size + 7)
    )
    largest = 256 if target.on_gpu else 8
    if case.attn_type == "encoder":
        chunks = ()
    for variant in variants_of(step, target.seed, largest, chunks):
        if case.attn_type == "encoder" and variant.kind in ("chunks", "lengths of other requests"):
            continue  # a shorter sequence has other keys
        failure = _compare(target, variant, alone, compared)
        failures += [failure] if failure else []
    failures += _graphs(target, case, step, alone, compared)
    requests = [[request] for request in range(case.batch_spec.num_reqs)]
    return replace(
        entry,
        explanation=tuple(target.backend.explain_lines(case.spec, info)),
        kernels=_kernels(target, step, [*requests, [*range(len(requests))]]),
        compared={kind: compared[kind] for kind in KINDS if compared[kind]},
        sha256=hash_of(x for one in alone for x in (one.out, one.lse)),
        different=dict(Counter(failure.partition(":")[0] for failure in failures)),
        failures=tuple(failures[:_MAX_FAILURES]),
    )


def _run(target: BackendUnderTest, step: MaterializedCase) -> AttentionOutput:
    """The results of one batch, in memory of their own."""
    found = run_materialized_case(target.backend, step)
    lse = None if found.lse is None else found.lse.clone()
    return AttentionOutput(found.out.clone(), lse)


def _kernels(
    target: BackendUnderTest, step: MaterializedCase, batches: list[list[int]]
) -> tuple[str, ...]:
    """Names of the GPU kernels that batches of these requests run."""
    if not target.on_gpu:
        return ()
    parts = [slice_batch(step, requests) for requests in batches]
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for part in parts:
            _run(target, part)
        torch.cuda.synchronize(target.device)
    return _attention_kernels(profiler.events())


def _attention_kernels(events: Iterable[Any]) -> tuple[str, ...]:
    """Names of the kernels among the events of a profiler, without those of torch and copies."""
    names = {event.name for event in events if event.device_type.name == "CUDA"}
    return tuple(sorted(name for name in names if not name.startswith(_OTHER_KERNELS)))


def _compare(
    target: BackendUnderTest,
    variant: BatchVariant,
    alone: list[AttentionOutput],
    compared: Counter[str],
) -> str:
    """Run a variant; the first difference, or ""."""
    own = variant.hidden_from
    if own is None:
        found = _run(target, variant.step)
    else:
        value = 1e4 if target.backend.capabilities.needs_finite_cache else float("nan")
        with hidden_memory(variant.step, own, value):
            found = _run(target, variant.step)
    return _difference(variant, found, alone, compared)


def _difference(
    variant: BatchVariant,
    found: AttentionOutput,
    alone: list[AttentionOutput],
    compared: Counter[str],
) -> str:
    """The first difference of the results of a variant, or ""."""
    row = 0
    for request, first, end in variant.parts:
        rows, wanted = slice(row, row + end - first), alone[request]
        row += end - first
        if variant.hidden_from not in (None, request):
            continue
        compared[variant.kind] += end - first
        pairs = [("out", found.out, wanted.out)]
        if found.lse is not None and wanted.lse is not None:
            pairs.append(("lse", found.lse, wanted.lse))
        for quantity, ours, theirs in pairs:
            same = compare_bits(ours[rows], theirs[first:end], quantity)
            if not same.passed:
                return (
                    f"{variant.kind}: {variant.label}: tokens {first} to {end} of request "
                    f"{request}: {same}"
                )
    return ""


def _graphs(
    target: BackendUnderTest,
    case: Case,
    step: MaterializedCase,
    alone: list[AttentionOutput],
    compared: Counter[str],
) -> list[str]:
    """Decodes in a step captured for more requests. On a CPU, without a graph (check G1)."""
    lens = case.batch_spec.query_lens
    graph_case = case.replace(cudagraph="UNIFORM_SINGLE_TOKEN_DECODE", needs_lse=False)
    info = resolve_device(target.device)
    decodes = [r for r in range(len(lens)) if lens[r] == 1]
    if not decodes or target.backend.validate_configuration(graph_case.spec, info):
        return []
    captured = CapturedStep(
        target,
        graph_case,
        1,
        step.inputs.placement.num_blocks,
        _CAPTURED_REQUESTS,
        max(case.batch_spec.seq_lens),
    )
    failures = []
    for chosen in (decodes, decodes[-1:], decodes[::-1][:2], decodes * 2):
        chosen = chosen[:_CAPTURED_REQUESTS]
        part = slice_batch(step, chosen)
        captured.load(part)
        captured.replay()
        out = captured.out[: len(chosen)].clone()
        variant = BatchVariant(
            "CUDA graphs",
            f"requests {chosen} in a step of {_CAPTURED_REQUESTS}",
            part,
            tuple((r, 0, 1) for r in chosen),
        )
        failure = _difference(variant, AttentionOutput(out, None), alone, compared)
        failures += [failure] if failure else []
    return failures
