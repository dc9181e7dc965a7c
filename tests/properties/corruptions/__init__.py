"""Random corruptions of the arguments of operations outside `Attention`.

Each operation has a trial: valid random arguments, the call, and a reference that reads the
arguments in plain Python. `check_trial` changes some arguments and demands that the call is refused
and writes nothing, or that its result and the memory are those of the reference.
"""

from tests.properties.corruptions.trial import Meaningless, Outcome, Trial, check_trial

__all__ = ["Meaningless", "Outcome", "Trial", "check_trial"]
