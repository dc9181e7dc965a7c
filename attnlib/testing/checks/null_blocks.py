"""N5: blocks behind a window are replaced by one null block, and hold anything (P12).

The same case runs with a block table that names all blocks, and with one in which blocks that no
query sees are a block of zeros. The freed blocks are poisoned. The results must have the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.budget import compare_bits
from attnlib.testing.case import Case
from attnlib.testing.check import Check, CheckCase
from attnlib.testing.materialized_case import MaterializedCase
from attnlib.testing.runner import run_materialized_case

__all__ = ["CHECKS"]


def _first_visible(case: Case, position: int) -> int:
    """The first key that the query at `position` sees."""
    if case.attention_chunk_size:
        return position // case.attention_chunk_size * case.attention_chunk_size
    assert case.sliding_window is not None
    return max(position - case.sliding_window + 1, 0)


def _free_blocks(step: MaterializedCase) -> int:
    """Put the null block in the place of blocks behind the window, and poison these blocks.

    Returns:
        The number of freed entries.
    """
    inputs, case = step.inputs, step.case
    batch, size = inputs.batch, case.block_size
    views = (inputs.cache.key, inputs.cache.value)
    rows = [
        inputs.block_table[request, : -(-length // size)].tolist()
        for request, length in enumerate(batch.seq_lens)
    ]
    null = next(n for n in range(views[0].shape[0]) if all(n not in row for row in rows))
    freed, held = set(), set()
    count = 0
    for request, row in enumerate(rows):
        first = batch.seq_lens[request] - batch.query_lens[request]
        dead = min(_first_visible(case, first) // size, len(row))
        freed.update(row[:dead])
        held.update(row[dead:])
        inputs.block_table[request, :dead] = null
        count += dead
    poison = float("nan") if case.poison == "nan" else 3.0
    for view in views:
        view[null] = 0.0
        for block in freed - held:
            view[block] = poison
    return count


def _check(target: BackendUnderTest, case: Case) -> str:
    whole = run_materialized_case(target.backend, case.materialize(target.device, kv_written=False))
    step = case.materialize(target.device, kv_written=False)
    if not _free_blocks(step):
        return f"no block of this case is behind a window: the check has no effect | case: {case}"
    freed = run_materialized_case(target.backend, step)
    comparisons = [compare_bits(freed.out, whole.out, "out")]
    if freed.lse is not None and whole.lse is not None:
        comparisons.append(compare_bits(freed.lse, whole.lse, "lse"))
    errors = [str(comparison) for comparison in comparisons if not comparison.passed]
    return f"null blocks change the result: {'; '.join(errors)} | case: {case}" if errors else ""


def _cases(target: BackendUnderTest) -> Iterator[CheckCase]:
    size = target.base_case.block_size
    long = f"q1s{9 * size + 3}_q1s{3 * size}_q{size}s{6 * size + 1}_q1s1"
    for name, features in (
        ("window", {"sliding_window": size + 3}),
        ("short-window", {"sliding_window": 2}),
        ("chunks", {"attention_chunk_size": 2 * size}),
    ):
        case = target.case(batch=long, **features)
        yield CheckCase(name, partial(_check, target, case), case)


CHECKS = (Check("N5", "null blocks behind a window", _cases),)
