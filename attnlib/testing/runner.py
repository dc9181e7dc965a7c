"""Run one step on one backend, the way an engine does: builder once, impl, write, attend.

Nothing here knows what is right; `compare_with_oracle` asks the oracle and the budget.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from attnlib.backends.base import AttentionBackend, AttentionImpl
from attnlib.testing.budget import compare
from attnlib.testing.case import Case
from attnlib.testing.materialized_case import MaterializedCase
from attnlib.testing.outcome import UnsupportedCase

__all__ = [
    "AttentionOutput",
    "attend",
    "check_supported",
    "write_then_attend",
    "compare_with_oracle",
    "make_impl",
    "run_case",
    "run_materialized_case",
]

Backend = type[AttentionBackend]


@dataclass(frozen=True)
class AttentionOutput:
    """What a backend gave: out [T, Hq, Dv], and lse [T, Hq] float32 where it was asked for."""

    out: torch.Tensor
    lse: torch.Tensor | None


def check_supported(backend: Backend, case: Case, device: torch.device | str) -> None:
    """Raise `UnsupportedCase` when the backend declares that it cannot serve the case."""
    reasons = backend.validate_configuration(case.spec, device)
    if reasons:
        raise UnsupportedCase(reasons)


def make_impl(backend: Backend, step: MaterializedCase) -> AttentionImpl:
    """The per-layer object of a step."""
    return backend.get_impl_cls()(
        step.spec,
        scale=step.params.scale,
        alibi_slopes=step.params.alibi_slopes,
        sinks=step.params.sinks,
        kv_sharing_target_layer_name="producer" if step.spec.kv_sharing else None,
        config=backend.config,
        prefix="verify",
    )


def attend(impl: AttentionImpl, step: MaterializedCase, metadata: Any) -> AttentionOutput:
    """One forward into poisoned, strided outputs."""
    inputs = step.inputs
    lse = None
    if step.spec.needs_lse:
        lse = torch.full(
            inputs.query.shape[:2], float("nan"), dtype=torch.float32, device=inputs.query.device
        )
    if step.case.is_paged:
        impl.forward(inputs.query, step.cache(), metadata, inputs.out, lse)
    else:
        impl.forward_unpaged(inputs.query, inputs.key, inputs.value, metadata, inputs.out, lse)
    return AttentionOutput(inputs.out, lse)


def run_materialized_case(backend: Backend, step: MaterializedCase) -> AttentionOutput:
    """Build, write what is not written yet (P7), attend."""
    impl = make_impl(backend, step)
    metadata = backend.make_builder(step.spec, step.inputs.query.device).build(0, step.common())
    if step.case.is_paged and not step.inputs.kv_written:
        impl.write_kv(step.inputs.key, step.inputs.value, step.cache(), metadata.slot_mapping)
    return attend(impl, step, metadata)


def run_case(
    backend: Backend, case: Case, device: torch.device | str, *, kv_written: bool = False
) -> AttentionOutput:
    """One case on fresh tensors; by default the backend writes this step's keys itself.

    Raises:
        UnsupportedCase: the backend declares that it cannot.
    """
    check_supported(backend, case, device)
    kv_written = kv_written or case.attn_type == "encoder_decoder" or case.kv_sharing
    return run_materialized_case(backend, case.materialize(device, kv_written=kv_written))


def write_then_attend(
    writer: Backend, reader: Backend, case: Case, device: torch.device | str
) -> AttentionOutput:
    """One backend writes this step's keys into a cache, another attends to it.

    Raises:
        UnsupportedCase: one of the two declares that it cannot; the reasons say which.
    """
    for backend in (writer, reader):
        if reasons := backend.validate_configuration(case.spec, device):
            raise UnsupportedCase([f"{backend.get_name()}: {reason}" for reason in reasons])
    step = case.materialize(device, kv_written=False)
    make_impl(writer, step).write_kv(
        step.inputs.key, step.inputs.value, step.cache(), step.inputs.slot_mapping
    )
    return attend(
        make_impl(reader, step),
        step,
        reader.make_builder(case.spec, device).build(0, step.common()),
    )


def compare_with_oracle(
    case: Case,
    seen: AttentionOutput,
    device: torch.device | str,
    truth: MaterializedCase | None = None,
) -> str:
    """Hold an observation against the oracle: "" within budget, else both errors and the case."""
    truth = truth or case.materialize(device)
    expected, same_precision = truth.oracle(), truth.oracle(case.torch_dtype)
    findings = [compare(seen.out, expected.out, same_precision.out, case.torch_dtype, "out")]
    if seen.lse is not None:
        findings.append(
            compare(seen.lse, expected.lse, same_precision.lse, case.torch_dtype, "lse")
        )
    rows = case.batch_spec.num_actual_tokens
    wrong = [str(finding) for finding in findings if not finding.passed]
    if seen.out[rows:].any():
        wrong.append(f"rows {rows} and later belong to nobody and must be exactly 0 (M6)")
    return f"{'; '.join(wrong)} | case: {case}" if wrong else ""
