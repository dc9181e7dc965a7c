"""The KV formats that an audit compares."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from attnlib.errors import ContractError
from attnlib.kv_dtype import KV_FORMAT_PAIRS, PAGE_FORMATS, kv_cache_format
from attnlib.kv_formats import installed_kv_formats, load_kv_format
from attnlib.kv_rotation import KVRotation

__all__ = ["AUDIT_FORMATS", "AuditFormat", "audit_formats", "named_format"]


@dataclass(frozen=True)
class AuditFormat:
    """A format to audit.

    Attributes:
        label: name in reports.
        kv_cache_dtype: value of `AttentionSpec.kv_cache_dtype`.
        scales: "one", "tensor" or "head" for scales outside of the cache: 1, or computed from the
            keys and values of each call, as `enable_kv_scales_calculation` does; "page" for formats
            with scales in the page.
        fp8_queries: whether queries and weights of requests with more than one query token are
            rounded to e4m3, too (`AttentionSpec.allow_fp8_queries`, M19).
        value_cache_dtype, kv_rotation: as in `AttentionSpec`.
    """

    label: str
    kv_cache_dtype: str
    scales: str = "page"
    fp8_queries: bool = False
    value_cache_dtype: str | None = None
    kv_rotation: str | None = None

    @property
    def spec_fields(self) -> dict[str, Any]:
        """The fields of a spec that say how a cache stores heads."""
        return {
            "kv_cache_dtype": self.kv_cache_dtype,
            "value_cache_dtype": self.value_cache_dtype,
            "kv_rotation": self.kv_rotation,
        }


def _pairs() -> Iterator[AuditFormat]:
    """The built-in pairs, rotated and not, and each format of keys only and of values only."""
    for pair in KV_FORMAT_PAIRS:
        key, value = pair.replace("plain", "auto").split(",")
        if "auto" not in (key, value):
            one = AuditFormat(f"{key}, {value} values", key, value_cache_dtype=value)
            yield from (one, _rotated(one))
        else:
            side = f"{key}, keys" if value == "auto" else f"{value}, values"
            yield AuditFormat(side, key, value_cache_dtype=value)


def _rotated(one: AuditFormat) -> AuditFormat:
    """A format with rotated heads."""
    return replace(one, label=f"{one.label}, rotated", kv_rotation="hadamard")


_FLOAT8 = tuple(AuditFormat(f"{name}, scale 1", name, "one") for name in ("fp8_e4m3", "fp8_e5m2"))
_PAGES = tuple(AuditFormat(name, name) for name in PAGE_FORMATS)

AUDIT_FORMATS: tuple[AuditFormat, ...] = (
    AuditFormat("bfloat16", "bfloat16", "one"),
    *_FLOAT8,
    AuditFormat("fp8_e4m3", "fp8_e4m3", "tensor"),
    AuditFormat("fp8_e4m3 per head", "fp8_e4m3", "head"),
    AuditFormat("fp8_e4m3, fp8 queries", "fp8_e4m3", "tensor", fp8_queries=True),
    AuditFormat("fp8_e5m2", "fp8_e5m2", "tensor"),
    *_PAGES,
    *map(_rotated, (*_FLOAT8, *_PAGES)),
    *_pairs(),
)
"""The formats that `audit_call` compares by default. Rows of keys or of values have the other side
in the dtype of the model."""


def audit_formats() -> tuple[AuditFormat, ...]:
    """`AUDIT_FORMATS`, and the open formats that are registered or installed (P16): rotated, and
    not rotated unless they need it."""
    rows = list(AUDIT_FORMATS)
    for stored in installed_kv_formats():
        if not stored.rotated:
            rows.append(AuditFormat(stored.name, stored.name))
        rows.append(_rotated(AuditFormat(stored.name, stored.name)))
    return tuple(rows)


def named_format(text: str) -> AuditFormat:
    """A row by its label in `audit_formats`, or by the formats of keys and of values.

    Args:
        text: a label, or KEYS, KEYS,VALUES or either with +ROTATION. Sides are values of
            `AttentionSpec.kv_cache_dtype` or paths of open formats (`load_kv_format`).

    Raises:
        ContractError: no row has this label, and no format or rotation this name.
        RegistrationError: another format has the name of one at a path.
    """
    for one in audit_formats():
        if one.label == text:
            return one
    sides, _, rotation = text.partition("+")
    names = [load_kv_format(one).name if ":" in one else one for one in sides.split(",")]
    if len(names) > 2:
        raise ContractError(f"{text!r} names {len(names)} formats: write KEYS,VALUES+ROTATION")
    stored = [kv_cache_format(name, torch.bfloat16) for name in names]
    in_page = any(one.scales_in_page for one in stored)
    return AuditFormat(
        label=",".join(names) + (rotation and f"+{rotation}"),
        kv_cache_dtype=names[0],
        scales="page" if in_page else "tensor" if stored[0].dtype.itemsize == 1 else "one",
        value_cache_dtype=names[1] if len(names) == 2 else None,
        kv_rotation=None if not rotation else str(KVRotation.of(rotation)),
    )
