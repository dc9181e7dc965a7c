"""`attnlib tune`: measure tunable parameters and backends on this chip, and write the table that
selection uses.

plan    the cases to measure, from model configs, specs, or the cases of `attnlib bench`
session the loop over cases, the output and the table
main    arguments

The measurements are in `attnlib.tuning.measure`.
"""

from attnlib.cli.tune.main import main

__all__ = ["main"]
