"""Run one case on one backend the way an engine does, and compare the result with the oracle.

The call sequence is: build the metadata, write the new keys and values, call `forward`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from attnlib.backends.base import AttentionBackend, AttentionImpl
from attnlib.backends.rotated import make_backend_impl
from attnlib.errors import ContractError
from attnlib.metadata import AttentionMetadata
from attnlib.testing.budget import compare
from attnlib.testing.case import Case
from attnlib.testing.materialized_case import MaterializedCase
from attnlib.testing.oracle import OracleResult
from attnlib.testing.outcome import UnsupportedCase
from attnlib.testing.score_rounding import rounding_limits

__all__ = [
    "AttentionOutput",
    "attend",
    "check_least_product",
    "check_supported",
    "compare_with_oracle",
    "equals_result_without",
    "expected_results",
    "find_operation",
    "make_impl",
    "run_case",
    "run_materialized_case",
    "write_then_attend",
]

Backend = type[AttentionBackend]


@dataclass(frozen=True)
class AttentionOutput:
    """The output of one forward call.

    Attributes:
        out: [T, Hq, Dv].
        lse: [T, Hq] float32, or None if the case does not request the LSE.
    """

    out: torch.Tensor
    lse: torch.Tensor | None


def check_supported(backend: Backend, case: Case, device: torch.device | str) -> None:
    """Check the backend's declaration.

    Raises:
        UnsupportedCase: the backend declares that it does not support the case.
        ContractError: it declares so without a reason.
    """
    reasons = backend.validate_configuration(case.spec, device)
    if any(not isinstance(reason, str) or not reason.strip() for reason in reasons):
        raise ContractError(
            f"{backend.get_name()} must give a reason for what it does not support, got {reasons!r}"
        )
    if reasons:
        raise UnsupportedCase(reasons)


def check_least_product(backend: Backend, case: Case, score: float) -> None:
    """Check that the backend does not hide keys of this score (`Capabilities.least_product`).

    Raises:
        UnsupportedCase: it hides them.
    """
    scale = case.scale or case.head_size**-0.5
    if not case.logits_soft_cap and score / scale < backend.capabilities.least_product:
        least = backend.capabilities.least_product
        raise UnsupportedCase([f"least_product={least:g}: keys of the score {score:g} are hidden"])


def find_operation(backend: Backend, name: str) -> Callable[..., Any]:
    """The operation of a backend that no attention layer runs.

    Raises:
        UnsupportedCase: the backend has none with this name.
    """
    found = backend.get_operation(name)
    if found is None:
        raise UnsupportedCase([f"operation {name}: not supported"])
    return found


def make_impl(backend: Backend, step: MaterializedCase) -> AttentionImpl:
    """The backend's per-layer object for a case."""
    extra = {} if step.spec.score_function is None else {"score_tensors": step.score_tensors()}
    return make_backend_impl(
        backend,
        step.spec,
        scale=step.params.scale,
        alibi_slopes=step.params.alibi_slopes,
        sinks=step.params.sinks if step.spec.has_sink else None,
        kv_sharing_target_layer_name="producer" if step.spec.kv_sharing else None,
        config=backend.config,
        prefix="verify",
        **extra,
    )


def attend(
    impl: AttentionImpl, step: MaterializedCase, metadata: AttentionMetadata
) -> AttentionOutput:
    """Call forward once. The output tensors are strided and filled with poison before the call."""
    inputs = step.inputs
    lse = None
    if step.spec.needs_lse:
        lse = inputs.query.new_full(inputs.query.shape[:2], float("nan"), dtype=torch.float32)
    if (given := step.query_tensors()) is not None:
        impl = impl.of_call(given)
    selected = step.selected_keys()
    if selected is not None:
        impl.forward_selected(inputs.query, step.cache(), metadata, selected, inputs.out, lse)
    elif step.case.is_paged:
        impl.forward(inputs.query, step.cache(), metadata, inputs.out, lse)
    else:
        impl.forward_unpaged(inputs.query, inputs.key, inputs.value, metadata, inputs.out, lse)
    return AttentionOutput(inputs.out, lse)


