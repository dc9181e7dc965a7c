"""A state layer on flash-linear-attention: which function, and what it is given."""

from __future__ import annotations

from typing import Any

import torch

from attnlib.backends._foreign.packed_states import PackedBatch, PackedStateImpl, normalized
from attnlib.backends.fla.probe import find_functions
from attnlib.backends.state_impl import StateInputs
from attnlib.ops.addresses import as_count
from attnlib.ops.states.inputs import LEAST_LOG_DECAY
from attnlib.spec import StateSpec

__all__ = ["FlaStateImpl"]

_CHUNK_FROM = 65
"""As in the layers of flash-linear-attention, which run up to 64 tokens in the recurrent form."""

_FUNCTIONS = {
    ("delta", "head"): ("gated_delta_rule", "g"),
    ("delta", "constant"): ("gated_delta_rule", "g"),
    ("delta", "channel"): ("kda", "g"),
    ("add", "head"): ("simple_gla", "g"),
    ("add", "constant"): ("simple_gla", "g_gamma"),
    ("add", "channel"): ("gla", "g"),
}
"""(update, decay) -> end of the names of its functions, and the argument for log decays."""


class FlaStateImpl(PackedStateImpl):
    """Log decays are natural logarithms there too; states are asked for as `[Dv, Dk]`.

    Raises:
        ContractError: the setting `chunk_from` is not a count.
    """

    def __init__(self, spec: StateSpec, **kwargs: Any) -> None:
        super().__init__(spec, **kwargs)
        setting = self.config.get("chunk_from", _CHUNK_FROM)
        self._chunk_from = as_count("chunk_from", setting, 1)

    def recur(
        self, inputs: StateInputs, initial: torch.Tensor, batch: PackedBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `PackedStateImpl.recur`. Chunked kernels multiply float32 inputs as TF32, so that
        float32 layers run in the recurrent form only."""
        spec = self.spec
        name, decay_name = _FUNCTIONS[spec.update, spec.decay]
        chunked = batch.longest >= self._chunk_from and spec.dtype is not torch.float32
        arguments = self._delta(inputs) if spec.update == "delta" else self._add(inputs)
        decay = inputs.log_decay
        if chunked:
            decay = decay.clamp(min=LEAST_LOG_DECAY)  # these kernels sum log decays
            arguments["cu_seqlens_cpu"] = batch.starts_cpu
        if decay_name == "g":
            decay = decay.expand(*inputs.value.shape[:2], *decay.shape[2:])[None].contiguous()
        if name == "gla" and not chunked:
            decay_name = "gk"
        functions, problem = find_functions()
        assert not problem, problem  # selection has called `unavailable`
        out, final = functions[f"{'chunk' if chunked else 'fused_recurrent'}_{name}"](
            **arguments,
            **{decay_name: decay},
            scale=self.scale,
            initial_state=initial,
            output_final_state=True,
            state_v_first=True,
            cu_seqlens=batch.starts,
        )
        return out[0], final

    def _delta(self, inputs: StateInputs) -> dict[str, Any]:
        """Functions with beta, key heads of their own, and the norm of T4."""
        names = ("q", "k", "v", "beta")
        tensors = (inputs.query, inputs.key, inputs.value, inputs.beta)
        given = {name: x[None] for name, x in zip(names, tensors, strict=True) if x is not None}
        return {**given, "use_qk_l2norm_in_kernel": self.spec.qk_norm}

    def _add(self, inputs: StateInputs) -> dict[str, Any]:
        """Functions without beta and norm, and with a key head per state head (T4)."""
        query, key, value = inputs.query, inputs.key, inputs.value
        if self.spec.qk_norm:
            query, key = normalized(query), normalized(key)
        if self.spec.group_size > 1:
            query, key = (x.repeat_interleave(self.spec.group_size, 1) for x in (query, key))
        if self.spec.has_beta and inputs.beta is not None:
            value = (value * inputs.beta.unsqueeze(-1)).to(value.dtype)
        return {"q": query[None], "k": key[None], "v": value[None]}
