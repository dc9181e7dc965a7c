"""What a backend declares to support, and one check per field of the spec.

Capabilities fail closed: a feature that a backend does not state counts as unsupported.
`unsupported_reasons` returns all reasons at once, each with the value and the limit.
"""

from attnlib.capabilities.checks import CHECKS
from attnlib.capabilities.declaration import NOT_STATED, Capabilities
from attnlib.capabilities.predicates import Reason
from attnlib.capabilities.state_checks import STATE_CHECKS, chosen_form
from attnlib.capabilities.state_declaration import StateCapabilities
from attnlib.capabilities.unsupported import (
    serves_kind,
    unsupported_device_reasons,
    unsupported_reasons,
)
from attnlib.sizes import Sizes

__all__ = [
    "CHECKS",
    "NOT_STATED",
    "STATE_CHECKS",
    "Capabilities",
    "Reason",
    "Sizes",
    "StateCapabilities",
    "chosen_form",
    "serves_kind",
    "unsupported_device_reasons",
    "unsupported_reasons",
]
