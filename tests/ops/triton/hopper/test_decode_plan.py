"""How the Hopper decode divides requests over the chip, and how its kernels sum products."""

from __future__ import annotations

import pytest

from attnlib.ops.triton.hopper.decode_grid import are_mostly_whole, token_parts, whole_requests
from tests.ops.triton.cross_compile import compile_in_process


@pytest.mark.parametrize(
    ("per_head", "num_reqs", "expected"),
    [
        (33, 48, 24),  # two requests each, on 96 of 132 multiprocessors
        (33, 66, 33),
        (33, 49, 33),  # an odd number of requests
        (33, 44, 33),  # 22 consumers would be less than 0.7 of the chip
        (33, 33, 33),
        (33, 1, 33),
        (16, 24, 12),
        (16, 48, 16),
        (1, 5, 1),
    ],
)
def test_whole_requests(per_head: int, num_reqs: int, expected: int) -> None:
    assert whole_requests(per_head, num_reqs, 1, quantized=False) == expected


def test_verification_uses_all_consumers() -> None:
    """24 requests of 8 tokens took 12% longer on three quarters of the chip."""
    assert whole_requests(16, 24, 8, quantized=False) == 16


@pytest.mark.parametrize(
    ("num_reqs", "expected"),
    [
        (128, 32),
        (256, 32),
        (60, 30),
        (58, 33),  # 29 consumers would be less than 0.9 of the chip
        (48, 33),
    ],
)
def test_quantized_caches_need_most_of_the_chip(num_reqs: int, expected: int) -> None:
    assert whole_requests(33, num_reqs, 1, quantized=True) == expected


def test_programs_that_combine_are_resident_together() -> None:
    """Four on each multiprocessor where most requests have one split; 32 tokens each at most."""
    assert [are_mostly_whole(reqs, 132) for reqs in (1, 64, 65, 512)] == [False, False, True, True]
    for tokens in (1, 5, 127, 128, 200, 512, 5000):
        for programs in (1, 8, 16, 64):
            assert token_parts(tokens, {}, programs, 132) == tokens
            parts = token_parts(tokens, {"TOKENS": 32}, programs, 132)
            each = -(-tokens // parts)
            assert each <= 32 and (parts - 1) * each < tokens <= parts * each
            assert parts * programs <= 4 * 132 or parts == -(-tokens // 32)


@pytest.mark.slow
def test_sums_of_products_have_one_form() -> None:
    """`a * b + c * d` becomes a fused operation, whose rounded product LLVM chooses per kernel:
    a kernel that rotates (P15) and the other one would differ in the last bit."""
    pytest.importorskip("triton")
    cases = [
        *("decode-128-int8-rotated", "decode-128-int8-rotated-workers", "decode-128-mxfp4-rotated"),
        *("decode-128-int8-int4-rotated-warp", "decode-128-int4", "decode-128-int4-warp"),
    ]
    found = compile_in_process("tests.ops.triton.hopper.cross_compile", *cases)
    assert {result["case"]: result.get("sums", result) for result in found} == dict.fromkeys(
        cases, []
    )
