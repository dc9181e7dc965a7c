"""Plans whose direct launches are not possible: the kernels are launched by Triton, on tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnlib.backends.base import AttentionImpl
from attnlib.backends.triton.launches import LayerCall
from attnlib.errors import ContractError
from attnlib.ops.triton.launch.bound import ALIGNMENT

if TYPE_CHECKING:
    from attnlib.backends.triton.plan import TritonPlan

__all__ = ["run_by_triton"]


def run_by_triton(plan: TritonPlan, impl: AttentionImpl, call: LayerCall) -> None:
    """Run a plan by Triton: its kernels, or the plain kernels where addresses are not aligned and
    the prepared ones need alignment.

    Args:
        plan: the plan.
        impl: of the calling layer.
        call: flat or per head.

    Raises:
        ContractError: unaligned addresses of a batch-invariant layer, whose bits depend on the
            kernel (M15).
    """
    spec, launches = plan.spec, plan.launches
    call = call.per_head(spec)
    aligned = not call.addresses & ALIGNMENT and launches.rows_aligned
    if aligned or not launches.needs_alignment:
        launches.run_by_triton(call, impl, plan.batch, plan.split, aligned)
        return
    if spec.batch_invariant:
        raise ContractError(
            "query, output and caches of a layer with batch_invariant=True must start on "
            "16-byte boundaries: other kernels would give other bits; copy them, or "
            'configure the backend with kernels="portable"',
            rule="M15",
        )
    query, key, value, cache, out, lse = call
    if plan.plain is None:
        metadata = plan.metadata()
        assert metadata is not None  # the caller holds the batch
        states = (metadata, out, lse, "portable")
        plan.plain = type(plan)(impl, plan.signature, query, key, value, cache, *states)
    plan.plain.run(impl, query, key, value, cache, out, lse)
