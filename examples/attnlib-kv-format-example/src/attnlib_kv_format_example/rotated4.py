"""4-bit Lloyd-Max numbers of a rotated head, and one float16 scale: 4.125 bits for heads of 128."""

import functools

import torch

from attnlib.kv_formats import KVFormat

_HALF = (0.1284, 0.3881, 0.6568, 0.9423, 1.2562, 1.6180, 2.0690, 2.7326)
LEVELS = (*(-x for x in reversed(_HALF)), *_HALF)


@functools.cache  # CUDA graphs cannot hold copies from the host
def levels(device: torch.device) -> torch.Tensor:
    return torch.tensor(LEVELS, device=device)


def encode(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    has_nan = x.isnan().any(-1, keepdim=True)
    x = x.nan_to_num(0.0, 3e4, -3e4).clamp(-3e4, 3e4)
    rms = x.square().mean(-1, keepdim=True).sqrt()
    middles = (levels(x.device)[1:] + levels(x.device)[:-1]) / 2
    codes = torch.bucketize((x / rms.clamp(min=1e-30)).contiguous(), middles)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    return packed.to(torch.uint8), torch.where(has_nan, torch.nan, rms).half()


def decode(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    both = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()
    return levels(codes.device)[both] * scale.float()


ROTATED_4BIT = KVFormat(
    name="example:rotated4", version=1, dtype=torch.uint8, bits=4, scale_dtype=torch.float16,
    groups_per_head=1, head_size_multiple=2, encode=encode, decode=decode, error=0.11, rotated=True,
    number=LEVELS,
)  # fmt: skip
