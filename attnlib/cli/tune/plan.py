"""The cases to measure: batches for layers of a config or spec, or cases of `attnlib bench`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from attnlib.bench.case import BenchCase
from attnlib.bench.case_text import parse_case
from attnlib.bench.state_case import StateCase
from attnlib.bench.suites import choose_cases
from attnlib.cli.spec_flags import names_a_spec, specs_of
from attnlib.errors import ContractError
from attnlib.spec import AttentionSpec
from attnlib.testing.batch_spec import parse_batch

__all__ = ["case_of", "plan_cases"]

_SHAPES = {
    ("cuda", True): ("8q1s8k", "q4k"),
    ("cuda", False): (
        "q1s1k",
        "q1s8k",
        "8q1s8k",
        "64q1s4k",
        "16q4s4k",
        "q2k",
        "q8k",
        "2q1s8k_q2ks8k",
    ),
    ("cpu", True): ("2q1s128", "q64"),
    ("cpu", False): ("q1s512", "8q1s256", "q256", "4q1s256_q128"),
}
"""(device type, --quick) -> batches for layers that are given without --shapes."""

_KNOWN = {
    "num_heads", "num_kv_heads", "head_size", "head_size_v", "block_size", "dtype",
    "kv_cache_dtype", "sliding_window", "logits_soft_cap", "has_sink",
}  # fmt: skip
"""Spec fields that a case can express. A layer that uses any other field cannot be measured."""


def plan_cases(options: argparse.Namespace, device_type: str) -> tuple[list[BenchCase], list[str]]:
    """(cases in order, layers that are left out with the reason).

    Raises:
        ContractError: shapes or cases that do not parse, or there is nothing to measure.
    """
    if not names_a_spec(options) and not options.shapes:
        default = "quick" if device_type == "cuda" else "cpu"
        chosen = choose_cases(options.cases, options.suite, default)
        attention = [case for case in chosen if isinstance(case, BenchCase)]
        states = [case.name for case in chosen if isinstance(case, StateCase)]
        if not attention:
            raise ContractError(
                f"{states[0]} is a state layer, which has nothing to tune: choose attention layers"
            )
        return attention, [f"{name}: a state layer has nothing to tune" for name in states]
    if options.cases or options.suite:
        raise ContractError(
            "a CASE includes its layer: give cases alone, or a spec (--config, --head-size ...) "
            "with --shapes"
        )
    shapes = (
        options.shapes.split(",")
        if options.shapes
        else _SHAPES["cuda" if device_type == "cuda" else "cpu", options.quick]
    )
    cases, left_out = [], []
    for kind, spec in specs_of(options).items():
        try:
            cases += [case_of(spec, shape, kind) for shape in shapes]
        except ContractError as error:
            left_out.append(str(error))
    if not cases:
        raise ContractError(f"nothing can be measured: {'; '.join(left_out)}")
    return cases, left_out


def case_of(spec: AttentionSpec, shape: str, kind: str = "") -> BenchCase:
    """The case of a layer and a batch.

    Raises:
        ContractError: the batch does not parse, or the layer has a feature that cases cannot
            express.
    """
    fields: dict[str, Any] = {
        "num_heads": spec.num_heads,
        "num_kv_heads": spec.num_kv_heads,
        "head_size": spec.head_size,
        "head_size_v": spec.head_size_v,
        "block_size": spec.block_size,
        "dtype": str(spec.dtype).removeprefix("torch."),
        "kv_cache_dtype": spec.kv_cache_dtype
        if isinstance(spec.kv_cache_dtype, str)
        else str(spec.kv_cache_dtype).removeprefix("torch."),
        "sliding_window": spec.sliding_window,
        "logits_soft_cap": spec.logits_soft_cap,
        "sinks": spec.has_sink,
    }
    other = _other_fields(spec)
    if other:
        raise ContractError(
            f"{kind or 'this layer'} has {', '.join(other)}, which a case cannot express: it keeps "
            "the shipped parameters and ranking"
        )
    name = f"{shape}@{kind or 'spec'}"
    return replace(parse_case(shape), name=name, batch=parse_batch(shape), **fields)


def _other_fields(spec: AttentionSpec) -> Sequence[str]:
    """Fields with other than default values that a case cannot express, except those that do not
    affect the time.
    """
    plain = AttentionSpec(**{name: getattr(spec, name) for name in _KNOWN})
    ignored = {
        "needs_lse",
        "kv_sharing",
        "batch_invariant",
        "cudagraph",
        "kv_cache_layout",
        "kv_scale_kind",
    }
    names = set(spec.__dataclass_fields__) - _KNOWN - ignored
    return sorted(
        f"{name}={getattr(spec, name)}"
        for name in names
        if getattr(spec, name) != getattr(plain, name)
    )
