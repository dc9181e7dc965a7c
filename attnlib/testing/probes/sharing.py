"""K6: a layer that shares another layer's cache never writes (P8).

The sharing layer is called the way a model calls it, with keys and values of its own in hand. Every byte of the cache
must stay, and the layer must attend to what the producer wrote.
"""

from __future__ import annotations

from collections.abc import Iterator

from attnlib.testing.backend_under_test import Subject
from attnlib.testing.case import Case
from attnlib.testing.probe import Check, Probe
from attnlib.testing.runner import Observation, judge

__all__ = ["PROBES"]


def _check(subject: Subject, case: Case) -> str:
    from attnlib.layer import Attention

    step = case.step(subject.device)
    layer = Attention(
        step.spec,
        backend=subject.backend,
        scale=step.terms.scale,
        kv_sharing_target_layer_name="layers.0.attention",
        prefix="layers.1.attention",
        device=subject.device,
    )
    metadata = subject.backend.make_builder(step.spec, subject.device).build(0, step.common())
    before = [storage.clone() for storage in step.inputs.cache.storage]
    foreign_key, foreign_value = step.inputs.key * 0 + 3.0, step.inputs.value * 0 + 5.0
    out = layer(step.inputs.query, foreign_key, foreign_value, step.cache(), metadata)
    for old, new in zip(before, step.inputs.cache.storage, strict=True):
        if not bool((old == new).all()):
            changed = int((old != new).sum())
            return f"the sharing layer wrote: {changed} bytes of the producer's cache changed (P8) | case: {case}"
    return judge(case, Observation(out, None), subject.device)


def _sharing(subject: Subject) -> Iterator[Check]:
    for batch in ("decode", "mixed"):
        case = subject.case(batch=batch, kv_sharing=True, needs_lse=False)
        yield Check(batch, lambda case=case: _check(subject, case), case)  # type: ignore[misc]


PROBES = (Probe("K6", "a sharing layer never writes", _sharing),)
