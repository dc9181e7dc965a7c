"""What `explain` says about a cache: its write, its rotation and its formats."""

from __future__ import annotations

from attnlib.kv_rotation import KVRotation
from attnlib.spec import AttentionSpec

__all__ = ["cache_lines", "write_line"]


def write_line(spec: AttentionSpec) -> str:
    """The launches of a write by a backend with `rotary_write`. The capability leaves open formats
    out, and rotations of a cache without scales in its pages (P15)."""
    if spec.has_open_format:
        return "write:   the functions of the format, in torch; q/k norm and rotation before them"
    if spec.scales_in_page or spec.kv_rotation is None:
        return "write:   one launch, with q/k norm and rotation"
    return "write:   one launch; q/k norm and rotation take separate ones"


def cache_lines(spec: AttentionSpec) -> list[str]:
    """Rotation and formats of the cache of a layer."""
    rotation = spec.kv_rotation
    lines = [] if rotation is None else [_rotation_line(rotation)]
    lines += _open_format_lines(spec)
    stored = spec.kv_format
    if stored.bits <= 4 and not (rotation is not None and rotation.keys):
        lines.append(
            f"warning: keys of {stored.bits} bits without a rotation ({stored.name}) change many "
            "models; compare them by attnlib audit-kv --perplexity with int8_per_token_head keys, "
            "4-bit values and kv_rotation=hadamard"
        )
    return lines


def _open_format_lines(spec: AttentionSpec) -> list[str]:
    """The formats of packages, and what they need (P16)."""
    rotation, lines = spec.kv_rotation, []
    keys = ("keys", spec.kv_format, spec.head_size)
    for side, stored, size in (keys, ("values", spec.value_format, spec.head_size_v)):
        if not stored.is_open:
            continue
        bits = f"{8 * stored.bytes_per_head(size) / size:.4g} bits"
        lines.append(f"{side} are stored as {stored.name}, version {stored.version}: {bits}")
        if stored.rotated and not (rotation is not None and getattr(rotation, side)):
            lines.append(f"warning: {stored.name} is made for rotated {side}: set kv_rotation")
    return lines


def _rotation_line(rotation: KVRotation) -> str:
    """What a rotation of the cache adds to the launches of a backend (P15)."""
    sides = [name for name in ("keys", "values") if getattr(rotation, name)]
    around = ["queries"] * rotation.keys + ["outputs"] * rotation.values
    return (
        f"rotation: {rotation}; {' and '.join(sides)} before the write, {' and '.join(around)} in "
        "launches of their own"
    )
