"""K9: relations between rotated and normalized heads, without a computation of their values (P11).

The two styles of rotation rotate the same elements in another order, and rotation keeps the length
of a normalized head.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from attnlib.ops.rotary import HeadNorm
from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.case import Case
from attnlib.testing.check import Check, CheckCase
from attnlib.testing.layouts import read_slots
from attnlib.testing.materialized_case import MaterializedCase

__all__ = ["CHECKS"]


def _rotate(
    target: BackendUnderTest, step: MaterializedCase, order: torch.Tensor | None, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rotated queries, and the keys in the cache, [n, H, D].

    Args:
        order: [D], the order in which elements of queries and keys are passed; results have the
            order of the step.
        kwargs: arguments of `rotate_and_write_kv`.
    """
    from attnlib.layer import Attention

    inputs = step.inputs
    layer = Attention(
        step.spec, backend=target.backend, scale=step.params.scale, device=target.device
    )
    metadata = target.backend.make_builder(step.spec, target.device).build(0, step.common())
    query, key = inputs.query, inputs.key
    if order is not None:
        query, key = query[..., order], key[..., order]
    rotated = layer.rotate_and_write_kv(query, key, inputs.value, step.cache(), metadata, **kwargs)
    found = rotated, read_slots(inputs.cache.key, inputs.written_slots())
    if order is None:
        return found
    back = order.argsort()
    return found[0][..., back], found[1][..., back]


def _angles(case: Case, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, [T, D / 2] in the dtype of the case."""
    draw = torch.Generator().manual_seed(case.seed)
    angles = torch.randn(case.batch_spec.num_tokens, case.head_size // 2, generator=draw)
    return angles.cos().to(device, case.torch_dtype), angles.sin().to(device, case.torch_dtype)


def _check_styles(target: BackendUnderTest, case: Case) -> str:
    """Neighbors as pairs, and the same elements in the order in which halves are pairs."""
    cos, sin = _angles(case, target.device)
    order = torch.arange(case.head_size, device=target.device).view(-1, 2).T.flatten()
    pairs, halves = (
        _rotate(
            target,
            case.materialize(target.device, kv_written=False),
            given,
            cos=cos,
            sin=sin,
            interleaved=given is None,
        )
        for given in (None, order)
    )
    count = case.batch_spec.num_actual_tokens
    for name, one, other in zip(("queries", "keys"), pairs, halves, strict=True):
        if not torch.equal(one[:count], other[:count]):
            return f"pairs of neighbors and of halves give other {name} (P11) | case: {case}"
    return ""


def _check_length(target: BackendUnderTest, case: Case) -> str:
    """A normalized head has the root mean square 1, and rotation does not change it."""
    cos, sin = _angles(case, target.device)
    step = case.materialize(target.device, kv_written=False)
    for heads in (step.inputs.query, step.inputs.key):
        heads.mul_(torch.arange(1, len(heads) + 1, device=heads.device)[:, None, None])
    ones = torch.ones(case.head_size, device=target.device, dtype=case.torch_dtype)
    norm = HeadNorm(ones, eps=0.0)
    rotated = _rotate(target, step, None, cos=cos, sin=sin, q_norm=norm, k_norm=norm)
    most = 8 * torch.finfo(case.torch_dtype).eps
    count = case.batch_spec.num_actual_tokens
    for name, heads in zip(("query", "key"), rotated, strict=True):
        size = heads[:count].double().pow(2).mean(-1).sqrt()
        off = (size - 1).abs().amax(-1)
        if not bool(off.max() <= most):
            token = int(off.nan_to_num(torch.inf).argmax())
            return (
                f"the normalized {name} of token {token} has the root mean square "
                f"{float(size[token].max()):.4g}; expected 1 within {most:.2g} (P11) | case: {case}"
            )
    return ""


def _relations(target: BackendUnderTest) -> Iterator[CheckCase]:
    for batch in ("mixed", "decode"):
        case = target.case(batch=batch, head_size=target.base_case.head_size)
        yield CheckCase(f"styles-{batch}", partial(_check_styles, target, case), case)
        yield CheckCase(f"length-{batch}", partial(_check_length, target, case), case)


CHECKS = (Check("K9", "both styles of rotation agree, normalized heads have length 1", _relations),)
