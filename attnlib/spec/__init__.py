"""What a layer needs from a backend.

`AttentionSpec` and `StateSpec` contain everything that may decide whether a backend supports a
layer, and nothing else: `attnlib.capabilities` has exactly one check for each field. Values that do
not affect the choice (the scale, the values of slopes, sinks and weights) are parameters of the
layer.
"""

from attnlib.spec.attention_spec import AttentionSpec
from attnlib.spec.kinds import AttentionType, CudaGraphSupport, MaskKind, Window
from attnlib.spec.layer_spec import LayerSpec
from attnlib.spec.state_spec import StateSpec
from attnlib.spec.trees import tree_spec

__all__ = [
    "AttentionSpec",
    "AttentionType",
    "CudaGraphSupport",
    "LayerSpec",
    "MaskKind",
    "StateSpec",
    "Window",
    "tree_spec",
]
