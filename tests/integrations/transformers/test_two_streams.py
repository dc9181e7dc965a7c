"""M17: DeepSeek V4 attends to a window and to compressed entries, with the tokens of eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnlib.integrations.transformers import attention
from attnlib.integrations.transformers.described_mask import read_mask
from attnlib.integrations.transformers.mask_tensor import MaskTensor
from attnlib.integrations.transformers.masks import attnlib_mask
from attnlib.integrations.transformers.two_streams import EntryMask
from tests.integrations.transformers_sweep import tiny
from tests.integrations.transformers_sweep.trial import installed


def _mask(queries: int = 3, keys: int = 5) -> MaskTensor:
    mask = attnlib_mask(2, queries, keys, q_offset=keys - queries)
    assert isinstance(mask, MaskTensor)
    return mask


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool]]:
    """(all entries visible, served by kernels) of each call with entries."""
    found: list[tuple[bool, bool]] = []
    attend = attention.attend_two_streams

    def counting(call: Any, mask: EntryMask) -> torch.Tensor | None:
        out = attend(call, mask)
        found.append((mask.bias is None, out is not None))
        return out

    monkeypatch.setattr(attention, "attend_two_streams", counting)
    return found


def test_tokens_are_those_of_eager(streams: list[tuple[bool, bool]]) -> None:
    """Forward, padding on both sides, and `generate`, with 2 of up to 8 entries selected and
    entries of 4 and of 8 tokens."""
    model = tiny.build("deepseek_v4", "DeepseekV4ForCausalLM")
    kinds = ["heavily_compressed_attention", "compressed_sparse_attention"]
    assert model.config.layer_types == kinds
    for module in model.modules():
        if hasattr(module, "index_topk"):
            module.index_topk = 2
    ids = torch.randint(2, 60, (2, 23), generator=torch.Generator().manual_seed(0))
    left, right = torch.ones_like(ids), torch.ones_like(ids)
    left[0, :6], right[1, 17:] = 0, 0
    options = {"max_new_tokens": 7, "do_sample": False, "pad_token_id": 0}
    found: dict[str, Any] = {}
    with installed(), torch.no_grad():
        for implementation in ("eager", "attnlib"):
            model.set_attn_implementation(implementation)
            assert not streams  # eager attention does not come here
            logits = [
                model(ids).logits,
                *(model(ids, attention_mask=m).logits for m in (left, right)),
            ]
            tokens = [model.generate(ids, **options)]
            tokens.append(model.generate(ids, attention_mask=left, **options))
            found[implementation] = logits, tokens
    # Forwards with padding queries need the evaluated mask: two layers of two forwards and of one
    # prefill. Decodes of the first layer see all entries.
    assert [served for _, served in streams].count(False) == 6 and len(streams) > 20
    assert (True, True) in streams and (False, True) in streams
    (eager, eager_tokens), (ours, our_tokens) = found["eager"], found["attnlib"]
    for expected, actual, mask in zip(
        eager, ours, [torch.ones_like(ids), left, right], strict=True
    ):
        assert (expected - actual)[mask.bool()].abs().max() < 1e-4
    assert all(torch.equal(*pair) for pair in zip(eager_tokens, our_tokens, strict=True))


def test_the_entries_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model without its entries, and with the sinks counted twice, has other logits."""
    model = tiny.build("deepseek_v4", "DeepseekV4ForCausalLM")
    ids = torch.arange(2, 25)[None]
    with installed(), torch.no_grad():
        model.set_attn_implementation("attnlib")
        expected = model(ids).logits
        bias = EntryMask.__new__

        def hidden(cls: Any, own: MaskTensor, entries: Any, count: int) -> EntryMask:
            return bias(cls, own, torch.full_like(entries, -torch.inf), count)

        monkeypatch.setattr(EntryMask, "__new__", hidden)
        assert (model(ids).logits - expected).abs().max() > 1e-3
        monkeypatch.undo()
        for name, values in model.named_parameters():
            if name.endswith("sinks"):
                values += torch.tensor(2.0).log()
        assert (model(ids).logits - expected).abs().max() > 1e-3


@pytest.mark.parametrize("visible", [True, False])
def test_columns_of_entries_keep_the_description(visible: bool) -> None:
    """The values are those that the operations compute without the description."""
    mask, values = _mask(), _mask().evaluated()
    if visible:
        extended = torch.nn.functional.pad(mask, (0, 2), value=0.0)
        expected = torch.nn.functional.pad(values, (0, 2), value=0.0)
    else:
        bias = torch.tensor([0.0, -torch.inf]).expand(2, 1, 3, 2)
        extended = torch.cat([mask, bias], dim=-1)
        expected = torch.cat([values, bias], dim=-1)
    assert isinstance(extended, EntryMask) and extended.shape == expected.shape == (2, 1, 3, 7)
    assert extended.num_entries == 2 and (extended.bias is None) is visible
    read = read_mask(extended)
    assert isinstance(read, torch.Tensor) and torch.equal(read, expected)
    assert torch.equal(extended + 1, expected + 1)


def test_other_columns_are_evaluated() -> None:
    """What is no column of entries, and masks that a model wrote to."""
    plain = _mask().evaluated()
    bias = torch.zeros(2, 1, 3, 2)
    written = _mask()
    written.evaluated()[..., 0] = 0.0
    for made, expected in (
        (torch.cat([_mask(), _mask()], dim=-1), torch.cat([plain, plain], dim=-1)),
        (torch.cat([_mask(), bias.double()], dim=-1), torch.cat([plain, bias.double()], dim=-1)),
        (torch.cat([bias, _mask()], dim=-1), torch.cat([bias, plain], dim=-1)),
        (torch.nn.functional.pad(_mask(), (1, 0)), torch.nn.functional.pad(plain, (1, 0))),
        (
            torch.nn.functional.pad(_mask(), (0, 1), value=1.0),
            torch.nn.functional.pad(plain, (0, 1), value=1.0),
        ),
        (torch.cat([written, bias], dim=-1), torch.cat([written.evaluated(), bias], dim=-1)),
    ):
        assert type(made) is torch.Tensor and torch.equal(made, expected)
