"""Parameters of layers that some kernels need when a batch is planned."""

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
    """Parameters of a layer that kernels need when a batch is planned.

    Attributes:
        window_left: number of keys visible before the query's own; -1 for all.
        logits_soft_cap: soft cap of the scores, or None.
        sm_scale: softmax scale.
        window_right: number of keys visible after the query's own; -1 for all.
    """

    window_left: int
    logits_soft_cap: float | None
    sm_scale: float
    window_right: int = -1


def get_per_layer_parameters(
    layers: Mapping[str, Any], impl_cls: type | None = None
) -> dict[str, PerLayerParameters]:
    """The parameters of each layer.

    Args:
        layers: name -> `Attention`, or any object with an `impl`.
        impl_cls: the class that every impl must have; None accepts all.

    Raises:
        UnsupportedConfigError: the impl of a layer is not an `impl_cls`.
    """
    found = {}
    for name, layer in layers.items():
        impl = layer.impl
        if impl_cls is not None and not isinstance(impl, impl_cls):
            raise UnsupportedConfigError(
                f"layer {name} runs on {type(impl).__name__}, but this plan supports only "
                f"{impl_cls.__name__}: plan the layers of each backend separately"
            )
        left, right = impl.spec.visible_window.as_kernel_args()
        found[name] = PerLayerParameters(left, impl.spec.logits_soft_cap, impl.scale, right)
    return found


def infer_global_hyperparameters(
    per_layer_params: Mapping[str, PerLayerParameters],
) -> PerLayerParameters:
    """The parameters that all layers share.

    Raises:
        UnsupportedConfigError: there are no layers, or two of them differ; the message names both
            and their parameters.
    """
    groups = group_layers(per_layer_params)
    if not groups:
        raise UnsupportedConfigError(
            "no attention layers were found, so there is nothing to plan for"
        )
    if len(groups) > 1:
        (first, first_names), (second, second_names) = list(groups.items())[:2]
        raise UnsupportedConfigError(
            f"layers {first_names[0]} ({first}) and {second_names[0]} ({second}) differ, but one "
            f"plan is used for all of them: build one plan per group (`group_layers`), or create a "
            f"builder for each group"
        )
    return next(iter(groups))


def group_layers(
    per_layer_params: Mapping[str, PerLayerParameters],
) -> dict[PerLayerParameters, list[str]]:
    """Group layers by their parameters, in order of appearance, so that each group has one plan."""
    groups: dict[PerLayerParameters, list[str]] = {}
    for name, parameters in per_layer_params.items():
        groups.setdefault(parameters, []).append(name)
    return groups
