"""Every backend that attnlib knows by name: where its class is, what it needs, how to get it. One table, no if-chains."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BUILTIN_BACKENDS", "BuiltinBackend"]


@dataclass(frozen=True)
class BuiltinBackend:
    """One line of the table.

    Attributes:
        name: what users write.
        path: "module:Class", imported when somebody asks for it.
        priority: higher is tried first by auto.
        install_hint: the command that brings what it needs; "" when attnlib itself is enough.
    """

    name: str
    path: str
    priority: int
    install_hint: str = ""


BUILTIN_BACKENDS: dict[str, BuiltinBackend] = {
    backend.name: backend
    for backend in (
        BuiltinBackend(
            "flash_attn",
            "attnlib.backends.flash_attn:FlashAttnBackend",
            400,
            "pip install flash-attn (2), or pip install --pre flash-attn-4 (4, Hopper and later)",
        ),
        BuiltinBackend(
            "flashinfer",
            "attnlib.backends.flashinfer:FlashInferBackend",
            350,
            "pip install flashinfer-python (it compiles its kernels with nvcc and ninja at first use)",
        ),
        BuiltinBackend("triton", "attnlib.backends.triton:TritonBackend", 300),
        BuiltinBackend("torch", "attnlib.backends.torch:TorchBackend", 100),
    )
}
