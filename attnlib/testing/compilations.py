"""Which Triton and Gluon kernels are compiled."""

from __future__ import annotations

from attnlib.ops.triton.launch.compilations import CompiledKernel, compiled_kernels

__all__ = ["CompiledKernel", "compiled_kernels"]
