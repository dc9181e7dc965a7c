"""Experts of vLLM's models by torch, where vLLM leaves them to the platform (0.33)."""

from __future__ import annotations

from typing import Any

import torch


def register() -> None:
    """Let vLLM's layers of experts use these; repeated calls do nothing."""
    from vllm.model_executor.custom_op import CustomOp, op_registry_oot
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as vllm_experts

    class Experts(vllm_experts.UnquantizedFusedMoEMethod):
        is_monolithic = True

        def apply_monolithic(
            self, layer: Any, x: torch.Tensor, router_logits: torch.Tensor, **_: Any
        ) -> torch.Tensor:
            """The best experts of each token by softmax, whose weights sum to 1."""
            probabilities = router_logits.float().softmax(-1)
            weights, chosen = probabilities.topk(layer.top_k, dim=-1)
            weights = weights / weights.sum(-1, keepdim=True)
            gate, up = torch.einsum("th,eih->tei", x, layer.w13_weight).chunk(2, dim=-1)
            inner = torch.nn.functional.silu(gate) * up
            each = torch.einsum("tei,ehi->teh", inner, layer.w2_weight)
            picked = each.gather(1, chosen[..., None].expand(-1, -1, each.shape[-1]))
            return (picked * weights[..., None].to(x.dtype)).sum(1)

    name = vllm_experts.UnquantizedFusedMoEMethod.__name__
    if name not in op_registry_oot:
        CustomOp.register_oot(name=name)(Experts)
