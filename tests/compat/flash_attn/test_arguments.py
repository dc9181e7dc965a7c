"""Values of every argument that no call can have, and empty batches (M7)."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from attnlib.compat import flash_attn
from attnlib.errors import AttnlibError

STARTS, KEY_STARTS = (torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (3, 8))
LENGTHS = torch.tensor([4, 5], dtype=torch.int32)


def calls() -> dict[str, dict[str, Any]]:
    """Function -> arguments of a call."""
    q, k, v = torch.randn(2, 3, 4, 16), *torch.randn(2, 2, 8, 2, 16)
    packed = {"cu_seqlens_q": STARTS, "cu_seqlens_k": KEY_STARTS}
    packed |= {"max_seqlen_q": 3, "max_seqlen_k": 8}
    stacked = torch.stack([k, v], 2)
    return {
        "flash_attn_func": {"q": q, "k": k, "v": v},
        "flash_attn_varlen_func": {"q": q.flatten(0, 1), "k": k.flatten(0, 1), "v": v.flatten(0, 1)}
        | packed,
        "flash_attn_with_kvcache": {
            "q": q, "k_cache": k, "v_cache": v, "cache_seqlens": LENGTHS, "k": k[:, :2],
            "v": v[:, :2], "rotary_cos": torch.randn(8, 4), "rotary_sin": torch.randn(8, 4),
        },
        "flash_attn_qkvpacked_func": {"qkv": torch.randn(2, 5, 3, 4, 16)},
        "flash_attn_kvpacked_func": {"q": q, "kv": stacked},
        "flash_attn_varlen_qkvpacked_func": {
            "qkv": torch.randn(6, 3, 4, 16), "cu_seqlens": STARTS, "max_seqlen": 3,
        },
        "flash_attn_varlen_kvpacked_func": {"q": q.flatten(0, 1), "kv": stacked.flatten(0, 1)}
        | packed,
    }  # fmt: skip


NAMES = [
    (function, name)
    for function in calls()
    for name in inspect.signature(getattr(flash_attn, function)).parameters
]
VALUES = {
    "None": None,
    "text": "x",
    "-1": -1,
    "10**30": 10**30,
    "nan": float("nan"),
    "list": [1, 2],
    "pair of None": (None, None),
    "dict": {},
    "object": object(),
    "dtype": torch.float32,
    "number": torch.tensor(3),
    "lengths": LENGTHS,
    "empty": torch.zeros(0),
    "row": torch.zeros(4),
    "matrix": torch.zeros(2, 3, dtype=torch.int32),
    "heads": torch.randn(2, 3, 4, 16),
    "stacked": torch.randn(2, 5, 4, 4, 16),
    "sparse": torch.randn(2, 3, 4, 16).to_sparse(),
    "meta": torch.randn(2, 3, 4, 16, device="meta"),
}


@pytest.mark.parametrize(("function", "name"), NAMES)
def test_a_value_of_any_type_is_served_or_refused(function: str, name: str) -> None:
    """No error of Python or torch reaches the caller."""
    wrong = []
    for kind, value in VALUES.items():
        try:
            getattr(flash_attn, function)(**{**calls()[function], name: value})
        except AttnlibError as error:
            assert len(str(error)) > 20
        except Exception as error:
            wrong.append(f"{kind}: {error!r}")
    assert not wrong


def test_sines_without_cosines_are_refused() -> None:
    """They rotated nothing, without a message."""
    arguments = {**calls()["flash_attn_with_kvcache"], "rotary_cos": None}
    with pytest.raises(flash_attn.FlashAttentionArgumentError, match="rotary_cos is None"):
        flash_attn.flash_attn_with_kvcache(**arguments)


@pytest.mark.parametrize(("batch", "queries"), [(0, 3), (2, 0)])
def test_nothing_to_attend(batch: int, queries: int) -> None:
    """M7: no requests and no queries, with LSE, over a cache, over blocks and packed."""
    q, cache = torch.randn(batch, queries, 4, 16), torch.randn(3, 8, 2, 16)
    lengths, table = (torch.zeros(shape, dtype=torch.int32) for shape in (batch, (batch, 1)))
    for given in ({"cache_seqlens": lengths, "block_table": table}, {}):
        caches = cache if given else cache[:batch]
        out, lse = flash_attn.flash_attn_with_kvcache(
            q, caches, caches.clone(), return_softmax_lse=True, **given
        )
        assert out.shape == q.shape and lse.shape == (batch, 4, queries)
    starts = torch.zeros(batch + 1, dtype=torch.int32)
    both: tuple[dict[str, Any], ...] = ({"block_table": table}, {})
    for paged in both:
        keys = cache if paged else cache[0, :0]
        paged["return_attn_probs"] = True
        out, lse, _ = flash_attn.flash_attn_varlen_func(
            q.flatten(0, 1), keys, keys.clone(), starts, starts, 0, 0, **paged
        )
        assert out.shape == (0, 4, 16) and lse.shape == (4, 0)
