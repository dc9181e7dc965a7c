"""`attnlib demo` over saved models with state layers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from attnlib.cli.main import main
from tests.example_checkpoint import save
from tests.integrations.transformers.test_state_mixers import built, skip_in_older_releases


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_next", "bamba", "lfm2", "mamba2", "minimax"])
def test_all_tokens_are_those_of_the_model(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """In chunks, mixed batches and after preemption, from a folder, whose configuration has lists
    where that of a new model has tuples."""
    skip_in_older_releases(name)
    save(built(name), tmp_path)
    assert main(["demo", "--device", "cpu", "--model", str(tmp_path)]) == 0
    # 12 requests of 24 tokens, but for those that write a line break.
    found = re.search(r"PASSED: (\d+)/(\d+) tokens", capsys.readouterr().out)
    assert found is not None and found[1] == found[2] and 200 < int(found[1]) <= 288
