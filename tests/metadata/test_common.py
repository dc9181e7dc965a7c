"""M1, M7, P3, P4: batches from lists of lengths, and invalid ones."""

import pytest
import torch

from attnlib.errors import ContractError
from attnlib.metadata.common import CommonAttentionMetadata


def _batch(**changes) -> CommonAttentionMetadata:
    arguments = {
        "query_lens": [1, 3],
        "seq_lens": [5, 3],
        "block_table": [[9, 2], [4]],
        "block_size": 4,
        "device": "cpu",
        **changes,
    }
    return CommonAttentionMetadata.from_lengths(**arguments)


def test_fields_of_a_batch() -> None:
    batch = _batch()
    assert (
        batch.query_start_loc.tolist() == [0, 1, 4] and batch.query_start_loc.dtype == torch.int32
    )
    assert batch.seq_lens.tolist() == [5, 3] and batch.num_computed_tokens_cpu.tolist() == [4, 0]
    assert (batch.num_reqs, batch.num_actual_tokens, batch.max_query_len, batch.max_seq_len) == (
        2,
        4,
        3,
        5,
    )
    assert batch.block_table_tensor.tolist() == [[9, 2], [4, -1]]
    assert (
        batch.slot_mapping.tolist() == [8, 16, 17, 18] and batch.slot_mapping.dtype == torch.int64
    )
    assert batch.compute_num_computed_tokens().tolist() == [
        4,
        0,
    ] and batch.query_lens_cpu.tolist() == [1, 3]


def test_a_block_table_as_a_tensor() -> None:
    table = torch.tensor([[9, 2, 2**30], [4, -1, -7]])
    assert _batch(block_table=table).slot_mapping.tolist() == _batch().slot_mapping.tolist()


@pytest.mark.parametrize(
    "lengths", [([], []), ([0], [0]), ([0, 0], [3, 0]), ([2, 0, 1], [2, 0, 1])]
)
def test_empty_is_legal_everywhere(lengths: tuple) -> None:
    """M7"""
    queries, sequences = lengths
    table = [[index] for index in range(len(queries))]
    batch = CommonAttentionMetadata.from_lengths(queries, sequences, table, 4, "cpu")
    assert batch.num_actual_tokens == sum(queries) == batch.slot_mapping.shape[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query_lens": [1, 3, 1]}, "3 query_lens and 2 seq_lens"),
        ({"query_lens": [1, -3]}, r"query_lens\[1\]=-3 must not be negative"),
        ({"seq_lens": [5, 2]}, r"seq_lens\[1\]=2 is below query_lens\[1\]=3.*\[M1\]"),
        (
            {"block_table": [[9], [4]]},
            r"block_table row 0 has 1 entries.* seq_lens\[0\]=5 needs 2 blocks of 4 tokens \[P3\]",
        ),
        (
            {"block_table": torch.tensor([[9], [4]])},
            r"block_table row 0 has 1 entries, but seq_lens\[0\]=5 needs 2 blocks",
        ),
        ({"block_table": [[9, 2]]}, "block_table has 1 rows for 2 requests"),
        (
            {"block_table": [[9, -1], [4]]},
            r"block_table\[0\]\[1\]=-1 is not a block, but request 0 writes position 4",
        ),
        ({"block_size": None}, "block_size=None must be given"),
        ({"block_size": 0}, "block_size=0 must be given"),
        ({"block_size": 4.0}, "block_size 4.0 is a float; it must be an integer"),
        ({"query_lens": None}, "query_lens=None must hold integers"),
        ({"query_lens": [1, "3"]}, r"query_lens=\[1, '3'\] must hold integers"),
        ({"seq_lens": [5, 2**70]}, r"seq_lens=\[5, 1180591620717411303424\] must hold integers"),
        ({"block_table": [9, 2]}, r"block_table=\[9, 2\] must be a tensor"),
        ({"max_query_len": 3.0}, "max_query_len 3.0 is a float; it must be an integer"),
        (
            {"causal": [True, False]},
            r"causal=\[True, False\] must be True, False, None or a tensor",
        ),
        ({"query_lens": [1, 2.5]}, "query_lens is torch.float32; it must hold integers"),
        ({"seq_lens": torch.tensor([5.0, 3.0])}, "seq_lens is torch.float32; it must hold"),
        ({"seq_lens": [5, 2**31]}, r"seq_lens\[1\]=2147483648 does not fit int32"),
        (
            {"query_lens": [2**30, 2**30], "seq_lens": [2**30, 2**30], "block_table": None},
            "query_lens sum to 2147483648, but query_start_loc is int32",
        ),
        ({"block_table": [[9, 2**32], [4]]}, r"block_table\[0\]\[1\]=4294967296 does not fit"),
        (
            {"block_table": torch.tensor([[9, 2**32], [4, 0]])},
            r"block_table\[0\]\[1\]=4294967296 does not fit int32",
        ),
        ({"block_table": torch.tensor([[9.0, 2.0], [4.0, 0.0]])}, "block_table is torch.float32"),
        ({"max_query_len": 2}, r"max_query_len=2 is below query_lens\[1\]=3"),
        ({"max_seq_len": 4}, r"max_seq_len=4 is below seq_lens\[0\]=5"),
        ({"max_seq_len": "x"}, "max_seq_len 'x' is a str; it must be an integer"),
    ],
)
def test_invalid_batches_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        _batch(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query_start_loc": None}, "query_start_loc is a NoneType; it must be a tensor"),
        ({"seq_lens": [5, 3]}, "seq_lens is a list; it must be a tensor"),
        ({"slot_mapping": torch.tensor(3)}, "slot_mapping is a 0-d tensor; it must be a tensor"),
        ({"num_reqs": None}, "num_reqs None is a NoneType; it must be an integer"),
        ({"num_actual_tokens": float("nan")}, "num_actual_tokens nan is a float"),
        ({"max_seq_len": -1}, "max_seq_len=-1 must not be negative"),
        ({"query_start_loc_cpu": [0, 5, 4]}, "the query length of request 1 is -1"),
        ({"query_start_loc_cpu": [1, 1, 4]}, "query_start_loc begins at 1; it must be 0"),
        ({"seq_lens_cpu": [5, -3]}, "seq_lens of request 1 is -3"),
        ({"num_computed_tokens_cpu": [4.0, 0.0]}, "num_computed_tokens_cpu is float32"),
    ],
)
def test_fields_of_another_kind_are_refused(changes: dict, message: str) -> None:
    changes = {
        name: torch.tensor(
            value, dtype=torch.float32 if isinstance(value[0], float) else torch.int32
        )
        if name.endswith("_cpu")
        else value
        for name, value in changes.items()
    }
    with pytest.raises(ContractError, match=message):
        _batch().replace(**changes)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([0, 5, 4], "the query length of request 1 is -1; it must not be negative"),
        ([0, -2, 4], "the query length of request 0 is -2; it must not be negative"),
        ([2, 3, 4], "query_start_loc begins at 2; it must be 0"),
        ([0, 1, 40], "query_start_loc ends at 40, but num_actual_tokens=4"),
        ([0, 0, 4], "max_query_len=3 is below the query length 4 of request 1"),
    ],
)
@pytest.mark.parametrize("has_copies", [False, True])
def test_starts_on_a_cpu_are_checked_without_host_copies(
    values: list[int], message: str, has_copies: bool
) -> None:
    """Kernels of the interpreter would write outside of their memory."""
    common = _batch()
    if not has_copies:
        common = common.replace(query_start_loc_cpu=None, seq_lens_cpu=None)
    with pytest.raises(ContractError, match=message):
        common.replace(query_start_loc=torch.tensor(values, dtype=torch.int32))


