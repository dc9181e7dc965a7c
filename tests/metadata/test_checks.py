"""What every builder refuses without ATTNLIB_VALIDATE: dtypes, shapes and bounds of a batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import attnlib
from attnlib.backends.base import AttentionBackend
from attnlib.errors import ContractError
from attnlib.metadata.groups import StateGroupBatch
from tests.backends.adapters import install_adapters
from tests.backends.fake_flash_attn import Recorder

SPEC = attnlib.AttentionSpec(
    num_heads=4, num_kv_heads=2, head_size=64, dtype=torch.float16, block_size=16
)
BACKENDS = ["torch", "triton", "flash_attn", "flashinfer", "prefill:torch,decode:triton"]


@pytest.fixture
def adapters(monkeypatch: pytest.MonkeyPatch) -> dict[str, type[AttentionBackend]]:
    """The adapters over fakes of their packages."""
    return install_adapters(monkeypatch, Recorder())


def _builder(name: str, adapters: dict[str, type[AttentionBackend]]) -> Any:
    backend = adapters.get(name) or attnlib.get_attn_backend(SPEC, name, "cpu")
    return backend.make_builder(SPEC, "cpu")


def _common() -> attnlib.CommonAttentionMetadata:
    return attnlib.CommonAttentionMetadata.from_lengths(
        [1, 3], [20, 18], [[1, 2], [3, 4]], 16, "cpu"
    )


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no table": ({"block_table_tensor": None}, r"attn_type=decoder reads the cache .*\[P3\]"),
    "starts int64": (
        {"query_start_loc": torch.tensor([0, 1, 4])},
        r"query_start_loc is int64 \[3\] on cpu; it must be int32 \[3\] for num_reqs=2",
    ),
    "starts of three": (
        {"query_start_loc": torch.tensor([0, 1, 2, 4], dtype=torch.int32)},
        r"query_start_loc is int32 \[4\]",
    ),
    "host starts": (
        {"query_start_loc_cpu": torch.tensor([0, 4], dtype=torch.int32)},
        r"query_start_loc_cpu is int32 \[2\]",
    ),
    "float lengths": ({"seq_lens": torch.tensor([20.0, 18.0])}, r"seq_lens is float32 \[2\]"),
    "lengths of one": (
        {"seq_lens_cpu": torch.tensor([20], dtype=torch.int32)},
        r"seq_lens_cpu is int32 \[1\]",
    ),
    "lengths elsewhere": (
        {"seq_lens": torch.zeros(2, dtype=torch.int32, device="meta")},
        r"seq_lens is int32 \[2\] on meta",
    ),
    "num_reqs": ({"num_reqs": 1}, r"query_start_loc is int32 \[3\] on cpu; .* num_reqs=1"),
    "table int64": (
        {"block_table_tensor": torch.tensor([[1, 2], [3, 4]])},
        r"block_table_tensor is int64 \[2, 2\] on cpu; it must be int32 \[2, max_blocks\]",
    ),
    "table of one row": (
        {"block_table_tensor": torch.tensor([[1, 2]], dtype=torch.int32)},
        r"block_table_tensor is int32 \[1, 2\]",
    ),
    "slots int32": (
        {"slot_mapping": torch.zeros(4, dtype=torch.int32)},
        r"slot_mapping is int32 \[4\] on cpu; it must be int64 \[4\]",
    ),
    "slots in rows": (
        {"slot_mapping": torch.zeros(2, 2, dtype=torch.int64)},
        r"slot_mapping is int64 \[2, 2\]",
    ),
    "max_query_len": (
        {"max_query_len": 2},
        "max_query_len=2 is below the query length 3 of request 1: it must be an upper bound",
    ),
    "max_seq_len": ({"max_seq_len": 19}, "max_seq_len=19 is below seq_lens 20 of request 0"),
    "num_actual_tokens": (
        {"num_actual_tokens": 3},
        "query_start_loc ends at 4, but num_actual_tokens=3",
    ),
    "causal int64": ({"causal": torch.tensor([1, 0])}, r"causal is int64 \[2\].* bool \[2\]"),
    "causal of three": (
        {"causal": torch.tensor([True, True, True])},
        r"causal is bool \[3\]",
    ),
    "bias too narrow": ({"query_bias": torch.zeros(4, 2)}, r"query_bias is float32 \[4, 2\]"),
    "bias float16": (
        {"query_bias": torch.zeros(4, 3, dtype=torch.float16)},
        r"query_bias is float16 .*it must be float32 \[4, >= 3\]",
    ),
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_builder_refuses_the_same_batches(
    backend: str, adapters: dict[str, type[AttentionBackend]]
) -> None:
    builder = _builder(backend, adapters)
    builder.build(0, _common())
    for name, (changes, message) in REFUSED.items():
        # Builders that need lengths on the host compare them with those on the device first.
        with pytest.raises(ContractError, match=f"{message}|pass equal values, or .*_cpu=None"):
            builder.build(0, _common().replace(**changes))
            pytest.fail(f"{backend} accepts: {name}")
    for value in (None, {"seq_lens": [1]}):
        with pytest.raises(
            ContractError, match="Metadata: use CommonAttentionMetadata.from_lengths"
        ):
            builder.build(0, value)
    states: Any = StateGroupBatch(_common(), (), None)
    with pytest.raises(ContractError, match=r"call its method build\(builder\)"):
        builder.build(0, states)


def test_inconsistent_values_are_found_by_every_builder(
    adapters: dict[str, type[AttentionBackend]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """ATTNLIB_VALIDATE=1; tests/debug/test_validation.py has all kinds."""
    monkeypatch.setenv("ATTNLIB_VALIDATE", "1")
    wrong = _common()
    wrong.seq_lens = wrong.seq_lens_cpu = torch.tensor([20, 2], dtype=torch.int32)
    for backend in BACKENDS:
        builder = _builder(backend, adapters)
        builder.build(0, _common())
        with pytest.raises(ContractError, match=r"seq_lens\[1\]=2 is below the 3 new tokens"):
            builder.build(0, wrong)
