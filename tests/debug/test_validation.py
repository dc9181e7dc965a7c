"""ATTNLIB_VALIDATE=1 names every inconsistent batch. `docs/validation.md` lists the kinds by id."""

from __future__ import annotations

import dataclasses
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import attnlib
from attnlib.errors import ContractError

SPEC = attnlib.AttentionSpec(
    num_heads=4, num_kv_heads=2, head_size=16, dtype=torch.float32, block_size=4
)
QUERY_LENS, SEQ_LENS, TABLE = [1, 2, 12], [5, 6, 12], [[6, 2], [1, 3], [4, 5, 7]]
NUM_BLOCKS, TOKENS = 8, 15


def _ints(values: list[Any]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _slots(**changes: int) -> torch.Tensor:
    """The right slots, except for `t3=5`: token 3 has slot 5."""
    slots = [8, 4 + 8, 4 + 9, *range(16, 24), *range(28, 32)]
    slots[1], slots[2] = 3 * 4 + 0, 3 * 4 + 1
    for name, slot in changes.items():
        slots[int(name[1:])] = slot
    return torch.tensor(slots)


def _bias(value: float) -> torch.Tensor:
    bias = torch.zeros(TOKENS, 12)
    bias[2, 1] = value
    return bias


_TABLE = [[6, 2, -1], [1, 3, -1], [4, 5, 7]]

KINDS: dict[str, tuple[str, Any, str]] = {
    "V1": ("query_start_loc", _ints([1, 1, 3, 15]), r"query_start_loc\[0\]=1 must be 0"),
    "V2": ("query_start_loc", _ints([0, 3, 1, 15]), "query_start_loc falls from 3 to 1"),
    "V3": ("query_start_loc", _ints([0, 1, 3, 16]), "query_start_loc ends at 16"),
    "V4": ("seq_lens", _ints([5, -6, 12]), r"seq_lens\[1\]=-6 must not be negative"),
    "V5": ("seq_lens", _ints([5, 1, 12]), r"seq_lens\[1\]=1 is below the 2 new tokens"),
    "V6": ("query_start_loc_cpu", _ints([0, 2, 3, 15]), r"query_start_loc_cpu\[1\]=2"),
    "V7": ("seq_lens_cpu", _ints([5, 5, 12]), r"seq_lens\[1\]=6 on.*seq_lens_cpu\[1\]=5"),
    "V8": ("num_computed_tokens_cpu", _ints([4, 4, 1]), r"num_computed_tokens_cpu\[2\]=1"),
    "V9": ("max_query_len", 11, "max_query_len=11 is below .* 12 of request 2"),
    "V10": ("max_seq_len", 11, "max_seq_len=11 is below .* 12 of request 2"),
    "V11": ("block_table", _ints([[6, 2], [1, 3], [4, 5]]), "block_table row 2 has 2 entries"),
    "V12": ("block_table", _ints([[6, 2, -1], [1, -1, -1], [4, 5, 7]]), r"table\[1\]\[1\]=-1"),
    "V13": ("block_table", _ints([[6, 2, -1], [1, 3, -1], [4, 8, 7]]), r"\[2\]\[1\]=8 is outside"),
    "V14": ("slot_mapping", _slots(t3=32), r"slot_mapping\[3\]=32 is outside the cache of 32"),
    "V15": ("slot_mapping", _slots(t3=-2), r"slot_mapping\[3\]=-2 is outside"),
    "V16": ("slot_mapping", _slots(t3=8), r"slot_mapping\[3\] and slot_mapping\[0\] are both 8"),
    "V17": ("slot_mapping", _slots(t0=9), r"slot_mapping\[0\]=9, but request 0 reads position 4"),
    "V18": ("slot_mapping", _slots()[:14], "slot_mapping has 14 entries for 15 new tokens"),
    "V19": ("slot_mapping", None, r"slot_mapping\[15\]=0 writes a padding row"),
    "V20": ("query_bias", _bias(float("nan")), r"query_bias\[2\]\[1\]=nan of request 1"),
    "V21": ("query_bias", _bias(float("inf")), r"query_bias\[2\]\[1\]=inf of request 1"),
    "V22": ("num_decode_tokens", 2, "num_decode_tokens=2, but query_start_loc puts 3"),
    "V23": ("max_decode_query_len", 1, "max_decode_query_len=1 is below the query length 2"),
    "V24": ("prefill_query_start_loc", _ints([0, 11]), r"prefill_query_start_loc is \[0, 11\]"),
    "V25": ("k_scale", torch.tensor(0.0), r"k_scale=0.0 of the cache of layer layers.0 must be"),
    "V26": ("v_scale", torch.tensor([1.0, float("nan")]), r"v_scale\[1\]=nan of the cache"),
    "V27": ("sinks", torch.tensor([0.0, 1.0, torch.inf, 0.0]), r"sinks\[2\]=inf of layer layers.0"),
    "V28": ("alibi_slopes", torch.tensor([0.0, torch.nan, 1.0, 0.0]), r"alibi_slopes\[1\]=nan"),
}  # fmt: skip

OTHER_KINDS = ("V29", "V30", "V31", "V32", "V33", "V34")
"""Tested in `tests/sparse/test_key_selection.py`, `tests/metadata/test_shared_prefix.py` and
`tests/metadata/test_compressed.py`."""

AT_BUILD = [name for name, (field, *_) in KINDS.items() if name not in {"V13", "V14"}][:19]
AT_CALL = [name for name in KINDS if name not in {"V8"}]


@pytest.fixture(autouse=True)
def _validating(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNLIB_VALIDATE", "1")


def _setup(backend: str, name: str = "") -> tuple[Any, ...]:
    changes: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    if name in ("V25", "V26"):
        changes["kv_cache_dtype"] = "fp8"
        changes["kv_scale_kind"] = "head" if name == "V26" else "tensor"
    elif name == "V27":
        changes["has_sink"], tensors["sinks"] = True, torch.zeros(4)
    elif name == "V28":
        changes["has_alibi"], tensors["alibi_slopes"] = True, torch.zeros(4)
    elif name in ("V20", "V21"):
        changes["mask_kind"] = "query_bias"
    spec = SPEC.replace(**changes)
    layer = attnlib.Attention(spec, backend=backend, device="cpu", prefix="layers.0", **tensors)
    cache = attnlib.PagedKVCache.allocate(spec, NUM_BLOCKS, "cpu")
    common = attnlib.CommonAttentionMetadata.from_lengths(QUERY_LENS, SEQ_LENS, TABLE, 4, "cpu")
    rows = TOKENS + (1 if name == "V19" else 0)
    q, k, v = torch.randn(rows, 4, 16), torch.randn(rows, 2, 16), torch.randn(rows, 2, 16)
    return layer, cache, common, layer.backend.make_builder(spec, "cpu"), (q, k, v)


def _broken(source: Any, name: str) -> Any:
    """The batch or its metadata, with one wrong field."""
    field, value, _ = KINDS[name]
    is_common = isinstance(source, attnlib.CommonAttentionMetadata)
    if name == "V19":  # one row of padding, which a batch for a CUDA graph may have
        changes = {"num_actual_tokens": 16, "slot_mapping": torch.cat([_slots(), _ints([0])])}
    else:
        changes = {"block_table_tensor" if is_common and field == "block_table" else field: value}
    return source.replace(**changes) if is_common else dataclasses.replace(source, **changes)


def test_a_right_batch_passes() -> None:
    layer, cache, common, builder, tensors = _setup("torch")
    step = builder.build(0, common)
    assert step.slot_mapping.tolist() == _slots().tolist()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(*tensors, cache, step)


@pytest.mark.parametrize("backend", ["torch", "triton", "prefill:torch,decode:triton"])
@pytest.mark.parametrize("name", AT_BUILD)
def test_the_builder_names_an_inconsistent_batch(name: str, backend: str) -> None:
    *_, common, builder, _ = _setup(backend, name)
    # A batch on the CPU refuses lengths below 0. Builders that need lengths on the host compare
    # them with those of the batch first.
    made = "query_start_loc begins at 1; it must be 0|of request 1 is -[0-9]; it must not be"
    message = f"{KINDS[name][2]}|{made}|_cpu is .* but .* is .*: pass equal values"
    with pytest.raises(ContractError, match=message):
        builder.build(0, _broken(common, name))


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("name", AT_CALL)
def test_the_layer_names_an_inconsistent_batch(name: str, backend: str) -> None:
    """Nothing is written then."""
    layer, cache, common, builder, tensors = _setup(backend, name)
    step = builder.build(0, common)
    field, value, message = KINDS[name]
    if field in ("k_scale", "v_scale"):
        setattr(cache, field, value)
    elif field in ("sinks", "alibi_slopes"):
        setattr(layer, field, value)
    else:
        step = _broken(step, name)
    before = cache.key_cache.clone()
    with pytest.raises(ContractError, match=message):
        layer(*tensors, cache, step)
    assert torch.equal(cache.key_cache.view(torch.uint8), before.view(torch.uint8))


def test_host_lengths_that_are_not_needed_may_be_bounds_but_not_too_small() -> None:
    *_, common, builder, _ = _setup("triton")
    bounds = {"seq_lens_cpu": _ints([5, 12, 12]), "num_computed_tokens_cpu": _ints([4, 10, 0])}
    builder.build(0, common.replace(**bounds))
    none = _ints([0, 0, 0])
    builder.build(0, common.replace(seq_lens_cpu=none, query_start_loc_cpu=_ints([0, 0, 0, 0])))
    with pytest.raises(ContractError, match=r"seq_lens\[1\]=6 on the device.*_cpu\[1\]=5"):
        builder.build(0, common.replace(seq_lens_cpu=_ints([5, 5, 12])))


@pytest.mark.parametrize(
    "backend", ["triton", "prefill:triton,decode:triton", "prefix:triton,suffix:triton"]
)
@pytest.mark.parametrize("query_len", [1, 3])
def test_capture_metadata_is_called_with_the_batch_of_its_buffers(
    backend: str, query_len: int
) -> None:
    """M7, G3: a graph, and a call without one, read the lengths on the device; what they contradict
    on the device is refused."""
    layer, cache, *_, tensors = _setup(backend)
    limits = attnlib.BatchLimits(max_num_reqs=4, max_num_tokens=12, max_seq_len=16)
    builder = layer.backend.make_builder(SPEC, "cpu", limits=limits)
    state = layer.backend.get_state_cls()(builder, limits)
    captured = state.graph_capture_get_metadata_for_batch(4, query_len=query_len)
    q, k, v = (tensor[: 4 * query_len] for tensor in tensors)
    layer(q, k, v, cache, captured)
    for lengths in ([7, 9, 4], [4, 12, 3, 5]):
        blocks = iter(range(NUM_BLOCKS))
        table = [[next(blocks) for _ in range(-(-length // 4))] for length in lengths]
        new = [min(query_len, 2)] * len(lengths)
        common = attnlib.CommonAttentionMetadata.from_lengths(new, lengths, table, 4, "cpu")
        padded = state.begin_forward(common, 4, query_len)
        out = layer(q, k, v, cache, captured)
        assert torch.equal(out, layer(q, k, v, cache, builder.build(0, padded)))
        state.get_graph_input_buffers()["block_table"][1, 0] = NUM_BLOCKS
        with pytest.raises(ContractError, match=r"block_table\[1\]\[0\]=8 is outside"):
            layer(q, k, v, cache, captured)


def test_the_documentation_lists_every_kind() -> None:
    page = Path(__file__).parents[2] / "docs" / "validation.md"
    listed = re.findall(r"^\| (V\d+) \|", page.read_text(), re.M)
    assert listed == [*KINDS, *OTHER_KINDS] and len(listed) >= 21


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_saturated_elements_are_reported_with_their_share(backend: str) -> None:
    """M9: 448 is the largest e4m3 number; slots of -1 do not count."""
    spec = SPEC.replace(kv_cache_dtype="fp8")
    layer = attnlib.Attention(spec, backend=backend, device="cpu", prefix="layers.7")
    cache = attnlib.PagedKVCache.allocate(spec, NUM_BLOCKS, "cpu")
    common = attnlib.CommonAttentionMetadata.from_lengths([4], [4], [[0]], 4, "cpu")
    step = layer.backend.make_builder(spec, "cpu").build(0, common)
    step.slot_mapping = torch.tensor([0, 1, -1, 3])
    key = torch.ones(4, 2, 16)
    key[0] = 449.0
    key[2] = 1e6
    with pytest.warns(UserWarning, match=r"33.33% of the new keys of layer layers.7 saturate.*448"):
        layer(torch.randn(4, 4, 16), key, torch.ones(4, 2, 16), cache, step)
    cache.k_scale = 2.0
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # numpy deprecates what Triton 3.6 does
        layer(torch.randn(4, 4, 16), key, torch.ones(4, 2, 16), cache, step)
