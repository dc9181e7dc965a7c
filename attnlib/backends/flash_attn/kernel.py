"""One installed generation of FlashAttention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from attnlib.backends._foreign.imports import Keywords

__all__ = ["FlashKernel"]


@dataclass(frozen=True)
class FlashKernel:
    """One generation of FlashAttention with a paged cache, and how to call it.

    Attributes:
        version: 2, 3 or 4.
        source: the module it was found in.
        release: the distribution's version, "" when unknown.
        function: the attention function; called by keyword only.
        keywords: its keyword arguments.
        select: fixed arguments that choose this generation, such as `fa_version=3`.
        scheduler: the ahead-of-time scheduler, or None.
        flags: the build flags that are set ("FLASHATTENTION_DISABLE_...").
        block_multiple: the block size must be a multiple of this.
        unbounded: what stands for a side without a bound in `window_size`.
        splits_on_hopper: whether FlashAttention 4 can split keys on Hopper.
        separate_256: whether FlashAttention 4 has a kernel for head size 256 alone on Blackwell.
    """

    version: int
    source: str
    release: str
    function: Callable[..., Any]
    keywords: Keywords
    select: Mapping[str, Any] = field(default_factory=dict)
    scheduler: Callable[..., Any] | None = None
    flags: frozenset[str] = frozenset()
    block_multiple: int = 1
    unbounded: int | None = -1
    splits_on_hopper: bool = False
    separate_256: bool = False

    @property
    def label(self) -> str:
        """Its name in messages."""
        return f"FlashAttention {self.version} ({f'{self.source} {self.release}'.strip()})"

    @property
    def takes_key_bound(self) -> bool:
        """Whether it takes the longest sequence length; otherwise it uses the table width."""
        return "max_seqlen_k" in self.keywords

    @property
    def takes_lengths(self) -> bool:
        """Whether it takes sequence lengths; otherwise it takes their cumulative sum."""
        return self.keywords.first("seqused_k", "cache_seqlens") is not None
