"""Batches are not changed by calls; copies, pickles and forked processes give the same bits."""

from __future__ import annotations

import copy
import io
import os
import pickle
import subprocess
import sys
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch

import attnlib
from attnlib.errors import ContractError
from tests.properties.check import _call, _layer
from tests.properties.draw import Draw, Limits, draw_of
from tests.properties.step import place, tensors_of

LIMITS = Limits(dtypes=("float32",), longest=40, longest_query=12, most_heads=8, rare=0.0)
BACKENDS = [
    "torch",
    pytest.param("triton", marks=pytest.mark.slow),
    pytest.param("prefill:torch,decode:triton", marks=pytest.mark.slow),
]
SCRATCH = {"workspace", "counters"}  # kernels write them; they hold no fact of the batch


def _supported(backend: str, seed: int) -> Draw:
    """The first draw from `seed` on that the backend supports and that writes a paged cache."""
    while True:
        draw = draw_of(seed, LIMITS)
        if draw.spec.is_paged and draw.forms.written == "given" and draw.batch.num_tokens:
            try:
                attnlib.get_attn_backend(draw.spec, backend, "cpu")
                return draw
            except attnlib.UnsupportedConfigError:
                pass
        seed += 1


def _tensors(thing: Any, name: str = "") -> dict[str, torch.Tensor]:
    """All tensors of a batch and its parts, by dotted name."""
    if isinstance(thing, torch.Tensor):
        return {name: thing}
    found: dict[str, torch.Tensor] = {}
    if is_dataclass(thing) and not isinstance(thing, type):
        for field in fields(thing):
            if field.name not in SCRATCH:
                found |= _tensors(getattr(thing, field.name), f"{name}.{field.name}")
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_calls_do_not_change_the_batch(backend: str) -> None:
    for seed in range(6):
        draw = _supported(backend, 100 * seed)
        placement = place(draw, "cpu")
        chosen = attnlib.get_attn_backend(draw.spec, backend, "cpu")
        metadata = chosen.make_builder(draw.spec, "cpu").build(0, placement.common)
        before = {name: tensor.clone() for name, tensor in _tensors(metadata).items()}
        plain = {f.name: getattr(metadata, f.name) for f in fields(metadata)}
        for number in range(2):
            tensors = tensors_of(draw, placement, "cpu", number)
            _call(_layer(draw, chosen, tensors, "cpu"), tensors, metadata)
        after = _tensors(metadata)
        assert before.keys() == after.keys() and len(before) > 3
        for name, tensor in before.items():
            assert torch.equal(tensor.nan_to_num(7.0), after[name].nan_to_num(7.0)), name
        for name, value in plain.items():
            assert getattr(metadata, name) is value, f"{name} was assigned"


def test_derived_fields_of_a_composite_cannot_be_assigned() -> None:
    draw = _supported("prefill:torch,decode:triton", 0)
    chosen = attnlib.get_attn_backend(draw.spec, "prefill:torch,decode:triton", "cpu")
    metadata = chosen.make_builder(draw.spec, "cpu").build(0, place(draw, "cpu").common)
    for name in sorted(metadata.fixed_fields):
        with pytest.raises(ContractError, match="cannot be assigned"):
            setattr(metadata, name, getattr(metadata, name))


def _by_torch_save(thing: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda thing: pickle.loads(pickle.dumps(thing)),
    "torch.save": _by_torch_save,
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("how", COPIES)
def test_copies_give_the_same_bits(how: str, backend: str) -> None:
    """Copies of a used batch, layer and cache; a deep copy of a cache has its own memory."""
    for seed in range(3):
        draw = _supported(backend, 1000 + 100 * seed)
        placement = place(draw, "cpu")
        chosen = attnlib.get_attn_backend(draw.spec, backend, "cpu")
        metadata = chosen.make_builder(draw.spec, "cpu").build(0, placement.common)
        tensors = tensors_of(draw, placement, "cpu", 0)
        layer, cache = _layer(draw, chosen, tensors, "cpu"), tensors.cache
        expected, _ = _call(layer, tensors, metadata)
        expected = expected.clone()
        make = COPIES[how]
        copies = make((metadata, layer, cache))
        metadata2, layer2, cache2 = map(copy.copy, copies) if how == "copy" else copies
        handles = [int(one.handle) for one in (metadata, layer, cache, metadata2, layer2, cache2)]
        assert len(set(handles)) == 6, "copies have ids of their own"
        assert metadata2.recent_plan is None and not metadata2.plans
        if how != "copy":
            cache.key_cache.zero_()  # the original no longer matters
            cache.value_cache.zero_()
        tensors2 = tensors_of(draw, placement, "cpu", 0)
        object.__setattr__(tensors2, "cache", cache2)
        out, _ = _call(layer2, tensors2, metadata2)
        assert torch.equal(out, expected)


def test_specs_and_pools_survive_copies() -> None:
    pool = attnlib.BlockAllocator(6, 2)
    blocks = pool.allocate(3)
    pool.commit([1, 2, 3, 4], blocks)
    table = attnlib.BlockTable(2, 4)
    table.add_row(blocks, 1)
    for make in (copy.deepcopy, COPIES["pickle"]):
        draw = draw_of(5, LIMITS)
        assert make(draw.spec) == draw.spec and hash(make(draw.spec)) == hash(draw.spec)
        pool2, table2 = make(pool), make(table)
        assert pool2.acquire_prefix([1, 2, 3, 4, 5]).block_ids == tuple(blocks[:2])
        assert pool.ref_count(blocks[0]) == 1, "the original does not change"
        table2.append_row([5], 1)
        assert table2.row(1) == [*blocks, 5] and table.row(1) == blocks
        assert table2.commit(2)[1, 3] == 5, "the tensor that kernels read follows the rows"


FORK = """
import os, sys, torch
torch.set_num_threads(1)
from tests.properties.check import run_draw
from tests.properties.draw import draw_of
from tests.properties.test_copies import LIMITS, _supported
draws = [_supported("torch", 100 * seed) for seed in range(8)]
assert not any(run_draw(draw, "torch", "cpu").wrong for draw in draws)
children = []
for child in range(3):
    pid = os.fork()
    if pid == 0:
        wrong = [run_draw(draw, "torch", "cpu").wrong for draw in draws]
        os._exit(1 if any(wrong) else 0)
    children.append(pid)
assert not any(run_draw(draw, "torch", "cpu").wrong for draw in draws)
sys.exit(any(os.waitpid(pid, 0)[1] for pid in children))
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_forked_processes_compute_the_same() -> None:
    """Selection, groups and signatures of the parent are usable in its children."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", FORK], env=environment, timeout=300, check=False,
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
