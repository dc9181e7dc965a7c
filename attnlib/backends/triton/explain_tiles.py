"""Where the tiles of a layer's kernels come from: the line that `explain` prints about them."""

from __future__ import annotations

from collections.abc import Sequence

from attnlib.backends.triton.spec_shape import layer_shape
from attnlib.device import DeviceInfo
from attnlib.ops.triton.heuristics.tile_table import TileEntry, page_elements, shipped_tables
from attnlib.spec import AttentionSpec
from attnlib.tuning.rankings import shipped_tuning
from attnlib.tuning.store import tuning_for

__all__ = ["tile_lines"]

_NOT_MEASURED = "compiled"
"""The provenance of entries that were chosen among tiles that compile."""


def tile_lines(spec: AttentionSpec, device: DeviceInfo, lines: Sequence[str]) -> list[str]:
    """The tables that tiles are taken from, in order of precedence; nothing on GPUs other than
    Hopper without a table of their own.

    Args:
        spec: what the layer needs.
        device: facts about the device.
        lines: those about the kernels of the layer.
    """
    if device.type != "cuda":
        return []
    found = []
    own, shipped = tuning_for(device), shipped_tuning(device)
    if own is not None and own.parameters.get("triton"):
        found.append(f"those of {own.source}")
    if shipped is not None and shipped.parameters.get("triton"):
        nearest = "" if shipped.chip == device.name else ", the nearest chip with a table"
        found.append(f"those measured on the {shipped.chip}{nearest}")
    is_hopper = not device.is_rocm and device.capability is not None and device.capability[0] == 9
    if is_hopper or found:
        found.append(_common_tiles(spec, lines) if is_hopper else "the common ones")
    return [f"tiles:   {', else '.join(found)}"] if found else []


def _common_tiles(spec: AttentionSpec, lines: Sequence[str]) -> str:
    """The tiles of every Hopper GPU, and whether those of these kernels were measured."""
    hopper = [line for line in lines if "Hopper kernel" in line]
    if not hopper:
        return "the common ones of portable kernels, most of which were not measured"
    if spec.use_mla or spec.key_selection is not None or spec.batch_invariant:
        return "the common Hopper tiles, chosen on an H200"  # constants of these kernels
    measured = [
        entry.provenance != _NOT_MEASURED
        for line in hopper
        for table in shipped_tables()
        for entry in table.entries
        if _is_for(entry, spec, line)
    ]
    if not any(measured):
        return "the common Hopper tiles, not measured for this head size"
    return f"the common Hopper tiles, {'' if all(measured) else 'in part '}measured on an H200"


def _is_for(entry: TileEntry, spec: AttentionSpec, line: str) -> bool:
    """Whether a kernel of a line may use this entry, for batches of some size."""
    if entry.op != ("hopper_decode" if line.startswith("decode") else "hopper_prefill"):
        return False
    stored, elements = spec.kv_format, set[str]()
    if not spec.is_paged or not spec.is_kv_quantized or " copies" in line:
        elements.add("16-bit")
    if spec.is_paged and spec.is_kv_quantized:
        paged = page_elements(stored, layer_shape(spec).value_format)
        elements.add(paged if stored.scales_in_page else "fp8")
    size = max(64, spec.head_size, spec.head_size_v)
    bounds = [(least or 0, most) for name, least, most in entry.ranges if name == "head_size"]
    fits = all(least <= size and (most is None or size <= most) for least, most in bounds)
    return fits and bool(elements.intersection(entry.elements))