def run_materialized_case(backend: Backend, step: MaterializedCase) -> AttentionOutput:
    """Build the metadata, write the keys and values that are not in the cache (P7), attend."""
    impl = make_impl(backend, step)
    metadata = backend.make_builder(step.spec, step.inputs.query.device).build(0, step.common())
    if step.case.is_paged and not step.inputs.kv_written:
        impl.write_kv(step.inputs.key, step.inputs.value, step.cache(), metadata.slot_mapping)
    return attend(impl, step, metadata)


def run_case(
    backend: Backend, case: Case, device: torch.device | str, *, kv_written: bool = False
) -> AttentionOutput:
    """Run a case on new tensors.

    Args:
        backend: the backend class.
        case: the case.
        device: the device to run on.
        kv_written: the cache already holds this step's keys and values. By default, the backend
            writes them.

    Raises:
        UnsupportedCase: the backend declares that it does not support the case.
    """
    check_supported(backend, case, device)
    kv_written = kv_written or case.attn_type == "encoder_decoder" or case.kv_sharing
    return run_materialized_case(backend, case.materialize(device, kv_written=kv_written))


def write_then_attend(
    writer: Backend, reader: Backend, case: Case, device: torch.device | str
) -> AttentionOutput:
    """Write this step's keys and values with one backend and attend with another.

    Raises:
        UnsupportedCase: one of the two does not support the case; each reason starts with the
            backend's name.
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
    actual: AttentionOutput,
    device: torch.device | str,
    reference: MaterializedCase | None = None,
) -> str:
    """Compare an output with the float64 oracle.

    Args:
        case: the case that produced the output.
        actual: the output of the backend.
        device: the device to run the oracle on.
        reference: tensors to compute the expected result from; None materializes the case.

    Returns:
        "" if every error is within the budget, otherwise the errors, their limits and the case.
    """
    given = expected_results(case, str(device)) if reference is None else _oracle_results(reference)
    expected, same_precision = given
    comparisons = []
    for name in ("out",) if actual.lse is None else ("out", "lse"):
        found, exact, rounded = (getattr(x, name) for x in (actual, expected, same_precision))
        limits = rounding_limits(expected, name, case.torch_dtype, device)
        comparisons.append(compare(found, exact, rounded, case.torch_dtype, name, limits))
    num_tokens = case.batch_spec.num_actual_tokens
    errors = [str(comparison) for comparison in comparisons if not comparison.passed]
    if actual.out[num_tokens:].any():
        errors.append(f"padding rows {num_tokens} and later must be exactly 0 (M6)")
    return f"{'; '.join(errors)} | case: {case}" if errors else ""


def equals_result_without(
    actual: AttentionOutput,
    with_it: tuple[OracleResult, OracleResult],
    without_it: tuple[OracleResult, OracleResult],
    dtype: torch.dtype,
) -> bool:
    """True if a feature is ignored: the output is wrong with it and within budget without it.

    The limit of each comparison is that of its own oracle. Otherwise the effect of the feature
    would count as an error of the same-precision computation, and any error would be within it.

    Args:
        actual: the output of the backend.
        with_it, without_it: the oracle in float64 and in `dtype`, with and without the feature.
        dtype: the dtype of the case.
    """
    wrong, right = (
        compare(actual.out, expected.out, same_precision.out, dtype)
        for expected, same_precision in (with_it, without_it)
    )
    return right.passed and not wrong.passed


def _oracle_results(reference: MaterializedCase) -> tuple[OracleResult, OracleResult]:
    """The expected output in float64 and in the precision of the case, without weights and mask."""
    results = reference.oracle(), reference.oracle(reference.case.torch_dtype)
    return replace(results[0], weights=(), visible=()), replace(results[1], weights=(), visible=())


@lru_cache(maxsize=4)  # checks compare several layers or calls with one case
def expected_results(case: Case, device: str) -> tuple[OracleResult, OracleResult]:
    """The oracle of a case in float64 and in the precision of the case."""
    return _oracle_results(case.materialize(device))
