"""vLLM's state layers, computed by attnlib on slots in vLLM's pages (ATTNLIB_VLLM_STATES=1).

Weights, projections and norms stay vLLM's. `register` replaces the classes by vLLM's registry of
layers, before a model is made.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

from attnlib.integrations.vllm.state_inputs import StepConstants
from attnlib.integrations.vllm.state_pages import StateArguments, StatePages

__all__ = ["AttnlibGatedDeltaNet", "AttnlibMixer2", "register"]


class AttnlibMixer2(StatePages, MambaMixer2):
    """Mamba2: Nemotron-H, Granite 4, Falcon-H1, Zamba2, Codestral Mamba."""

    def state_arguments(self, constants: StepConstants) -> StateArguments:
        """See `StatePages`; the sizes are those of this rank."""
        fields = {
            "num_heads": self.num_heads // self.tp_size,
            "num_key_heads": self.n_groups // self.tp_size,
            "key_size": self.ssm_state_size,
            "value_size": self.head_dim,
            "update": "add",
            "has_skip": True,
            "conv_channels": self.tped_conv_size,
            "conv_width": self.conv_kernel_size,
            "conv_activation": self.activation,
            "has_conv_bias": self.conv1d.bias is not None,
        }
        bias = None if self.conv1d.bias is None else self.conv1d.bias.detach()
        tensors = {"conv_weight": self.conv_weights.detach(), "conv_bias": bias}
        form = {
            "order": "vkq",
            "gates": "mamba2",
            "rate": constants.add(self.A, torch._foreach_neg_),
            "bias": constants.add(self.dt_bias),
        }
        return fields, {**tensors, "skip": constants.add(self.D), "scale": 1.0}, form

    def conv_ssm_forward(self, projected_states: torch.Tensor, output: torch.Tensor) -> None:
        """What vLLM's operator of this layer calls, between its projections."""
        sizes = [self.tped_intermediate_size, self.tped_conv_size, self.tped_dt_size]
        _, x, step_size = torch.split(projected_states, sizes, dim=-1)
        self.run_step(x, (step_size, None), output)


class AttnlibGatedDeltaNet(StatePages, QwenGatedDeltaNetAttention):
    """Gated delta nets of Qwen3-Next and Qwen3.5."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.enable_fused_gdn_spec_decode = False
        self._forward_method = self.forward_cuda  # also on vLLM's CPU platform

    def state_arguments(self, constants: StepConstants) -> StateArguments:
        """See `StatePages`; the sizes are those of this rank."""
        weight = self.conv1d.weight.detach().squeeze(1)
        fields = {
            "num_heads": self.num_v_heads // self.tp_size,
            "num_key_heads": self.num_k_heads // self.tp_size,
            "key_size": self.head_k_dim,
            "value_size": self.head_v_dim,
            "qk_norm": True,
            "conv_channels": weight.shape[0],
            "conv_width": weight.shape[1],
            "conv_activation": self.activation,
        }
        form = {
            "gates": "softplus",
            "rate": constants.add(self.A_log, torch._foreach_exp_),
            "bias": constants.add(self.dt_bias),
        }
        return fields, {"conv_weight": weight}, form

    def _forward_core(
        self, mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, core_attn_out: torch.Tensor
    ) -> None:
        """What vLLM's operator of this layer calls, between its projections."""
        self.run_step(mixed_qkv, (a, b), core_attn_out.flatten(1))


def register() -> None:
    """Replace vLLM's layers by these; repeated calls do nothing."""
    for layer in (AttnlibMixer2, AttnlibGatedDeltaNet):
        replaced = inspect.getmro(layer)[2].__name__
        if replaced not in op_registry_oot:
            PluggableLayer.register_oot(name=replaced)(layer)
