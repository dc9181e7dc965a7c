"""What a backend declares to support, and one check per field of the spec.

Capabilities fail closed: a feature that a backend does not state counts as unsupported.
`unsupported_reasons` returns all reasons at once, each with the value and the limit.
"""

from attnlib.capabilities.checks import (
    CHECKS,
    Reason,
    unsupported_device_reasons,
    unsupported_reasons,
)
from attnlib.capabilities.declaration import NOT_STATED, Capabilities
from attnlib.sizes import Sizes

__all__ = [
    "CHECKS",
    "NOT_STATED",
    "Capabilities",
    "Reason",
    "Sizes",
    "unsupported_device_reasons",
    "unsupported_reasons",
]
