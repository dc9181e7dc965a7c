"""Backends in vLLM's style as backends of attnlib.

    attnlib.register_backend("mine", adapt_backend(MyVllmBackend))

The impl of such a backend is constructed from sizes (`impls`); its builder is a v1 builder, and may
build metadata of any class. It runs in layers of attnlib, over a `PagedKVCache`, with graphs and in
the conformance suite.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from attnlib.backends._pairs.classes import make_pair
from attnlib.backends.base import AttentionBackend, AttentionImpl
from attnlib.capabilities import Capabilities, Sizes
from attnlib.compat.vllm.adapted_builder import AdaptedBuilder, builder_of
from attnlib.compat.vllm.adapted_cache import CacheForm
from attnlib.compat.vllm.adapted_impl import AdaptedImpl
from attnlib.spec import AttentionType, MaskKind

__all__ = ["AdaptedBackend", "adapt_backend"]


class AdaptedBackend(AttentionBackend):
    """Base of adapted backends; `adapt_backend` creates the classes.

    Attributes:
        source: the class that was adapted.
    """

    source: ClassVar[Any]
    builder_cls: ClassVar[type[AdaptedBuilder]]
    impl_cls: ClassVar[type[AdaptedImpl]]

    @classmethod
    def get_name(cls) -> str:
        name = cls.source.get_name() if hasattr(cls.source, "get_name") else None
        return str(name or cls.source.__name__).lower()

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl]:
        return cls.impl_cls

    @classmethod
    def get_builder_cls(cls) -> type[AdaptedBuilder]:
        return cls.builder_cls


def adapt_backend(
    backend: Any, *, extra_impl_args: Mapping[str, Any] | None = None, **capabilities: Any
) -> type[AttentionBackend]:
    """A backend of attnlib from a backend in vLLM's style.

    Args:
        backend: has `get_impl_cls`, `get_kv_cache_shape`, and optionally `get_name`, a v1
            `get_builder_cls`, `get_kv_cache_stride_order` and `get_supported_head_sizes`. Without a
            builder the impl gets attnlib's `PagedMetadata`.
        extra_impl_args: further arguments of the impl's constructor.
        capabilities: fields of `attnlib.Capabilities`. vLLM's interface states head sizes, the
            layout and graphs only; without more, the backend supports causal decoder layers of
            float dtypes with caches in these, any block size and head ratio, on CPU and GPU, and
            no windows, soft caps, slopes or sinks. Slopes and sinks go to the constructor: an impl
            keeps those that a layer has when it is made.

    Raises:
        RegistrationError: a builder of vLLM v0, which needs a runner.
        ContractError: a cache shape that is not a permutation of `[2, B, N, H, D]`, or an order of
            its dimensions in memory that is not a layout.
    """
    if not extra_impl_args and not capabilities:
        return _plain(backend)
    return _adapted(backend, dict(extra_impl_args or {}), capabilities)


@functools.lru_cache(maxsize=256)
def _plain(backend: Any) -> type[AttentionBackend]:
    """One class for all layers of a model."""
    return _adapted(backend, {}, {})


def _adapted(
    backend: Any, extra: dict[str, Any], capabilities: dict[str, Any]
) -> type[AttentionBackend]:
    """The class; how it is pickled, too."""
    form, builder = CacheForm.of(backend), builder_of(backend)
    dtypes = (torch.float16, torch.bfloat16, torch.float32)
    sizes = getattr(backend, "get_supported_head_sizes", None)
    stated = {
        "devices": ("cpu", "cuda"),
        "dtypes": dtypes,
        "kv_cache_dtypes": dtypes,
        "head_sizes": Sizes(minimum=1) if sizes is None else Sizes(exactly=tuple(sizes())),
        "block_sizes": Sizes(minimum=1),
        "kv_cache_layouts": (form.layout,),
        "group_sizes": Sizes(minimum=1),
        "attn_types": (AttentionType.DECODER,),
        "mask_kinds": (MaskKind.CAUSAL,),
        "cudagraph": builder["cudagraph_support"],
    }
    body = {
        "source": backend,
        "capabilities": Capabilities(**{**stated, **capabilities}),
        "description": f"{backend.__name__}, in vLLM's style",
        "__module__": __name__,
    }
    return make_pair(
        AdaptedBackend,
        body,
        (_adapted, (backend, extra, capabilities)),
        builder=(AdaptedBuilder, builder),
        impl=(AdaptedImpl, {"source": backend, "form": form, "extra": extra}),
    )
