"""Convolution, gates, recurrence and norm of a step in one launch (`kernels/fused_step.py`)."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from attnlib.ops.states.batch import StateBatch
from attnlib.ops.states.inputs import RecurrenceParams, Taps
from attnlib.ops.states.step_form import FusedInputs
from attnlib.ops.states.tensors import StateTensors
from attnlib.ops.triton.heuristics.device import DeviceLimits, limits_of
from attnlib.ops.triton.heuristics.state_tiles import StateTile
from attnlib.ops.triton.hopper.kernels.fused_decode import fused_decode_kernel
from attnlib.ops.triton.kernels.fused_step import FusedConfig, fused_step_kernel
from attnlib.ops.triton.states import config as configs
from attnlib.ops.triton.states.launch import KernelLaunch
from attnlib.ops.triton.states.short_convolution import convolution_config
from attnlib.ops.triton.states.step_parts import norm_launch, step_config

__all__ = ["PreparedFusedStep", "norm_is_apart"]


def norm_is_apart(heads: int, tile: StateTile, limits: DeviceLimits, num_heads: int) -> bool:
    """Whether the norm has a launch of its own behind the step.

    Programs of a group of the norm wait for the number of those before them. With many programs,
    that takes longer than a launch.

    Args:
        heads: of a group of the norm.
        tile: of the step.
        limits: of the device.
        num_heads: of all requests.
    """
    return tile.copies and heads * tile.blocks > 1 and num_heads >= 2 * limits.num_sms


class PreparedFusedStep:
    """The launch of one step over one batch, for tensors and slots that differ in addresses and
    values only.

    Its bits, and those of the slots, are those of the separate operations. Tensors, slots and
    positions are not checked.

    Args:
        inputs: of the step; all last dimensions are dense.
        taps: of the convolution.
        slots: in the form `tail`, with a convolution and a recurrence.
        batch: of requests with at most `max_rollback + 1` tokens.
        params: of the recurrence.
        out: `[T', Hv, Dv]`, each row dense, written in place.
    """

    def __init__(
        self,
        inputs: FusedInputs,
        taps: Taps,
        slots: StateTensors,
        batch: StateBatch,
        params: RecurrenceParams,
        out: Tensor,
    ) -> None:
        x, a, b, z, form = inputs
        layout, limits, rows = slots.layout, limits_of(x), out.shape[0]
        keys, values, heads = layout.key_size, layout.value_size, layout.num_heads
        channels = x.shape[1]
        width = keys if layout.decay == "channel" else 1
        gates: tuple[int, ...] = (heads * width, width, heads, 1)
        if form.gates == "given":
            decays = (0, a.stride(0)) if a.dim() == 1 else a.stride()[:2]
            gates = (*decays, *((0, 0) if b is None else b.stride()))
        strides = (channels, keys, channels, keys, channels, values, *out.stride()[:2], *gates)
        recurrence = configs.Recurrence.on_chip(params, limits)
        tile = configs.step_tile(layout, params, limits, batch.num_reqs, is_fused=True)
        queries = configs.most_queries(layout, tile, batch.max_query_len)
        tokens = queries if tile.copies else triton.next_power_of_2(batch.max_query_len)
        strides = (*strides, *configs.slot_strides(slots))
        state = configs.state_config(layout, recurrence, strides, tile, queries=queries)
        convolution = convolution_config(x, taps, slots, batch, x.new_empty(0, channels))
        sizes = {"q": layout.num_key_heads * keys, "v": heads * values}
        sizes["k"] = sizes["q"]
        starts = [sum(sizes[each] for each in form.order.partition(name)[0]) for name in "qkv"]
        width_of_keys = triton.next_power_of_2(keys)
        step = step_config(a, b, z, out, form, layout.has_beta, tokens)
        group, self._norm = form.norm_size // values, None
        if step.NORM and norm_is_apart(group, tile, limits, batch.num_reqs * heads):
            step, self._norm = step._replace(NORM=False), norm_launch(out, z, form)
        config = FusedConfig(
            state,
            convolution._replace(TOKENS=tokens),
            step,
            Q=starts[0],
            K=starts[1],
            V=starts[2],
            WIDTH=width_of_keys,
            ELEMENTS=triton.next_power_of_2(2 * width_of_keys + tile.rows * tile.passes),
        )
        options = tile.options(limits.is_amd)
        grid = (batch.num_reqs + 1, heads * state.BLOCKS)
        numbers = (float(params.scale), batch.num_reqs, rows)
        kernel: Any = fused_decode_kernel if tile.copies else fused_step_kernel
        self._launch = KernelLaunch(kernel, config, grid, numbers, **options)
        self._in_shared_memory = tile.copies
        self._gates = 0 if form.gates == "given" or tile.copies else rows * heads
        self._width = width

    def run(
        self,
        inputs: FusedInputs,
        taps: Taps,
        slots: StateTensors,
        batch: StateBatch,
        skip: Tensor | None,
        out: Tensor,
    ) -> None:
        """Launch on the current stream."""
        x, a, b, z, form = inputs
        convolved, decay, beta = x, a, b
        if self._gates:
            sizes = (self._gates * self._width, self._gates)
            memory = torch.empty(sum(sizes), dtype=torch.float32, device=x.device)
            decay, beta = memory[: sizes[0]], memory[sizes[0] :]
        if not self._in_shared_memory:
            convolved = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        sources = (x, taps.weight, taps.bias, a, b, form.rate, form.bias, z, form.norm_weight)
        targets = (convolved, decay, beta, skip, out, slots.counters)
        windows = (slots.window, slots.window_positions, *slots.for_kernels)
        # A tensor that the kernel does not read stands for an absent one.
        given = [a if each is None else each for each in (*sources, *targets, *windows)]
        self._launch.run(*given, *batch.tensors)
        if self._norm is not None and form.norm_weight is not None:
            self._norm.run(out, out if z is None else z, form.norm_weight)
