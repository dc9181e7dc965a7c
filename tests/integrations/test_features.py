"""The table of features inside other engines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from attnlib.integrations.features import ENGINES, FEATURES, Feature, features_of

ROOT = Path(__file__).parents[2]
REASONS = "refused: ", "absent: ", "not run: ", "not compared: "

_ADAPTER, _LATENT = "tests/hosts/vllm_adapter.py", "tests/hosts/vllm_latent_adapter.py"
_SGLANG = "tests/integrations/sglang/test_backend.py"
_MODELS = f"{_SGLANG}::test_models_and_options_that_are_not_supported_are_refused_with_all_reasons"
BY_THE_ENGINE = {
    ("vllm", "int4 per group, mxfp4"), ("vllm", "keys and values in different formats"),
    ("sglang", "EAGLE drafts in chains"), ("sglang", "gpt-oss, Llama 4, EXAONE 4"),
    ("sglang", "state layers"),
}  # fmt: skip
"""What the engine refuses before it asks attnlib."""
REFUSALS = {
    ("vllm", "decode context parallelism: masks by batch, pages with scales"): (
        "tests/hosts/vllm_masks.py"
        "::test_masks_and_pages_with_scales_over_a_distributed_cache_are_refused"
    ),
    ("vllm", "prefill context parallelism elsewhere"): f"{_ADAPTER}::test_one_refusal_of_each_kind",
    ("vllm", "KV connectors of sparse latents"): f"{_LATENT}::test_refusals",
    ("vllm", "quantized output"): f"{_ADAPTER}::test_scaled_output_is_refused",
    ("sglang", "Gemma 4"): (
        "tests/hosts/test_sglang.py::test_sglang_finds_attnlib_and_serves_its_batches"
    ),
    ("sglang", "cross-attention"): _MODELS,
    ("sglang", "decode context parallelism"): _MODELS,
    ("sglang", "pools for windows"): _MODELS,
}
"""Engine and feature -> the test that attnlib refuses it."""


def _is_there(cell: str) -> bool:
    """Whether the file of a cell exists, and has its test."""
    file, _, name = cell.partition("::")
    text = (ROOT / file).read_text()
    return not file.endswith(".py") or re.search(rf"^def {name}\(", text, re.MULTILINE) is not None


@pytest.mark.parametrize("row", FEATURES, ids=lambda row: f"{row.engine} {row.name}")
def test_each_cell_is_a_test_or_has_a_reason(row: Feature) -> None:
    assert len(row.cells) == len(ENGINES[row.engine])
    assert not row.name.startswith("the same")  # `attnlib doctor` leaves rows out
    for cell in row.cells:
        assert cell.startswith(REASONS) or _is_there(cell), cell


def test_each_refusal_of_attnlib_has_a_test() -> None:
    refused = {
        (row.engine, row.name)
        for row in FEATURES
        if any(cell.startswith("refused: ") for cell in row.cells)
    }
    assert refused == BY_THE_ENGINE | REFUSALS.keys()
    for cell in REFUSALS.values():
        assert _is_there(cell), cell


def test_features_of_a_version() -> None:
    older, newer = (features_of("vllm", version) for version in ("0.26.0", "0.33"))
    assert older.keys() == newer.keys() and older != newer
    assert features_of("vllm", "0.3.0") == features_of("vllm", "0.330.0") == {}
