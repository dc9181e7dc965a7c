"""Is what was served what the model itself says? Every token and every logit against the model's own eager attention, request by request.

The reference reads prompt and generated tokens in one forward pass: if at each place the reference's best token is the one that was generated, then
greedy decoding by the reference gives the same tokens.

Below float32 eager attention rounds too, and a token may differ where the reference itself hardly prefers its own: by less than the error that the
dtype is allowed, measured on the reference's logits alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from attnlib.cli.demo.scheduler import Request

__all__ = ["LOGIT_BUDGET", "Verdict", "compare", "judge"]

LOGIT_BUDGET = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 6e-2}
"""Largest error of a logit that each dtype may cause, as a share of the largest logit of its row: some tens of roundings through the layers."""


@dataclass(frozen=True)
class Verdict:
    """What the comparison found.

    Attributes:
        tokens: tokens compared.
        equal: tokens that the reference would have chosen too.
        largest_error: largest error of a logit, as a share of the largest logit of its row; inf when one is not finite.
        budget: how large it may be.
        divergence: the first token that differs, in words; "" when none does.
        excused: tokens that differ where the reference prefers its own by less than the budget; never any in float32.
    """

    tokens: int
    equal: int
    largest_error: float
    budget: float
    divergence: str
    excused: int

    @property
    def passed(self) -> bool:
        """Something was compared, logits are within the budget, and every token is equal or excused."""
        return (
            self.tokens > 0
            and self.largest_error <= self.budget
            and self.equal + self.excused == self.tokens
        )

    def __str__(self) -> str:
        tokens = f"{self.equal}/{self.tokens} tokens equal to eager attention's"
        error = f"largest logit error {self.largest_error:.1e} of the row's largest (allowed {self.budget:.0e})"
        ties = (
            f"; {self.excused} differ where eager prefers its own by less than that"
            if self.excused
            else ""
        )
        divergence = f"; first divergence: {self.divergence}" if self.divergence else ""
        return f"{'PASSED' if self.passed else 'FAILED'}: {tokens}; {error}{ties}{divergence}"


def judge(model: Any, requests: list[Request], logits: dict[int, list[torch.Tensor]]) -> Verdict:
    """Compare every generated token and its logits with the model's eager attention.

    Args:
        model: the model itself.
        requests: done, with their tokens.
        logits: as `serve` returned them.
    """
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        pairs = [
            (request, _reference(model, request), torch.stack(logits[request.index]))
            for request in requests
        ]
    finally:
        model.set_attn_implementation(before)
    return compare(pairs, next(model.parameters()).dtype)


def compare(pairs: list[tuple[Request, torch.Tensor, torch.Tensor]], dtype: torch.dtype) -> Verdict:
    """The verdict on (request, the reference's logits, ours), both `[generated tokens, vocabulary]` float32, of a model in `dtype`."""
    budget = LOGIT_BUDGET.get(dtype, LOGIT_BUDGET[torch.float32])
    equal = excused = 0
    worst, divergence = 0.0, ""
    for request, theirs, ours in pairs:
        errors, scales = (theirs - ours).abs().amax(-1), theirs.abs().amax(-1)
        shares = torch.where(errors == 0, 0.0, errors / scales).nan_to_num(
            nan=torch.inf
        )  # NaN compares as neither more nor less
        worst = max(worst, float(shares.max()))
        for place, (row, token) in enumerate(zip(theirs, request.generated, strict=True)):
            best = int(row.argmax())
            if best == token:
                equal += 1
                continue
            gap = float(row[best] - row[token])
            excused += dtype is not torch.float32 and gap <= budget * float(scales[place])
            divergence = divergence or (
                f"request {request.index}, token {place}: {token} where eager has {best}, preferred by {gap:.1e} "
                f"({gap / float(scales[place]):.1e} of the row's largest)"
            )
    return Verdict(
        sum(len(request.generated) for request, _, _ in pairs),
        equal,
        worst,
        budget,
        divergence,
        excused,
    )


@torch.no_grad()
def _reference(model: Any, request: Request) -> torch.Tensor:
    """Logits of each generated token, `[generated tokens, vocabulary]` float32 on the CPU."""
    ids = torch.tensor([request.tokens[:-1]], device=next(model.parameters()).device)
    logits: torch.Tensor = (
        model(ids, use_cache=False).logits[0, len(request.prompt) - 1 :].float().cpu()
    )
    return logits
