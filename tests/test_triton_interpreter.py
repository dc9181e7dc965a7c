"""The faster interpreter computes what Triton's interpreter computes."""

from __future__ import annotations

import math
import os

import pytest
import torch

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton is not interpreted here", allow_module_level=True)

import triton.language as tl  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

from tests.triton_interpreter import speed_up_interpreter  # noqa: E402

REPLACED = {
    interpreter: ("_patch_lang", "_patch_attr", "_get_np_dtype"),
    interpreter.TensorHandle: ("__init__",),
    interpreter.InterpreterBuilder: ("binary_op",),
    tl.core.block_type: ("__init__",),
    tl.core.tensor: ("__init__",),
    tl.core.dtype: ("__eq__",),
    tl.core: ("_unwrap_if_constexpr",),
    interpreter.TritonSemantic: (
        "computation_type_impl", "broadcast_impl_value", "cast", "binary_op_type_checking_impl",
    ),
    type(interpreter.interpreter_builder): ("create_dot",),
}  # fmt: skip
"""All functions of Triton that the faster interpreter replaces."""


@triton.jit
def _scaled(values, factor: tl.constexpr):
    return tl.where(values > 2, values * factor, values)


@triton.jit
def _kernel(source, target, SIZE: tl.constexpr, FAIL: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    for step in tl.static_range(2):
        tl.static_assert(not FAIL)
        tl.store(target + at, _scaled(tl.load(source + at), 3) + step)


@triton.jit
def _arithmetic_kernel(source, target):
    """Equal numbers in several operations, types and shapes."""
    x = tl.load(source + tl.arange(0, 8))
    y = x / 2 + (x + 2) * 2.0 - 2 / (x + 3.0) + (x > 2) * 2 + x.to(tl.int32) // 2 % 3
    pairs = (x[:, None] - x[None, :]) * (x + 1)[None, :]
    y += tl.where(x[:, None] > x, pairs, 0.5).to(tl.float32).sum(1)
    for step in range(3):
        y += (x[:, None] * 2 + step > 2.0).to(tl.float32).sum(1) * step
    tl.store(target + tl.arange(0, 8), y.to(tl.float32))


@triton.jit
def _product_kernel(left, right, target, ROWS: tl.constexpr, SIZE: tl.constexpr):
    rows, lanes = tl.arange(0, ROWS), tl.arange(0, SIZE)
    a = tl.load(left + rows[:, None] * SIZE + lanes[None, :])
    b = tl.load(right + lanes[:, None] * SIZE + lanes[None, :])
    tl.store(target + rows[:, None] * SIZE + lanes[None, :], tl.dot(a, b, a))


@triton.jit
def _cast_kernel(source, narrow, wide):
    at = tl.arange(0, 16)
    values = tl.load(source + at).to(tl.bfloat16)
    tl.store(narrow + at, values)
    tl.store(wide + at, values.to(tl.float32))
    first = tl.load(source).to(tl.bfloat16)
    tl.store(wide + 16, first.to(tl.float32))


def _run(source: torch.Tensor, fail: bool = False) -> torch.Tensor:
    target = torch.zeros_like(source)
    _kernel[(2,)](source, target, source.shape[0] // 2, fail)
    return target


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8, torch.int32, torch.int64])
def test_results_equal_those_of_triton(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where integers wrap: the overflow check of the interpreter never raises."""
    source = torch.tensor([1, 2, 3, 4, 5, 6, 7, 100], dtype=dtype)
    ours = _run(source)
    assert ours[:3].tolist() == [2, 3, 10]
    sums = [torch.zeros(8) for _ in range(3)]
    for number in range(2):  # the second call uses what the first one cached
        _arithmetic_kernel[(1,)](source, sums[number])
    for owner, names in REPLACED.items():
        for name in names:
            monkeypatch.setattr(owner, name, getattr(owner, name).__wrapped__)
    monkeypatch.setattr(
        interpreter.interpreter_builder, "options", interpreter.InterpreterOptions()
    )
    torch.testing.assert_close(_run(source), ours, rtol=0, atol=0)
    _arithmetic_kernel[(1,)](source, sums[2])
    assert sums[2].any() and torch.equal(sums[0], sums[2]) and torch.equal(sums[1], sums[2])


def test_casts_to_bfloat16_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """All numbers that are not subnormal, in blocks and alone."""
    source = torch.tensor([1.9999, 0.0, -0.0, math.inf, -math.inf, math.nan, 3.39e38, -1.2e-37])
    source = torch.cat([source, torch.randn(8) * 100])
    found = []
    for _ in range(2):
        narrow, wide = torch.zeros(16, dtype=torch.bfloat16), torch.zeros(17)
        _cast_kernel[(1,)](source, narrow, wide)
        found.append((narrow.view(torch.int16), wide.view(torch.int32)))
        own = interpreter.TritonSemantic.cast
        monkeypatch.setattr(interpreter.TritonSemantic, "cast", getattr(own, "__wrapped__", own))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


def test_the_bits_of_a_row_of_a_product_do_not_depend_on_its_place() -> None:
    """M15, which the kernels of OpenBLAS for Haswell and Zen break."""
    left, right = torch.randn(16, 64), torch.randn(64, 64)
    products = []
    for shift in range(16):
        target = torch.empty_like(left)
        _product_kernel[(1,)](left.roll(shift, 0), right, target, 16, 64)
        products.append(target.roll(-shift, 0))
    torch.testing.assert_close(products[0], left @ right + left)
    assert all(torch.equal(products[0], product) for product in products)


@pytest.mark.parametrize("fail", [False, True])
def test_a_launch_leaves_the_language_as_it_was(fail: bool) -> None:
    modules = (tl, tl.core, tl.math, tl.tensor)
    before = [dict(vars(module)) for module in modules]
    if fail:
        with pytest.raises(interpreter.InterpreterError):
            _run(torch.ones(8), fail=True)
    else:
        _run(torch.ones(8))
    for module, members in zip(modules, before, strict=True):
        assert dict(vars(module)) == members, module
    torch.testing.assert_close(_run(torch.ones(8)), torch.full((8,), 2.0))


def test_every_dtype_is_the_one_of_triton() -> None:
    own = interpreter._get_np_dtype.__wrapped__
    names = ("int1", "int8", "uint8", "int32", "uint32", "int64", "float16", "bfloat16", "float8e5")
    for dtype in [getattr(tl, name) for name in names]:
        pointer = tl.pointer_type(dtype)
        for kind in (dtype, pointer, tl.block_type(dtype, [4]), tl.block_type(pointer, [4])):
            assert interpreter._get_np_dtype(kind) == own(kind), kind


def test_shared_types_are_those_of_triton() -> None:
    """Also after a type of the same shape, and invalid shapes are still rejected."""
    for shape in ([4], [tl.constexpr(4)], [4, 1], [1, 4]):
        for dtype in (tl.float16, tl.int32, tl.pointer_type(tl.float16)):
            first, second = (tl.block_type(dtype, shape) for _ in range(2))
            own = tl.block_type.__new__(tl.block_type)
            tl.block_type.__init__.__wrapped__(own, dtype, shape)
            assert first == second == own and (first.numel, first.name) == (own.numel, own.name)
            assert tl.core.tensor(None, second).shape == tl.core.tensor(None, own).shape
    assert tl.block_type(tl.float16, [4]) != tl.block_type(tl.float16, [4, 1])
    assert tl.block_type(tl.float16, [4]) != tl.block_type(tl.float32, [4])
    for _ in range(2):
        with pytest.raises(ValueError, match="power of 2"):
            tl.block_type(tl.float16, [3])


def test_replacing_twice_changes_nothing() -> None:
    before = [getattr(owner, name) for owner, names in REPLACED.items() for name in names]
    speed_up_interpreter(interpreter)
    after = [getattr(owner, name) for owner, names in REPLACED.items() for name in names]
    assert after == before
