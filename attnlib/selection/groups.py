"""Backends for a model whose layers differ: one choice per group of like layers, one layout that all of them read.

A model mixes windowed and full layers, or head sizes; one group that only a slow backend serves should not slow the others down. Each group is
selected on its own, and since groups share memory, the cache's layout is agreed on among all that were chosen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from attnlib.backends.base import AttentionBackend
from attnlib.cache.layout import get_kv_cache_layout, negotiate_layout
from attnlib.device import DeviceInfo, resolve_device
from attnlib.errors import ContractError
from attnlib.selection.selector import get_attn_backend
from attnlib.spec import AttentionSpec

__all__ = ["GroupSelection", "select_for_groups"]

Choice = str | type[AttentionBackend] | None


@dataclass(frozen=True)
class GroupSelection:
    """What was chosen for each group.

    Attributes:
        specs: the groups' specs, with the shared layout filled in where they are paged.
        backends: group -> backend.
        layout: the layout of every paged group's cache; None when no group is paged.
    """

    specs: Mapping[str, AttentionSpec]
    backends: Mapping[str, type[AttentionBackend]]
    layout: str | None

    def __str__(self) -> str:
        """One line a group."""
        lines = [f"{name}: {backend.get_name()}" for name, backend in self.backends.items()]
        return "\n".join([*lines, f"layout: {self.layout or 'none, nothing is cached'}"])


def select_for_groups(
    groups: Mapping[str, AttentionSpec],
    backend: Choice | Mapping[str, Choice] = None,
    device: torch.device | str | DeviceInfo | None = None,
) -> GroupSelection:
    """A backend for each group of layers, and the layout that they share.

    Args:
        groups: name -> what the layers of that group need.
        backend: one choice for all (any form of `get_attn_backend`), or a choice for each group that has one; others go by the usual precedence.
        device: where they will run; None means a GPU where torch sees one, else the CPU.

    Raises:
        ContractError: a choice for a group that is not there.
        LayoutMismatchError: the chosen backends read no common layout; the message names every group's backend and what it reads.
        UnknownBackendError, BackendUnavailableError, UnsupportedConfigError: as `get_attn_backend`, for one group.
    """
    info = resolve_device(device)
    choices = dict(backend) if isinstance(backend, Mapping) else dict.fromkeys(groups, backend)
    strangers = [name for name in choices if name not in groups]
    if strangers:
        raise ContractError(
            f"a backend is chosen for group {strangers[0]!r}, but the groups are {', '.join(map(repr, groups)) or 'none'}"
        )
    chosen = {
        name: get_attn_backend(spec, choices.get(name), info, layer_name=name)
        for name, spec in groups.items()
    }
    layout = _shared_layout(groups, chosen)
    if layout is None:
        return GroupSelection(dict(groups), chosen, None)
    specs = {
        name: spec.replace(kv_cache_layout=layout) if spec.is_paged else spec
        for name, spec in groups.items()
    }
    return GroupSelection(specs, chosen, layout)


def _shared_layout(
    groups: Mapping[str, AttentionSpec], chosen: Mapping[str, type[AttentionBackend]]
) -> str | None:
    demands = []
    for name, spec in groups.items():
        if spec.is_paged:
            reads = chosen[name].capabilities.kv_cache_layouts or ("NHD",)
            demands.append(
                (
                    f"{name} ({chosen[name].get_name()})",
                    (spec.kv_cache_layout,) if spec.kv_cache_layout else reads,
                )
            )
    return negotiate_layout(demands, get_kv_cache_layout()) if demands else None
