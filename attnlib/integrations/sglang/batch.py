"""SGLang's batches as attnlib's, and reasons against what attnlib cannot serve."""

from __future__ import annotations

from typing import Any

import torch

from attnlib.errors import UnsupportedConfigError
from attnlib.metadata.common import CommonAttentionMetadata

__all__ = [
    "block_table",
    "captured_lengths",
    "common_metadata",
    "rejections",
    "sequence_lengths",
    "step_lengths",
    "verifies_trees",
]


def rejections(runner: Any) -> list[str]:
    """Why attnlib cannot serve a model runner; empty if it can."""
    reasons = []
    if getattr(runner.model_config, "is_encoder_decoder", False):
        reasons.append("cross-attention is not supported")
    if hasattr(runner.token_to_kv_pool, "translate_loc_from_full_to_swa"):
        reasons.append(
            "a separate pool for layers with windows is not supported: pass "
            "--disable-hybrid-swa-memory"
        )
    if (getattr(runner.server_args, "dcp_size", None) or 1) > 1:
        reasons.append("decode context parallelism is not supported")
    return reasons


def verifies_trees(runner: Any) -> bool:
    """Whether the draft tokens of a verification form a tree."""
    return getattr(runner.server_args, "speculative_eagle_topk", None) not in (None, 1)


def step_lengths(batch: Any, context_len: int) -> tuple[torch.Tensor | int, int, int]:
    """Lengths of a batch.

    Args:
        batch: SGLang's.
        context_len: the longest sequence, the bound where SGLang has no lengths on the host.

    Returns:
        The new tokens of each request (`[R]`, or one number for all), those of them that are not
        part of `batch.seq_lens`, and an upper bound of the sequence lengths.

    Raises:
        NotImplementedError: a kind of batch that is not supported.
    """
    mode = batch.forward_mode
    longest = int(batch.seq_lens_cpu.max()) if batch.seq_lens_cpu is not None else context_len
    if mode.is_decode():
        return 1, 0, longest
    if mode.is_target_verify():
        drafted = int(batch.spec_info.draft_token_num)
        return drafted, drafted, min(longest + drafted, context_len)
    if batch.extend_seq_lens is not None:
        return batch.extend_seq_lens, 0, longest
    raise NotImplementedError(
        f"attnlib has no implementation of batches with forward_mode={mode}: use another "
        "--attention-backend, for the draft model --speculative-draft-attention-backend"
    )


def captured_lengths(batch: Any, context_len: int) -> tuple[int, int, int, int]:
    """Lengths of a batch in a CUDA graph, whose requests have equally many new tokens.

    Args:
        batch: SGLang's, for a capture or a replay.
        context_len: as in `step_lengths`.

    Returns:
        The requests, and what `step_lengths` returns.

    Raises:
        UnsupportedConfigError: a kind of batch that is not captured, or drafts of other lengths.
    """
    mode, requests = batch.forward_mode, len(batch.seq_lens)
    if mode.is_decode() or mode.is_target_verify():
        new, uncounted, longest = step_lengths(batch, context_len)
        assert isinstance(new, int)
        return requests, new, uncounted, longest
    if not _extends_drafts(mode):
        raise UnsupportedConfigError(
            f"attnlib is captured for decodes, verifications and extensions of drafts, not for "
            f"forward_mode={mode}: pass --disable-decode-cuda-graph, or another --attention-backend"
        )
    # A replay has SGLang's whole buffers, and no `extend_seq_lens`.
    requests, host = batch.batch_size, batch.seq_lens_cpu
    lists = (getattr(x, "extend_seq_lens_cpu", None) for x in (batch, batch.spec_info))
    widths = {int(n) for n in next((x for x in lists if x), ())[:requests]}
    if (width := int(getattr(batch.spec_info, "num_tokens_per_req", 0) or 0)) > 0:
        widths.add(width)
    if len(widths) != 1:
        raise UnsupportedConfigError(
            f"a captured extension of drafts has requests of {sorted(widths)} new tokens; attnlib "
            "needs one number: pass --speculative-draft-attention-backend triton"
        )
    longest = context_len if host is None else int(host[:requests].max())
    return requests, widths.pop(), 0, longest


def _extends_drafts(mode: Any) -> bool:
    """Whether the draft model reads the tokens of a verification."""
    return bool(getattr(mode, "is_draft_extend_v2", bool)())


def sequence_lengths(batch: Any) -> torch.Tensor | None:
    """The sequence lengths with new tokens on the host, `[R]` int32; None if SGLang has none."""
    if batch.seq_lens_cpu is None:
        return None
    if _extends_drafts(batch.forward_mode):  # of a replay, the whole buffer
        counted: torch.Tensor = batch.seq_lens_cpu[: batch.batch_size].to(torch.int32)
        return counted
    drafted = batch.spec_info.draft_token_num if batch.forward_mode.is_target_verify() else 0
    lengths: torch.Tensor = batch.seq_lens_cpu.to(torch.int32) + int(drafted)
    return lengths


def block_table(
    req_to_token: torch.Tensor, requests: torch.Tensor, max_seq_len: int, page_size: int
) -> torch.Tensor:
    """`[R, pages]` int32 page ids. SGLang's table has the slot of each token, and the tokens of a
    page have consecutive slots, so that every page's first slot names it."""
    first_slots = req_to_token[:, :max_seq_len:page_size][requests]
    return (first_slots // page_size).to(torch.int32)


def common_metadata(
    batch: Any, req_to_token: torch.Tensor, page_size: int, context_len: int
) -> CommonAttentionMetadata:
    """A batch outside of graphs."""
    new, uncounted, longest = step_lengths(batch, context_len)
    seq_lens = batch.seq_lens + uncounted if uncounted else batch.seq_lens
    requests = len(seq_lens)
    device = seq_lens.device
    host_lengths: torch.Tensor
    if isinstance(new, int):
        host_lengths = torch.full((requests,), new, dtype=torch.int32, device="cpu")
    else:
        known = getattr(batch, "extend_seq_lens_cpu", None)
        known = new.cpu() if known is None else known
        host_lengths = torch.as_tensor(known, dtype=torch.int32, device="cpu")
    starts = torch.zeros(requests + 1, dtype=torch.int32, device="cpu")
    torch.cumsum(host_lengths, 0, out=starts[1:])
    return CommonAttentionMetadata(
        query_start_loc=starts.to(device, non_blocking=True),
        query_start_loc_cpu=starts,
        seq_lens=seq_lens.to(torch.int32),
        seq_lens_cpu=sequence_lengths(batch),
        num_reqs=requests,
        num_actual_tokens=int(starts[-1]),
        max_query_len=int(host_lengths.max()) if requests else 0,
        max_seq_len=longest,
        block_table_tensor=block_table(req_to_token, batch.req_pool_indices, longest, page_size),
        slot_mapping=batch.out_cache_loc.to(torch.int64),
    )
