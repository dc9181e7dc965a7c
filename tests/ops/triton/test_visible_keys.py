"""Block tables of the keys that a mask shows: both implementations against a loop over the keys."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

import pytest
import torch

from attnlib.errors import ContractError

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def on_the_device() -> Iterator[None]:
    with torch.device(DEVICE):
        yield


@pytest.fixture(params=["torch", "triton"])
def list_visible_keys(request: pytest.FixtureRequest):
    return import_module(f"attnlib.ops.{request.param}.visible_keys").list_visible_keys


NAMES = (
    *("random", "longer than a block", "a view of wider rows", "all and none"),
    *("one row for all", "one key"),
)


def masks() -> dict[str, torch.Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(0)
    wide = torch.rand(3, 2500, generator=generator) < 0.7
    return {
        "random": torch.rand(4, 33, generator=generator) < 0.5,
        "longer than a block": wide,
        "a view of wider rows": wide[:, 5:1200],
        "all and none": torch.tensor([[True] * 9, [False] * 9]),
        "one row for all": torch.ones(1, 17, dtype=torch.bool).expand(5, -1),
        "one key": torch.ones(2, 1, dtype=torch.bool),
    }


@pytest.mark.parametrize("name", NAMES)
def test_keys_are_listed_in_order(name: str, list_visible_keys) -> None:
    visible, distance = masks()[name], 4096
    rows, keys = visible.shape
    buffer = torch.full((rows, keys + 3), -7, dtype=torch.int32)
    lengths, starts = (torch.full((n,), -7, dtype=torch.int32) for n in (rows, rows + 1))
    list_visible_keys(visible, distance, table=buffer[:, :keys], lengths=lengths, starts=starts)
    assert starts.tolist() == list(range(rows + 1))
    assert torch.equal(lengths, visible.sum(1, dtype=torch.int32))
    for row, shown in enumerate(visible):
        expected = shown.nonzero()[:, 0] + row * distance
        assert torch.equal(buffer[row, : len(expected)].long(), expected)
        assert bool((buffer[row, len(expected) : keys] == -1).all())
    assert bool((buffer[:, keys:] == -7).all())


def test_a_narrow_table_ends_the_rows(list_visible_keys) -> None:
    table, lengths = torch.ones(2, 4, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    visible = torch.tensor([[True] * 8, [False] * 6 + [True] * 2])
    starts = torch.zeros(3, dtype=torch.int32)
    list_visible_keys(visible, 8, table=table, lengths=lengths, starts=starts)
    assert lengths.tolist() == [4, 2]
    assert table[0].tolist() == [0, 1, 2, 3] and table[1].tolist() == [14, 15, -1, -1]


@pytest.mark.parametrize("changed", ["visible", "table", "lengths", "starts"])
def test_other_tensors_are_refused(changed: str, list_visible_keys) -> None:
    given = {
        "visible": torch.ones(2, 4, dtype=torch.bool),
        "table": torch.zeros(2, 4, dtype=torch.int32),
        "lengths": torch.zeros(2, dtype=torch.int32),
        "starts": torch.zeros(3, dtype=torch.int32),
    }
    for wrong in (given[changed].long(), given[changed][:1], given[changed].repeat(2, 1).mT):
        tensors = given | {changed: wrong}
        visible = tensors.pop("visible")
        with pytest.raises(ContractError, match=changed if changed != "visible" else None):
            list_visible_keys(visible, 4, **tensors)
