"""FlashInfer's merges and its append to a paged cache."""

from __future__ import annotations

import math

import pytest
import torch

from attnlib.compat import flashinfer
from attnlib.errors import ContractError
from tests.compat.reference import attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LOG2_E = math.log2(math.e)


def _states(parts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Outputs and base-2 LSEs over parts of the keys, and over all of them."""
    torch.manual_seed(0)
    q, k, v = torch.randn(5, 4, 16), torch.randn(12, 2, 16), torch.randn(12, 2, 16)
    found = [attention(q, *kv) for kv in zip(k.chunk(parts), v.chunk(parts), strict=True)]
    out, lse = attention(q, k, v)
    v_parts = torch.stack([x[0] for x in found], 1).float().to(DEVICE)
    s_parts = torch.stack([x[1] * LOG2_E for x in found], 1).float().to(DEVICE)
    return v_parts, s_parts, out.float().to(DEVICE), (lse * LOG2_E).float().to(DEVICE)


def test_merge_state() -> None:
    v, s, out, lse = _states(2)
    merged = flashinfer.merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1])
    torch.testing.assert_close(merged, (out, lse), rtol=1e-5, atol=1e-5)
    mask = torch.tensor([1, 0, 1, 1, 0], dtype=torch.uint8, device=DEVICE)
    for rows in (None, mask):
        v_own, s_own = v[:, 0].clone(), s[:, 0].clone()
        flashinfer.merge_state_in_place(v_own, s_own, v[:, 1], s[:, 1], rows)
        chosen = torch.ones(5, dtype=torch.bool, device=DEVICE) if rows is None else rows.bool()
        torch.testing.assert_close(v_own[chosen], out[chosen], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(s_own[chosen], lse[chosen], rtol=1e-5, atol=1e-5)
        assert torch.equal(v_own[~chosen], v[~chosen, 0]) and torch.equal(
            s_own[~chosen], s[~chosen, 0]
        )


@pytest.mark.parametrize("parts", [1, 3, 4])
def test_merge_states(parts: int) -> None:
    v, s, out, lse = _states(parts)
    torch.testing.assert_close(flashinfer.merge_states(v, s), (out, lse), rtol=1e-5, atol=1e-5)


def test_states_without_keys() -> None:
    """M5: an LSE of -inf stands for no keys; its output is not used, even if it is NaN."""
    v, s, out, lse = _states(1)
    nothing = (torch.full_like(v, torch.nan), torch.full_like(s, -torch.inf))
    both = [torch.cat(x, 1) for x in zip((v, s), nothing, strict=True)]
    torch.testing.assert_close(flashinfer.merge_states(*both), (out, lse), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        flashinfer.merge_state(nothing[0][:, 0], nothing[1][:, 0], v[:, 0], s[:, 0]), (out, lse),
        rtol=1e-5, atol=1e-5,
    )  # fmt: skip
    empty = flashinfer.merge_states(*nothing)
    assert not empty[0].any() and bool((empty[1] == -torch.inf).all())


def test_shapes_that_disagree() -> None:
    v, s, _, _ = _states(2)
    with pytest.raises(ContractError, match="v_a, s_a, v_b and s_b have shapes"):
        flashinfer.merge_state(v[:, 0], s[:, 0], v[:, 1], s[:1, 1])
    with pytest.raises(ContractError, match="v has shape"):
        flashinfer.merge_states(v, s[:, :1])
    with pytest.raises(ContractError, match="mask has shape"):
        flashinfer.merge_state_in_place(
            v[:, 0], s[:, 0], v[:, 1], s[:, 1], torch.ones(2, device=DEVICE)
        )


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("single", [True, False])
def test_append(layout: str, single: bool) -> None:
    """Requests and positions from lengths, then one write; rows without a request are skipped."""
    ints = lambda *x: torch.tensor(x, dtype=torch.int32, device=DEVICE)  # noqa: E731  # short
    page_size, indptr, indices = 4, ints(0, 2, 2, 5), ints(3, 1, 0, 6, 2)
    seq_lens = flashinfer.get_seq_lens(indptr, ints(3, 0, 1), page_size)
    assert seq_lens.tolist() == [7, 0, 9]
    batch, positions = flashinfer.get_batch_indices_positions(ints(0, 3, 3, 5), seq_lens, 7)
    assert batch.tolist() == [0, 0, 0, 2, 2, -1, -1]
    assert positions.tolist() == [4, 5, 6, 7, 8, -1, -1]
    inner = (page_size, 2, 8) if layout == "NHD" else (2, page_size, 8)
    cache = torch.randn(8, 2, *inner, device=DEVICE)
    key, value = torch.randn(2, 7, 2, 8, device=DEVICE)
    wanted = cache.clone()
    logical = wanted if layout == "NHD" else wanted.transpose(2, 3)
    for row, (page, offset) in enumerate(((1, 0), (1, 1), (1, 2), (6, 3), (2, 0))):
        logical[page, 0, offset], logical[page, 1, offset] = key[row], value[row]
    argument = cache if single else (cache[:, 0], cache[:, 1])
    flashinfer.append_paged_kv_cache(
        key, value, batch, positions, argument, indices, indptr, ints(3, 0, 1), layout
    )
    assert torch.equal(cache, wanted)
    with pytest.raises(ContractError, match="append_value is torch.float32"):
        flashinfer.append_paged_kv_cache(
            key, value[:3], batch, positions, argument, indices, indptr, ints(3, 0, 1), layout
        )


@pytest.mark.skipif(DEVICE != "cpu", reason="values on a GPU are checked under ATTNLIB_VALIDATE")
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"positions": [4]}, "positions has 1 elements; it must have 3"),
        ({"batch_indices": [0]}, "batch_indices has 1 elements; it must have 3"),
        ({"positions": [4.0, 5.0, 6.0]}, "positions is torch.float32"),
        ({"positions": [4, 5, 8]}, r"positions\[2\]=8 of request 0 is past the pages"),
        ({"batch_indices": [0, 0, 2]}, r"batch_indices\[2\]=2 is not a request"),
        ({"kv_indices": [3, 9, 0]}, r"positions\[0\]=4 of request 0 is in a page that the cache"),
        ({"kv_indptr": [0, 2, 4]}, "kv_indptr ends at 4, past the 3 rows"),
        ({"kv_indptr": [0, 3, 2]}, "kv_indptr falls from 3 to 2"),
        ({"append_key": (3, 4, 8)}, r"append_key is torch.float32 \(3, 4, 8\)"),
        ({"append_key": (3, 8)}, r"append_key is torch.float32 \(3, 8\)"),
        ({"append_value": (3, 2, 4)}, r"append_value is torch.float32 \(3, 2, 4\)"),
        ({"append_value": (2, 2, 8)}, r"append_value is torch.float32 \(2, 2, 8\)"),
    ],
)
def test_an_append_with_other_rows_is_refused(changed: dict, message: str) -> None:
    """Each wrong argument alone; nothing is written."""
    arguments = {
        "append_key": (3, 2, 8),
        "append_value": (3, 2, 8),
        "batch_indices": [0, 0, 0],
        "positions": [4, 5, 6],
        "kv_indices": [3, 1, 0],
        "kv_indptr": [0, 2, 3],
        **changed,
    }
    call = {
        name: torch.randn(value)
        if isinstance(value, tuple)
        else torch.tensor(value, dtype=None if isinstance(value[0], float) else torch.int32)
        for name, value in arguments.items()
    }
    cache = torch.randn(8, 2, 4, 2, 8)
    before = cache.clone()
    with pytest.raises(ContractError, match=message):
        flashinfer.append_paged_kv_cache(
            **call, paged_kv_cache=cache, kv_last_page_len=torch.tensor([3, 1])
        )
    assert torch.equal(cache, before)


@pytest.mark.skipif(DEVICE != "cpu", reason="values on a GPU are checked under ATTNLIB_VALIDATE")
def test_lists_around_an_append_are_checked() -> None:
    ints = lambda *x: torch.tensor(x, dtype=torch.int32)  # noqa: E731  # short
    for message, call in (
        ("kv_indptr has 2 elements", lambda: flashinfer.get_seq_lens(ints(0, 2), ints(1, 2), 4)),
        ("kv_indptr falls", lambda: flashinfer.get_seq_lens(ints(0, 2, 1), ints(1, 2), 4)),
        ("page_size=0", lambda: flashinfer.get_seq_lens(ints(0, 2), ints(1), 0)),
        (
            "append_indptr ends at 5, past the 4 rows",
            lambda: flashinfer.get_batch_indices_positions(ints(0, 5), ints(9), 4),
        ),
        (
            r"seq_lens\[0\]=3 is below the 5 new tokens",
            lambda: flashinfer.get_batch_indices_positions(ints(0, 5), ints(3), 5),
        ),
    ):
        with pytest.raises(ContractError, match=message):
            call()


def test_an_append_to_memory_that_is_shared_is_refused() -> None:
    """Pages of an expanded cache, and values in the memory of the keys."""
    ints = lambda *x: torch.tensor(x, dtype=torch.int32, device=DEVICE)  # noqa: E731  # short
    key, value = torch.randn(2, 2, 2, 8, device=DEVICE)
    rest = (ints(0, 0), ints(0, 1))
    pages = (ints(3), ints(0, 1), ints(2))
    memory = torch.randn(8, 4, 2, 8, device=DEVICE)
    before = memory.clone()
    for cache, message in (
        ((memory[:1].expand(8, 4, 2, 8), memory), "key_cache has strides .*tokens share memory"),
        ((memory, memory), "key_cache and value_cache share memory"),
        ((memory,), "paged_kv_cache has 1 tensors .*tuple"),
    ):
        with pytest.raises(ContractError, match=message):
            flashinfer.append_paged_kv_cache(key, value, *rest, cache, *pages)
    assert torch.equal(memory, before)
    separate = torch.randn(8, 2, 4, 2, 8, device=DEVICE)
    flashinfer.append_paged_kv_cache(torch._neg_view(key), value, *rest, separate, *pages)
    assert torch.equal(separate[3, 0, :2], -key)


def test_states_of_other_dtypes() -> None:
    v, s, _, _ = _states(2)
    with pytest.raises(ContractError, match="with at least one state"):
        flashinfer.merge_states(v[:, :0], s[:, :0])
    with pytest.raises(ContractError, match="s is torch.float16"):
        flashinfer.merge_states(v, s.half())
    with pytest.raises(ContractError, match="s_b is torch.int32"):
        flashinfer.merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1].int())
