"""Mask functions of transformers as kernel arguments."""

from __future__ import annotations

import torch
from transformers import masking_utils

from attnlib.integrations.transformers.patterns import recognize
from attnlib.spec import Window


def test_mask_functions_of_transformers() -> None:
    """All functions with a kernel argument are recognized; a function with another part is not."""
    causal, both = masking_utils.causal_mask_function, masking_utils.bidirectional_mask_function
    assert recognize(causal) == (True, Window(None, 0), None, None)
    assert recognize(both) == (False, Window(), None, None)
    assert recognize(masking_utils.sliding_window_causal_mask_function(4)) == (
        True,
        Window(3, 0),
        None,
        None,
    )
    assert recognize(masking_utils.sliding_window_bidirectional_mask_function(4)) == (
        False,
        Window(4, 4),
        None,
        None,
    )
    assert recognize(
        masking_utils.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.long))
    ) == (True, Window(None, 0), 4, None)
    segments = torch.tensor([[0, 0, 1]])
    packed = recognize(
        masking_utils.and_masks(causal, masking_utils.packed_sequence_mask_function(segments))
    )
    assert packed is not None and packed.segments is segments and not packed.is_plain
    assert recognize(masking_utils.or_masks(causal, both)) is None
    assert recognize(masking_utils.and_masks(causal, lambda b, h, q, k: k != 2)) is None
