"""Make Triton's interpreter faster without changing what it computes.

Triton (3.6 to 3.9) repeats work that does not depend on the call, which takes more than half of the
time of an interpreted kernel:

- Every call of a device function searches `triton.language` for builtins and replaces them, which
  the launch has done before. Here a call inside a launch does this once per set of modules.
- Every operation builds the table from Triton's to numpy's dtypes. Here the result is cached.
- Every sum, difference and product of integers is also computed in int64 for an overflow check, and
  the result is dropped, because the interpreter's options do not enable assertions
  (`options.debug`). Here the check is off unless assertions are on.

`TRITON_INTERPRET=1 python -m tests.triton_interpreter ARGUMENTS` runs an `attnlib` command so.
"""

from __future__ import annotations

import dataclasses
import functools
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
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


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


def main(arguments: list[str]) -> int:
    """Run an `attnlib` command in the faster interpreter."""
    from triton.runtime import interpreter

    from attnlib.cli import main as command

    speed_up_interpreter(interpreter)
    return command(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
