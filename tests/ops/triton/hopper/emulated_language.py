"""What the functions of emulated kernels (`emulate`) call."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from triton.experimental.gluon import language as gl

from tests.ops.triton.hopper.emulated_assembly import assembly
from tests.ops.triton.hopper.emulated_memory import (
    EARLY_LOADS,
    LOCAL,
    Barrier,
    Deadlock,
    Memory,
    Products,
    TensorMap,
)
from tests.ops.triton.hopper.emulated_tensors import (
    LAYOUT,
    Chosen,
    Pointer,
    Tensor,
    as_torch,
    raw,
)

__all__ = ["CTA", "REPLACED", "Language", "enter"]


def _mma(a: Any, b: Memory, acc: Tensor, *, use_acc: bool = True, is_async: bool = False) -> Tensor:
    result: Tensor = LOCAL.products.issue(a, b, acc, use_acc)
    if not is_async:
        LOCAL.products.wait(0)
    return result


def _mma_wait(pending: int = 0, deps: Sequence[Tensor] = ()) -> Any:
    LOCAL.products.wait(int(pending))
    return tuple(deps) if len(deps) > 1 else deps[0]


def _mma_v2(a: Tensor, b: Tensor, acc: Tensor) -> Tensor:
    assert a.value.dtype == b.value.dtype, "operands of a product have different dtypes"
    return Tensor((acc.value.double() + a.value.double() @ b.value.double()).float())


def _reduce(x: Tensor, axis: int | None, apply: Callable[..., torch.Tensor]) -> Tensor:
    return Tensor(apply(x.value, axis))


def _max(x: torch.Tensor, axis: int) -> torch.Tensor:
    if not x.is_floating_point():
        return x.amax(axis)
    none = x.isnan()
    return torch.where(none.all(axis), torch.nan, x.masked_fill(none, -torch.inf).amax(axis))


def _pairwise(apply: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda a, b: Tensor(apply(torch.as_tensor(raw(a)), torch.as_tensor(raw(b))))


def _scan(x: Tensor, axis: int, combine: Any) -> Tensor:
    return Tensor(x.value.cumsum(axis).to(x.value.dtype))


def _where(condition: Any, a: Any, b: Any) -> Tensor | Chosen:
    if isinstance(a, Pointer):
        return Chosen(condition, a, b)
    a, b = raw(a), raw(b)
    dtype = next((x.dtype for x in (a, b) if isinstance(x, torch.Tensor)), None)
    a, b = (x if isinstance(x, torch.Tensor) else torch.as_tensor(x, dtype=dtype) for x in (a, b))
    return Tensor(torch.where(torch.as_tensor(raw(condition)), a, b))


def _full(shape: Sequence[int], value: Any, dtype: Any, layout: Any = None) -> Tensor:
    return Tensor(torch.full(tuple(shape), value, dtype=as_torch(dtype)))


def _allocate(dtype: Any, shape: Sequence[int], layout: Any) -> Memory:
    if isinstance(layout, _BarrierLayout):
        content: Any = _Barriers([[Barrier()] for _ in range(shape[0])])
        return Memory(content)
    to = as_torch(dtype)
    size = torch.Size(shape).numel() * to.itemsize
    # NaN where nothing has been written.
    return Memory(torch.full((size,), 0xFF, dtype=torch.uint8).view(to).view(*shape).clone())


class _BarrierLayout:
    pass


class _Barriers(list[Any]):
    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index)[0]


class CTA:
    def __init__(self, program: tuple[int, int, int], grid: tuple[int, int, int]) -> None:
        self.program, self.grid = program, grid
        self.consumers = threading.Barrier(2)


def _specialize(partitions: Any, warps: Sequence[int], registers: Any) -> None:
    cta, failures = LOCAL.cta, []

    def run(number: int, function: Any, args: Any, num_warps: int) -> None:
        enter(cta, f"partition {number} of CTA {cta.program}", num_warps)
        try:
            function(*args)
            assert not LOCAL.products.issued, "products were issued and not waited for"
        except BaseException as error:
            failures.append(error)

    counts = [LOCAL.num_warps, *warps]
    threads = [
        threading.Thread(target=run, args=(number, function, args, count), daemon=True)
        for number, ((function, args), count) in enumerate(zip(partitions, counts, strict=True))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise min(failures, key=lambda error: isinstance(error, Deadlock))


def enter(cta: CTA, name: str, num_warps: int) -> None:
    LOCAL.cta, LOCAL.partition, LOCAL.num_warps = cta, name, num_warps
    LOCAL.products, LOCAL.waited = Products(), False


def _arrive_after_copies(barrier: Barrier, increment_count: bool = True) -> None:
    barrier.update(32 * LOCAL.num_warps, 0)


def _load_box(tensor_map: TensorMap, place: Any, barrier: Barrier, target: Memory) -> None:
    if not LOCAL.waited:
        EARLY_LOADS.add(LOCAL.partition.partition(" of ")[0])
    barrier.update(0, -tensor_map.load(place, target))


def _copy_to_shared(target: Memory, pointers: Pointer | Chosen, mask: Any = None) -> None:
    target.store(pointers.load(mask, 0))


def _atomic_add(pointer: Pointer, value: Any, mask: Any = None, sem: str = "") -> Tensor:
    before = pointer.load(mask, 0)  # CTAs run one after the other, and one partition counts
    pointer.store(before + value, mask)
    return before


def _split(x: Tensor) -> tuple[Tensor, Tensor]:
    assert x.shape[-1] == 2
    return Tensor(x.value[..., 0]), Tensor(x.value[..., 1])


_MATH: dict[str, Any] = {
    "div_rn": lambda a, b: Tensor(torch.as_tensor(raw(a)) / torch.as_tensor(raw(b))),
}
_LANGUAGE: dict[str, Any] = {
    "math": types.SimpleNamespace(**_MATH),
    "debug_barrier": lambda: None,
    "fma": lambda a, b, c: a * b + c,
    "sqrt_rn": lambda x: Tensor(torch.sqrt(torch.as_tensor(raw(x)))),
    "arange": lambda start, end, layout=None: Tensor(torch.arange(start, end, dtype=torch.int32)),
    "full": _full,
    "zeros": lambda shape, dtype, layout=None: _full(shape, 0, dtype),
    "zeros_like": lambda x: Tensor(torch.zeros_like(x.value)),
    "where": _where,
    "maximum": _pairwise(torch.fmax),
    "minimum": _pairwise(torch.fmin),
    "max": lambda x, axis: _reduce(x, axis, _max),
    "sum": lambda x, axis: _reduce(x, axis, lambda x, axis: x.sum(axis).to(x.dtype)),
    "xor_sum": lambda x, axis: Tensor(torch.bitwise_xor(*x.value.unbind(axis))),  # of two
    "abs": lambda x: Tensor(x.value.abs()),
    "cdiv": lambda a, b: Tensor(torch.as_tensor((raw(a) + raw(b) - 1) // raw(b))),
    "exp": lambda x: Tensor(torch.exp(torch.as_tensor(raw(x)))),
    "rsqrt": lambda x: Tensor(torch.rsqrt(torch.as_tensor(raw(x)))),
    "exp2": lambda x: Tensor(torch.exp2(torch.as_tensor(raw(x)))),
    "log2": lambda x: Tensor(torch.log2(x.value)),
    "load": lambda pointer, mask=None, other=None, **_: pointer.load(mask, other),
    "store": lambda pointer, value, mask=None: pointer.store(value, mask),
    "atomic_add": _atomic_add,
    "expand_dims": lambda x, axis: Tensor(x.value.unsqueeze(axis)),
    "permute": lambda x, order: Tensor(x.value.permute(*order)),
    "reshape": lambda x, shape: Tensor(x.value.reshape(tuple(shape))),
    "broadcast": lambda a, b: (Tensor(a.value.expand(b.value.shape)), b),
    "gather": lambda x, index, axis: Tensor(x.value.gather(axis, index.value.long())),
    "join": lambda a, b: Tensor(torch.stack((a.value, b.value), -1)),
    "split": _split,
    "convert_layout": lambda x, layout, assert_trivial=False: x,
    "associative_scan": _scan,
    "program_id": lambda axis: Tensor(torch.tensor(LOCAL.cta.program[axis], dtype=torch.int32)),
    "num_programs": lambda axis: Tensor(torch.tensor(LOCAL.cta.grid[axis], dtype=torch.int32)),
    "num_warps": lambda: LOCAL.num_warps,
    "static_range": range,
    "allocate_shared_memory": _allocate,
    "inline_asm_elementwise": assembly,
    "warp_specialize": _specialize,
    "min": lambda x, axis: _reduce(x, axis, lambda x, axis: x.amin(axis)),
    "static_assert": lambda condition, *_: None,
    "pointer_type": lambda element: types.SimpleNamespace(element_ty=element),
}
REPLACED: dict[str, Any] = {
    "fence_async_shared": lambda: None,
    "partition_barrier": lambda: None,
    "reinterpret": lambda memory, dtype, shape, layout: memory.reinterpret(dtype, shape),
    "mma_v2": _mma_v2,
    "warpgroup_mma": _mma,
    "warpgroup_mma_wait": _mma_wait,
    "load_box": _load_box,
    "copy_to_shared": _copy_to_shared,
    "arrive_after_copies": _arrive_after_copies,
    "commit_copies": lambda: None,
    "wait_for_copies": lambda pending=0: None,
    "gdc_wait": lambda: None,
    "gdc_launch_dependents": lambda: None,
    "mbarrier": types.SimpleNamespace(
        MBarrierLayout=_BarrierLayout,
        init=lambda barrier, count: barrier.init(count),
        expect=lambda barrier, size: barrier.update(1, int(size)),
        wait=lambda barrier, parity: barrier.wait(parity),
        arrive=lambda barrier, count=1: barrier.update(count, 0),
    ),
}


class Language:
    """`gluon.language` and `triton.language` for emulated functions."""

    def __getattr__(self, name: str) -> Any:
        if name in _LANGUAGE:
            return _LANGUAGE[name]
        if name.endswith("Layout"):
            return LAYOUT
        return getattr(gl, name)  # dtypes
