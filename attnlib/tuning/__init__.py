"""Tuning tables: what `attnlib tune` measured on a chip, for selection (rankings) and for backends
(parameters).

    layers    classes of layers that share a ranking
    table     the table as data
    store     the file of a chip's table; read once, on first use
    document  the file as `attnlib tune` extends and writes it
    rankings  rankings that ship with attnlib
    tuner     the interface that a backend implements to have its parameters measured
    measure   candidates on the chip: check, time, choose; rankings from benchmark results

`measure` builds on `attnlib.bench`; no other module of attnlib except the command line imports it.
"""

from attnlib.tuning.layers import layer_class
from attnlib.tuning.rankings import shipped_ranking
from attnlib.tuning.store import chip_name, clear_cache, generation, table_path, tuning_for
from attnlib.tuning.table import Ranking, Tuning

__all__ = [
    "Ranking",
    "Tuning",
    "chip_name",
    "clear_cache",
    "generation",
    "layer_class",
    "shipped_ranking",
    "table_path",
    "tuning_for",
]
