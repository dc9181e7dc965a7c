"""Is what was served what the model itself says? Every token and every logit against the model's own eager attention, request by request.

The reference reads prompt and generated tokens in one forward pass: if at each place the reference's best token is the one that was generated, then
greedy decoding by the reference gives the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from attnlib.cli.demo.scheduler import Request

__all__ = ["LOGIT_BUDGET", "Verdict", "judge"]

LOGIT_BUDGET = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 6e-2}
"""Largest error of a logit that each dtype may cause, as a share of the largest logit of its row: some tens of roundings through the layers."""


@dataclass(frozen=True)
class Verdict:
    """What the comparison found.

    Attributes:
        tokens: tokens compared.
        equal: tokens that the reference would have chosen too.
        largest_error: largest error of a logit, as a share of the largest logit of its row.
        budget: how large it may be.
        divergence: the first token that differs, in words; "" when none does.
        excused: every token that differs does so where the reference itself is undecided by less than the error of its logits.
    """

    tokens: int
    equal: int
    largest_error: float
    budget: float
    divergence: str
    excused: bool

    @property
    def passed(self) -> bool:
        """Logits within the budget, and tokens equal (or, below float32, undecided where they are not)."""
        return self.largest_error <= self.budget and (self.equal == self.tokens or self.excused)

    def __str__(self) -> str:
        tokens = f"{self.equal}/{self.tokens} tokens equal to eager attention's"
        error = f"largest logit error {self.largest_error:.1e} of the row's largest (allowed {self.budget:.0e})"
        return f"{'PASSED' if self.passed else 'FAILED'}: {tokens}; {error}" + (f"; first divergence: {self.divergence}" if self.divergence else "")


@torch.no_grad()
def judge(model: Any, requests: list[Request], logits: dict[int, list[torch.Tensor]]) -> Verdict:
    """Compare every generated token and its logits with the model's eager attention.

    Args:
        model: the model itself.
        requests: done, with their tokens.
        logits: as `serve` returned them.
    """
    parameter = next(model.parameters())
    budget = LOGIT_BUDGET.get(parameter.dtype, LOGIT_BUDGET[torch.float32])
    tokens = equal = 0
    worst, divergence, excused = 0.0, "", parameter.dtype is not torch.float32
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        for request in requests:
            reference = model(torch.tensor([request.tokens[:-1]], device=parameter.device), use_cache=False).logits[0].float().cpu()
            rows = reference[len(request.prompt) - 1 :]
            for place, (theirs, ours, token) in enumerate(zip(rows, logits[request.index], request.generated, strict=True)):
                error = float((theirs - ours).abs().max())
                worst = max(worst, error / float(theirs.abs().max()))
                tokens += 1
                best = int(theirs.argmax())
                if best == token:
                    equal += 1
                    continue
                gap = float(theirs[best] - theirs[token])
                excused = excused and gap <= 2 * error
                divergence = divergence or (
                    f"request {request.index}, token {place}: {token} where eager has {best}, by {gap:.1e} with logits off by {error:.1e}"
                )
    finally:
        model.set_attn_implementation(before)
    return Verdict(tokens, equal, worst, budget, divergence, excused)
