"""The kernels that layers need on a GPU of another machine, without that GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attnlib.cache.storage import PagedKVCache
from attnlib.device import DeviceInfo
from attnlib.errors import ContractError
from attnlib.layer.attention import Attention
from attnlib.layer.warmup import warmup
from attnlib.mla.latent_attention import LatentAttention
from attnlib.mla.warmup import warm_up_expanded
from attnlib.selection import get_attn_backend
from attnlib.spec import AttentionSpec
from attnlib.workspace import BatchLimits

__all__ = [
    "DescribedLayer",
    "DescribedServer",
    "check_described",
    "described_layers",
    "needed_kernels",
    "run_described",
]

_OVER_LATENTS = " over latents"
_BLOCKS = 2
"""Blocks of a cache: no kernel depends on their number."""


@dataclass(frozen=True)
class DescribedServer:
    """A server on another machine.

    Attributes:
        device: its GPU.
        limits: its largest batch.
        num_sms: multiprocessors of the GPU; None for those of its model.
        engine: what owns the caches, on which kernels depend: "attnlib", or "vllm", whose blocks
            have keys and values of a token in one row, and scales in tensors.
    """

    device: DeviceInfo
    limits: BatchLimits
    num_sms: int | None = None
    engine: Literal["attnlib", "vllm"] = "attnlib"

    def chip(self) -> Any:
        """`DeviceLimits` of the GPU, with the tiles that were tuned for a chip of its name.

        Raises:
            ContractError: a GPU whose numbers are not known, or no triton.
        """
        try:
            from attnlib.backends.triton.chips import described_limits
            from attnlib.backends.triton.tune import tuned_tiles
        except ModuleNotFoundError as error:
            raise ContractError(
                f"the kernels of {self.device} cannot be named here ({error}): "
                'pip install "triton>=3.6"'
            ) from None

        limits = described_limits(self.device, self.num_sms)
        return replace(limits, tuned=tuned_tiles(replace(self.device, is_hypothetical=False)))


@dataclass(frozen=True)
class DescribedLayer:
    """A kind of layer.

    Attributes:
        spec: what it needs.
        expanded: of a layer over latents whose prefills are expanded (M12): elements of a key
            without its rotary part, and of a value.
    """

    spec: AttentionSpec
    expanded: tuple[int, int] | None = None


def described_layers(specs: Mapping[str, AttentionSpec]) -> dict[str, DescribedLayer]:
    """The layers of a model by kind. The sizes of expanded prefills are those of the kind with keys
    of every head (`specs_from_config`)."""
    found = {}
    for kind, spec in specs.items():
        heads = specs.get(kind.removesuffix(_OVER_LATENTS)) if spec.use_mla else None
        sizes = None
        if heads is not None and not heads.use_mla:
            sizes = (heads.head_size - (spec.head_size - spec.head_size_v), heads.head_size_v)
        found[kind] = DescribedLayer(spec, sizes)
    return found


def run_described(
    server: DescribedServer,
    layers: Iterable[DescribedLayer],
    take: Callable[[Any, Callable[[], Any]], None],
    *,
    writes_notes: bool = False,
) -> None:
    """Run `warmup` for layers on a described GPU: kernels are chosen as there, nothing is launched.

    Args:
        server: where the layers will run.
        layers: the layers.
        take: `take(kernel, compile)` for each `NeededKernel`, once; see
            `attnlib.ops.triton.launch.described`.
        writes_notes: whether Triton's cache gets notes for the same warm-ups on the server.

    Raises:
        ContractError: a GPU whose numbers are not known, or a spec with a score function, whose
            tensors are not known.
        BackendUnavailableError: this process cannot compile kernels.
        UnsupportedConfigError: the `triton` backend does not support a spec on that GPU.
    """
    layers = list(layers)
    check_described(server, layers)
    from attnlib.backends.triton.described import DescribedTritonBackend
    from attnlib.ops.triton.launch.described import Launches, described_gpu

    with described_gpu(server.chip(), take, Launches() if writes_notes else None):
        for layer in layers:
            spec = layer.spec
            cache = _new_cache(spec, server.engine) if spec.is_paged else None
            attention = _new_layer(spec, DescribedTritonBackend)
            warmup(attention, cache, server.limits, device="cpu")
            if layer.expanded is not None and cache is not None:
                _run_expanded(layer, cache, server.limits, DescribedTritonBackend)


def _new_cache(spec: AttentionSpec, engine: str) -> PagedKVCache:
    if engine != "vllm" or spec.scales_in_page:
        return PagedKVCache.allocate(spec, _BLOCKS, "cpu")
    if spec.kv_cache_layout is None and not spec.use_mla:
        spec = spec.replace(kv_cache_layout="NHD_PACKED")
    cache = PagedKVCache.allocate(spec, _BLOCKS, "cpu")
    if spec.is_kv_quantized:
        cache.k_scale = cache.v_scale = torch.ones((), dtype=torch.float32)
    return cache


def check_described(server: DescribedServer, layers: Iterable[DescribedLayer]) -> None:
    """Refuse what `run_described` refuses, except in a process that cannot compile."""
    for layer in layers:
        get_attn_backend(layer.spec, "triton", server.device)  # raises with the reasons
        if layer.spec.score_function is not None:
            raise ContractError(
                "kernels of a layer with a score function cannot be compiled without its tensors: "
                "run attnlib.warmup on the layer"
            )
    server.chip()


def _new_layer(spec: AttentionSpec, backend: Any) -> Attention:
    slopes = torch.ones(spec.num_heads) if spec.has_alibi else None
    sinks = torch.zeros(spec.num_heads) if spec.has_sink else None
    return Attention(spec, backend=backend, alibi_slopes=slopes, sinks=sinks, device="cpu")


def _run_expanded(
    layer: DescribedLayer, cache: PagedKVCache, limits: BatchLimits, backend: Any
) -> None:
    """Expanded prefills of a layer over latents, without their projections."""
    assert layer.expanded is not None
    spec, (key_size, value_size) = layer.spec, layer.expanded
    projection = torch.empty(
        spec.num_heads, key_size + value_size, spec.head_size_v, dtype=spec.dtype
    )
    sinks = torch.zeros(spec.num_heads) if spec.has_sink else None
    with _NoProducts():  # type: ignore[no-untyped-call]  # torch leaves it untyped
        latent = LatentAttention(spec, projection, key_size, backend=backend, sinks=sinks)
        warm_up_expanded(latent, cache, limits)


class _NoProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, products of matrices have the right form and no value: those of a model's projections
    would take minutes on a CPU."""

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        if function in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
            left, right = arguments
            return left.new_empty(*left.shape[:-1], right.shape[-1])
        return function(*arguments, **(keywords or {}))


def needed_kernels(server: DescribedServer, layers: Iterable[DescribedLayer]) -> list[Any]:
    """The kernels that layers need, as `NeededKernel`; nothing is compiled. Errors as
    `run_described`."""
    found: list[Any] = []
    run_described(server, layers, lambda kernel, compile: found.append(kernel))
    return list(dict.fromkeys(found))
