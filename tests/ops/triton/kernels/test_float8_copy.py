"""The copy of float8 keys and values for float8 products: keys as rows, values transposed."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("lengths", [[200, 17, 0, 128], [5]])
def test_keys_are_rows_and_values_are_transposed(lengths: list[int]) -> None:
    from attnlib.ops.triton.kernels.float8_copy import float8_copy_kernel

    torch.manual_seed(0)
    heads, size, block_size = 2, 32, 16
    pages = [-(-length // block_size) for length in lengths]
    table = torch.zeros(len(lengths), max(pages)).int()
    order = torch.randperm(sum(pages)).int()
    for row, count in enumerate(pages):
        table[row, :count], order = order[:count], order[count:]
    cache = torch.randint(1, 256, (2, sum(pages), block_size, heads, size)).to(torch.uint8)
    rows = sum(lengths) + 7
    columns = (rows + 144 * len(lengths) + 143) // 16 * 16
    keys = torch.zeros(rows, heads, size, dtype=torch.uint8)
    values = torch.full((heads * size, columns), 255, dtype=torch.uint8)
    starts = torch.full((len(lengths) + 1,), -1, dtype=torch.int32)
    given = [x.to(DEVICE) for x in (*cache, keys, values, starts, torch.tensor(lengths), table)]
    key, value, keys, values, starts, lens, table = given
    float8_copy_kernel[(3,)](
        key, value, None, None, keys, values, starts, lens.int(), table, len(lengths), rows,
        table.stride(0), *key.stride()[:3], *value.stride()[:3], *(None,) * 6, NUM_KV_HEADS=heads,
        D=size, DV=size, BLOCK_SIZE=block_size, VEC_K=1, VEC_V=1, TOKENS=128,
    )  # fmt: skip
    assert starts.tolist() == [0, *torch.tensor(lengths).cumsum(0).tolist()]
    first = 0
    for request, length in enumerate(lengths):
        position = torch.arange(length, device=DEVICE)
        block = table[request, position // block_size].long()
        assert torch.equal(keys[first : first + length], key[block, position % block_size])
        padded = -(-length // 128) * 128
        expected = torch.zeros(padded, heads * size, dtype=torch.uint8, device=DEVICE)
        expected[:length] = value[block, position % block_size].flatten(1)
        # Position 4 t + 2 a + r of 16 holds key 8 a + 2 t + r.
        ordered = expected.view(padded // 16, 2, 4, 2, heads * size).transpose(1, 2)
        ordered = ordered.reshape(padded, heads * size)
        column = first // 16 * 16 + 144 * request
        assert torch.equal(values[:, column : column + padded], ordered.T)
        first += length
