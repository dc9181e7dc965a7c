"""`attnlib bench`: backends side by side in one process, on the same tensors, right before fast.

A figure from another machine or another day says little, because chips and clocks differ; so a target here is always a
ratio measured in one run, and a share of ceilings measured in that run too. Read in this order:

    case, suites    what is measured: a batch and the shape of a layer, by name or in a few letters
    work            how many bytes and operations a case cannot do without
    material        its tensors: cold caches, blocks in random order
    gate            is the answer right? nothing that is wrong gets a time
    stopwatch, ceilings   microseconds; what the chip can do at most
    contenders, measure   who takes part, and one case on all of them
    results, table, figures   rows, kept as JSON, shown as text and as pictures
"""

from __future__ import annotations
