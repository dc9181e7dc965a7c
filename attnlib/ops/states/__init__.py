"""What the operations on recurrent states share: the layout of a slot, batches, parameters, checks.

The operations are `state_step` and `short_convolution`, in `ops.torch.states` and
`ops.triton.states`. Rules T1 to T20 define them.
"""

from attnlib.ops.states.batch import StateBatch
from attnlib.ops.states.inputs import RecurrenceParams, StateInputs, Taps
from attnlib.ops.states.layout import SlotField, StateLayout
from attnlib.ops.states.step_form import StepForm
from attnlib.ops.states.tensors import StateTensors

__all__ = [
    "RecurrenceParams",
    "SlotField",
    "StateBatch",
    "StateInputs",
    "StateLayout",
    "StateTensors",
    "StepForm",
    "Taps",
]
