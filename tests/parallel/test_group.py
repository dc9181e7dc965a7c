"""Groups of ranks (X8)."""

from __future__ import annotations

import pytest

from attnlib.errors import ContractError
from attnlib.parallel import RankGroup
from tests.parallel.group_cases import CASES
from tests.parallel.workers import results


def test_a_group_needs_processes() -> None:
    with pytest.raises(ContractError, match="call init_process_group before RankGroup"):
        RankGroup()


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_differ_leave_or_are_late(world_size: int) -> None:
    for name, texts in results("tests.parallel.group_cases", [*CASES], world_size).items():
        assert not any(texts), (name, texts)
