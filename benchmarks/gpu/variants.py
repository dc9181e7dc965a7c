"""The `triton` backend restricted to one family of kernels, to verify and measure each of them.

python -m attnlib verify benchmarks/gpu/variants.py:Hopper      # Hopper kernels for all decodes
python -m attnlib verify benchmarks/gpu/variants.py:Portable    # portable kernels on every chip
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attnlib.backends.triton import TritonBackend

__all__ = ["Hopper", "Portable"]


class Hopper(TritonBackend):
    """The Hopper kernels for every call that they support, also where they are slower."""

    config: ClassVar[Mapping[str, Any]] = {"kernels": "hopper"}

    @staticmethod
    def get_name() -> str:
        return "triton-hopper"


class Portable(TritonBackend):
    """The portable Triton kernels, on Hopper too."""

    config: ClassVar[Mapping[str, Any]] = {"kernels": "portable"}

    @staticmethod
    def get_name() -> str:
        return "triton-portable"
