"""Calls of a step plan whose tensors its kernels cannot read: by the plain kernels."""

from __future__ import annotations

from collections.abc import Callable

from attnlib.backends.base import AttentionImpl
from attnlib.backends.step_plan import StepPlan
from attnlib.backends.triton.launches import LayerCall
from attnlib.errors import ContractError
from attnlib.kv_rotation import KVRotation
from attnlib.spec import AttentionSpec

__all__ = ["PlainCalls"]


class PlainCalls:
    """The calls of a plan with unaligned tensors.

    Args:
        spec: of the layers.
        rotation: where the kernels of the plan rotate (P15); the plain ones do not. Else None.

    Raises:
        ContractError: a batch-invariant layer, whose bits depend on the kernel (M15).
    """

    def __init__(self, spec: AttentionSpec, rotation: KVRotation | None) -> None:
        if spec.batch_invariant:
            raise ContractError(
                "query, output and caches of a layer with batch_invariant=True must start on "
                "16-byte boundaries: other kernels would give other bits; copy them, or "
                'configure the backend with kernels="portable"',
                rule="M15",
            )
        self._rotation = rotation
        self._plan: StepPlan | None = None

    def run(
        self,
        impl: AttentionImpl,
        call: LayerCall,
        make: Callable[[AttentionImpl, LayerCall], StepPlan],
    ) -> None:
        """Run one of them; `make` prepares the plan of the plain kernels."""
        rotation, output = self._rotation, call.out
        if rotation is not None and rotation.keys:
            call = call._replace(query=impl.rotate_heads(call.query, rotation.seed))
        if self._plan is None:
            self._plan = make(impl, call)
        self._plan.run(impl, *call)
        if rotation is not None and rotation.values:
            impl.rotate_heads(output, rotation.seed, inverse=True, out=output)
