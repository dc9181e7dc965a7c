"""Mask functions of transformers as kernel arguments."""

from __future__ import annotations

import torch
from transformers import masking_utils

from attnlib.integrations.transformers.patterns import Pattern, recognize
from attnlib.spec import Window


def test_mask_functions_of_transformers() -> None:
    """All functions with a kernel argument are recognized; a function with another part is not."""
    causal, both = masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function
    assert recognize(causal) == Pattern(True, Window(None, 0))
    assert recognize(both) == Pattern(False)
    windows = {
        masking_utils.sliding_window_causal_mask_function(4): Pattern(True, Window(3, 0)),
        masking_utils.sliding_window_bidirectional_mask_function(4): Pattern(False, Window(4, 4)),
    }
    for function, pattern in windows.items():
        assert recognize(function) == pattern
    assert recognize(
        masking_utils.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.long))
    ) == Pattern(True, Window(None, 0), 4)
    segments = torch.tensor([[0, 0, 1]])
    packed = recognize(
        masking_utils.and_masks(causal, masking_utils.packed_sequence_mask_function(segments))
    )
    assert packed is not None and packed.segments is segments and not packed.is_plain
    assert recognize(masking_utils.or_masks(causal, both)) is None
    assert recognize(masking_utils.and_masks(causal, lambda b, h, q, k: k != 2)) is None
