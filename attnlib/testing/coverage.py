"""Capability coverage of a conformance run.

Cases that a backend declares as unsupported are not run, so a declaration can hide errors, and a
capability can be declared without a case that uses it. The coverage therefore lists every
capability as exercised (used by a passing case), declared but not exercised, declared as not
supported, or not stated.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from attnlib.backends.base import AttentionBackend
from attnlib.capabilities import NOT_STATED, Capabilities
from attnlib.kv_dtype import format_pair
from attnlib.spec import CudaGraphSupport
from attnlib.testing.case import Case
from attnlib.testing.outcome import CaseResult, Outcome
from attnlib.testing.state_coverage import declared_state_features

__all__ = ["Coverage", "capability_uses", "measure_coverage"]

_SIZED = ("head_sizes", "block_sizes", "group_sizes")
_LISTED = (
    "devices",
    "dtypes",
    "kv_cache_dtypes",
    "kv_formats",
    "kv_format_pairs",
    "kv_scale_kinds",
    "kv_cache_layouts",
    "attn_types",
    "mask_kinds",
)
_FLAGS = (
    "head_size_v_may_differ",
    "sliding_window",
    "attention_chunks",
    "logits_soft_cap",
    "alibi",
    "sink",
    "score_function",
    "key_selection",
    "compressed_entries",
    "mla",
    "lse",
    "kv_sharing",
    "batch_invariant",
)


def _format_value(value: Any) -> str:
    return str(getattr(value, "value", value)).removeprefix("torch.")


def capability_uses(case: Case, device_type: str) -> tuple[str, ...]:
    """The capabilities that a case uses, as "field" or "field:value"."""
    spec = case.spec
    uses = [
        f"devices:{device_type}",
        f"dtypes:{_format_value(spec.dtype)}",
        "head_sizes",
        "group_sizes",
    ]
    uses += [
        f"attn_types:{_format_value(spec.attn_type)}",
        f"mask_kinds:{_format_value(spec.mask_kind)}",
    ]
    pair = format_pair(spec.kv_format, spec.value_format)
    if pair is not None:
        uses += ["block_sizes", f"kv_format_pairs:{pair}"]
    elif spec.scales_in_page:
        uses += ["block_sizes", f"kv_formats:{spec.kv_format.name}"]
    elif spec.is_paged:
        uses += ["block_sizes", f"kv_cache_dtypes:{_format_value(spec.kv_dtype)}"]
    if spec.kv_cache_layout is not None and not spec.scales_in_page:
        uses.append(f"kv_cache_layouts:{spec.kv_cache_layout}")
    if spec.is_kv_quantized and not spec.scales_in_page:
        uses.append(f"kv_scale_kinds:{spec.kv_scale_kind}")
    flags = {
        "head_size_v_may_differ": spec.head_size_v != spec.head_size and not spec.use_mla,
        "sliding_window": not spec.visible_window.is_full,
        "attention_chunks": spec.attention_chunk_size is not None,
        "logits_soft_cap": spec.logits_soft_cap is not None,
        "alibi": spec.has_alibi,
        "sink": spec.has_sink,
        "score_function": spec.score_function is not None,
        "key_selection": spec.key_selection is not None,
        "compressed_entries": spec.compressed_entries is not None,
        "mla": spec.use_mla,
        "lse": spec.needs_lse,
        "kv_sharing": spec.kv_sharing,
        "batch_invariant": spec.batch_invariant,
        f"cudagraph:{spec.cudagraph.name}": spec.cudagraph is not CudaGraphSupport.NEVER,
    }
    return (*uses, *(name for name, used in flags.items() if used))


@dataclass(frozen=True)
class Coverage:
    """The capabilities of a backend by coverage.

    Attributes:
        exercised: declared as supported and used by a passing case.
        not_exercised: declared as supported, not used by a passing case.
        not_supported: declared as not supported.
        not_stated: missing from the declaration.
    """

    exercised: tuple[str, ...]
    not_exercised: tuple[str, ...]
    not_supported: tuple[str, ...]
    not_stated: tuple[str, ...]

    @property
    def num_declared(self) -> int:
        """Number of capabilities that are declared as supported."""
        return len(self.exercised) + len(self.not_exercised)

    def __str__(self) -> str:
        """Summary in one line."""
        return (
            f"{len(self.exercised)}/{self.num_declared} declared capabilities exercised, "
            f"{len(self.not_supported)} declared as not supported, {len(self.not_stated)} not "
            "stated"
        )


def _declared(caps: Capabilities) -> tuple[list[str], list[str], list[str]]:
    """(supported, not supported, not stated), in the notation of `capability_uses`."""
    supported: list[str] = []
    unsupported: list[str] = []
    unstated: list[str] = []
    for name in (*_SIZED, *_LISTED, *_FLAGS, "cudagraph"):
        value = getattr(caps, name)
        if value is NOT_STATED:
            unstated.append(name)
        elif name in _SIZED:
            supported.append(name)
        elif name in _LISTED:
            supported += [f"{name}:{_format_value(entry)}" for entry in value if entry != "ANY"]
        elif name == "cudagraph":
            levels = [
                level for level in CudaGraphSupport if CudaGraphSupport.NEVER < level <= value
            ]
            supported += [f"cudagraph:{level.name}" for level in levels]
        else:
            (supported if value else unsupported).append(name)
    return supported, unsupported, unstated


def measure_coverage(backend: type[AttentionBackend], results: Iterable[CaseResult]) -> Coverage:
    """Compare the capabilities that the passing cases used with the backend's declaration."""
    used = {use for result in results if result.outcome is Outcome.PASS for use in result.uses}
    declared = _declared(backend.capabilities), declared_state_features(backend.state_capabilities)
    supported, unsupported, unstated = (
        [*of_attention, *of_states] for of_attention, of_states in zip(*declared, strict=True)
    )
    return Coverage(
        exercised=tuple(name for name in supported if name in used),
        not_exercised=tuple(name for name in supported if name not in used),
        not_supported=tuple(unsupported),
        not_stated=tuple(unstated),
    )
