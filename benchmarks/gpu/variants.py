"""The `triton` backend restricted to one family of kernels, to verify and measure each of them.

python -m attnlib verify benchmarks/gpu/variants.py:Hopper      # Hopper kernels for all decodes
python -m attnlib verify benchmarks/gpu/variants.py:LongContext # Hopper kernels of long contexts
python -m attnlib verify benchmarks/gpu/variants.py:Portable    # portable kernels on every chip
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attnlib.backends.base import AttentionImpl
from attnlib.backends.triton import TritonBackend
from attnlib.ops.triton.heuristics import hopper_tiles

__all__ = ["Hopper", "LongContext", "Portable"]


class Hopper(TritonBackend):
    """The Hopper kernels for every call that they support, also where they are slower."""

    config: ClassVar[Mapping[str, Any]] = {"kernels": "hopper"}

    @staticmethod
    def get_name() -> str:
        return "triton-hopper"


class LongContext(Hopper):
    """The same, and prefills of all lengths with the kernel for long contexts.

    The length is a constant of the module: layers of other backends in the process see it, too.
    """

    @staticmethod
    def get_name() -> str:
        return "triton-long-context"

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        hopper_tiles.SHORT_CONTEXT = 0
        return TritonBackend.get_impl_cls()


class Portable(TritonBackend):
    """The portable Triton kernels, on Hopper too."""

    config: ClassVar[Mapping[str, Any]] = {"kernels": "portable"}

    @staticmethod
    def get_name() -> str:
        return "triton-portable"
