"""A5: a query that sees one packed latent returns it (P14).

The backend writes the latents and reads them: no bytes are made by the suite, and no softmax is
needed to know the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.case import Case
from attnlib.testing.check import Check, CheckCase
from attnlib.testing.checks.packed_latents import LAYER, attend_packed
from attnlib.testing.runner import find_operation

__all__ = ["CHECKS"]


def _check(target: BackendUnderTest, case: Case) -> str:
    """Queries that see their own key alone return its latent, up to the rounding of its group.

    The groups of a token have very different magnitudes, so that each needs a scale of its own.
    """
    write = find_operation(target.backend, "write_packed_latents")
    step = case.materialize(target.device)
    inputs, key = step.inputs, step.inputs.key
    for group in range(4):
        key[:, 0, 128 * group : 128 * (group + 1)] *= 2.0 ** (-6 * group)
    shape = (*inputs.cache.key.shape[:2], 656)
    data = torch.full(shape, 0xFF, dtype=torch.uint8, device=target.device)
    size = case.block_size
    for blocks, length in zip(inputs.block_table.long(), inputs.seq_lens.tolist(), strict=True):
        positions = torch.arange(length, device=target.device)
        data[blocks[positions // size], positions % size] = 0  # finite latents (P5)
    write(key[:, 0], data, inputs.slot_mapping)
    last = inputs.written_slots()[-1]
    found = attend_packed(target, step, data)
    latents = key[..., :512].double()
    groups = latents.view(len(latents), 4, 128)
    largest = groups.abs().amax(-1, keepdim=True).expand_as(groups).reshape(latents.shape)
    eps = torch.finfo(case.torch_dtype).eps
    most = latents.abs() * (2.0**-4 + 2 * eps) + largest * 2.0**-18 + 2.0**-24
    off = (found.out.double() - latents).abs() > most
    if bool(off.any()):
        row, head, element = off.nonzero()[0].tolist()
        return (
            f"row {row} sees one key: element {element} is {float(found.out[row, head, element])} "
            f"where {float(latents[row, 0, element])} was written (P14) | case: {case}"
        )
    nan = torch.tensor([0, 0, 0xC0, 0x7F], dtype=torch.uint8, device=data.device)
    data[last // size, last % size, 520:524] = nan  # the scale of group 2
    rows = attend_packed(target, step, data).out
    others = rows[: int(inputs.query_start_loc[-2])]
    if not bool(rows[-1, :, 256:384].isnan().all()) or bool(others.isnan().any()):
        return f"a scale that is NaN must reach the row that sees it, no others | case: {case}"
    return ""


def _cases(target: BackendUnderTest) -> Iterator[CheckCase]:
    for name, batch in (("decode", "q1s37_q1s20"), ("mixed", "q1s40_q9s23_q2s2")):
        case = target.case(**{**LAYER, "batch": batch, "sliding_window": 1})
        yield CheckCase(name, partial(_check, target, case), case)


CHECKS = (Check("A5", "a query that sees one packed latent returns it", _cases),)
