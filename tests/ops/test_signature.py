"""`tensor_check`: layouts with and without a free dimension."""

from __future__ import annotations

import pytest
import torch

from attnlib.ops.signature import tensor_check

KEYS = torch.zeros(2, 4, 10, 16)


@pytest.mark.parametrize(
    ("other", "fixed", "free"),
    [
        (torch.zeros(2, 4, 10, 16), True, True),
        (torch.zeros(2, 4, 12, 16), False, True),
        (torch.zeros(2, 4, 20, 16)[:, :, :10], False, True),
        (torch.zeros(2, 3, 10, 16), False, False),
        (torch.zeros(1, 4, 10, 16), False, False),
        (torch.zeros(2, 4, 10, 8), False, False),
        (torch.zeros(2, 10, 4, 16).transpose(1, 2), False, False),
        (torch.zeros(2, 4, 16, 10).mT, False, False),
        (torch.zeros(2, 4, 10, 16, dtype=torch.float64), False, False),
    ],
)
def test_the_free_dimension_has_any_size(other: torch.Tensor, fixed: bool, free: bool) -> None:
    exact, growing = tensor_check(KEYS), tensor_check(KEYS, free=(2,))
    assert exact is not None and growing is not None
    assert (exact(other), growing(other)) == (fixed, free)


def test_a_tensor_without_a_free_dimension_is_compared_completely() -> None:
    check = tensor_check(KEYS, KEYS, free=(None, 2))
    longer = torch.zeros(2, 4, 12, 16)
    assert check is not None and check(KEYS, longer) and not check(longer, KEYS)


def test_tensors_with_a_gradient_have_no_check() -> None:
    assert tensor_check(torch.zeros(2, requires_grad=True)) is None
