"""The launches over two key streams (M17): what they follow from."""

from __future__ import annotations

import pytest
import torch

from attnlib.ops.params import AttentionParams
from attnlib.ops.triton import attention_call, two_streams
from attnlib.ops.triton.attention_call import AttentionCall
from attnlib.ops.triton.batch_tensors import BatchTensors
from attnlib.ops.triton.entry_stream import EntryStream
from attnlib.ops.triton.launch.cache import LAUNCHES
from attnlib.sparse.key_selection import KeySelection, SelectedKeys
from tests.described_server import H100


class _Attend:
    """In the place of the launch of the kernel."""

    num_splits = 1

    def __init__(self, call: AttentionCall, entries: EntryStream, count: int) -> None:
        self.count = count


def _launch(listed: int | None, columns: int = 4, most: int = 200) -> object:
    tokens, latents = 3, torch.zeros(2, 64, 1, 512, dtype=torch.bfloat16)
    starts, table = torch.arange(tokens + 1).int(), torch.zeros(tokens, 2).int()
    query, lists, selection = torch.zeros(tokens, 64, 512, dtype=torch.bfloat16), None, None
    params = AttentionParams(scale=0.1, window=(127, 0))
    batch = BatchTensors.of(params, starts, starts[1:].clone(), table, max_query_len=0)
    if listed is not None:
        selection = KeySelection(max_blocks=512)
        lists = SelectedKeys(torch.zeros(tokens, 1, listed).int())
    entries = EntryStream(
        *(latents, latents, 1.0, 1.0, torch.zeros(tokens, columns).int(), starts[1:].clone()),
        *(most, selection, lists),
    )
    out = torch.empty_like(query)
    call = AttentionCall.of(query, latents, latents, out, None, batch, params)
    return two_streams._prepare(call, entries)


def test_steps_whose_entries_grow_share_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wider lists and tables, and more entries, up to the next power of 2."""
    monkeypatch.setattr(attention_call, "limits_of", lambda _: H100)
    monkeypatch.setattr(two_streams, "streams_reasons", lambda *_: [])
    monkeypatch.setattr(two_streams, "HopperStreams", _Attend)
    LAUNCHES.clear()
    first = _launch(70)
    assert _launch(100) is first and _launch(128, columns=7, most=900) is first
    assert _launch(129) is not first
    complete = _launch(None, most=200)
    assert complete is not first and _launch(None, columns=9, most=256) is complete
    assert _launch(None, most=257) is not complete
    LAUNCHES.clear()
