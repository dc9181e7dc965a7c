"""Tuning of the triton backend: candidates for `attnlib tune`, and use of the measured tiles."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from attnlib.backends.triton.tile_candidates import tile_candidates
from attnlib.backends.triton.tile_groups import TileGroup, tile_group
from attnlib.device import DeviceInfo, device_info
from attnlib.errors import ContractError
from attnlib.ops.params import AttentionParams
from attnlib.ops.triton.heuristics.device import device_index, limits_of, set_tuned_tiles
from attnlib.ops.triton.heuristics.hopper_decode_tiles import DecodeTile
from attnlib.ops.triton.heuristics.hopper_tiles import HopperTile
from attnlib.ops.triton.heuristics.tile_table import OPS, TileTable, parse_table
from attnlib.tuning.rankings import shipped_tuning
from attnlib.tuning.store import tuning_for, warn_ignored
from attnlib.tuning.table import Tuning
from attnlib.tuning.tuner import Best, Parameters, Tuner

if TYPE_CHECKING:
    from attnlib.bench.case import BenchCase
    from attnlib.bench.inputs import CaseInputs

__all__ = ["TritonTuner", "parse_tiles", "tuned_tiles", "use_tuned_tiles"]

_HOPPER = {"hopper_prefill": HopperTile, "hopper_decode": DecodeTile}


def use_tuned_tiles(device: torch.device) -> None:
    """Let kernels on `device` prefer these tiles (`tuned_tiles`)."""
    if device.type != "cuda":
        return
    index = torch.cuda.current_device() if device.index is None else device.index
    set_tuned_tiles(index, tuned_tiles(device_info("cuda", index)))


def tuned_tiles(device: DeviceInfo) -> TileTable | None:
    """The user's tiles, then those that ship for the chip or the nearest one; None without any."""
    return _tiles_of(tuning_for(device), shipped_tuning(device))


@functools.lru_cache(maxsize=8)
def _tiles_of(*tunings: Tuning | None) -> TileTable | None:
    """The tiles of tables in order of precedence, as one table.

    Returns None if there are none. A table that cannot be used is ignored after one warning. Launch
    caches key on the identity of the result.
    """
    tables = []
    for tuning in tunings:
        if tuning is not None and tuning.parameters.get("triton"):
            try:
                tables.append(parse_tiles(tuning))
            except ContractError as error:
                warn_ignored(str(error))
    if len(tables) < 2:
        return tables[0] if tables else None
    names = " and ".join(table.name for table in tables)
    entries = tuple(entry for table in tables for entry in table.entries)
    return TileTable(names, tables[0].chip, entries)


def parse_tiles(tuning: Tuning) -> TileTable:
    """The tiles of a tuning table.

    Raises:
        ContractError: a line is not a tile; the message names the file, the line and the problem.
    """
    lines = list(tuning.parameters.get("triton", ()))
    document = {"schema": 1, "chip": tuning.chip, "provenance": tuning.provenance, "tiles": lines}
    table = parse_table(document, tuning.source)
    for index, entry in enumerate(table.entries):
        if entry.op in _HOPPER:
            try:
                _HOPPER[entry.op](**dict(entry.tile))
            except TypeError as error:
                raise ContractError(
                    f"tile table {tuning.source}, tiles[{index}]: {error}; "
                    "write the table again with attnlib tune"
                ) from None
    return table


class TritonTuner(Tuner):
    """Tiles of the Triton and Hopper kernels on one device.

    The public operations are called directly, without the backend, with a table of one entry that
    selects the candidate.

    Args:
        device: a CUDA device, or the CPU under Triton's interpreter (for tests).
    """

    operations = tuple(OPS)

    def __init__(self, device: torch.device) -> None:
        probe = torch.empty(0, dtype=torch.float32, device=device)
        self._index, self._probe = device_index(probe), probe

    def group(self, case: BenchCase, operation: str) -> TileGroup | None:
        return tile_group(case, operation, limits_of(self._probe))

    def candidates(self, case: BenchCase, operation: str) -> Sequence[Parameters]:
        return tile_candidates(case, operation, limits_of(self._probe))

    @contextmanager
    def bind(
        self, inputs: CaseInputs, operation: str, parameters: Parameters
    ) -> Iterator[Callable[[int], object]]:
        before = limits_of(self._probe).tuned
        set_tuned_tiles(self._index, _single_tile_table(operation, parameters))
        try:
            yield _call(operation, inputs)
        finally:
            set_tuned_tiles(self._index, before)

    def table_lines(self, best: Mapping[Any, Best], provenance: str) -> list[dict[str, Any]]:
        """One line per group.

        Decode groups that differ in work only and share one tile become one line.
        """
        families: dict[TileGroup, list[TileGroup]] = {}
        for group in best:
            families.setdefault(group.family, []).append(group)
        return [
            line
            for family, members in families.items()
            for line in _family_lines(family, members, best, provenance)
        ]

    def line_key(self, line: Mapping[str, Any]) -> Hashable:
        """All conditions but `keys_per_sm`: the lines of one family are measured and replaced
        together.
        """
        names = ("op", "products", "elements", "head_size", "rows", "block_size", "visible")
        return json.dumps([line.get(name) for name in names])


