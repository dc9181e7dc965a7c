"""The `triton` backend kept to one family of kernels, for exams and measurements of each path.

python -m attnlib verify benchmarks/gpu/variants.py:Hopper      # Gluon wherever it can, short decodes too
python -m attnlib verify benchmarks/gpu/variants.py:Portable    # plain Triton on every chip
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attnlib.backends.triton import TritonBackend

__all__ = ["Hopper", "Portable"]


class Hopper(TritonBackend):
    """Gluon kernels wherever they can serve a call, not only where they are the quicker ones."""

    config: ClassVar[Mapping[str, Any]] = {"kernels": "hopper"}

    @staticmethod
    def get_name() -> str:
        return "triton-hopper"


class Portable(TritonBackend):
    """Plain Triton kernels on a Hopper chip too."""

    config: ClassVar[Mapping[str, Any]] = {"kernels": "portable"}

    @staticmethod
    def get_name() -> str:
        return "triton-portable"
