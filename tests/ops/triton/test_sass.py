"""`sass.descriptor_sources` on short listings."""

from __future__ import annotations

import pytest

from tests.ops.triton.sass import descriptor_sources

START = """
        /*0000*/                   ULDC.64 UR10, c[0x0][0x210] ;
        /*0010*/                   ULDC UR7, c[0x0][0x284] ;
        /*0020*/                   S2UR UR4, SR_CgaCtaId ;
        /*0030*/                   UMOV UR5, 0x400 ;
        /*0040*/                   ULEA UR12, UR4, UR5, 0x18 ;
        /*0050*/                   UIADD3 UR11, UR12, 0x8000, URZ ;
        /*0060*/                   USHF.R.U32.HI UR11, URZ, 0x4, UR11 ;
        /*0070*/                   USGXT.U32 UR50, UR11, 0xe ;
        /*0080*/                   UMOV UR51, 0x40000040 ;
        /*0090*/                   HGMMA.64x128x16.F32 R24, R104, gdesc[UR48], RZ, !UPT ;
"""
PRODUCT = """
        /*0200*/                   HGMMA.64x16x16.F32 R88, R28, gdesc[UR4].tnspB, R88 ;
        /*0210*/                   EXIT ;
"""
FROM_BASE = """
        /*0100*/                   UIADD3 UR6, UP0, UR50, 0x20, URZ ;
        /*0110*/                   UIADD3.X UR7, URZ, -0x3ffffff0, URZ, UP0, !UPT ;
"""
SPILLED = """
        /*0100*/                   IMAD.U32 R188, RZ, RZ, UR50 ;
        /*0110*/                   STL [R1+0x84], R188 ;
        /*0120*/                   LDG.E R188, desc[UR8][R66.64] ;
        /*0130*/                   LDL R223, [R1+0x84] ;
        /*0140*/                   R2UR UR6, R223 ;
        /*0150*/                   UMOV UR7, 0xc0000010 ;
"""
WAITED = """
        /*0100*/                   HGMMA.64x8x16.F16 RZ, gdesc[URZ], RZ, !UPT, gsb0 ;
        /*0110*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
"""
FROM_ARGUMENTS = """
        /*0100*/                   UIADD3 UR10, UP0, UR10, 0x20, URZ ;
        /*0110*/                   UIADD3.X UR7, UR7, -0x3ffffff0, URZ, UP0, !UPT ;
        /*0120*/                   UMOV UR6, UR10 ;
"""
FROM_NOTHING = """
        /*0100*/                   UIADD3.64 UR6, UR38, 0x200007e, URZ ;
"""
FROM_MEMORY = """
        /*0100*/                   LDG.E R12, desc[UR8][R66.64] ;
        /*0110*/                   R2UR UR6, R12 ;
        /*0120*/                   UMOV UR7, 0xc0000010 ;
"""
ON_ONE_PATH = """
        /*0100*/              @!P0 BRA `(.L_x_1) ;
        /*0110*/                   UMOV UR6, 0x842 ;
        /*0120*/                   UMOV UR7, 0xc0000010 ;
.L_x_1:
"""


@pytest.mark.parametrize("middle", [FROM_BASE, SPILLED, WAITED + FROM_BASE])
def test_constants(middle: str) -> None:
    """Also through the stack, and beside a product without a result."""
    assert descriptor_sources(START + middle + PRODUCT) == {}


@pytest.mark.parametrize(
    ("middle", "sources"),
    [
        (FROM_ARGUMENTS, {"argument"}),
        (FROM_NOTHING, {"undefined"}),
        (FROM_MEMORY, {"memory"}),
        (ON_ONE_PATH, {"undefined", "argument"}),
    ],
)
def test_other_sources(middle: str, sources: set[str]) -> None:
    """The first one is what ptxas 12.8 made of draw 3003003."""
    assert descriptor_sources(START + middle + PRODUCT) == {"0200": sources}


def test_a_loop() -> None:
    """The second iteration uses what the first one has left."""
    loop = """
        /*00a0*/                   UMOV UR6, 0x842 ;
        /*00b0*/                   UMOV UR7, 0xc0000010 ;
.L_x_4:
        /*0100*/                   HGMMA.64x16x16.F32 R88, R28, gdesc[UR4].tnspB, R88 ;
        /*0110*/                   {} ;
        /*0120*/               @P0 BRA `(.L_x_4) ;
"""
    changed = loop.format("ULDC UR6, c[0x0][0x284]")
    assert descriptor_sources(START + changed + PRODUCT) == {
        "0100": {"argument"},
        "0200": {"argument"},
    }
    assert descriptor_sources(START + loop.format("UIADD3 UR8, UR6, 0x2, URZ") + PRODUCT) == {}
