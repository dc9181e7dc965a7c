"""The attention layer: `Attention(q, k, v, cache, metadata)` and what a call of it passes through.

`attention.py` is the module. A call like the one before runs its plan at once (`call.py`); another
one goes to `plans.py`, which finds a plan by the signature of the call, or checks the call
(`checks.py`, `cache_checks.py`, `metadata_checks.py`, `scales.py`) and prepares one. `rotary.py` is
the call that rotates and writes only, `operator.py` the layer under torch.compile, and `warmup.py`
runs a layer on every class of batch. A plan calls the backend's impl.

`StateLayer` (`state.py`) is the layer with a recurrent state; its calls, checks and operators are
in the files that begin with `state_`.
"""

from attnlib.layer.attention import Attention as Attention
from attnlib.layer.state import StateLayer as StateLayer

__all__ = ["Attention", "StateLayer"]
