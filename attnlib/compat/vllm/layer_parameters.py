"""vLLM's parameters of layers that a kernel needs when a batch is planned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from attnlib.compat.vllm.config import layers_of
from attnlib.errors import AssertedContractError
from attnlib.spec import AttentionSpec

__all__ = ["PerLayerParameters", "get_per_layer_parameters", "infer_global_hyperparameters"]


@dataclass
class PerLayerParameters:
    """Parameters of a layer.

    Attributes:
        window_left: number of keys visible before the query's own; -1 for all.
        logits_soft_cap: soft cap of the scores, or None.
        sm_scale: softmax scale.
    """

    window_left: int
    logits_soft_cap: float | None
    sm_scale: float


def get_per_layer_parameters(
    vllm_config: Any, cls_: type | None = None
) -> dict[str, PerLayerParameters]:
    """The parameters of every attention layer of a model.

    Args:
        vllm_config: its `compilation_config.static_forward_context` maps names to layers; or such a
            mapping itself. The impl of a layer has `scale`, and optionally `sliding_window`, (left,
            right), and `logits_soft_cap`. An impl of attnlib has them in its spec.
        cls_: the class that every impl must have; None accepts all.

    Raises:
        AssertedContractError: the impl of a layer is not a `cls_`.
    """
    found = {}
    for name, layer in layers_of(vllm_config).items():
        impl = layer.impl
        if cls_ is not None and not isinstance(impl, cls_):
            raise AssertedContractError(
                f"layer {name} runs on {type(impl).__name__}, but this plan supports only "
                f"{cls_.__name__}: plan the layers of each backend separately"
            )
        spec = getattr(impl, "spec", None)
        if isinstance(spec, AttentionSpec):
            left, cap = spec.visible_window.as_kernel_args()[0], spec.logits_soft_cap
        else:
            window = getattr(impl, "sliding_window", None)
            left = -1 if window is None else window[0]
            cap = getattr(impl, "logits_soft_cap", None)
        found[name] = PerLayerParameters(left, cap, impl.scale)
    return found


def infer_global_hyperparameters(
    per_layer_params: Mapping[str, PerLayerParameters],
) -> PerLayerParameters:
    """The parameters that all layers share.

    Raises:
        AssertedContractError: there are no layers, or one differs from the first; the message
            names both.
    """
    if not per_layer_params:
        raise AssertedContractError(
            "no attention layers were found, so there is nothing to plan for"
        )
    first, shared = next(iter(per_layer_params.items()))
    for name, found in per_layer_params.items():
        if found != shared:
            raise AssertedContractError(
                f"layers {first} ({shared}) and {name} ({found}) differ, but one plan is used for "
                "all of them: plan the layers of each kind separately"
            )
    return shared
