"""K6: a layer that shares another layer's cache never writes (P8).

The sharing layer is called the way a model calls it, with keys and values of its own in hand. Every byte of the cache
must stay, and the layer must attend to what the producer wrote.
"""

from __future__ import annotations

from collections.abc import Iterator

from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.case import Case
from attnlib.testing.check import Check, CheckCase
from attnlib.testing.runner import AttentionOutput, compare_with_oracle

__all__ = ["CHECKS"]


def _check(target: BackendUnderTest, case: Case) -> str:
    from attnlib.layer import Attention

    step = case.materialize(target.device)
    layer = Attention(
        step.spec,
        backend=target.backend,
        scale=step.params.scale,
        kv_sharing_target_layer_name="layers.0.attention",
        prefix="layers.1.attention",
        device=target.device,
    )
    metadata = target.backend.make_builder(step.spec, target.device).build(0, step.common())
    before = [storage.clone() for storage in step.inputs.cache.storage]
    foreign_key, foreign_value = step.inputs.key * 0 + 3.0, step.inputs.value * 0 + 5.0
    out = layer(step.inputs.query, foreign_key, foreign_value, step.cache(), metadata)
    for old, new in zip(before, step.inputs.cache.storage, strict=True):
        if not bool((old == new).all()):
            changed = int((old != new).sum())
            return f"the sharing layer wrote: {changed} bytes of the producer's cache changed (P8) | case: {case}"
    return compare_with_oracle(case, AttentionOutput(out, None), target.device)


def _sharing(target: BackendUnderTest) -> Iterator[CheckCase]:
    for batch in ("decode", "mixed"):
        case = target.case(batch=batch, kv_sharing=True, needs_lse=False)
        yield CheckCase(batch, lambda case=case: _check(target, case), case)  # type: ignore[misc]


CHECKS = (Check("K6", "a sharing layer never writes", _sharing),)
