"""Score functions of common models and batches.

| function | changes | mask kind of the layer | tensors |
|---|---|---|---|
| `prefix_lm` | prompts are bidirectional, the rest is causal | bidirectional | prefix_len |
| `bidirectional_spans` | tokens of an image see each other | bidirectional | span_begin, span_end |
| `retained_window` | a window behind prompts, which stay visible | causal | prefix_len |
| `documents` | packed documents do not see each other | causal or not | document_begin, _end |
| `multi_item` | items see the shared prompt and themselves | causal | prefix_len, item_begin |
| `block_diffusion` | blocks are bidirectional, causal between blocks | bidirectional | |
| `head_windows` | every head has its own window | causal | window |
| `relative_bias` | T5: a bias by head and distance | any | bias |
| `relative_logits` | Inkling: a bias by token, head and distance | any | rel |
| `alibi_sqrt` | ALiBi with the root of the distance | any | slope |
| `speculative_tree` | window, chunks, ALiBi in a tree of tokens | query_bias | tree, slope |

The functions of one row of the table are equal for equal arguments, so layers share their plans.
"""

from __future__ import annotations

from attnlib.score_functions.biases import (
    alibi_sqrt,
    head_windows,
    relative_bias,
    relative_logits,
    t5_relative_bias,
)
from attnlib.score_functions.documents import document_tensors, documents, multi_item
from attnlib.score_functions.spans import (
    bidirectional_spans,
    block_diffusion,
    prefix_lm,
    retained_window,
    span_tensors,
)
from attnlib.score_functions.trees import speculative_tree, tree_position, tree_tensor

__all__ = [
    "alibi_sqrt",
    "bidirectional_spans",
    "block_diffusion",
    "document_tensors",
    "documents",
    "head_windows",
    "multi_item",
    "prefix_lm",
    "relative_bias",
    "relative_logits",
    "retained_window",
    "span_tensors",
    "speculative_tree",
    "t5_relative_bias",
    "tree_position",
    "tree_tensor",
]
