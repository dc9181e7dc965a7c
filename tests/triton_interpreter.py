"""Make Triton's interpreter faster, and its products independent of where a row stands.

Some kernels of OpenBLAS (Haswell, Zen) compute the last rows of a matrix in another order than the
others, so that the bits of a row depend on its place in the tile. A GPU computes all rows alike,
and batch-invariant kernels rely on it (M15). Here each row is a product of its own. Everything else
is computed as without this module.

Triton (3.6 to 3.9) repeats work that does not depend on the call, which takes more than half of the
time of an interpreted kernel:

- Every call of a device function searches `triton.language` for builtins and replaces them, which
  the launch has done before. Here a call inside a launch does this once per set of modules.
- Every operation builds the table from Triton's to numpy's dtypes. Here the result is cached.
- Every result gets a block type and a shape, which are checked and built element by element. Here
  they are shared by all results of the same type.
- Every operator derives the common type of its operands and broadcasts them, also where nothing
  changes, and is called through three functions that add one argument. Here types are compared by
  identity first, common types, shapes and blocks of one number are cached, and one function
  remains.
- Every result is checked for elements that are wider than its type, by several functions. Here the
  width of a type is computed once.
- A cast follows a chain of 15 conditions on both types. Here a cast between plain numbers calls
  numpy.
- A cast between float32 and bfloat16 takes the number apart and puts it together again. Here it
  moves the bits, which is also right for subnormal numbers.
- Every sum, difference and product of integers is also computed in int64 for an overflow check, and
  the result is dropped, because the interpreter's options do not enable assertions
  (`options.debug`). Here the check is off unless assertions are on.

`TRITON_INTERPRET=1 python -m tests.triton_interpreter ARGUMENTS` runs an `attnlib` command so.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

__all__ = ["main", "speed_up_interpreter"]


def speed_up_interpreter(interpreter: Any) -> None:
    """Replace functions of `triton.runtime.interpreter` in this process by faster ones."""
    if hasattr(interpreter._patch_lang, "__wrapped__"):
        return  # done before
    interpreter._patch_lang = _patch_once(interpreter)
    interpreter._get_np_dtype = _cached_dtypes(interpreter)
    interpreter._patch_attr = _direct_attr(interpreter)
    _share_types(interpreter.tl.core)
    _shorten_results(interpreter)
    _shorten_operators(interpreter.tl.core, interpreter.TritonSemantic)
    _multiply_by_rows(interpreter)
    _shorten_casts(interpreter)
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


class _Kept(dict[Any, Any]):
    """What a type keeps. Triton 3.6 copies types that are constants of kernels, and its tuples,
    which are among the attributes of tensors, cannot be copied."""

    def __deepcopy__(self, memo: object) -> _Kept:
        return self


def _multiply_by_rows(interpreter: Any) -> None:
    """Products of matrices as one product for each row."""
    builder, handle = type(interpreter.interpreter_builder), interpreter.TensorHandle
    own = builder.create_dot

    @functools.wraps(own)
    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        rows = handle(a.data[..., :, None, :], a.dtype)
        columns = handle(b.data[..., None, :, :], b.dtype)
        product = own(self, rows, columns, handle(d.data[..., :, None, :], d.dtype), *rest)
        return handle(product.data[..., 0, :], product.dtype)

    builder.create_dot = create_dot


def _patch_once(interpreter: Any) -> Callable[[Any], Any]:
    """`_patch_lang` that does nothing for modules that the current launch has patched."""
    own, language = interpreter._patch_lang, interpreter.tl
    patched: set[ModuleType] = set()

    @functools.cache
    def modules_of(function: Any) -> frozenset[ModuleType]:
        values = list(function.__globals__.values())
        return frozenset(m for m in (language, language.core) if any(m is v for v in values))

    @functools.wraps(own)
    def patch_lang(function: Any) -> Any:
        modules = modules_of(function)
        if modules and modules <= patched:
            return interpreter._LangPatchScope()
        scope = own(function)
        if not patched:  # the launch itself; its scope ends with the launch
            restore = scope.restore

            def restore_and_forget() -> None:
                restore()
                patched.clear()

            scope.restore = restore_and_forget
        patched.update(modules)
        return scope

    return patch_lang


def _cached_dtypes(interpreter: Any) -> Callable[[Any], Any]:
    """`_get_np_dtype` that looks a scalar type up by its name."""
    own, language = interpreter._get_np_dtype, interpreter.tl
    known: dict[str, Any] = {}

    @functools.wraps(own)
    def get_np_dtype(dtype: Any) -> Any:
        scalar = dtype.element_ty if isinstance(dtype, language.block_type) else dtype
        if isinstance(scalar, language.pointer_type):
            return own(scalar)
        if (found := known.get(scalar.name)) is None:
            found = known[scalar.name] = own(scalar)
        return found

    return get_np_dtype


def _direct_attr(interpreter: Any) -> Callable[..., None]:
    """`_patch_attr` whose replacements call the builtin itself, not its checks of `_semantic`."""
    own = interpreter._patch_attr
    semantic = interpreter.TritonSemantic(interpreter.interpreter_builder)

    @functools.cache
    def direct(member: Any) -> Any:
        builtin = inspect.unwrap(member)

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return builtin(*args, **kwargs)

        return call

    @functools.wraps(own)
    def patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        scope.set_attr(obj, name, direct(member))

    return patch_attr


def _share_types(core: Any) -> None:
    """Build a block type once for each element type and shape, and a shape once for each type."""
    make_block, make_tensor = core.block_type.__init__, core.tensor.__init__

    @functools.wraps(make_block)
    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = tuple([size.value if type(size) is core.constexpr else size for size in shape])
        blocks = element_ty.__dict__.setdefault("_blocks", _Kept())
        if (known := blocks.get(key)) is None:
            make_block(self, element_ty, shape)
            self._sizes, self._results = key, _Kept()
            blocks[key] = self.__dict__
        else:
            self.__dict__ = known  # equal types share their attributes, which never change

    @functools.wraps(make_tensor)
    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        known = type.__dict__.get("_results")
        if known:
            self.__dict__.update(known, handle=handle, type=type)
            return
        make_tensor(self, handle, type)
        type.__dict__["_results"] = _Kept(
            {name: value for name, value in vars(self).items() if name not in ("handle", "type")}
        )

    core.block_type.__init__, core.tensor.__init__ = init_block, init_tensor


def _shorten_results(interpreter: Any) -> None:
    """The check of each result, and operators with two operands, with the width of types cached."""
    handle, builder = interpreter.TensorHandle, interpreter.InterpreterBuilder
    make_handle, operate, pointer = (
        handle.__init__, builder.binary_op, interpreter.tl.pointer_type
    )  # fmt: skip

    def width(dtype: Any) -> int:
        """Bytes of an element; pointers have any number."""
        if (found := dtype.__dict__.get("_bytes")) is None:
            known = not isinstance(dtype, pointer)
            found = dtype._bytes = max(1, dtype.primitive_bitwidth // 8) if known else 16
        return found  # type: ignore[no-any-return]

    @functools.wraps(make_handle)
    def init_handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        if data.itemsize > width(dtype):
            make_handle(self, data, dtype)  # raises the error
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr

    @functools.wraps(operate)
    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        left, right = lhs.data, rhs.data
        if left.dtype.kind == "b" and right.dtype.kind == "b":
            return operate(self, lhs, rhs, op)
        dtype, output = lhs.dtype.scalar, op(left, right)
        if output.itemsize > width(dtype):
            output = output.astype(interpreter._get_np_dtype(dtype))
        return handle(output, dtype)

    handle.__init__, builder.binary_op = init_handle, binary_op


_INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
_PLAIN_CASTS = {
    *((a, b) for a in (*_INTEGERS, "int1", "fp32", "fp64") for b in (*_INTEGERS, "fp32", "fp64")),
    *((a, "fp16") for a in (*_INTEGERS, "int1", "fp32", "fp64")),
    ("fp16", "fp32"),
}
"""Pairs of different types between which numpy's cast is that of the interpreter."""