def test_ids_past_the_end_of_a_row_may_exceed_int32() -> None:
    """P3: they are undefined; the conversion must not turn them into valid ids."""
    table = torch.tensor([[9, 2, 2**32 + 1], [4, -(2**40), 2**63 - 1]])
    batch = _batch(block_table=table)
    assert batch.block_table_tensor.tolist()[0] == [9, 2, 2**31 - 1]
    assert batch.slot_mapping.tolist() == _batch().slot_mapping.tolist()


def test_slots_past_the_tokens_are_dropped() -> None:
    """Padding of a CUDA graph writes nothing (P4), and the tensor of the caller is not written."""
    slots = torch.arange(9)
    batch = _batch().replace(slot_mapping=slots)
    assert batch.slot_mapping.tolist() == [0, 1, 2, 3]
    assert batch.slot_mapping.data_ptr() == slots.data_ptr()
    assert slots.tolist() == list(range(9))


def test_replace_leaves_the_original_batch_unchanged() -> None:
    batch = _batch()
    starts = torch.tensor([0, 1, 1], dtype=torch.int32)
    shorter = batch.replace(num_actual_tokens=1, query_start_loc=starts, query_start_loc_cpu=starts)
    assert shorter.slot_mapping.tolist() == [8]
    assert batch.slot_mapping.tolist() == [8, 16, 17, 18]


def test_unpadded_takes_the_first_requests() -> None:
    batch = _batch(causal=torch.tensor([True, False])).unpadded(1, 1)
    assert (
        batch.num_reqs,
        batch.num_actual_tokens,
        batch.seq_lens.tolist(),
        batch.slot_mapping.tolist(),
    ) == (1, 1, [5], [8])
    assert batch.causal.tolist() == [True]
    with pytest.raises(ContractError, match="num_reqs 1.0 is a float; it must be an integer"):
        _batch().unpadded(1.0, 1)


def test_unsigned_block_ids_are_those_of_signed_ones() -> None:
    """torch compares no unsigned integers of 16 to 64 bits."""
    wanted = _batch(block_table=torch.tensor([[9, 2], [4, 0]])).slot_mapping
    for dtype in (torch.uint16, torch.uint32, torch.uint64):
        table = torch.tensor([[9, 2], [4, 0]]).to(dtype)
        assert torch.equal(_batch(block_table=table).slot_mapping, wanted)


def test_cross_attention_keys_may_be_fewer_than_queries() -> None:
    batch = CommonAttentionMetadata.from_lengths([4], [2], [[0]], 4, "cpu", is_cross_attention=True)
    assert batch.slot_mapping is None and batch.seq_lens.tolist() == [2]


def test_slots_of_cross_attention_are_those_of_the_keys() -> None:
    """The keys of an encoder may be more than the new tokens; all of them are written."""
    batch = CommonAttentionMetadata.from_lengths([1], [4], [[0]], 4, "cpu", is_cross_attention=True)
    assert batch.replace(slot_mapping=torch.arange(4)).slot_mapping.tolist() == [0, 1, 2, 3]
