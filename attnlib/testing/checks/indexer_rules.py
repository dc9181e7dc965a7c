"""I2: rules that each list of the indexer follows, whatever the scores are (M14).

No scores are computed here. Lists ascend and end in -1, name blocks up to that of the query, and
contain its last blocks. Keys that are all equal give the first blocks. A key with a scale gives the
list of the key that is multiplied by it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from attnlib.testing.backend_under_test import BackendUnderTest
from attnlib.testing.case import Case
from attnlib.testing.check import Check, CheckCase
from attnlib.testing.runner import find_operation

__all__ = ["CHECKS"]

_HEADS, _SIZE = 2, 32


@dataclass(frozen=True)
class _Form:
    """What a case varies; attributes as in `key_indexer`."""

    block_size: int
    max_blocks: int
    local_blocks: int = 0
    weighted: bool = True


_FORMS = {
    "tokens": _Form(1, 6),
    "blocks": _Form(4, 3, local_blocks=1, weighted=False),
    "blocks-local": _Form(3, 4, local_blocks=2),
}


class _Lists:
    """Calls the operation with one batch and several keys."""

    def __init__(self, target: BackendUnderTest, case: Case, form: _Form) -> None:
        self.select_keys = find_operation(target.backend, "select_keys")
        self.case, self.form, self.device = case, form, target.device
        self.step = case.materialize(target.device)
        self.draw = torch.Generator().manual_seed(case.seed)
        rows = case.batch_spec.num_tokens
        self.query = self.integers(-3, 4, rows, _HEADS, _SIZE)
        self.weights = self.integers(1, 4, rows, _HEADS).abs() if form.weighted else None

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.draw).float()

    def pool(self, per_token: torch.Tensor, fill: float) -> torch.Tensor:
        """A pool whose slots have the rows of `per_token`, by request and position."""
        batch, placement, size = (
            self.case.batch_spec,
            self.step.inputs.placement,
            self.case.block_size,
        )
        pool = torch.full((placement.num_blocks, size, *per_token.shape[1:]), fill)
        first = 0
        for request, seq_len in enumerate(batch.seq_lens):
            slots = torch.tensor(placement.slots(request, 0, seq_len, size)).long()
            pool[slots // size, slots % size] = per_token[first : first + seq_len]
            first += seq_len
        return pool

    def __call__(self, keys: torch.Tensor, scales: torch.Tensor | None = None) -> torch.Tensor:
        """[T, lists, K] on the CPU, for keys [tokens, Di] and scales [tokens]."""
        stored = self.case.torch_dtype if scales is None else torch.float8_e4m3fn
        inputs, batch = self.step.inputs, self.case.batch_spec
        lists = 1 if self.form.weighted else _HEADS
        shape = (batch.num_tokens, lists, self.form.max_blocks)
        out = torch.full(shape, -3, dtype=torch.int32, device=self.device)
        self.select_keys(
            self.query.to(self.device, self.case.torch_dtype),
            None if self.weights is None else self.weights.to(self.device),
            self.pool(keys, torch.nan).to(stored).to(self.device),
            None if scales is None else self.pool(scales, torch.nan).to(self.device),
            inputs.block_table,
            inputs.query_start_loc,
            inputs.seq_lens,
            self.step.spec.key_selection,
            local_blocks=self.form.local_blocks,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
            out=out,
        )
        return out.cpu()


def _rule_broken(lists: torch.Tensor, case: Case, form: _Form, equal_keys: bool) -> str:
    """The first list that breaks a rule; "" if none does."""
    batch, row = case.batch_spec, 0
    for query_len, seq_len in batch.lengths:
        for position in range(seq_len - query_len, seq_len):
            own = position // form.block_size
            wanted = min(own + 1, form.max_blocks)
            local = set(range(max(own + 1 - form.local_blocks, 0), own + 1))
            for head, entries in enumerate(lists[row].tolist()):
                found = entries[:wanted]
                first = [block for block in range(own + 1) if block not in local]
                only = sorted({*first[: wanted - len(local)], *local})
                for broken, rule in (
                    (found != sorted(set(found)), "ascend"),
                    (entries[wanted:] != [-1] * (form.max_blocks - wanted), "end in -1"),
                    (min(found) < 0 or max(found) > own, f"name blocks from 0 to {own}"),
                    (not local <= set(found), f"contain the last blocks {sorted(local)}"),
                    (equal_keys and found != only, f"be {only}, as all scores are equal"),
                ):
                    if broken:
                        return f"the list {entries} of row {row}, head {head}, must {rule} (M14)"
            row += 1
    return "" if bool((lists[row:] == -1).all()) else "lists of padding rows must be -1 (M14)"


def _check(target: BackendUnderTest, case: Case, form: _Form) -> str:
    lists = _Lists(target, case, form)
    tokens = sum(case.batch_spec.seq_lens)
    keys, factors = lists.integers(-4, 5, tokens, _SIZE), 2.0 ** lists.integers(-1, 2, tokens)
    error = _rule_broken(lists(keys), case, form, equal_keys=False)
    error = error or _rule_broken(lists(keys * 0 + 1), case, form, equal_keys=True)
    if not error:
        scaled, real = lists(keys, factors), lists(keys * factors[:, None], torch.ones(tokens))
        wrong = (scaled != real).any(-1).nonzero()
        if len(wrong):
            row, head = wrong[0].tolist()
            error = (
                f"row {row}, head {head}: keys with scales give {scaled[row, head].tolist()}, keys "
                f"that are multiplied by them {real[row, head].tolist()} (M14)"
            )
    return f"{error} | case: {form}, {case}" if error else ""


def _cases(target: BackendUnderTest) -> Iterator[CheckCase]:
    for name, form in _FORMS.items():
        scope = "all_heads" if form.weighted else "kv_head"
        selection = (scope, form.block_size, form.max_blocks, 1)
        case = target.case(
            batch="q1s37_q5s20_q7_q1s1_pad2",
            key_selection=selection,
            num_heads=_HEADS * 2,
            num_kv_heads=_HEADS,
        )
        yield CheckCase(name, partial(_check, target, case, form), case)


CHECKS = (Check("I2", "rules that each list of the indexer follows", _cases),)