def _to_bfloat16(data: Any) -> Any:
    """Toward zero, as the interpreter casts; it keeps these numbers as uint16."""
    bits = data.view("uint32").copy()
    bits >>= 16
    return bits.astype("uint16")


def _from_bfloat16(data: Any) -> Any:
    bits = data.astype("uint32")
    bits <<= 16
    return bits.view("float32")


_MOVES = {("fp32", "bf16"): _to_bfloat16, ("bf16", "fp32"): _from_bfloat16}
"""Casts that move bits, by the names of the types."""


def _shorten_casts(interpreter: Any) -> None:
    """Casts to the type of the operand, and between plain numbers."""
    core, semantic = interpreter.tl.core, interpreter.TritonSemantic
    cast = semantic.cast

    @functools.wraps(cast)
    def short_cast(self: Any, input: Any, dst_ty: Any, *rest: Any, **more: Any) -> Any:
        source, target = input.dtype, dst_ty.scalar
        if source is dst_ty:
            return input
        names = source.name, target.name
        is_plain = source is not target and (names in _PLAIN_CASTS or names in _MOVES)
        if more or not is_plain or rest not in ((), (None,)):
            return cast(self, input, dst_ty, *rest, **more)
        sizes = input.type.__dict__.get("_sizes")
        block = target if sizes is None else core.block_type(target, list(sizes))
        data = input.handle.data
        if (move := _MOVES.get(names)) is not None:
            data = move(data)
        else:
            data = data.astype(interpreter._get_np_dtype(target))
        return core.tensor(interpreter.TensorHandle(data, target), block)

    semantic.cast = short_cast


