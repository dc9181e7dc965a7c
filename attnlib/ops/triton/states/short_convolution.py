"""The causal convolution before a recurrence, in one launch (`kernels/short_convolution.py`)."""

from __future__ import annotations

import triton
from torch import Tensor

from attnlib.ops.states.batch import StateBatch
from attnlib.ops.states.inputs import Taps
from attnlib.ops.states.tensors import StateTensors
from attnlib.ops.triton.heuristics.device import limits_of
from attnlib.ops.triton.kernels.short_convolution import ConvolutionConfig, short_convolution_kernel
from attnlib.ops.triton.states.config import check_dense
from attnlib.ops.triton.states.launch import KernelLaunch

__all__ = ["PreparedConvolution", "convolution_config", "short_convolution"]

_CHANNELS = 256
"""Channels of a program."""
_ELEMENTS = 2048
"""Outputs of a program of a prefill."""


def short_convolution(
    x: Tensor, taps: Taps, slots: StateTensors, batch: StateBatch, *, out: Tensor
) -> None:
    """See `attnlib.ops.torch.states.short_convolution`. Slots and positions are not checked.

    Raises:
        ContractError: dtypes that the kernels do not take, or rows that are not dense.
    """
    PreparedConvolution(x, taps, slots, batch, out).run(x, taps, slots, batch, out)


class PreparedConvolution:
    """The launch of `short_convolution` over one batch, for tensors and slots that differ in
    addresses and values only. Arguments and errors as there."""

    def __init__(
        self, x: Tensor, taps: Taps, slots: StateTensors, batch: StateBatch, out: Tensor
    ) -> None:
        check_dense(x=x, out=out)
        limits_of(x)
        config = convolution_config(x, taps, slots, batch, out)
        tiles = out.shape[0] // config.TOKENS + batch.num_reqs + 1
        grid = (tiles, triton.cdiv(config.C, config.CHANNELS))
        numbers = (batch.num_reqs, out.shape[0], tiles)
        self._launch = KernelLaunch(short_convolution_kernel, config, grid, numbers)

    def run(
        self, x: Tensor, taps: Taps, slots: StateTensors, batch: StateBatch, out: Tensor
    ) -> None:
        """Launch on the current stream."""
        if out.numel():
            # An argument that the kernel does not read stands for an absent one.
            bias = taps.weight if taps.bias is None else taps.bias
            window = slots.window, slots.window_positions
            self._launch.run(x, taps.weight, bias, out, *window, *batch.tensors)


def convolution_config(
    x: Tensor, taps: Taps, slots: StateTensors, batch: StateBatch, out: Tensor
) -> ConvolutionConfig:
    """The constants of a call; arguments as in `short_convolution`."""
    layout, width = slots.layout, taps.weight.shape[1]
    channels = min(_CHANNELS, triton.next_power_of_2(layout.conv_channels))
    tokens = min(batch.max_query_len, max(1, _ELEMENTS // channels))
    return ConvolutionConfig(
        C=layout.conv_channels,
        W=width,
        D=layout.max_rollback,
        RING=layout.num_window_rows,
        TOKENS=triton.next_power_of_2(max(tokens, width - 1, 1)),
        CHANNELS=channels,
        HAS_BIAS=taps.bias is not None,
        SILU=taps.activation == "silu",
        X_T=x.stride(0),
        O_T=out.stride(0),
        W_C=taps.weight.stride(0),
        W_W=taps.weight.stride(1),
        WINDOW=slots.window.stride(0),
        POSITIONS=slots.window_positions.stride(0),
    )
