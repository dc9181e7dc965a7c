"""X3, X4: the addresses of a batch follow on the device, without reading it."""

from __future__ import annotations

import pytest
import torch

from attnlib import AttentionSpec
from attnlib.errors import ContractError
from attnlib.parallel import (
    Contiguous,
    Interleaved,
    divided_batch,
    local_block_table,
    local_slots,
)
from attnlib.parallel.addresses import table_of, token_positions
from attnlib.parallel.divisions import Division
from attnlib.parallel.local_spec import local_form
from attnlib.parallel.merge import MergeRows
from attnlib.parallel.metadata import GivenScales, ParallelMetadata
from attnlib.parallel.prefill_metadata import PrefillMetadata
from attnlib.parallel.rows import local_rows
from attnlib.parallel.staging import StagingPlan

SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_size=16, dtype=torch.float32, block_size=4)


@pytest.mark.parametrize("division", [Interleaved(2, 4), Contiguous(2, 20)], ids=str)
@pytest.mark.parametrize("changes", [{}, {"sliding_window": 6}, {"has_alibi": True}], ids=str)
def test_nothing_reads_the_device(changes: dict[str, object], division: Division) -> None:
    """Meta tensors have no elements: a function that reads one raises."""
    starts, lengths, table = (
        torch.zeros(*shape, dtype=torch.int32, device="meta") for shape in ((4,), (3,), (3, 8))
    )
    tokens = token_positions(starts, lengths, 7)
    assert local_slots(division, 1, tokens, table, 4).shape == (7,)
    assert local_block_table(division, 1, table, 4).shape[0] == 3
    rows = local_rows(
        local_form(SPEC.replace(**changes), division, 1), division, 1, tokens, lengths, table
    )
    assert rows.seq_lens.shape == (7,)
    assert StagingPlan.of(starts, tokens.request, 5, 4).block_table.shape == (3, 2)
    assert MergeRows.of(2, 7, True, table.device).rows.shape == (21,)


def test_tables_of_windows_are_narrow() -> None:
    """A row has the blocks of its window, not those of its request."""
    division, lengths = Interleaved(2), torch.tensor([1000], dtype=torch.int32)
    table = torch.arange(125, dtype=torch.int32)[None]
    tokens = token_positions(torch.tensor([0, 2], dtype=torch.int32), lengths, 2)
    form = local_form(SPEC.replace(sliding_window=16), division, 0)
    rows = local_rows(form, division, 0, tokens, lengths, table)
    # Positions 983 to 998 and 984 to 999: local indices 492 to 499, in the blocks 123 and 124.
    assert rows.block_table[:, :2].tolist() == [[123, 124]] * 2
    assert rows.block_table.shape[1] <= 4
    assert rows.seq_lens.tolist() == [8, 8]


def test_tables_hold_integers() -> None:
    """A part of a block id is refused, and an id that int32 cannot hold becomes no other block."""
    assert divided_batch([1, 1], [9, 1], [[1, 2], [3]], "cpu").block_table_tensor.tolist() == [
        [1, 2], [3, 0],
    ]  # fmt: skip
    assert int(table_of(torch.tensor([[2**32 + 1]]))) == torch.iinfo(torch.int32).max
    for rows in ([[1.5]], torch.tensor([[1.0]]), [1, 2], None, torch.tensor([1]), [[[1, 2]]]):
        with pytest.raises(ContractError, match="block_table"):
            divided_batch([1], [9], rows, "cpu")


@pytest.mark.parametrize("kind", [ParallelMetadata, PrefillMetadata])
def test_batches_compute_no_scales(kind: type[GivenScales]) -> None:
    """M9: the request for it, which other batches follow, is refused and not ignored."""
    batch = kind.__new__(kind)
    batch.enable_kv_scales_calculation = False
    with pytest.raises(ContractError, match="pass k_scale and v_scale, equal on all ranks"):
        batch.enable_kv_scales_calculation = True
    assert not batch.enable_kv_scales_calculation
