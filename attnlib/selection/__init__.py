"""Choosing a backend, and saying why.

In: a spec and a device. Out: a backend class, or a report that tells what was chosen, what was rejected and every reason. Next: the layer.
"""

from attnlib.selection.registry import register_backend, unregister_backend
from attnlib.selection.report import CandidateReport, SelectionReport, SelectionStatus
from attnlib.selection.selector import (
    explain,
    get_attn_backend,
    list_backends,
    load_backend,
    use_backend,
)

__all__ = [
    "CandidateReport",
    "SelectionReport",
    "SelectionStatus",
    "explain",
    "get_attn_backend",
    "list_backends",
    "load_backend",
    "register_backend",
    "unregister_backend",
    "use_backend",
]
