"""Cases of `attnlib tune` that share a tile: pure functions of the case and the chip."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attnlib.backends.triton.spec_shape import layer_shape
from attnlib.ops.triton.heuristics.hopper_tiles import padded_width, widest_part
from attnlib.ops.triton.heuristics.splits import visible_bound
from attnlib.ops.triton.heuristics.tile_table import page_elements, visible_class, work_class
from attnlib.ops.triton.heuristics.tiles import next_power_of_2, split_head_size
from attnlib.ops.triton.hopper.common_reasons import CallFeatures
from attnlib.ops.triton.hopper.sizes import DECODE_ROWS
from attnlib.ops.triton.hopper.support import (
    decode_unsupported_reasons,
    prefill_unsupported_reasons,
)

if TYPE_CHECKING:
    from attnlib.bench.case import BenchCase
    from attnlib.ops.triton.heuristics.device import DeviceLimits  # imports triton at run time
    from attnlib.spec import AttentionSpec

__all__ = ["TileGroup", "case_window", "case_work", "tile_group"]


@dataclass(frozen=True)
class TileGroup:
    """Cases that share a tile, described by the conditions of a line in a tile table.

    Attributes:
        op: decode, prefill, latent, hopper_prefill or hopper_decode.
        products: the kind of matrix instruction of the chip (`DeviceLimits.products`).
        elements: the element format (`TileProblem.elements`).
        head_size: the wider of the two head sizes, as padded.
        rows: query rows per KV head, rounded up to a power of two, at most 128.
        block_size: N; set for hopper_prefill only.
        work: class of work in keys per SM; set for decodes only.
        visible: class of the window; set for hopper_prefill only.
    """

    op: str
    products: str
    elements: str
    head_size: int
    rows: int
    block_size: int | None = None
    work: int | None = None
    visible: tuple[int, int | None] | None = None

    @property
    def family(self) -> TileGroup:
        """The group without its class of work."""
        return dataclasses.replace(self, work=None)

    def conditions(self) -> dict[str, Any]:
        """The conditions of a table line, without the class of work."""
        line: dict[str, Any] = {
            "op": self.op,
            "products": [self.products],
            "elements": [self.elements],
            "head_size": [self.head_size, self.head_size],
        }
        if self.op == "hopper_prefill":
            line["block_size"] = [self.block_size, self.block_size]
            if self.visible is not None:
                line["visible"] = list(self.visible)
        elif self.op != "hopper_decode":
            most = 64 if self.op == "latent" else 128
            line["rows"] = [self.rows, None if self.rows >= most else self.rows]
        elif self.elements != "16-bit":
            line["rows"] = [16, self.rows]
        return line


def _on_hopper(case: BenchCase, limits: DeviceLimits) -> bool:
    """True if the Hopper kernel of this kind of batch supports the case."""
    shape, plain = layer_shape(case.spec), CallFeatures()
    if case.kind == "prefill":
        return not prefill_unsupported_reasons(shape, plain, limits)
    return not decode_unsupported_reasons(shape, plain, limits, case.batch.max_query_len)


def tile_group(case: BenchCase, op: str, limits: DeviceLimits) -> TileGroup | None:
    """The group of a case.

    Returns None if `op` does not serve it. Mixed batches run the two operations and have no tiles.
    """
    if case.kind not in ("prefill", "decode"):
        return None
    if op == "latent" or case.mla:
        return _latent_group(case, limits) if op == "latent" and case.mla else None
    if op.removeprefix("hopper_") != case.kind:
        return None
    if op != case.kind and not _on_hopper(case, limits):
        return None
    spec, sizes = case.spec, (case.head_size, case.head_size_v or case.head_size)
    elements = _elements(spec, limits)
    head_size = max(padded_width(size) for size in sizes)
    rows = DECODE_ROWS if op == "hopper_decode" else 128
    if op == "hopper_decode" and spec.scales_in_page:
        elements = page_elements(spec.kv_format, layer_shape(spec).value_format)
    if op == "hopper_decode" and elements != "16-bit":
        # Converted tiles are in registers, so the tile depends on the rows.
        rows = max(16, next_power_of_2(case.batch.max_query_len * spec.group_size))
    if op == case.kind:  # the portable kernels
        head_size = max(sum(split_head_size(size)) for size in sizes)
        if op == "prefill" and limits.products == "async" and elements != "float32":
            head_size = next_power_of_2(max(sizes))  # one chunk, see `tiles.head_chunks`
        rows = max(16, next_power_of_2(case.batch.max_query_len * spec.group_size))
    group = TileGroup(op, limits.products, elements, head_size, min(128, rows))
    if case.kind == "decode":
        return dataclasses.replace(group, work=case_work(case, limits))
    if op == "hopper_prefill":
        visible = visible_class(case_window(case))
        width = widest_part(*sizes, spec.kv_dtype.itemsize, case.block_size)
        group = dataclasses.replace(group, head_size=width)
        return dataclasses.replace(group, block_size=case.block_size, visible=visible)
    return group


def _elements(spec: AttentionSpec, limits: DeviceLimits) -> str:
    """The element format (`TileProblem.elements`)."""
    stored = "16-bit" if spec.kv_dtype.itemsize > 1 else "fp8" if limits.has_fp8 else "fp8-bytes"
    if spec.scales_in_page and spec.kv_format.bits == 4:
        stored = "int4"
    return "float32" if spec.dtype.itemsize == 4 else stored


def _latent_group(case: BenchCase, limits: DeviceLimits) -> TileGroup:
    """The group of a case over latents, whose decodes and prefills share tiles."""
    spec = case.spec
    rows = max(16, next_power_of_2(case.batch.max_query_len * spec.group_size))
    elements, head_size = _elements(spec, limits), next_power_of_2(spec.head_size_v)
    return TileGroup("latent", limits.products, elements, head_size, min(64, rows))


def case_work(case: BenchCase, limits: DeviceLimits) -> int:
    """The class of work of a decode, in keys per SM."""
    spec, batch = case.spec, case.batch
    visible = visible_bound(
        batch.max_query_len, batch.max_seq_len, spec.visible_window.as_kernel_args(), True, 0
    )
    return work_class(batch.num_reqs, spec.num_kv_heads, visible, limits.num_sms)


def case_window(case: BenchCase) -> int | None:
    """The most keys that the window lets one query see; None without a window."""
    left, right = case.spec.visible_window.as_kernel_args()
    return left + right + 1 if left >= 0 and right >= 0 else None
