"""The built-in backends: name, class, priority and how to install what they need."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BUILTIN_BACKENDS", "BuiltinBackend"]


@dataclass(frozen=True)
class BuiltinBackend:
    """One built-in backend.

    Attributes:
        name: the name users give.
        path: "module:Class", imported at first use.
        priority: "auto" tries higher priorities first.
        install_hint: how to install its dependencies; "" if it has none.
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
            "pip install flashinfer-python (compiles its kernels with nvcc and ninja at first use)",
        ),
        BuiltinBackend("triton", "attnlib.backends.triton:TritonBackend", 300),
        BuiltinBackend("torch", "attnlib.backends.torch:TorchBackend", 100),
        # Below torch, which supports all that it does: by name only.
        BuiltinBackend(
            "flash_mla",
            "attnlib.backends.flash_mla:FlashMLABackend",
            50,
            "build https://github.com/deepseek-ai/FlashMLA",
        ),
        BuiltinBackend(
            "flashinfer_mla",
            "attnlib.backends.flashinfer.mla:FlashInferMLABackend",
            40,
            "pip install flashinfer-python (compiles its kernels with nvcc and ninja at first use)",
        ),
        # State layers only, in the form `plain`: by name until a measurement ranks them.
        BuiltinBackend(
            "fla", "attnlib.backends.fla:FlaBackend", 30, "pip install flash-linear-attention"
        ),
        BuiltinBackend(
            "flashinfer_gdn",
            "attnlib.backends.flashinfer.gdn:FlashInferGDNBackend",
            20,
            "pip install flashinfer-python (compiles its kernels with nvcc and ninja at first use)",
        ),
    )
}
