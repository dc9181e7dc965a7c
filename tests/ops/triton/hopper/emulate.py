"""Run Gluon kernels on a CPU, without Triton's compiler: the functions of a kernel as Python.

Partitions of a CTA are threads; tensors and shared memory are torch tensors without layouts; CTAs
run one after the other. Waits for mbarriers count phases, arrivals and bytes, so that a missing
arrival or a wrong parity ends in `Deadlock`. A product is computed when it is waited for, from the
shared memory at that time; its result cannot be read before. What is not emulated: layouts, the
order of memory accesses of one partition's threads, fences, and times.
"""

from __future__ import annotations

import ctypes
import json
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.runtime.interpreter import InterpretedFunction

from tests.ops.triton.hopper.emulated_language import CTA, REPLACED, Language, enter
from tests.ops.triton.hopper.emulated_memory import QueryMap, TensorMap
from tests.ops.triton.hopper.emulated_tensors import Pointer, Tensor

__all__ = ["launch", "print_cases", "run_emulated"]

_EMULATED: dict[int, Any] = {}
_FUNCTIONS = (triton.runtime.JITFunction, InterpretedFunction)
"""Of Gluon, and of Triton in a process that interprets it."""
_MODULES = ("attnlib.", "triton.experimental.gluon.language.nvidia.")
"""Beginnings of the names of modules whose functions are emulated or replaced."""


def _aggregate(cls: Any) -> Any:
    """An emulated class of an aggregate: fields and methods."""
    names = list(cls.__annotations__)

    def create(self: Any, *args: Any, **kwargs: Any) -> None:
        values = dict(zip(names, args, strict=False)) | kwargs
        assert values.keys() == set(names), f"{cls.__name__} has the fields {names}"
        self.__dict__.update(values)

    methods = {
        name: _emulated(method)
        for name in dir(cls)
        if isinstance(method := getattr(cls, name, None), triton.runtime.JITFunction)
    }
    return type(cls.__name__, (), {"__init__": create, **methods})


def _returned(value: Any) -> Any:
    """A result of a function, whose numbers are tensors."""
    if isinstance(value, tuple):
        items = map(_returned, value)
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return Tensor(torch.tensor(value, dtype=torch.int32)) if type(value) is int else value


def _numbers(*limits: Any) -> Iterator[Tensor]:
    """The numbers of a loop at run time."""
    return (Tensor(torch.tensor(x, dtype=torch.int32)) for x in range(*map(int, limits)))


def _names(code: types.CodeType) -> Iterator[str]:
    """The names that a function and its comprehensions read."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _function(function: Callable[..., Any]) -> Callable[..., Any]:
    known = function.__globals__
    found: dict[str, Any] = {"__builtins__": known["__builtins__"], "range": _numbers}
    body = types.FunctionType(
        function.__code__, found, function.__name__, function.__defaults__, function.__closure__
    )
    body.__kwdefaults__ = function.__kwdefaults__

    def result(*args: Any, **kwargs: Any) -> Any:
        return _returned(body(*args, **kwargs))

    _EMULATED[id(function)] = result
    for name in _names(function.__code__):
        if name in known:
            found[name] = REPLACED.get(name, _emulated(known[name]))
    defaults = function.__defaults__ or ()
    body.__defaults__ = tuple(_emulated(value) for value in defaults)
    return result


class _Module:
    """A module whose functions are emulated."""

    def __init__(self, module: types.ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return REPLACED.get(name, _emulated(getattr(self._module, name)))


def _emulated(value: Any) -> Any:
    """What stands for a global value of a kernel's module."""
    if id(value) in _EMULATED:
        return _EMULATED[id(value)]
    if value is gl or getattr(value, "__name__", "") == "triton.language":
        return Language()
    if isinstance(value, gl.constexpr):
        return value.value
    if isinstance(value, _FUNCTIONS):
        known = _EMULATED.get(id(value.fn))
        result = known or _function(value.fn)
    elif isinstance(value, types.ModuleType) and value.__name__.startswith(_MODULES):
        result = _Module(value)
    elif isinstance(value, type) and "__triton_aggregate__" in dir(value):
        result = _aggregate(value)
    else:
        return value
    _EMULATED[id(value)] = result
    return result


def launch(
    kernel: Any, grid: tuple[int, int, int], *args: Any, num_warps: int = 4, **constants: Any
) -> None:
    """Run a kernel, CTA after CTA."""
    run = _emulated(kernel)
    numbers = [Tensor(torch.tensor(x, dtype=torch.int32)) if type(x) is int else x for x in args]
    for x in range(grid[0]):
        for y in range(grid[1]):
            for z in range(grid[2]):
                enter(CTA((x, y, z), grid), f"CTA {(x, y, z)}", num_warps)
                run(*numbers, **constants)


def run_emulated(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
    """In place of `JITFunction.run`."""
    constants = {name: value for name, value in options.items() if name in self.arg_names}
    launch(self, tuple(grid), *map(_argument, args), num_warps=options["num_warps"], **constants)


def _argument(value: Any) -> Any:
    """An argument of a launch as `launch` takes it."""
    if isinstance(value, torch.Tensor):
        return Pointer.of(value)
    if not hasattr(value, "block_shape"):
        return value
    dtype, shape, strides = value.base.dtype, list(value.shape), list(value.strides)
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    memory = (ctypes.c_uint8 * ((last + 1) * dtype.itemsize)).from_address(value.base.data_ptr())
    tensor = torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)
    if len(shape) == 3:
        return QueryMap(tensor, value.block_shape)
    return TensorMap(tensor, value.block_shape[-2:])


def print_cases(cases: Iterable[str], emulate: Callable[[str], dict[str, Any]]) -> None:
    """The command of a module of cases: a JSON line for each case that it names, or for all."""
    torch.set_num_threads(1)
    for name in sys.argv[1:] or cases:
        print(json.dumps({"case": name, **emulate(name)}), flush=True)
