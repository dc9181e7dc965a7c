"""FlashInfer-Bench trace sets: definitions and workloads of attention kernels, as plain data.

A trace set is a folder with `definitions/**/*.json`, `workloads/**/*.jsonl` and the tensors of the
workloads in safetensors files. The format is that of the package `flashinfer-bench` 0.1, which is
not needed here: https://bench.flashinfer.ai/docs/flashinfer-trace
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from attnlib.errors import ContractError

__all__ = ["Definition", "Workload"]

_PAGED = ("q", "k_cache", "v_cache", "kv_indptr", "kv_indices")
_RAGGED = ("q", "k", "v", "qo_indptr", "kv_indptr")
_OPTIONAL = ("sm_scale", "qo_indptr", "kv_last_page_len")


@dataclass(frozen=True)
class Definition:
    """The definition of one kernel.

    Attributes:
        name: its name, such as `gqa_paged_decode_h32_kv8_d128_ps1`.
        axes: axis -> its constant value; variable axes are missing.
        inputs: input -> (axes of its shape or None for a scalar, dtype), in the order of the
            arguments.
        outputs: names of the outputs in order.
    """

    name: str
    axes: Mapping[str, int]
    inputs: Mapping[str, tuple[tuple[str, ...] | None, str]]
    outputs: tuple[str, ...]

    @classmethod
    def read(cls, path: Path) -> Definition:
        """The definition in a JSON file.

        Raises:
            ContractError: the file is not a definition.
        """
        try:
            data = json.loads(path.read_text())
            inputs = {
                name: (None if tensor["shape"] is None else tuple(tensor["shape"]), tensor["dtype"])
                for name, tensor in data["inputs"].items()
            }
            axes = {
                name: int(axis["value"])
                for name, axis in data["axes"].items()
                if axis["type"] == "const"
            }
            return cls(str(data["name"]), axes, inputs, tuple(data["outputs"]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ContractError(
                f"{path} is not a FlashInfer-Bench definition ({type(error).__name__}: {error}): "
                "remove it from the trace set"
            ) from error

    @property
    def is_paged(self) -> bool:
        """Whether keys and values are in pages; otherwise they are packed."""
        return "k_cache" in self.inputs

    @property
    def is_causal(self) -> bool:
        """Whether a query sees no later key; decodes have one query, which is the last token."""
        return "qo_indptr" not in self.inputs or "causal" in self.name.split("_")

    @property
    def unsupported_reason(self) -> str:
        """Why attnlib does not compute this kernel; "" if it does."""
        required = _PAGED if self.is_paged else _RAGGED
        missing = [name for name in required if name not in self.inputs]
        others = [name for name in self.inputs if name not in (*required, *_OPTIONAL)]
        outputs = [name for name in self.outputs if name not in ("output", "lse")]
        sizes = ["num_qo_heads", "num_kv_heads", "head_dim", *["page_size"] * self.is_paged]
        if missing or others or outputs or "output" not in self.outputs:
            parts = [*(f"no {name}" for name in missing), *others, *outputs]
            return f"its inputs or outputs are not those of GQA attention ({', '.join(parts)})"
        variable = [name for name in sizes if name not in self.axes]
        return f"{', '.join(variable)} must be constant" if variable else ""


@dataclass(frozen=True, eq=False)
class Workload:
    """One workload: the sizes of the variable axes, and where each input comes from.

    Attributes:
        definition: the kernel.
        uuid: its id.
        axes: variable axis -> size.
        inputs: input -> its descriptor: type "random", "scalar" or "safetensors".
        root: folder of the trace set, to which the paths of tensors are relative.
    """

    definition: Definition
    uuid: str
    axes: Mapping[str, int]
    inputs: Mapping[str, Mapping[str, Any]]
    root: Path

    def tensor(self, name: str) -> torch.Tensor | None:
        """The stored tensor of an input on the CPU; None if the input is random or missing.

        Raises:
            ContractError: safetensors is not installed, or file, key, shape or dtype do not fit.
        """
        given = self.inputs.get(name, {})
        if given.get("type") != "safetensors":
            return None
        try:
            from safetensors import safe_open
        except ImportError:
            raise ContractError(
                f"input {name} of workload {self.uuid} is a safetensors file: pip install "
                "'attnlib[bench]'"
            ) from None
        path = self.root / given["path"]
        try:
            with safe_open(path, framework="pt") as file:
                tensor: torch.Tensor = file.get_tensor(given["tensor_key"])
        except Exception as error:  # the library raises types of its own
            raise ContractError(
                f"input {name} of workload {self.uuid}: {path} has no tensor "
                f"{given.get('tensor_key')!r} ({error}): fetch the trace set again"
            ) from error
        self._check(name, tensor)
        return tensor

    def _check(self, name: str, tensor: torch.Tensor) -> None:
        axes, dtype = self.definition.inputs[name]
        sizes = {**self.axes, **self.definition.axes}
        shape = tuple(sizes.get(axis, -1) for axis in axes or ())
        if tuple(tensor.shape) != shape or str(tensor.dtype) != f"torch.{dtype}":
            raise ContractError(
                f"input {name} of workload {self.uuid} is {tensor.dtype} {tuple(tensor.shape)}; "
                f"its definition says {dtype} {shape}: fetch the trace set again"
            )

    @cached_property
    def scale(self) -> float | None:
        """`sm_scale`; None where the workload does not fix it."""
        given = self.inputs.get("sm_scale", {})
        return float(given["value"]) if given.get("type") == "scalar" else None

    def lengths(self) -> tuple[list[int], list[int]]:
        """(query tokens, keys) of each request.

        Raises:
            ContractError: the workload does not contain the offsets, or they contradict each other.
        """
        kv = self._offsets("kv_indptr")
        pages = [end - start for start, end in zip(kv, kv[1:], strict=False)]
        size = self.definition.axes.get("page_size", 1) if self.definition.is_paged else 1
        last = self.tensor("kv_last_page_len")
        tails = [size] * len(pages) if last is None else [int(n) for n in last]
        keys = [(n - 1) * size + tail if n else 0 for n, tail in zip(pages, tails, strict=True)]
        if "qo_indptr" not in self.definition.inputs:
            return [1] * len(keys), keys
        starts = self._offsets("qo_indptr")
        queries = [end - start for start, end in zip(starts, starts[1:], strict=False)]
        if len(queries) != len(keys):
            raise ContractError(
                f"workload {self.uuid} has {len(queries)} requests in qo_indptr and {len(keys)} in "
                "kv_indptr"
            )
        return queries, keys

    def pages(self) -> list[list[int]]:
        """The pages of each request.

        Raises:
            ContractError: the workload does not contain them, or a page is outside the cache.
        """
        indices = self.tensor("kv_indices")
        if indices is None:
            raise ContractError(f"workload {self.uuid} does not fix kv_indices")
        starts, ids = self._offsets("kv_indptr"), [int(page) for page in indices]
        limit = self.axes.get("num_pages", 0)
        if starts[-1] > len(ids) or not all(0 <= page < limit for page in ids[: starts[-1]]):
            raise ContractError(
                f"workload {self.uuid}: kv_indices has {len(ids)} entries, which must be "
                f"{starts[-1]} or more pages below num_pages={limit}"
            )
        return [ids[start:end] for start, end in zip(starts, starts[1:], strict=False)]

    def _offsets(self, name: str) -> list[int]:
        tensor = self.tensor(name)
        if tensor is None:
            raise ContractError(f"workload {self.uuid} does not fix {name}")
        offsets = [int(offset) for offset in tensor]
        if not offsets or offsets[0] != 0 or offsets != sorted(offsets):
            raise ContractError(f"workload {self.uuid}: {name} does not rise from 0")
        return offsets
