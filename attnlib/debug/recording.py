"""Files of recorded attention calls: tensors and plain values only.

They are read with `torch.load(..., weights_only=True)`. A score function is recorded by the names
of its Python functions, which are imported when the file is read, and by its tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from attnlib.debug.recorded_fields import plain_fields, plain_value, score_fields, spec_fields
from attnlib.debug.recording_files import KEY_OF_STATES, read_file, refuse_damaged, write_file
from attnlib.errors import ContractError
from attnlib.fields import check_types
from attnlib.kv_formats import find_kv_format
from attnlib.spec import AttentionSpec
from attnlib.testing.batch_spec import parse_batch
from attnlib.testing.block_placement import BlockPlacement
from attnlib.testing.case import Case
from attnlib.testing.inputs import StepInputs
from attnlib.testing.layouts import CacheViews, allocate_views
from attnlib.testing.materialized_case import MaterializedCase
from attnlib.testing.oracle import OracleParams
from attnlib.testing.score_functions import oracle_score
from attnlib.testing.tensor_io import (
    pack_cache_views,
    pack_tensor,
    unpack_cache_views,
    unpack_tensor,
)

__all__ = ["load_recording", "save_recording", "score_fields"]

_VERSION = 2
_TENSORS = (
    "query",
    "key",
    "value",
    "out",
    "block_table",
    "query_start_loc",
    "seq_lens",
    "slot_mapping",
)


def save_recording(step: MaterializedCase, path: str | Path) -> Path:
    """Write a step to a file and create its folder if necessary.

    Returns:
        The path of the file.
    """
    inputs = step.inputs
    blocks = torch.arange(inputs.placement.num_blocks, device=inputs.cache.key.device)
    params = {field.name: getattr(step.params, field.name) for field in fields(OracleParams)}
    data = {
        "attnlib_recording": _VERSION,
        "case": {name: plain_value(value) for name, value in asdict(step.case).items()},
        "spec": plain_fields(step.spec),
        "kv_formats": {
            one.name: one.version
            for one in (step.spec.kv_format, step.spec.value_format)
            if one.scales_in_page
        },
        "params": {
            name: value.cpu() if isinstance(value, torch.Tensor) else value
            for name, value in params.items()
            # The score follows from the score function and its tensors; pages hold their scales.
            if name != "score" and not (name.endswith("_scale") and inputs.cache.scales)
        },
        "score_tensors": {
            name: tensor.cpu()
            for kind in ("layer_tensors", "batch_tensors")
            for name, tensor in step.score_tensors(kind).items()
        },
        "batch": str(inputs.batch),
        "blocks": [list(row) for row in inputs.placement.blocks],
        "num_blocks": inputs.placement.num_blocks,
        "kv_written": inputs.kv_written,
        "cache": {"pages": inputs.cache.storage[0].cpu()}
        if inputs.cache.scales
        else pack_cache_views(inputs.cache.key, inputs.cache.value, blocks),
        "layout": inputs.cache.layout,
        **{name: pack_tensor(getattr(inputs, name)) for name in _TENSORS},
    }
    return write_file(data, path)


def load_recording(path: str | Path, device: torch.device | str = "cpu") -> MaterializedCase:
    """Read a recording.

    Args:
        path: the file.
        device: where to allocate the tensors.

    Raises:
        ContractError: the file is not a recording of this version, its score function cannot be
            imported, or its KV format has another version here.
    """
    data = read_file(Path(path))
    if isinstance(data, dict) and KEY_OF_STATES in data:
        raise ContractError(f"{path} is a call of a state layer: replay it with attnlib replay")
    if not isinstance(data, dict) or data.get("attnlib_recording") != _VERSION:
        found = data.get("attnlib_recording") if isinstance(data, dict) else type(data).__name__
        raise ContractError(
            f"{path} is not an attnlib recording of version {_VERSION} (found {found}): record the "
            "call again"
        )
    _check_formats(path, data.get("kv_formats", {}))  # recordings of earlier versions have none
    with refuse_damaged(path):
        return _step(data, device)


def _check_formats(path: str | Path, formats: Any) -> None:
    """Refuse stored bytes that the KV formats here would read in another way (P16).

    Raises:
        ContractError: a format of another version, or none of its name.
    """
    for name, version in formats.items() if isinstance(formats, dict) else [(formats, 0)]:
        try:
            find_kv_format(str(name), version)
        except ContractError as error:
            raise ContractError(f"{path} cannot be read: {error}") from None


def _step(data: Mapping[str, Any], device: torch.device | str) -> MaterializedCase:
    """The recorded step on a device."""
    check_types(Case, data["case"], "case")
    check_types(OracleParams, data["params"], "params")
    spec = AttentionSpec(**spec_fields(data["spec"]))
    case = Case(**data["case"])
    inputs = _inputs(data, case, device)
    params: dict[str, Any] = {
        name: v.to(device) if isinstance(v, torch.Tensor) else v
        for name, v in data["params"].items()
    }
    if inputs.cache.scales is not None:
        params |= {"k_scale": inputs.cache.scales[0], "v_scale": inputs.cache.scales[1]}
    score_tensors = None
    if spec.score_function is not None:
        score_tensors = {name: tensor.to(device) for name, tensor in data["score_tensors"].items()}
        params["score"] = oracle_score(spec.score_function, score_tensors, device)
    return MaterializedCase(case, spec, inputs, OracleParams(**params), score_tensors)


def _inputs(data: Mapping[str, Any], case: Case, device: torch.device | str) -> StepInputs:
    """The tensors of a call."""
    table = unpack_tensor(data["block_table"], "cpu")
    ids = [block for row in data["blocks"] for block in row]
    if type(data["num_blocks"]) is not int or max(ids, default=0) >= max(1, data["num_blocks"]):
        raise ContractError(f"num_blocks={data['num_blocks']!r} for the blocks {sorted(ids)}")
    if type(data["kv_written"]) is not bool:
        raise ContractError(f"kv_written={data['kv_written']!r} must be True or False")
    if "pages" in data["cache"]:
        blocks = max(1, data["num_blocks"])
        cache = allocate_views(case.dimensions, blocks, data["layout"], device)
        cache.storage[0].copy_(data["cache"]["pages"])
    else:
        cache = CacheViews(*unpack_cache_views(data["cache"], device), (), data["layout"])
    return StepInputs(
        batch=parse_batch(data["batch"]),
        dims=case.dimensions,
        placement=BlockPlacement(
            tuple(tuple(row) for row in data["blocks"]), data["num_blocks"], table
        ),
        seed=case.seed,
        kv_written=data["kv_written"],
        cache=cache,
        **{name: unpack_tensor(data[name], device) for name in _TENSORS},
    )
