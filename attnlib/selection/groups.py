"""Select backends for a model with several kinds of layers: one per layer group, one cache layout.

A model may combine windowed and full layers, or several head sizes. Each group of equal layers gets
its own backend, so that a group that only a slow backend supports does not slow down the others.
The groups share cache memory, so all selected backends must read one layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from attnlib.backends.base import AttentionBackend
from attnlib.cache.layout import get_kv_cache_layout, negotiate_layout
from attnlib.cache.pages import PAGE_LAYOUTS, page_layout
from attnlib.device import DeviceInfo, resolve_device
from attnlib.errors import ContractError
from attnlib.selection.selector import get_attn_backend
from attnlib.spec import AttentionSpec, LayerSpec, StateSpec

__all__ = ["GroupSelection", "select_for_groups"]

Request = str | type[AttentionBackend] | None


@dataclass(frozen=True)
class GroupSelection:
    """The selected backend of each group, and the layout they share.

    Attributes:
        specs: group -> its spec; `kv_cache_layout` is set for groups with a paged cache, `form`
            and `chunk_size` for state layers.
        backends: group -> its backend.
        layout: the cache layout of all groups with a paged cache; None if there is none. Formats
            with scales in the page have layouts of their own (P13): if other groups have caches
            too, it is that of the others.
    """

    specs: Mapping[str, Any]
    backends: Mapping[str, type[AttentionBackend]]
    layout: str | None

    def __str__(self) -> str:
        """One line per group, then the layout."""
        lines = [f"{name}: {backend.get_name()}" for name, backend in self.backends.items()]
        return "\n".join([*lines, f"layout: {self.layout or 'none (no paged cache)'}"])


def select_for_groups(
    groups: Mapping[str, LayerSpec],
    backend: Request | Mapping[str, Request] = None,
    device: torch.device | str | DeviceInfo | None = None,
) -> GroupSelection:
    """Select a backend for each group of layers, and a cache layout for all groups.

    Args:
        groups: group name -> what its layers need.
        backend: a request for all groups, in any form that `get_attn_backend` takes, or a mapping
            from group name to request. Groups without a request use `use_backend`,
            ATTNLIB_BACKEND or priority.
        device: where the layers run; None means a GPU if torch finds one, else the CPU.

    Raises:
        ContractError: a request for a group that does not exist.
        LayoutMismatchError: the selected backends read no common layout; the message names every
            group's backend and the layouts it reads.
        UnknownBackendError, BackendUnavailableError, UnsupportedConfigError: as in
            `get_attn_backend`, for one group.
    """
    if not isinstance(groups, Mapping):
        raise ContractError(
            f"groups is a {type(groups).__name__}; it must be a dictionary from group name to spec"
        )
    info = resolve_device(device)
    requests = dict(backend) if isinstance(backend, Mapping) else dict.fromkeys(groups, backend)
    unknown_keys = [name for name in requests if name not in groups]
    if unknown_keys:
        raise ContractError(
            f"a backend is requested for group {unknown_keys[0]!r}, but the groups are "
            f"{', '.join(map(repr, groups)) or 'none'}"
        )
    chosen = {
        name: get_attn_backend(spec, requests.get(name), info, layer_name=name)
        for name, spec in groups.items()
    }
    layout = _shared_layout(groups, chosen)
    specs = {name: _resolved(spec, chosen[name], layout) for name, spec in groups.items()}
    return GroupSelection(specs, chosen, layout)


def _resolved(spec: LayerSpec, backend: type[AttentionBackend], layout: str | None) -> LayerSpec:
    if isinstance(spec, StateSpec):
        return backend.resolve_state_spec(spec)
    if not (isinstance(spec, AttentionSpec) and spec.is_paged):
        return spec
    if spec.scales_in_page:
        layout = _layout_of_pages(spec)
    return spec.replace(kv_cache_layout=layout) if layout else spec


def _layout_of_pages(spec: AttentionSpec) -> str:
    """That of the spec, the one that the user has set if pages have it, or the default."""
    requested = get_kv_cache_layout()
    takes_it = spec.kv_cache_layout is None and requested in PAGE_LAYOUTS
    return page_layout(spec, requested if takes_it else None)


def _shared_layout(
    groups: Mapping[str, LayerSpec], chosen: Mapping[str, type[AttentionBackend]]
) -> str | None:
    paged = {
        name: spec
        for name, spec in groups.items()
        if isinstance(spec, AttentionSpec) and spec.is_paged
    }
    in_pages = [_layout_of_pages(spec) for spec in paged.values() if spec.scales_in_page]
    supported = []
    for name, spec in paged.items():
        if not spec.scales_in_page:
            reads = chosen[name].capabilities.kv_cache_layouts or ("NHD",)
            supported.append(
                (
                    f"{name} ({chosen[name].get_name()})",
                    (spec.kv_cache_layout,) if spec.kv_cache_layout else reads,
                )
            )
    if not supported:
        return in_pages[0] if in_pages else None
    return negotiate_layout(supported, get_kv_cache_layout())
