"""The `flashinfer_gdn` backend: gated delta nets on FlashInfer's `chunk_gated_delta_rule`.

FlashInfer's other functions of state layers do not compute what T5 defines: those for decodes
compute gates themselves, from tensors that a state layer does not have; `recurrent_kda` reads log
decays in bfloat16; `selective_state_update` takes one rate of decay per layer. This module can be
imported without FlashInfer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from attnlib.backends._foreign import packed_states
from attnlib.backends._foreign.imports import import_guarded, keywords_of
from attnlib.backends.base import AttentionBackend, StateImpl
from attnlib.backends.flashinfer.probe import FlashInferApi, find_api
from attnlib.backends.flashinfer.toolchain import unavailable_reasons
from attnlib.backends.state_impl import StateInputs
from attnlib.capabilities import Sizes
from attnlib.device import DeviceInfo

__all__ = ["FlashInferGDNBackend", "FlashInferGDNImpl"]

_NAME = "chunk_gated_delta_rule"
_NEEDED = ("beta", "initial_state", "output_final_state", "cu_seqlens", "output", "output_state")
_LEAST_LOG_DECAY = -80.0
"""exp of it is a normal float32. The kernel takes logarithms of factors, which must not be 0; a
state that decays by it is 0 beside the inputs of the next token."""


class FlashInferGDNBackend(AttentionBackend):
    """FlashInfer's chunked kernel, for prompts and decodes; states as in `fla`."""

    description = "gated delta nets on FlashInfer's chunked kernel"
    state_capabilities = packed_states.packed_capabilities(
        min_capability=(9, 0),
        dtypes=(torch.float16, torch.bfloat16),
        key_sizes=Sizes(exactly=(128,)),
        value_sizes=Sizes(exactly=(128,)),
        updates=("delta",),
        decays=("head",),
    )

    @staticmethod
    def get_name() -> str:
        return "flashinfer_gdn"

    @staticmethod
    def get_state_impl_cls() -> type[StateImpl]:
        return FlashInferGDNImpl

    @classmethod
    def unavailable(cls, device: DeviceInfo) -> list[str]:
        """See `unavailable_reasons`."""
        return unavailable_reasons(device, _find)


def _function() -> Callable[..., Any] | None:
    module = import_guarded("flashinfer.gdn_prefill").module
    return getattr(module, _NAME, None)


def _find(capability: tuple[int, int] | None) -> tuple[FlashInferApi | None, str]:
    api, problem = find_api(capability)
    function = _function()
    accepted = () if function is None else keywords_of(function)
    missing = [name for name in _NEEDED if name not in accepted]
    if missing and not problem:
        problem = (
            f"flashinfer's {_NAME} has no {missing[0]}: pip install -U flashinfer-python (0.6.12)"
        )
    return api, problem


class FlashInferGDNImpl(packed_states.PackedStateImpl):
    """Decays are factors there, states `[Dv, Dk]`, and a scale of 0 means the default."""

    def recur(
        self, inputs: StateInputs, initial: torch.Tensor, batch: packed_states.PackedBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `PackedStateImpl.recur`."""
        query, key, value, decay, beta = inputs
        if self.spec.qk_norm:
            query, key = packed_states.normalized(query), packed_states.normalized(key)
        factor = decay.clamp(min=_LEAST_LOG_DECAY).exp()
        function, out, final = _function(), torch.empty_like(value), torch.empty_like(initial)
        assert function is not None  # selection has called `unavailable`
        function(
            q=query,
            k=key,
            v=value,
            g=factor,
            beta=beta,
            scale=self.scale or 1.0,
            initial_state=initial,
            output_final_state=True,
            cu_seqlens=batch.starts,
            output=out,
            output_state=final,
        )
        return out if self.scale else torch.zeros_like(out), final
