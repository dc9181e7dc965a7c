"""Peak rates of the device, measured in the same run as the times that are compared with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from attnlib.bench.timer import EagerTimer, measure_in_turn, warm_up

__all__ = ["Peaks", "measure_peaks"]


@dataclass(frozen=True)
class Peaks:
    """Rates of simple operations.

    Attributes:
        copy_gbps: GB/s read and written by a device-to-device copy.
        read_gbps: GB/s read by a reduction.
        matmul_tflops: TFLOP/s of a square matrix product.
        matmul: dtype and size of the product.
    """

    copy_gbps: float
    read_gbps: float
    matmul_tflops: float
    matmul: str

    def to_json(self) -> dict[str, float | str]:
        """Field -> value."""
        return asdict(self)


def measure_peaks(device: torch.device) -> Peaks:
    """Measure on buffers larger than the last-level cache.

    On a GPU: 2 GiB, and a bfloat16 product of side 8192. On a CPU: 64 MiB, and a float32 product of
    side 512.
    """
    on_gpu = device.type == "cuda"
    elements, side = (2**29, 8192) if on_gpu else (2**24, 512)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    copy_us, read_us = _memory_us(elements, device)
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(left)
    product_us = _us(lambda: torch.mm(left, right, out=product), device)
    return Peaks(
        copy_gbps=2 * elements * 4 / copy_us / 1e3,
        read_gbps=elements * 4 / read_us / 1e3,
        matmul_tflops=2 * side**3 / product_us / 1e6,
        matmul=f"{str(dtype).removeprefix('torch.')} {side}^3 matrix product",
    )


def _memory_us(elements: int, device: torch.device) -> tuple[float, float]:
    """Microseconds to copy and to read `elements` float32.

    Reading is timed by the faster of two reductions.
    """
    source = torch.randn(elements, device=device)
    target = torch.empty_like(source)
    copied = _us(lambda: target.copy_(source), device)
    rows, total, sums = (
        source.view(-1, 2**12),
        torch.empty((), device=device),
        torch.empty(elements // 2**12, device=device),
    )
    whole = _us(lambda: torch.sum(source, dim=0, out=total), device)
    by_row = _us(lambda: torch.sum(rows, dim=1, out=sums), device)
    return copied, min(whole, by_row)


def _us(call: Callable[[], object], device: torch.device) -> float:
    """Microseconds per call, without a CUDA graph: the launch overhead is small compared with these
    kernels.
    """
    expected = warm_up(lambda _: call(), device)
    timer = EagerTimer(lambda _: call(), 1, device, expected / 4)
    return measure_in_turn({"call": timer}, {"call": expected})["call"].us
