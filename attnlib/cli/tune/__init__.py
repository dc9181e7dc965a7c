"""`attnlib tune`: measure tiles and backends on this chip, and write the table that auto follows.

plan         which cases, from model configs, specs, or the cases of `attnlib bench`
candidates   which tiles are worth a try: pure, for any chip
tiles        each candidate on each case: right first, then timed; what the table says of the best
backends     rows of `attnlib bench` as an order of backends for each kind of layer
document     the table as it grows, merged with what it said before
main         arguments and the loop
"""

from attnlib.cli.tune.main import main

__all__ = ["main"]
