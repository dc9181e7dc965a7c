"""Backend selection: from a spec and a device to a backend class, or a report with all reasons."""

from attnlib.selection.current import use_backend
from attnlib.selection.groups import GroupSelection, select_for_groups
from attnlib.selection.named import load_backend, merge_attention
from attnlib.selection.registry import list_backends, register_backend, unregister_backend
from attnlib.selection.report import CandidateReport, SelectionReport, SelectionStatus
from attnlib.selection.selector import explain, get_attn_backend

__all__ = [
    "CandidateReport",
    "GroupSelection",
    "SelectionReport",
    "SelectionStatus",
    "explain",
    "get_attn_backend",
    "list_backends",
    "load_backend",
    "merge_attention",
    "register_backend",
    "select_for_groups",
    "unregister_backend",
    "use_backend",
]
