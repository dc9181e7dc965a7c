"""R1: what a backend declares impossible must really be refused before a launch, and what it accepts must be buildable.

A refusal that is only printed, and then runs anyway, is the worst of both. Each field of the spec is set to something
unusual; either the backend gives reasons, and then an explicit choice raises with the same reasons, or it gives none,
and then the layer is made.
"""

from __future__ import annotations

from collections.abc import Iterator

from attnlib.device import DeviceInfo
from attnlib.errors import UnsupportedConfigError
from attnlib.testing.backend_under_test import Subject
from attnlib.testing.case import Case
from attnlib.testing.probe import Check, Probe

__all__ = ["PROBES"]

_UNUSUAL: dict[str, dict[str, object]] = {
    "head_size-13": {"head_size": 13},
    "head_size-1024": {"head_size": 1024},
    "value-size": {"head_size": 64, "head_size_v": 40},
    "block_size-7": {"block_size": 7},
    "block_size-544": {"block_size": 544},
    "group-17": {"num_heads": 34, "num_kv_heads": 2},
    "dtype-float16": {"dtype": "float16"},
    "dtype-float64": {"dtype": "float64"},
    "cache-fp8_e4m3": {"kv_cache_dtype": "fp8_e4m3"},
    "cache-fp8_e5m2-head": {"kv_cache_dtype": "fp8_e5m2", "kv_scale_kind": "head"},
    "layout-HND_PACKED": {"layout": "HND_PACKED"},
    "sliding_window": {"sliding_window": 7},
    "two-sided-window": {"mask": "bidirectional", "window": (3, 2)},
    "attention_chunk_size": {"attention_chunk_size": 32},
    "logits_soft_cap": {"logits_soft_cap": 30.0},
    "alibi": {"alibi": True},
    "sinks": {"sinks": True},
    "mask-bidirectional": {"mask": "bidirectional"},
    "mask-per_request": {"mask": "per_request"},
    "mask-query_bias": {"mask": "query_bias"},
    "mla": {
        "use_mla": True,
        "num_kv_heads": 1,
        "head_size": 96,
        "head_size_v": 64,
        "layout": "ALIASED",
    },
    "encoder_only": {"attn_type": "encoder_only", "mask": "bidirectional"},
    "encoder_decoder": {"attn_type": "encoder_decoder", "mask": "bidirectional"},
    "lse": {"needs_lse": True},
    "kv_sharing": {"kv_sharing": True},
    "batch_invariant": {"batch_invariant": True},
    "cudagraph": {"cudagraph": "ALWAYS"},
}


def _check(subject: Subject, case: Case) -> str:
    from attnlib.layer import Attention
    from attnlib.selection import get_attn_backend

    spec = case.spec
    reasons = subject.backend.validate_configuration(spec, subject.device)
    if any(not isinstance(reason, str) or not reason.strip() for reason in reasons):
        return f"a refusal must say why, got {reasons!r} | case: {case}"
    terms = case.terms(subject.device)

    def make_layer() -> object:
        return Attention(
            spec,
            backend=subject.backend,
            alibi_slopes=terms.alibi_slopes,
            sinks=terms.sinks,
            kv_sharing_target_layer_name="producer" if case.kv_sharing else None,
            device=subject.device,
        )

    if not reasons:
        make_layer()
        return ""
    for name, attempt in (
        ("get_attn_backend", lambda: get_attn_backend(spec, subject.backend, subject.device)),
        ("Attention", make_layer),
    ):
        try:
            attempt()
        except UnsupportedConfigError as error:
            if missing := [reason for reason in reasons if reason not in str(error)]:
                return f"{name} refuses without the reason {missing[0]!r}: {error} | case: {case}"
        else:
            return f"{name} does not raise although the backend declares: {'; '.join(reasons)} | case: {case}"
    return ""


def _foreign_device(subject: Subject) -> str:
    """A device type that nobody declares must be refused by name."""
    reasons = subject.backend.validate_configuration(subject.base.spec, DeviceInfo(type="abacus"))
    return (
        ""
        if any("abacus" in reason for reason in reasons)
        else f"a device of type abacus is accepted: {reasons}"
    )


def _refusals(subject: Subject) -> Iterator[Check]:
    for name, changes in _UNUSUAL.items():
        case = subject.case(**changes)
        yield Check(name, lambda case=case: _check(subject, case))  # type: ignore[misc]
    yield Check("foreign-device", lambda: _foreign_device(subject))


PROBES = (Probe("R1", "refusals raise before a launch, with their reasons", _refusals),)
