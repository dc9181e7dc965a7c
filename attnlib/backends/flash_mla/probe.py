"""Which module has FlashMLA's functions: the package itself, or the build that vLLM ships."""

from __future__ import annotations

from attnlib.backends._foreign.imports import Import, import_guarded

__all__ = ["FUNCTIONS", "MODULES", "find_flash_mla"]

FUNCTIONS = ("get_mla_metadata", "flash_mla_with_kvcache")
"""What the backend calls."""
MODULES = ("flash_mla", "vllm.third_party.flashmla.flash_mla_interface")
"""Where these functions may be, in order of preference."""


def find_flash_mla() -> Import:
    """The first module that has all functions; else why the first one that is installed cannot be
    used, or no module and no problem."""
    problem = ""
    for path in MODULES:
        found = import_guarded(path)
        if found.module is None:
            problem = problem or found.problem
            continue
        missing = [name for name in FUNCTIONS if not hasattr(found.module, name)]
        if not missing:
            return found
        problem = problem or (
            f"{path} has no function {', '.join(missing)}: install its main branch"
        )
    return Import(None, problem)
