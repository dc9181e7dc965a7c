"""Decides whether the Hopper kernel over latents serves a call; runs it over packed ones (P14)."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from attnlib.ops.packed_latents import PackedViews
from attnlib.ops.params import AttentionParams
from attnlib.ops.scales import MIN_LATE_SCALE
from attnlib.ops.triton.attention_call import AttentionCall
from attnlib.ops.triton.batch_tensors import BatchTensors
from attnlib.ops.triton.heuristics.tile_table import work_class
from attnlib.ops.triton.hopper.common_reasons import CallFeatures
from attnlib.ops.triton.hopper.decode_launches import HopperDecode
from attnlib.ops.triton.hopper.preference import latent_decode_keys
from attnlib.ops.triton.hopper.support import (
    latent_unsupported_reasons,
    packed_latents_unsupported_reasons,
)
from attnlib.ops.triton.hopper.tensor_support import are_readable, unsupported_strides
from attnlib.ops.triton.launch.bound import ALIGNMENT
from attnlib.ops.triton.launch.run import find_launches, run_attention

__all__ = ["run_packed_latents", "select_latents"]


def select_latents(
    call: AttentionCall,
    max_query_len: int,
    max_ctas: int | None = None,
    keys_per_sm: int | None = None,
    is_prefill: bool = False,
) -> HopperDecode | None:
    """The Hopper kernel over latents; None where the plain one serves them.

    Args:
        call: over pages, whose values are a prefix of the keys.
        max_query_len, max_ctas, keys_per_sm, is_prefill: see `latent_plan.prepare_latent_decode`.
    """
    params, features = call.params, CallFeatures.of(call.params)
    if latent_unsupported_reasons(call.shape, features, call.limits):
        return None
    tensors = (call.query, call.key, call.value, call.out)
    if features.score_function or not are_readable(*tensors, params):
        return None
    # Other layers do not import it.
    from attnlib.ops.triton.hopper.latent_plan import prepare_latent_decode

    return prepare_latent_decode(
        call, max_query_len, max_ctas, keys_per_sm=keys_per_sm, is_prefill=is_prefill
    )


def _takes(call: AttentionCall, visible: int) -> bool:
    """Whether the Hopper decode serves a call over packed latents, as `prepare_latent_decode` takes
    it, and is expected to be faster than the portable kernel.

    Args:
        visible: upper bound of the keys that a request sees.
    """
    shape = call.shape._replace(cache_dtype=call.value.dtype, latent=True)
    features, max_query_len = CallFeatures.of(call.params), max(1, call.max_query_len)
    if packed_latents_unsupported_reasons(shape, features, call.limits):
        return False
    keys = latent_decode_keys(call.num_reqs, shape.num_heads, max_query_len, call.limits.num_sms)
    tensors = {"query": call.query, "rotary": call.key, "elements": call.value, "out": call.out}
    return (
        keys is not None
        and visible >= keys
        and call.key.shape[0] > 0
        and call.params.scale >= MIN_LATE_SCALE
        and not call.addresses & ALIGNMENT
        and not unsupported_strides(**tensors)
    )


class _PackedLatents(NamedTuple):
    """The Hopper decode over packed latents, of calls that `_takes` allows."""

    max_query_len: int
    keys_per_sm: int

    def launch_key(self, call: AttentionCall) -> tuple[str, int, int]:
        """See `KernelFamily`."""
        return ("packed latents", *self)

    def prepare_launches(self, call: AttentionCall) -> HopperDecode:
        """See `KernelFamily`."""
        from attnlib.ops.triton.hopper.latent_plan import prepare_latent_decode

        return prepare_latent_decode(call, self.max_query_len, keys_per_sm=self.keys_per_sm)


def run_packed_latents(
    query: Tensor,
    parts: PackedViews,
    out: Tensor,
    lse: Tensor | None,
    batch: BatchTensors,
    params: AttentionParams,
    visible: int,
) -> bool:
    """Run a call once where the Hopper decode serves it; returns whether it does.

    Args:
        query, out, lse, params: of the call.
        parts: of the packed cache.
        batch: over the blocks of the cache.
        visible: upper bound of the keys that a request sees.
    """
    keys, values = parts.rotary.unsqueeze(2), parts.elements.unsqueeze(2)
    call = AttentionCall.of(query, keys, values, out, lse, batch, params)
    if not _takes(call, visible):
        return False
    work = work_class(call.num_reqs, 1, visible, call.limits.num_sms)
    run_attention(find_launches(_PackedLatents(max(1, call.max_query_len), work), call), call)
    return True
