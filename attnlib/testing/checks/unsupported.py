"""R1: unsupported configurations raise an error before any launch; supported ones can be built.

Each case sets one field of the spec to an uncommon value. If the backend returns reasons, selecting
it explicitly and building a layer must raise an error with the same reasons. Otherwise the layer
must build. A capability that is declared must be supported in a layer without other features.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from attnlib.device import DeviceInfo
from attnlib.errors import UnsupportedConfigError
from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.case import Case
from attnlib.testing.check import Check, CheckCase
from attnlib.testing.outcome import UnsupportedCase
from attnlib.testing.page_formats import PAGE_NAMES

__all__ = ["CHECKS"]

_PAGES: dict[str, object] = {"head_size": 64, "layout": "HND_INTERLEAVED"}
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
    "cache-int8_per_token_head": {**_PAGES, "kv_cache_dtype": "int8_per_token_head"},
    "layout-HND_PACKED": {"layout": "HND_PACKED"},
    "sliding_window": {"sliding_window": 7},
    "two-sided-window": {"mask": "bidirectional", "window": (3, 2)},
    "attention_chunk_size": {"attention_chunk_size": 32},
    "logits_soft_cap": {"logits_soft_cap": 30.0},
    "alibi": {"alibi": True},
    "sinks": {"sinks": True},
    "score_function": {"score": "attnlib.testing.score_functions:POSITIONS"},
    "key_selection": {"key_selection": ("kv_head", 4, 2, 1)},
    "compressed_entries": {"compressed": (4, 16, 0)},
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
_DECLARED = ("score_function", "key_selection", "compressed_entries", "batch_invariant")
"""Capabilities that do not depend on the version of a package."""


def _check(target: BackendUnderTest, case: Case) -> str:
    from attnlib.layer import Attention
    from attnlib.selection import get_attn_backend

    spec = case.spec
    reasons = target.backend.validate_configuration(spec, target.device)
    if any(not isinstance(reason, str) or not reason.strip() for reason in reasons):
        return f"an unsupported case must have reasons, got {reasons!r} | case: {case}"
    params = case.oracle_params(target.device)

    def make_layer() -> object:
        return Attention(
            spec,
            backend=target.backend,
            alibi_slopes=params.alibi_slopes,
            sinks=params.sinks,
            kv_sharing_target_layer_name="producer" if case.kv_sharing else None,
            device=target.device,
        )

    if not reasons:
        make_layer()
        return ""
    for name, attempt in (
        ("get_attn_backend", partial(get_attn_backend, spec, target.backend, target.device)),
        ("Attention", make_layer),
    ):
        try:
            attempt()
        except UnsupportedConfigError as error:
            if missing := [reason for reason in reasons if reason not in str(error)]:
                return f"{name} raises without the reason {missing[0]!r}: {error} | case: {case}"
        else:
            return (
                f"{name} does not raise, although the backend declares: {'; '.join(reasons)} "
                f"| case: {case}"
            )
    return ""


def _check_unknown_device(target: BackendUnderTest) -> str:
    """A device type that no backend declares must be unsupported; the reason names the type."""
    reasons = target.backend.validate_configuration(
        target.base_case.spec, DeviceInfo(type="abacus")
    )
    return (
        ""
        if any("abacus" in reason for reason in reasons)
        else f"a device of type abacus is accepted: {reasons}"
    )


def _check_declared(target: BackendUnderTest, case: Case, capability: str) -> str:
    """What the capabilities declare is supported in a layer without other features."""
    capabilities = target.backend.capabilities
    if capability in PAGE_NAMES:
        declared = capability in (capabilities.kv_formats or ())
    else:
        declared = getattr(capabilities, capability) is True
    if not declared:
        raise UnsupportedCase([f"{capability}: not declared"])
    reasons = target.backend.validate_configuration(case.spec, target.device)
    if not reasons:
        return ""
    return (
        f"the capabilities declare {capability}, but a layer without other features is "
        f"refused: {'; '.join(reasons)} | case: {case}"
    )


def _unsupported(target: BackendUnderTest) -> Iterator[CheckCase]:
    for name, changes in _UNUSUAL.items():
        case = target.case(**changes)
        yield CheckCase(name, partial(_check, target, case))
    pages = {name: {**_PAGES, "kv_cache_dtype": name} for name in PAGE_NAMES}
    for name, changes in {**{name: _UNUSUAL[name] for name in _DECLARED}, **pages}.items():
        case = target.case(needs_lse=False, **changes)
        yield CheckCase(f"declared-{name}", partial(_check_declared, target, case, name))
    yield CheckCase("unknown-device", partial(_check_unknown_device, target))


CHECKS = (Check("R1", "unsupported configurations raise with their reasons", _unsupported),)
