"""`attnlib bench`: compare backends in one process, on the same tensors, after a correctness check.

Absolute times differ between machines and between runs, because chips and clocks differ. The
results to compare are ratios of two times of one run, and shares of the peak rates that the same
run measured. The modules, in reading order:

    case, suites        what is measured: a batch and the shape of a layer
    work                the bytes and operations that a case needs
    inputs              the tensors of a case: cold caches, blocks in random order
    correctness         the check against the oracle; a backend with a wrong output gets no time
    timer, peaks        microseconds per call; peak rates of the device
    backends, runner    which backends take part; one backend on one case
    state_case, ...     the same parts for state layers
    measure, timing     one case on all backends
    results, table, figures   rows, stored as JSON, shown as text and as plots
"""

from __future__ import annotations
