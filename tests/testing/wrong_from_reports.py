"""Backends with errors of public bug reports, which concern large scores, sizes and memory.

`REPORTED` maps each error to the backend and to the check that is meant to detect it. The first six
pass the suite of commit a8ef0b7, as `python -m tests.testing.wrong_from_reports` shows in a tree of
it that has a copy of this module.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from attnlib.backends.base import AttentionBackend
from attnlib.cache.storage import PagedKVCache
from tests.testing.toy_backend import ToyBackend, ToyImpl, toy_with

_16_BITS = (torch.bfloat16, torch.float16)


def _largest_is_below(scores: torch.Tensor, limit: float) -> torch.Tensor:
    """[q, Hq] bool: rows that see a key, and whose scores [q, Hq, S] are all below a limit."""
    largest = scores.amax(dim=2)
    return (largest > -torch.inf) & (largest < limit)


class SoftCapOfTwoExponentials(ToyImpl):
    """Computes tanh from exp(x) and exp(-x) in float32: inf / inf if |score / cap| exceeds 88.

    vllm-project/vllm#56578: NaN in the rows of Gemma 2 whose scores exceed 4400.
    """

    def logits(
        self, query: torch.Tensor, keys: torch.Tensor, distance: torch.Tensor
    ) -> torch.Tensor:
        cap = self.spec.logits_soft_cap
        if not cap:
            return super().logits(query, keys, distance)
        self.spec, spec = self.spec.replace(logits_soft_cap=None), self.spec
        scores = super().logits(query, keys, distance * 0)
        capped = super().logits(query, keys, distance) - scores  # the bias alone
        self.spec = spec
        x = (scores / cap).float()
        up, down = torch.exp(x), torch.exp(-x)
        return cap * ((up - down) / (up + down)).double() + capped


class MaximumFromAFiniteNumber(ToyImpl):
    """Starts the running maximum at -5e4: all weights of a row underflow if its scores are lower.

    flashinfer-ai/flashinfer#4267: heads with massive activations return zeros.
    """

    def weigh(
        self, scores: torch.Tensor, values: torch.Tensor, sink: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = super().weigh(scores, values, sink)
        if not scores.shape[2]:
            return out, lse
        lost = _largest_is_below(scores, -5e4 - 100)
        return out.masked_fill(lost[..., None], 0.0), lse.masked_fill(lost, -torch.inf)


class MaximumOfAHiddenTile(ToyImpl):
    """Walks tiles of 128 keys from the end, and goes on from a maximum of 0 after a hidden tile.

    Dao-AILab/flash-attention#2082: rows whose last tile is hidden lose all weights if their scores
    are far below 0.
    """

    def weigh(
        self, scores: torch.Tensor, values: torch.Tensor, sink: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = super().weigh(scores, values, sink)
        if scores.shape[2] <= 128:
            return out, lse
        last = scores[..., scores.shape[2] // 128 * 128 :]
        hidden = (last == -torch.inf).all(dim=2) if last.shape[2] else lse == torch.inf
        lost = hidden & _largest_is_below(scores, -100)
        return out.masked_fill(lost[..., None], 0.0), lse.masked_fill(lost, -torch.inf)


class MaskOfMinus10000(ToyImpl):
    """Gives hidden keys the score -10000, which can be above those of visible keys.

    Weights of scores that are lower by more than 100 are 0, so that other rows do not change.

    vllm-project/vllm#49588 cites this line of its paged decodes; ohdearquant/lattice#361 is the
    report of a mask that wins.
    """

    def score_and_mask(
        self, scores: torch.Tensor, seen: torch.Tensor, p: torch.Tensor, k: torch.Tensor
    ) -> torch.Tensor:
        masked = super().score_and_mask(scores, seen, p, k)
        if not scores.shape[2]:
            return masked
        return torch.where(_largest_is_below(masked, -1e4)[..., None] & ~seen, -1e4, masked)


class GroupsAbove8In16Bits(ToyImpl):
    """Stores the results of groups of more than 8 query heads in the wrong order in 16 bits.

    NVIDIA/TensorRT-LLM#6573: wrong results of float16 and bfloat16 caches where a KV head has more
    than 8 query heads.
    """

    def kv_head_of(self, head: int) -> int:
        if self.spec.group_size > 8 and self.spec.dtype in _16_BITS:
            return (head // 8) % self.spec.num_kv_heads
        return super().kv_head_of(head)


class ValuePagesOfHeadSize256(ToyImpl):
    """Advances the pages of values by those of keys: behind 128 keys, it reads the pages before.

    NVIDIA/TensorRT-LLM#18244: wrong decodes with heads of 256 elements, where a step over the keys
    has several steps over the values.
    """

    def gather(
        self, cache: PagedKVCache, row: torch.Tensor, seq_len: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = super().gather(cache, row, seq_len)
        if self.spec.head_size == 256 and seq_len > 128:
            values = torch.cat((values[:128], values[64 : seq_len - 64]))
        return keys, values


class ClearsUnusedSlots(ToyImpl):
    """Clears the slots past a sequence in its last block, so that masked products are finite.

    torch-spyre/torch-spyre#4517: kernels that read whole pages depend on what is past a sequence,
    and clearing it removes the symptom.
    """

    def forward(
        self,
        query: torch.Tensor,
        cache: PagedKVCache,
        metadata: Any,
        output: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        size = cache.block_size
        for row, seq_len in zip(metadata.block_table, metadata.seq_lens.tolist(), strict=True):
            if seq_len % size:
                for view in (cache.key_cache, cache.value_cache):
                    block = view[int(row[seq_len // size])]
                    (block.view(torch.uint8) if view.element_size() == 1 else block)[
                        seq_len % size :
                    ] = 0
        super().forward(query, cache, metadata, output, lse)


REPORTED: dict[str, tuple[type[AttentionBackend], str]] = {
    "soft cap of two exponentials": (toy_with(SoftCapOfTwoExponentials), "W2"),
    "running maximum from -5e4": (toy_with(MaximumFromAFiniteNumber), "W5"),
    "running maximum of a hidden tile": (toy_with(MaximumOfAHiddenTile), "W4"),
    "hidden keys at -10000": (toy_with(MaskOfMinus10000), "W2"),
    "groups above 8 in 16 bits": (toy_with(GroupsAbove8In16Bits), "W3"),
    "value pages of head size 256": (toy_with(ValuePagesOfHeadSize256), "W4"),
    "unused slots cleared": (toy_with(ClearsUnusedSlots), "K5"),
}
"""Error -> the wrong backend and the check that is meant to detect it."""


def main() -> int:
    """Run the full suite on each backend of `REPORTED` and print the failed checks."""
    from attnlib.testing.conformance import run_conformance

    torch.set_num_threads(1)
    for error, (backend, _) in REPORTED.items():
        report = run_conformance(backend, device="cpu", against=[ToyBackend])
        print(f"{error}: {', '.join(report.failed_checks()) or 'passes'}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
