"""X6: threads that wait for words of another rank go on together."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tests.ops.triton.cross_compile import compile_in_process

FOLDER = Path(__file__).parents[3] / "attnlib" / "ops" / "triton"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_warps_leave_a_wait_together(target: str) -> None:
    """A merge whose warps left one by one gave wrong results under load, and so did one with words
    that two warps had. Nothing is read before the kernel before has ended, and no wait begins
    before all words are sent."""
    kernels = compile_in_process("tests.ops.triton.waiting_threads", target)
    warps = [each["warps"] for each in kernels if "merge" in each["kernel"]]
    assert warps == [4, 8, 2, 8, 2, 8, 1, 4]
    for kernel in kernels:
        in_source, in_machine_code = kernel["sent"]
        assert kernel["loops"] and 0 < in_source == in_machine_code, kernel
        assert kernel["overlaps"] == (target != "sm_80") and not kernel["reads_before"], kernel
        assert kernel["warps"] == 1 or not kernel["branches"], kernel
        assert not kernel["of_two_warps"], kernel


def test_no_other_kernel_waits_for_memory() -> None:
    """Another one belongs into `waiting_threads`."""
    loads = re.compile(r"volatile=True|ld\.(volatile|acquire|relaxed)")
    reads = [path.name for path in FOLDER.rglob("*.py") if loads.search(path.read_text())]
    assert reads == ["peer_words.py"]


def test_a_branch_on_a_loaded_word_is_found() -> None:
    waiting_threads = pytest.importorskip("tests.ops.triton.waiting_threads")
    loop = """$L_1:
        @%p1 ld.volatile.global.b64 { %rd1 }, [ %rd2 + 0 ];
        mov.b64 {_, %r1}, %rd1;
        shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1;
        SHARED
        setp.ne.b32 %p2, %r3, 0;
        @%p2 bra $L_1;"""
    alone, together = "mov.b32 %r3, %r2;", "st.shared.b32 [%r9], %r2; ld.shared.b32 %r3, [%r9];"
    divergent = waiting_threads.divergent_branches
    assert divergent(loop.replace("SHARED", alone)) == ["@%p2 bra $L_1;"]
    lines = loop.replace("SHARED", together).replace("; ld", ";\nld")
    assert divergent(lines) == []


def test_words_of_two_warps_are_found() -> None:
    waiting_threads = pytest.importorskip("tests.ops.triton.waiting_threads")
    ttgir = """#blocked = #ttg.blocked<{threadsPerWarp = [1, 32], warpsPerCTA = [WARPS]}>
        %1 = tt.load %2, %3 {isVolatile = true} : tensor<2x64x!tt.ptr<i64>, #blocked> loc(#4)"""
    for warps, count in (("4, 2", 1), ("2, 2", 0), ("1, 1", 0)):
        assert len(waiting_threads.words_of_two_warps(ttgir.replace("WARPS", warps))) == count


def test_words_that_are_sent_during_a_wait_are_found() -> None:
    waiting_threads = pytest.importorskip("tests.ops.triton.waiting_threads")
    ptx = "@%p1 st.global.v2.b64 [ %rd1 + 0 ], { %rd2, %rd3 };\nst.global.b64 [address], %rd4;"
    store, read = "@P5 STG.E.128 desc[UR4][R2.64], R4 ;", "LDG.E.64.STRONG.SYS R4, [R8.64] ;"
    assert waiting_threads.sent_words(ptx) == 1
    assert waiting_threads.sent_before_waits(f"{store}\n{read}\nSTG.E.64 [R2], R4 ;") == 1
    assert waiting_threads.sent_before_waits(f"{read}\n{store}") == 0
