"""A slice of a batch computes what the whole batch computes."""

from __future__ import annotations

import torch

from attnlib.testing.batch_slicing import slice_batch
from attnlib.testing.case import Case
from attnlib.testing.runner import run_materialized_case
from tests.testing.toy_backend import ToyBackend


def test_a_slice_gives_the_rows_of_the_whole_batch() -> None:
    step = Case(batch="q9s20_q1s33_q4", mask="per_request").materialize()
    whole = run_materialized_case(ToyBackend, step).out.clone()
    part = run_materialized_case(ToyBackend, slice_batch(step, [2, 0], [(1, 4), (3, 9)])).out
    torch.testing.assert_close(part, torch.cat([whole[11:14], whole[3:9]]), rtol=0, atol=1e-7)
