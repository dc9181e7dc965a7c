"""Rotary position embedding as `flash_attn_with_kvcache` applies it, in torch operations."""

from __future__ import annotations

import torch

from attnlib.compat.flash_attn.arguments import FlashAttentionArgumentError, check_tensor

__all__ = ["rotate_query_and_key"]


def rotate_query_and_key(
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor | None,
    offsets: torch.Tensor,
    *,
    interleaved: bool,
    same_query_position: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the new queries and keys by their positions. No host sync.

    Args:
        query: `[B, Sq, Hq, D]`.
        key: `[B, Sk, Hkv, D]`, the new keys.
        cos, sin: `[positions, rotary_dim / 2]`, the first `rotary_dim` elements of a head rotate.
        offsets: `[B]` int32, the position of the first new token.
        interleaved: rotate elements (0, 1), (2, 3), ...; else (0, rotary_dim / 2), (1, ...), ...
        same_query_position: rotate all queries of a request by the position of the first one.

    Raises:
        FlashAttentionArgumentError: `sin` is missing, or a shape does not fit.
    """
    if sin is None:
        raise FlashAttentionArgumentError("rotary_cos is given and rotary_sin is None: pass both")
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        check_tensor(name, table, 2, "[positions, rotary_dim / 2]", query)
    if cos.shape != sin.shape or 2 * cos.shape[1] > query.shape[3] or not cos.shape[0]:
        raise FlashAttentionArgumentError(
            f"rotary_cos has shape {tuple(cos.shape)} and rotary_sin {tuple(sin.shape)}; both must "
            f"be [positions, rotary_dim / 2] with rotary_dim <= headdim={query.shape[3]}"
        )
    steps = torch.arange(max(query.shape[1], key.shape[1]), device=offsets.device)
    positions = (offsets.long()[:, None] + steps).clamp(0, cos.shape[0] - 1)
    of_query = positions[:, :1] if same_query_position else positions[:, : query.shape[1]]
    return (
        _rotate(query, cos[of_query], sin[of_query], interleaved),
        _rotate(
            key, cos[positions[:, : key.shape[1]]], sin[positions[:, : key.shape[1]]], interleaved
        ),
    )


def _rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    """`[B, S, H, D]` rotated by `[B, S or 1, rotary_dim / 2]`; the products are float32."""
    half = cos.shape[-1]
    rotated, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    if interleaved:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
    else:
        first, second = rotated[..., :half], rotated[..., half:]
    cos, sin = cos.float()[:, :, None], sin.float()[:, :, None]
    pair = (first * cos - second * sin, first * sin + second * cos)
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((turned.to(x.dtype), rest), -1)
