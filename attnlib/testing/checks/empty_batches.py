"""N2 to N4: requests, rows and key tiles that contain nothing.

N2: requests without keys, requests without queries, and batches without requests or tokens. They
    must not affect the other requests.
N3: padding rows past the batch's tokens are exactly 0.
N4: windows and chunks that mask the first or the last tile of keys completely for some rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import torch

from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.case import Case
from attnlib.testing.check import Check, CheckCase
from attnlib.testing.runner import compare_with_oracle, run_case

__all__ = ["CHECKS"]


def _check_against_oracle(target: BackendUnderTest, case: Case) -> str:
    return compare_with_oracle(case, run_case(target.backend, case, target.device), target.device)


def _check_exact_zeros(target: BackendUnderTest, case: Case) -> str:
    """Rows that see no key must be exactly 0 with LSE -inf (M5)."""
    output = run_case(target.backend, case, target.device)
    if error := compare_with_oracle(case, output, target.device):
        return error
    no_key = torch.isinf(case.materialize(target.device).oracle().lse)
    if output.out[no_key].any():
        return f"rows that see no key must be exactly 0 (M5) | case: {case}"
    if output.lse is not None and not (output.lse[no_key] == -math.inf).all():
        return f"the LSE of rows that see no key must be -inf (M5) | case: {case}"
    return ""


def _empty(target: BackendUnderTest) -> Iterator[CheckCase]:
    block = target.base_case.block_size
    batches = {
        "no-requests": "empty",
        "no-tokens": f"q0s{block}_q0s3",
        "only-padding": "only_padding",
        "between-neighbors": "empty_rows",
        "no-keys-first": f"q2s0_q1s{block + 1}_q3s5",
        "no-keys-last": f"q1s{block + 1}_q3s5_q1s0",
        "longer-query-than-sequence": f"q1s9_q5s2_q1s{block}",
    }
    for name, batch in batches.items():
        case = target.case(batch=batch)
        yield CheckCase(name, partial(_check_exact_zeros, target, case), case)
    # Tokens before the first position have slot -1; the last slot of the pool is context.
    case = target.case(batch=f"q1s{2 * block}_q5s2", placement="top")
    yield CheckCase("tokens-without-slot", partial(_check_exact_zeros, target, case), case)
    case = target.case(batch="empty_rows", sinks=True)
    yield CheckCase("between-neighbors-sinks", partial(_check_against_oracle, target, case), case)
    case = case.replace(disabled_sinks=True)  # heads with a sink of -inf have rows without a key
    yield CheckCase("disabled-sinks", partial(_check_exact_zeros, target, case), case)


def _padding(target: BackendUnderTest) -> Iterator[CheckCase]:
    for name in ("graph_padding", "only_padding"):
        for poison in ("zero", target.base_case.poison):
            case = target.case(batch=name, poison=poison)
            yield CheckCase(f"{name}-{poison}", partial(_check_against_oracle, target, case), case)
    case = target.case(batch="q9s20_q5_pad7")
    yield CheckCase("prefill", partial(_check_against_oracle, target, case), case)
    # Padding tokens have no slot: the one that follows the last slot of the mapping is context.
    block = target.base_case.block_size
    case = target.case(batch=f"q1s{2 * block}_q1s3_2q0s0_pad2", placement="top")
    yield CheckCase("writes", partial(_check_against_oracle, target, case), case)
    case = target.case(batch="q1s20_q9_pad5")
    yield CheckCase("mixed", partial(_check_against_oracle, target, case), case)


def _masked_tiles(target: BackendUnderTest) -> Iterator[CheckCase]:
    long = 150 if target.quick else 300
    cases: dict[str, dict[str, object]] = {
        "decode-window": {"batch": f"q1s{long}_q1s2", "sliding_window": 3},
        "prefill-window": {"batch": f"q{long // 2}_q5s{long}", "sliding_window": 2},
        "own-key-only": {
            "batch": f"q40s{long // 2}_q1s90",
            "mask": "bidirectional",
            "window": (0, 0),
        },
        "right-only": {"batch": f"q70s{long // 2}", "mask": "bidirectional", "window": (None, 0)},
        "left-hidden": {"batch": "q70s80", "mask": "bidirectional", "window": (0, None)},
        "chunk-start": {"batch": "q1s129_q3s130_q1s128", "attention_chunk_size": 128},
        "tree-hides-own-tail": {"batch": "q8s64_q7s7", "mask": "query_bias"},
    }
    for name, changes in cases.items():
        case = target.case(**changes)
        yield CheckCase(name, partial(_check_against_oracle, target, case), case)


CHECKS = (
    Check("N2", "empty requests and empty batches", _empty),
    Check("N3", "padding rows are exactly zero", _padding),
    Check("N4", "fully masked key tiles", _masked_tiles),
)
