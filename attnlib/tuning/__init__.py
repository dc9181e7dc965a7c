"""What `attnlib tune` found out on this chip, for those who choose: backends by selection, tiles by the triton backend.

    layers    which layers count as alike
    table     one table: tiles, and an order of backends for each kind of layer
    store     where a chip's table lies; read once, when somebody first asks
    shipped   orders of backends that come with attnlib, for chips that it was measured on

Measuring is `attnlib.cli.tune`; nothing here measures.
"""

from attnlib.tuning.layers import layer_class
from attnlib.tuning.rankings import shipped_ranking
from attnlib.tuning.store import chip_name, forget, generation, table_path, tuning_for
from attnlib.tuning.table import Ranking, Tuning

__all__ = [
    "Ranking",
    "Tuning",
    "chip_name",
    "forget",
    "generation",
    "layer_class",
    "shipped_ranking",
    "table_path",
    "tuning_for",
]
