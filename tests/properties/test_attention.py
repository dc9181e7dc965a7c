"""Random calls of a layer agree with a float64 reference written from docs/semantics.md.

A draw varies the spec, the batch, the cache layout and the strides of every tensor. The output, the
LSE, the cache and everything that a call must not change are compared. Without options the number
of draws is bounded:

    pytest tests/properties/test_attention.py --draws 100000 --draw-processes 2
    pytest tests/properties/test_attention.py --draws 5000 --draw-backend triton
"""

from __future__ import annotations

from pathlib import Path

import pytest

from attnlib.backends.base import AttentionImpl
from tests.properties.campaign import Campaign, run_campaign
from tests.properties.check import run_draw
from tests.properties.draw import Limits, draw_of
from tests.testing import wrong_backends
from tests.testing.toy_backend import ToyImpl, toy_with


def test_draws_agree_with_the_reference(campaign: Campaign, report: Path | None) -> None:
    """M1 to M9 and P1 to P9."""
    total = run_campaign(campaign, report)
    share, seed = total.largest_share
    print(
        f"{campaign}: {total.agreed} agreed, {total.refused} refused, {total.not_run} not run, "
        f"largest error {share:.2f} of its bound (seed {seed}), {total.seconds} s"
    )
    assert not total.wrong, "\n".join(total.wrong)
    assert total.agreed, "every draw was refused"


def test_a_seed_gives_one_draw() -> None:
    """Also across processes: only integers and strings seed the generators."""
    limits = Limits()
    assert draw_of(17, limits) == draw_of(17, limits) != draw_of(18, limits)
    shared = [draw_of(seed, limits, 4) for seed in (8, 11, 12)]
    assert shared[0].spec == shared[1].spec != shared[2].spec
    assert shared[0].batch != shared[1].batch or shared[0].forms != shared[1].forms


FOUND = (
    "OffByOneWindow", "WindowOnPrefillOnly", "IgnoredSoftCap", "ScaleTwiceUnderSoftCap",
    "BaseTwoLse", "SinkIgnoredInDecode", "TopLeftCausal", "IgnoredKScale", "IgnoredVScale",
    "PerHeadScaleAveraged", "WritesSlotMinusOne", "IgnoresMappingLength",
    "WrapsInsteadOfSaturating", "ReadsPastTable", "NanFromUnusedValues", "ValuesClearedByBlock",
    "PlansKeepTensors", "WrongGroups", "LeavesPaddingRows", "AssumesPackedQuery",
    "FailsOnEmptyRequests", "SharingLayerWrites",
    "DifferentBitsEachCall", "IgnoredAlibi", "FirstTileFullyMasked", "StridesFromShape",
)  # fmt: skip


def _first_finding(impl: type[AttentionImpl]) -> int | None:
    """The first of 400 draws that disagrees with a toy backend; None if all agree."""
    backend = toy_with(impl)
    for seed in range(400):
        try:
            if run_draw(draw_of(seed, Limits()), backend, "cpu").wrong:
                return seed
        except Exception:
            return seed  # an error in a valid call is a finding too
    return None


@pytest.mark.slow
def test_draws_agree_with_the_toy_backend() -> None:
    """The backend that the wrong ones change."""
    assert _first_finding(ToyImpl) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUND)
def test_draws_find_wrong_backends(name: str) -> None:
    """Deliberate errors of the conformance suite's tests."""
    assert _first_finding(getattr(wrong_backends, name)) is not None
