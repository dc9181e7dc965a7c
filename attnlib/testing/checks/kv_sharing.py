"""K6: a layer that shares the cache of another layer never writes to it (P8).

The check calls the sharing layer with its own keys and values, as a model does. No byte of the
cache may change, and the layer must attend to the keys of the other layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

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
    own_key, own_value = step.inputs.key * 0 + 3.0, step.inputs.value * 0 + 5.0
    out = layer(step.inputs.query, own_key, own_value, step.cache(), metadata)
    for old, new in zip(before, step.inputs.cache.storage, strict=True):
        if not bool((old == new).all()):
            changed = int((old != new).sum())
            return (
                f"the sharing layer changed {changed} bytes of the shared cache (P8) | case: {case}"
            )
    return compare_with_oracle(case, AttentionOutput(out, None), target.device)


def _sharing(target: BackendUnderTest) -> Iterator[CheckCase]:
    for batch in ("decode", "mixed"):
        case = target.case(batch=batch, kv_sharing=True, needs_lse=False)
        yield CheckCase(batch, partial(_check, target, case), case)


CHECKS = (Check("K6", "a sharing layer never writes", _sharing),)
