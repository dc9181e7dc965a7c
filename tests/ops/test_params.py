"""Values that `AttentionParams` refuses: kernels would return different results for them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from attnlib.errors import ContractError
from attnlib.ops.params import AttentionParams
from attnlib.sizes import MAX_LOGITS_SOFT_CAP


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scale": math.nan}, r"scale=nan must be finite \[M3\]"),
        ({"scale": math.inf}, "scale=inf must be finite"),
        ({"window": (-2, 0)}, r"window=\(-2, 0\)"),
        ({"attention_chunk_size": -1}, "attention_chunk_size=-1"),
        ({"logits_soft_cap": -1.0}, "logits_soft_cap=-1.0"),
        ({"logits_soft_cap": math.inf}, "logits_soft_cap=inf .* at most 8192"),
        ({"logits_soft_cap": 1e30}, "logits_soft_cap=1e[+]30"),
        ({"logits_soft_cap": math.nan}, "logits_soft_cap=nan"),
        ({"k_scale": 0.0}, r"k_scale=0.0 must be finite and above 0.*\[M9\]"),
        ({"v_scale": -0.5}, "v_scale=-0.5"),
        ({"v_scale": math.inf}, "v_scale=inf"),
        ({"k_scale": math.nan}, "k_scale=nan"),
    ],
)
def test_values_outside_the_limits_are_refused(changes: dict[str, Any], words: str) -> None:
    """M2, M3, M9."""
    with pytest.raises(ContractError, match=words):
        AttentionParams(**{"scale": 1.0, **changes})
    with pytest.raises(ContractError, match=words):
        replace(AttentionParams(scale=1.0), **changes)


def test_values_at_the_limits() -> None:
    """Negative scales, the largest soft cap, and scales on a device without a synchronization."""
    params = AttentionParams(
        scale=-0.5,
        window=(0, -1),
        logits_soft_cap=MAX_LOGITS_SOFT_CAP,
        k_scale=torch.empty((), device="meta"),
        v_scale=torch.empty(2, device="meta"),
    )
    assert params.logits_soft_cap == MAX_LOGITS_SOFT_CAP