def _single_tile_table(operation: str, tile: Parameters) -> TileTable:
    """A table that selects this tile for every call of the operation."""
    line = {"op": operation, "tile": dict(tile), "provenance": "trial"}
    return parse_table(
        {"schema": 1, "chip": "trial", "provenance": {"trial": ""}, "tiles": [line]}, "trial"
    )


def _call(operation: str, inputs: CaseInputs) -> Callable[[int], object]:
    """One call of the operation on a copy of the cache."""
    common, oracle = inputs.common, inputs.params
    bounds: dict[str, Any] = {
        "max_query_len": common.max_query_len,
        "max_seq_len": common.max_seq_len,
    }
    params = [
        AttentionParams(
            scale=oracle.scale,
            window=oracle.window,
            logits_soft_cap=oracle.logits_soft_cap,
            sinks=oracle.sinks,
            k_scale=cache.k_scale,
            v_scale=cache.v_scale,
        )
        for cache in inputs.caches
    ]
    if operation == "latent":
        operation = inputs.case.kind
    scratch = {"workspace": _workspace(inputs, bounds)} if operation == "decode" else {}
    attend = _public_operation(operation)
    lengths: tuple[Any, ...] = (common.block_table_tensor, common.query_start_loc, common.seq_lens)

    def call(copy: int) -> None:
        cache = inputs.caches[copy]
        attend(
            inputs.query,
            cache.key_cache,
            cache.value_cache,
            *lengths,
            params[copy],
            **bounds,
            **scratch,
            out=inputs.output,
        )

    return call


def _public_operation(operation: str) -> Callable[..., None]:
    """The public operation, restricted to the kernel whose tiles are measured."""
    name = f"paged_{operation.removeprefix('hopper_')}"
    found: Callable[..., None] = getattr(import_module(f"attnlib.ops.triton.{name}"), name)
    kernels = "hopper" if operation.startswith("hopper_") else "portable"
    return functools.partial(found, kernels=kernels)


def _workspace(inputs: CaseInputs, bounds: Mapping[str, Any]) -> torch.Tensor | None:
    """Split workspace of a decode with the tile that is selected now."""
    from attnlib.ops.triton.paged_decode import (
        paged_decode_num_splits,
        paged_decode_workspace_bytes,
    )

    spec, query = inputs.spec, inputs.query
    splits = paged_decode_num_splits(
        query,
        inputs.caches[0].key_cache,
        spec.head_size_v,
        num_reqs=inputs.common.num_reqs,
        window=inputs.params.window,
        latent=spec.use_mla,
        **bounds,
    )
    needed = paged_decode_workspace_bytes(query.shape[0], spec.num_heads, spec.head_size_v, splits)
    return torch.empty(needed, dtype=torch.uint8, device=inputs.device) if needed else None


def _family_lines(
    family: TileGroup,
    members: Sequence[TileGroup],
    best: Mapping[TileGroup, Best],
    provenance: str,
) -> list[dict[str, Any]]:
    """Lines of one family in order of work.

    Each starts where the previous one ends; the last has no upper bound.
    """
    spans: list[
        tuple[int | None, Parameters, dict[str, Any]]
    ] = []  # (last work class, tile, times)
    for group in sorted(members, key=lambda each: each.work or 0):
        result = best[group]
        if spans and spans[-1][1] == result.parameters:
            spans[-1] = (group.work, spans[-1][1], {**spans[-1][2], **result.measured})
        else:
            spans.append((group.work, result.parameters, dict(result.measured)))
    lines = []
    for number, (end, tile, measured) in enumerate(spans):
        line = family.conditions()
        if len(spans) > 1:
            begin = (spans[number - 1][0] or 0) + 1 if number else 0
            line["keys_per_sm"] = [begin, end if number + 1 < len(spans) else None]
        lines.append({**line, "tile": dict(tile), "measured": measured, "provenance": provenance})
    return lines
