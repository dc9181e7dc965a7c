"""The causal convolution before a recurrence, in one launch (`kernels/short_convolution.py`)."""

from __future__ import annotations

import triton
from torch import Tensor

from attnlib.ops.states.batch import StateBatch
from attnlib.ops.states.tensors import StateTensors
from attnlib.ops.triton.heuristics.device import limits_of
from attnlib.ops.triton.kernels.short_convolution import (
    ConvolutionConfig,
    short_convolution_kernel,
)
from attnlib.ops.triton.states.config import check_dense
from attnlib.ops.triton.states.launch import KernelLaunch, batch_tensors

__all__ = ["short_convolution"]

_CHANNELS = 256
"""Channels of a program."""
_ELEMENTS = 2048
"""Outputs of a program of a prefill."""


def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    slots: StateTensors,
    batch: StateBatch,
    *,
    activation: str | None,
    out: Tensor,
) -> None:
    """See `attnlib.ops.torch.states.short_convolution`. Slots and positions are not checked.

    Raises:
        ContractError: dtypes that the kernels do not take, or rows that are not dense.
    """
    check_dense(x=x, out=out)
    limits_of(x)
    if not out.numel():
        return
    window, positions = slots.window, slots.window_positions
    assert window is not None and positions is not None  # a layer with a convolution has them
    layout, width = slots.layout, weight.shape[1]
    channels = min(_CHANNELS, triton.next_power_of_2(layout.conv_channels))
    tokens = min(batch.max_query_len, max(1, _ELEMENTS // channels))
    config = ConvolutionConfig(
        C=layout.conv_channels,
        W=width,
        D=layout.max_rollback,
        RING=layout.num_window_rows,
        TOKENS=triton.next_power_of_2(max(tokens, width - 1, 1)),
        CHANNELS=channels,
        HAS_BIAS=bias is not None,
        SILU=activation == "silu",
        X_T=x.stride(0),
        O_T=out.stride(0),
        W_C=weight.stride(0),
        W_W=weight.stride(1),
        WINDOW=window.stride(0),
        POSITIONS=positions.stride(0),
    )
    tiles = out.shape[0] // config.TOKENS + batch.num_reqs + 1
    grid = (tiles, triton.cdiv(layout.conv_channels, channels))
    # An argument that the kernel does not read stands for an absent one.
    bias = weight if bias is None else bias
    tensors = (x, weight, bias, out, window, positions, *batch_tensors(batch))
    numbers = (batch.num_reqs, out.shape[0], tiles)
    KernelLaunch(short_convolution_kernel, config, grid).run(tensors, numbers)
