"""`attnlib tune`: measure tunable parameters and backends on this chip, and write the table that
selection uses.

plan    the cases to measure, from model configs, specs, or the cases of `attnlib bench`
main    arguments, the loop over cases, and the output

The measurements are in `attnlib.tuning.measure`.
"""

from attnlib.cli.tune.main import main

__all__ = ["main"]
