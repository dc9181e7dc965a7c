"""One new token of each row, appended to dense keys and values."""

from __future__ import annotations

import pytest
import torch

from attnlib.errors import ContractError
from attnlib.ops.triton.append_rows import RowAppend
from attnlib.ops.triton.launch.bound import BoundLaunch


@pytest.mark.parametrize("sizes", [(64, 64), (40, 24), (20, 20)])
@pytest.mark.parametrize("heads", [1, 3, 40])
def test_only_the_row_of_the_token_changes(
    device: torch.device, sizes: tuple[int, int], heads: int
) -> None:
    """States come as `[B, 1, H, D]` or as slices of the projections of all heads."""
    generator = torch.Generator().manual_seed(heads)
    buffers = [torch.randn(2, heads, 50, size, generator=generator).to(device) for size in sizes]
    expected = [buffer.clone() for buffer in buffers]
    rows = [torch.randn(2, 1, heads * size + 3, generator=generator).to(device) for size in sizes]
    key, value = (
        x[..., : heads * size].unflatten(2, (heads, size)).transpose(1, 2)
        for x, size in zip(rows, sizes, strict=True)
    )
    append = RowAppend(key, value, *buffers)
    others = [buffer.clone() for buffer in buffers]  # those of another layer
    for position in (0, 7, 49):
        append.run(key, value, *buffers, position)
        for buffer, new in zip(expected, (key, value), strict=True):
            buffer[:, :, position] = new[:, :, 0]
        assert all(torch.equal(a, b) for a, b in zip(buffers, expected, strict=True))
    for position in (0, 7, 49):
        append.run(key, value, *others, position)
    assert all(torch.equal(a, b) for a, b in zip(others, expected, strict=True))


def test_a_token_that_is_there_is_written_until_launches_are_direct(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the token after it compiles nothing."""
    new = torch.ones(1, 2, 1, 16, device=device)
    buffers = torch.zeros(2, 1, 2, 8, 16, device=device)
    append = RowAppend(new, new, *buffers)
    append.prepare(new, new, *buffers, 5)
    assert (buffers[..., 5, :] == 1).all() and buffers.sum() == 2 * 2 * 16
    monkeypatch.setattr(BoundLaunch, "is_direct", True)
    monkeypatch.setattr(RowAppend, "run", lambda *_: pytest.fail("launched again"))
    append.prepare(new, new, *buffers, 6)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.half(),
        lambda x: x[:, :1],
        lambda x: x.repeat(1, 1, 2, 1),
        lambda x: torch.zeros(2, 2, 1, 32)[..., ::2],
    ],
    ids=["dtype", "heads", "two tokens", "not dense"],
)
def test_states_of_another_kind_are_refused(device: torch.device, change: object) -> None:
    buffer = torch.zeros(2, 2, 50, 16, device=device)
    new = torch.zeros(2, 2, 1, 16, device=device)
    with pytest.raises(ContractError):
        RowAppend(change(new).to(device), new, buffer, buffer)  # type: ignore[operator]
    assert not buffer.any()