_MOST_CONSTANTS = 512
"""Blocks of one number that are kept."""


def _shorten_operators(core: Any, semantic: Any) -> None:
    """Equality of types, the type of a result and broadcasting, where they are known before."""
    equal, common = core.dtype.__eq__, semantic.computation_type_impl
    broadcast, known = semantic.broadcast_impl_value, {}

    @functools.wraps(equal)
    def same(self: Any, other: Any) -> bool:
        return self is other or equal(self, other)

    @functools.wraps(common)
    def common_type(self: Any, a: Any, a_is_scalar: bool, b: Any, *rest: bool) -> Any:
        key = a.name, a_is_scalar, b.name, *rest
        if (found := known.get(key)) is None:
            found = known[key] = common(self, a, a_is_scalar, b, *rest)
        return found

    shapes: dict[Any, Any] = {}

    @functools.wraps(broadcast)
    def broadcast_value(self: Any, a: Any, b: Any) -> Any:
        sizes, others = a.type.__dict__.get("_sizes"), b.type.__dict__.get("_sizes")
        if others is None:
            return a, b if sizes is None else splat(self, b, sizes)
        if sizes is None:
            return splat(self, a, others), b
        if sizes == others:
            return a, b
        if (shape := shapes.get((sizes, others))) is None:
            a, b = broadcast(self, a, b)
            if len(sizes) == len(others):
                shapes[sizes, others] = a.type.__dict__["_sizes"]
            return a, b
        if sizes != shape:
            a = widened(self, a, shape)
        return a, b if others == shape else widened(self, b, shape)

    def splat(self: Any, x: Any, shape: tuple[int, ...]) -> Any:
        block = core.block_type(x.type.scalar, list(shape))
        return core.tensor(self.builder.create_splat(block, x.handle), block)

    def widened(self: Any, x: Any, shape: tuple[int, ...]) -> Any:
        block = core.block_type(x.type.scalar, list(shape))
        return core.tensor(self.builder.create_broadcast(x.handle, shape), block)

    unwrap, plain = core._unwrap_if_constexpr, (core.tensor, int, float, bool, str, type(None))

    @functools.wraps(unwrap)
    def unwrap_unless_plain(o: Any) -> Any:
        return o if type(o) in plain else unwrap(o)

    check = semantic.binary_op_type_checking_impl
    constants: dict[Any, Any] = {}
    results: dict[Any, Any] = {}

    @functools.wraps(check)
    def operands(self: Any, lhs: Any, rhs: Any, *flags: Any, **more: Any) -> tuple[Any, Any]:
        if type(lhs) is not core.tensor:
            return check(self, lhs, rhs, *flags, **more)
        if type(rhs) is core.tensor:
            names = lhs.dtype.name, rhs.dtype.name
            key: Any = *names, flags, tuple(more.items())
            if (found := results.get(key)) is None:
                left, right = check(self, lhs, rhs, *flags, **more)
                results[key] = tuple(
                    None if operand.dtype.name == name else operand.dtype
                    for operand, name in zip((left, right), names, strict=True)
                )
                return left, right
            lhs = lhs if found[0] is None else self.cast(lhs, found[0])
            rhs = rhs if found[1] is None else self.cast(rhs, found[1])
            return self.broadcast_impl_value(lhs, rhs)
        # A number is the second operand nearly always. -0.0 equals 0.0, but has other bits.
        if type(rhs) is not int and not (type(rhs) is float and rhs > 0):
            return check(self, lhs, rhs, *flags, **more)
        sizes = lhs.type.__dict__.get("_sizes")
        key = sizes, lhs.dtype.name, type(rhs), rhs, flags, tuple(more.items())
        if (found := constants.get(key)) is None:
            left, right = check(self, lhs, rhs, *flags, **more)
            if len(constants) >= _MOST_CONSTANTS:
                constants.clear()
            constants[key] = None if left.dtype is lhs.dtype else left.dtype, right
            return left, right
        return lhs if found[0] is None else self.cast(lhs, found[0]), found[1]

    core.dtype.__eq__, semantic.computation_type_impl = same, common_type
    semantic.broadcast_impl_value = broadcast_value
    semantic.binary_op_type_checking_impl = operands
    core._unwrap_if_constexpr = unwrap_unless_plain


def main(arguments: list[str]) -> int:
    """Run an `attnlib` command in the faster interpreter."""
    from triton.runtime import interpreter

    from attnlib.cli import main as command

    speed_up_interpreter(interpreter)
    gc.freeze()
    gc.set_threshold(100_000)
    return command(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
