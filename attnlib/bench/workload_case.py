"""Workloads of FlashInfer-Bench as cases of `attnlib bench`: their lengths, pages and tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from attnlib.bench.case import BenchCase, check_case
from attnlib.bench.trace_files import read_workloads
from attnlib.bench.trace_set import Workload
from attnlib.cache.storage import PagedKVCache
from attnlib.errors import ContractError
from attnlib.testing.batch_spec import BatchSpec
from attnlib.testing.block_placement import BlockPlacement
from attnlib.testing.layouts import write_slots

__all__ = ["WorkloadCase", "workload_cases"]

_KV_DTYPES = {"float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"}


@dataclass(frozen=True, kw_only=True)
class WorkloadCase(BenchCase):
    """A case with the pages of a workload, and its tensors where the workload stores them.

    Packed keys and values (ragged prefill) are placed in blocks of `block_size`.

    Attributes:
        workload: the workload.
    """

    workload: Workload

    def place(self, seed: int) -> BlockPlacement:
        """The pages of the workload."""
        if not self.workload.definition.is_paged:
            return super().place(seed)
        rows = self.workload.pages()
        width = max((len(row) for row in rows), default=0)
        padded = [[*row, *[-1] * (width - len(row))] for row in rows]
        table = torch.tensor(padded, dtype=torch.int32).reshape(len(rows), width)
        return BlockPlacement(tuple(map(tuple, rows)), self.workload.axes["num_pages"], table)

    def fill(self, cache: PagedKVCache, query: torch.Tensor, placement: BlockPlacement) -> None:
        """Copy the stored tensors of the workload over the random ones."""
        workload = self.workload
        if (stored := workload.tensor("q")) is not None:
            query.copy_(stored)
        for name, view in (("k", cache.key_cache), ("v", cache.value_cache)):
            if workload.definition.is_paged:
                if (stored := workload.tensor(f"{name}_cache")) is not None:
                    view.copy_(stored)
            elif (stored := workload.tensor(name)) is not None:
                slots = [
                    slot
                    for request, length in enumerate(self.batch.seq_lens)
                    for slot in placement.slots(request, 0, length, self.block_size)
                ]
                write_slots(view, slots, stored.to(view.device), 1.0)

    def with_block_size(self, block_size: int) -> BenchCase:
        """See `BenchCase.with_block_size`.

        Raises:
            ContractError: the workload has pages of another size.
        """
        if self.workload.definition.is_paged and block_size != self.block_size:
            raise ContractError(
                f"case {self.name} has pages of {self.block_size} tokens: leave out --block-size"
            )
        return super().with_block_size(block_size)

    def to_json(self) -> dict[str, Any]:
        """As `BenchCase.to_json`, with definition and id instead of the workload."""
        names = (field.name for field in fields(BenchCase))
        return {
            **{name: getattr(self, name) for name in names},
            "batch": str(self.batch),
            "definition": self.workload.definition.name,
            "workload": self.workload.uuid,
        }


def workload_cases(
    path: Path, patterns: Sequence[str] = (), block_size: int | None = None
) -> tuple[list[BenchCase], list[str]]:
    """The cases of a trace set or of one of its workload files.

    Args:
        path: the root of a trace set, or a JSONL file below it.
        patterns: globs over names `DEFINITION/ID`; empty for all.
        block_size: of packed keys and values; None means 16.

    Returns:
        The cases, and a line for each definition or workload that is left out.

    Raises:
        ContractError: no trace set, or no workload that attnlib computes.
    """
    cases: dict[str, BenchCase] = {}
    left_out: list[str] = []
    for found in read_workloads(path):
        if isinstance(found, str):
            left_out.append(found)
            continue
        short = f"{found.definition.name}/{found.uuid[:8]}"
        name = f"{found.definition.name}/{found.uuid}" if short in cases else short
        if patterns and not any(fnmatchcase(name, pattern) for pattern in patterns):
            continue
        try:
            case = _case(name, found)
        except ContractError as error:
            left_out.append(f"{name}: {error}")
            continue
        cases[name] = case.with_block_size(block_size) if block_size else case
    if not cases:
        reasons = "; ".join(left_out) or f"no workload matches {' '.join(patterns) or path}"
        raise ContractError(f"{path} has no workload to measure: {reasons}")
    return list(cases.values()), left_out


def _case(name: str, workload: Workload) -> WorkloadCase:
    definition = workload.definition
    if not definition.is_causal:
        raise ContractError("attnlib bench measures causal layers, and this prefill is not causal")
    queries, keys = workload.lengths()
    dtype = definition.inputs["q"][1]
    cache_dtype = definition.inputs["k_cache" if definition.is_paged else "k"][1]
    case = WorkloadCase(
        name=name,
        batch=BatchSpec(tuple(queries), tuple(keys)),
        num_heads=definition.axes["num_qo_heads"],
        num_kv_heads=definition.axes["num_kv_heads"],
        head_size=definition.axes["head_dim"],
        block_size=definition.axes["page_size"] if definition.is_paged else 16,
        dtype=dtype,
        kv_cache_dtype="auto" if cache_dtype == dtype else _KV_DTYPES.get(cache_dtype, cache_dtype),
        scale=workload.scale,
        workload=workload,
    )
    if definition.is_paged:
        workload.pages()  # raises if they are not stored, before anything is measured
    check_case(case)
    return case
