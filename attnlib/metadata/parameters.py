"""Numbers that differ between layers and that some kernels want when a batch is planned, not when a layer is called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from attnlib.errors import UnsupportedConfigError

__all__ = [
    "PerLayerParameters",
    "get_per_layer_parameters",
    "group_layers",
    "infer_global_hyperparameters",
]


@dataclass(frozen=True)
class PerLayerParameters:
    """What a plan-time kernel must know of a layer.

    Attributes:
        window_left: keys visible before the query's own; -1 for all.
        logits_soft_cap: None for none.
        sm_scale: the softmax scale.
        window_right: keys visible after the query's own; -1 for all.
    """

    window_left: int
    logits_soft_cap: float | None
    sm_scale: float
    window_right: int = -1


def get_per_layer_parameters(
    layers: Mapping[str, Any], impl_cls: type | None = None
) -> dict[str, PerLayerParameters]:
    """Scan attention layers (name -> `Attention`, or anything with an `impl`) for what plan-time kernels need.

    Raises:
        UnsupportedConfigError: a layer runs on another backend's impl than `impl_cls`.
    """
    found = {}
    for name, layer in layers.items():
        impl = layer.impl
        if impl_cls is not None and not isinstance(impl, impl_cls):
            raise UnsupportedConfigError(
                f"layer {name} runs on {type(impl).__name__}, but this plan serves {impl_cls.__name__} only"
            )
        left, right = impl.spec.visible_window.as_kernel_args()
        found[name] = PerLayerParameters(left, impl.spec.logits_soft_cap, impl.scale, right)
    return found


def infer_global_hyperparameters(
    per_layer_params: Mapping[str, PerLayerParameters],
) -> PerLayerParameters:
    """The one set of parameters that all layers share.

    Raises:
        UnsupportedConfigError: there are no layers, or two of them differ; the message names both and what differs.
    """
    groups = group_layers(per_layer_params)
    if not groups:
        raise UnsupportedConfigError(
            "no attention layers were found, so there is nothing to plan for"
        )
    if len(groups) > 1:
        (first, first_names), (second, second_names) = list(groups.items())[:2]
        raise UnsupportedConfigError(
            f"layers {first_names[0]} ({first}) and {second_names[0]} ({second}) differ, but one plan serves all of them: "
            f"build one plan per group (`group_layers`) or give the groups builders of their own"
        )
    return next(iter(groups))


def group_layers(
    per_layer_params: Mapping[str, PerLayerParameters],
) -> dict[PerLayerParameters, list[str]]:
    """Layers by their parameters, in order of appearance: one plan per group serves models whose layers differ."""
    groups: dict[PerLayerParameters, list[str]] = {}
    for name, parameters in per_layer_params.items():
        groups.setdefault(parameters, []).append(name)
    return groups
