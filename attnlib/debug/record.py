"""Record attention calls of a running layer in files that can be replayed on any backend.

    with record_calls("recordings", every=100):
        model.generate(...)

A recording holds only the cache blocks that the batch uses. All tensors keep their strides, so that
layout errors can be reproduced. The file holds tensors and plain values only and is read with
`torch.load(..., weights_only=True)`. A score function is recorded by the names of its Python
functions, which are imported when the file is read, and by its tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from enum import Enum
from pathlib import Path
from types import FunctionType
from typing import Any

import torch

from attnlib.cache.storage import PagedKVCache
from attnlib.errors import ContractError
from attnlib.instrumentation import OBSERVERS
from attnlib.ops.block_moves import move_blocks
from attnlib.score_functions import ScoreFunction
from attnlib.spec import AttentionSpec, Window
from attnlib.testing.batch_spec import BatchSpec
from attnlib.testing.block_placement import BlockPlacement
from attnlib.testing.case import Case
from attnlib.testing.inputs import StepInputs
from attnlib.testing.layouts import CacheViews, allocate_views
from attnlib.testing.materialized_case import MaterializedCase
from attnlib.testing.object_path import load_object
from attnlib.testing.oracle import OracleParams
from attnlib.testing.score_functions import oracle_score
from attnlib.testing.tensor_io import (
    pack_cache_views,
    pack_tensor,
    unpack_cache_views,
    unpack_tensor,
)

__all__ = [
    "capture_call",
    "capture_layer_call",
    "load_recording",
    "record_calls",
    "save_recording",
]

_VERSION = 2
_FP8 = {torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2"}


def _lengths(metadata: Any) -> tuple[list[int], list[int], torch.Tensor]:
    """Query lengths, sequence lengths and the block table, from the attributes of the metadata."""
    starts, seq_lens = (
        getattr(metadata, "query_start_loc", None),
        getattr(metadata, "seq_lens", None),
    )
    table = getattr(metadata, "block_table", None)
    if starts is None or seq_lens is None or table is None:
        raise ContractError(
            f"{type(metadata).__name__} does not have query_start_loc, seq_lens and block_table: a "
            "call can only be recorded if the backend's metadata has these attributes"
        )
    begin = starts.tolist()
    return [b - a for a, b in zip(begin, begin[1:], strict=False)], seq_lens.tolist(), table.cpu()


def case_of(spec: AttentionSpec, batch: BatchSpec) -> Case:
    """The `Case` with the fields of a spec and a batch."""
    dtype = str(spec.dtype).removeprefix("torch.")
    kv_cache_dtype = _FP8.get(spec.kv_dtype, spec.kv_format.name)
    if spec.kv_format.scales_in_page:
        kv_cache_dtype = spec.kv_format.name
    return Case(
        batch=str(batch),
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        head_size_v=spec.head_size_v,
        block_size=spec.block_size,
        dtype=dtype,
        kv_cache_dtype="auto" if kv_cache_dtype == dtype else kv_cache_dtype,
        kv_scale_kind=spec.kv_scale_kind,
        attn_type=spec.attn_type.value,
        mask=spec.mask_kind.value,
        sliding_window=spec.sliding_window,
        window=None if spec.window is None else (spec.window.left, spec.window.right),
        attention_chunk_size=spec.attention_chunk_size,
        logits_soft_cap=spec.logits_soft_cap,
        allow_fp8_queries=spec.allow_fp8_queries,
        alibi=spec.has_alibi,
        sinks=spec.has_sink,
        use_mla=spec.use_mla,
        needs_lse=spec.needs_lse,
        kv_sharing=spec.kv_sharing,
        layout=_layout_of(spec),
    )


def _layout_of(spec: AttentionSpec) -> str:
    if spec.use_mla:
        return "ALIASED"
    return spec.kv_cache_layout or ("HND_INTERLEAVED" if spec.kv_format.scales_in_page else "NHD")


def _copied_pages(
    case: Case, blocks: torch.Tensor, cache: PagedKVCache, device: torch.device
) -> CacheViews:
    """The blocks of a cache that holds its scales, in pages of their own."""
    copied = allocate_views(case.dimensions, max(1, len(blocks)), case.layout, device)
    assert copied.scales is not None  # a format with scales in the page
    views = (copied.key, copied.value, *copied.scales)
    move_blocks(cache.block_views, views, blocks.tolist(), list(range(len(blocks))))
    return copied


def capture_call(
    spec: AttentionSpec,
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    cache: PagedKVCache,
    metadata: Any,
    *,
    scale: float,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    score_tensors: Mapping[str, torch.Tensor] | None = None,
    kv_written: bool = True,
) -> MaterializedCase:
    """Copy a call and the cache blocks that it uses.

    Args:
        spec: the layer's spec.
        query: [T, Hq, D].
        key: [T, Hkv, D], or None if the layer does not write the cache.
        value: [T, Hkv, Dv], or None with `key`.
        cache: the layer's cache.
        metadata: metadata with the attributes query_start_loc, seq_lens and block_table, and
            optionally causal, query_bias and score_tensors.
        scale: softmax scale.
        alibi_slopes, sinks: [Hq] float32, or None.
        score_tensors: the layer tensors of the score function by name, or None.
        kv_written: the cache already holds this step's keys and values.

    Raises:
        ContractError: the metadata does not have the required attributes, the layer has selected
            keys or compressed entries, or its score function is defined in `__main__`, which no
            other process can import.
    """
    if spec.key_selection is not None or spec.compressed_entries is not None:
        raise ContractError(
            "a call with selected keys or compressed entries cannot be recorded, because "
            "recordings hold neither: compare two backends in a test instead"
        )
    score = None
    if spec.score_function is not None:
        _score_fields(spec.score_function)  # refuses what a file cannot describe
        batch_tensors = getattr(metadata, "score_tensors", None) or {}
        score_tensors = {
            name: tensor.detach().clone()
            for name, tensor in {**(score_tensors or {}), **batch_tensors}.items()
        }
        score = oracle_score(spec.score_function, score_tensors, query.device)
    query_lens, seq_lens, table = _lengths(metadata)
    batch = BatchSpec(tuple(query_lens), tuple(seq_lens), max(query.shape[0] - sum(query_lens), 0))
    placement, used_blocks = _renumber_blocks(table, seq_lens, cache.block_size)
    blocks = torch.tensor(used_blocks, dtype=torch.long, device=cache.device)
    slots = [
        slot
        for r, (q, s) in enumerate(zip(query_lens, seq_lens, strict=True))
        for slot in ([-1] * max(q - s, 0) + placement.slots(r, max(s - q, 0), s, cache.block_size))
    ]
    if key is None:  # nothing is written, and requests may share the blocks of their last tokens
        slots = [-1] * len(slots)
    case = case_of(spec, batch)
    device, kv_heads = query.device, spec.num_kv_heads
    inputs = StepInputs(
        batch=batch,
        dims=case.dimensions,
        placement=placement,
        seed=0,
        kv_written=kv_written,
        query=unpack_tensor(pack_tensor(query), device),
        key=unpack_tensor(pack_tensor(query[:, :kv_heads] if key is None else key), device),
        value=unpack_tensor(
            pack_tensor(query[:, :kv_heads, : spec.head_size_v] if value is None else value), device
        ),
        out=query.new_full((query.shape[0], spec.num_heads, spec.head_size_v), float("nan")),
        cache=_copied_pages(case, blocks, cache, device)
        if cache.page_format is not None
        else CacheViews(
            *unpack_cache_views(
                pack_cache_views(cache.key_cache, cache.value_cache, blocks), device
            ),
            (),
            "NHD",
        ),
        block_table=placement.block_table.to(device),
        query_start_loc=metadata.query_start_loc.clone(),
        seq_lens=metadata.seq_lens.clone(),
        slot_mapping=torch.tensor(
            [*slots, *[-1] * batch.padding_tokens], dtype=torch.int64, device=device
        ),
    )
    causal = getattr(metadata, "causal", None)
    params = replace(
        case.oracle_params(device),
        scale=scale,
        causal=spec.is_causal if causal is None else causal,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        query_bias=getattr(metadata, "query_bias", None),
        k_scale=inputs.cache.scales[0] if inputs.cache.scales else cache.k_scale,
        v_scale=inputs.cache.scales[1] if inputs.cache.scales else cache.v_scale,
        score=score,
    )
    return MaterializedCase(
        case, spec, inputs, params, None if spec.score_function is None else score_tensors
    )


def capture_layer_call(
    layer: Any,
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    cache: PagedKVCache,
    metadata: Any,
    *,
    needs_lse: bool,
) -> MaterializedCase:
    """Copy a completed call of an `Attention` layer with its scale, slopes, sinks, score tensors.

    Args:
        layer, query, key, value, cache, metadata: as an observer of `attnlib.instrumentation`
            gets them.
        needs_lse: whether the call returned the LSE.

    Raises:
        ContractError: as `capture_call`.
    """
    spec, impl = layer.spec.replace(needs_lse=needs_lse), layer.impl
    names = () if spec.score_function is None else spec.score_function.layer_tensors
    return capture_call(
        spec, query, key, value, cache, metadata, scale=impl.scale,
        alibi_slopes=impl.alibi_slopes, sinks=impl.sinks,
        score_tensors=dict(zip(names, impl.layer_score_tensors, strict=True)),
    )  # fmt: skip


@contextmanager
def record_calls(folder: str | Path, *, every: int = 1) -> Iterator[list[Path]]:
    """Record `Attention` calls of this process inside the `with` block.

    The files are `LAYER-NUMBER.pt`, with the prefix of the layer, for `attnlib audit-kv
    --recordings` and `attnlib replay`. Calls without a cache and replays of CUDA graphs are not
    recorded.

    Args:
        folder: is created if necessary.
        every: record the first call and then every `every`-th call of each layer.

    Yields:
        The files written so far.

    Raises:
        ContractError: `every` is less than 1, or a call cannot be recorded (`capture_call`).
    """
    if every < 1:
        raise ContractError(f"every={every} must be at least 1 (1 records every call)")
    files: list[Path] = []
    num_calls: dict[Any, int] = {}
    names: dict[Any, str] = {}

    def observe(layer: Any, query: Any, key: Any, value: Any, cache: Any, metadata: Any,
                output: Any, lse: Any) -> None:  # fmt: skip
        if cache is None:
            return
        number = num_calls.get(layer, 0)
        num_calls[layer] = number + 1
        name = names.setdefault(layer, layer.prefix or f"layer{len(names)}")
        if number % every == 0:
            step = capture_layer_call(
                layer, query, key, value, cache, metadata, needs_lse=lse is not None
            )
            path = Path(folder) / f"{name.replace('/', '_')}-{number}.pt"
            files.append(save_recording(step, path))

    OBSERVERS.append(observe)
    try:
        yield files
    finally:
        OBSERVERS.remove(observe)


def _renumber_blocks(
    table: torch.Tensor, seq_lens: list[int], block_size: int
) -> tuple[BlockPlacement, list[int]]:
    """A placement over the used blocks, numbered from 0, and their ids in the pool."""
    rows = [table[r, : -(-seq_len // block_size)].tolist() for r, seq_len in enumerate(seq_lens)]
    used_blocks = sorted({block for row in rows for block in row})
    index = {block: number for number, block in enumerate(used_blocks)}
    blocks = tuple(tuple(index[block] for block in row) for row in rows)
    width = max((len(row) for row in blocks), default=0)
    dense = torch.tensor([[*row, *[-1] * (width - len(row))] for row in blocks], dtype=torch.int32)
    return BlockPlacement(blocks, len(used_blocks), dense.view(len(blocks), width)), used_blocks


def _score_fields(function: ScoreFunction) -> dict[str, Any]:
    """A score function as plain values; functions as "module:name".

    Raises:
        ContractError: a function is defined in `__main__`.
    """
    values = {field.name: getattr(function, field.name) for field in fields(ScoreFunction)}
    for name, value in values.items():
        if isinstance(value, FunctionType):
            if value.__module__ == "__main__":
                raise ContractError(
                    f"a call with score function {function} cannot be recorded: {name} is defined "
                    "in __main__, which a replay cannot import; define it in a module of its own"
                )
            values[name] = f"{value.__module__}:{value.__qualname__}"
    return values


def _score_function(values: Mapping[str, Any]) -> ScoreFunction:
    """The score function of `_score_fields`.

    Raises:
        ContractError: a function cannot be imported.
    """
    made = dict(values)
    for name in ("function", "bounds", "head_bounds", "examples"):
        if made.get(name) is None:  # recordings of earlier versions have no head_bounds
            continue
        try:
            made[name] = load_object(made[name])
        except (ImportError, AttributeError) as error:
            raise ContractError(
                f"the recorded call has the score function {values['function']}, and {made[name]} "
                f"cannot be imported ({error}): make the module importable, for example by "
                "PYTHONPATH, and replay again"
            ) from None
    return ScoreFunction(**made)


def _plain(value: Any) -> Any:
    if isinstance(value, ScoreFunction):
        return _score_fields(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, torch.dtype):
        return str(value)
    return tuple(value) if isinstance(value, tuple) else value


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
        "case": {name: _plain(value) for name, value in asdict(step.case).items()},
        "spec": {
            field.name: _plain(getattr(step.spec, field.name)) for field in fields(AttentionSpec)
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
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    torch.save(data, target)
    return target


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


def load_recording(path: str | Path, device: torch.device | str = "cpu") -> MaterializedCase:
    """Read a recording.

    Args:
        path: the file.
        device: where to allocate the tensors.

    Raises:
        ContractError: the file is not a recording of this version, or its score function cannot be
            imported.
    """
    from attnlib.testing.batch_spec import parse_batch

    data = torch.load(Path(path), weights_only=True, map_location="cpu")
    if not isinstance(data, dict) or data.get("attnlib_recording") != _VERSION:
        found = data.get("attnlib_recording") if isinstance(data, dict) else type(data).__name__
        raise ContractError(
            f"{path} is not an attnlib recording of version {_VERSION} (found {found}): record the "
            "call again"
        )
    spec_fields = dict(data["spec"])
    for name in ("dtype", "kv_cache_dtype"):
        if str(spec_fields[name]).startswith("torch."):
            spec_fields[name] = getattr(torch, spec_fields[name].removeprefix("torch."))
    if spec_fields["window"] is not None:
        spec_fields["window"] = Window(*spec_fields["window"])
    function = None
    if spec_fields["score_function"] is not None:
        function = spec_fields["score_function"] = _score_function(spec_fields["score_function"])
    case = Case(**data["case"])
    table = unpack_tensor(data["block_table"], "cpu")
    if "pages" in data["cache"]:
        blocks = max(1, data["num_blocks"])
        cache = allocate_views(case.dimensions, blocks, data["layout"], device)
        cache.storage[0].copy_(data["cache"]["pages"])
    else:
        cache = CacheViews(*unpack_cache_views(data["cache"], device), (), data["layout"])
    inputs = StepInputs(
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
    params: dict[str, Any] = {
        name: v.to(device) if isinstance(v, torch.Tensor) else v
        for name, v in data["params"].items()
    }
    if cache.scales is not None:
        params |= {"k_scale": cache.scales[0], "v_scale": cache.scales[1]}
    score_tensors = None
    if function is not None:
        score_tensors = {name: tensor.to(device) for name, tensor in data["score_tensors"].items()}
        params["score"] = oracle_score(function, score_tensors, device)
    spec = AttentionSpec(**spec_fields)
    return MaterializedCase(case, spec, inputs, OracleParams(**params), score_tensors)
